"""Import rules for ONNX matrix products and normalizations, and the table of all rules.

Source: ONNX' operator specification, opsets 7 to 23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.importers.common.graph_builder import MOST_IN_CONFIG, NN, NUMPY, UNKNOWN, NotImportedError
from compress.model.importers.onnx.layout import OnnxValue, in_shape, laid, transposed
from compress.model.importers.onnx.network_builder import OnnxCall, Rule, order_of
from compress.model.importers.onnx.ops import activations, convolution, elementwise, recurrent, resize, shapes
from compress.model.importers.onnx.ops.convolution import image

Floats = NDArray[np.float32]


def dense(call: OnnxCall, source: OnnxValue, kernel: Floats, bias: list[Floats], axis: int = -1) -> OnnxValue:
    """Add a dense layer over one axis, with a kernel [in, out] whose rows are in the order of the input."""
    axis %= len(source.shape)
    taken, out = kernel.shape
    if source.shape[axis] != taken or kernel.size == 0:
        raise NotImportedError(f"weights {list(kernel.shape)} do not fit {list(source.shape)}")
    shape = (*source.shape[:axis], out, *source.shape[axis + 1 :])
    config = {"units": out, "use_bias": bool(bias)}
    if prod(source.shape) == taken:
        line = source
        if source.network_shape[-1] != taken:
            line = call.in_network_shape(source, replace(source, network_shape=(taken,)))
        like = OnnxValue(UNKNOWN, shape, (*line.network_shape[:-1], out), *((out,), (0,)) if out > 1 else ((), ()))
        return call.layer("Dense", config, [line], like, [kernel[line.positions], *bias])
    order = (*(dimension for dimension in order_of(source) if dimension != axis), axis)
    return call.layer("Dense", config, [call.arranged(source, order)], laid(UNKNOWN, shape, order), [kernel, *bias])


def gemm(call: OnnxCall) -> OnnxValue:
    """Gemm: a dense layer; a summand that is not a bias is added after it."""
    source, kernel = call.value(0), call.weights(1)
    if kernel.ndim != 2 or len(source.shape) != 2:
        raise NotImportedError(f"its weights have the shape {list(kernel.shape)}")
    if call.setting("transA", 0):
        source = transposed(source, (1, 0)) or transposed(call.straightened(source), (1, 0)) or source
    kernel = (kernel.T if call.setting("transB", 0) else kernel) * np.float32(call.number("alpha", None, 1.0))
    beta = np.float32(call.number("beta", None, 1.0))
    if not call.has(2):
        return dense(call, source, kernel, [])
    if call.is_constant(2):
        return _with_constant(call, source, kernel, call.weights(2) * beta)
    if beta != 1:
        raise NotImportedError(f"its beta is {beta}")
    operands, like = elementwise.together(call, [dense(call, source, kernel, []), call.value(2)], call.output_shape())
    return call.layer("Add", {}, [operands], like)


def _with_constant(call: OnnxCall, source: OnnxValue, kernel: Floats, constant: Floats) -> OnnxValue:
    """Return a dense layer plus a constant: its bias, if there is one value for each output."""
    outputs = kernel.shape[1]
    if constant.size in (1, outputs) and constant.shape[:-1] in ((), (1,)):
        return dense(call, source, kernel, [np.array(np.broadcast_to(constant.reshape(-1), (outputs,)))])
    return elementwise.broadcast(call, "Add", [dense(call, source, kernel, []), constant])


def matmul(call: OnnxCall) -> OnnxValue:
    """MatMul: with a constant matrix on either side a dense layer."""
    if call.is_constant(1) and (right := _matrix(call.weights(1))) is not None:
        result = dense(call, call.value(0), right, [])
        return in_shape(result, call.output_shape())
    if call.is_constant(0) and (left := _matrix(call.weights(0))) is not None and len(call.value(1).shape) > 1:
        result = dense(call, call.value(1), left.T, [], -2)
        return in_shape(result, call.output_shape())
    return _matrix_product(call)


def _matrix_product(call: OnnxCall) -> OnnxValue:
    operands = [call.weights(index) if call.is_constant(index) else call.value(index) for index in (0, 1)]
    result = call.output_shape()
    rank = len(result)
    if not all(2 <= len(operand.shape) <= rank for operand in operands):
        raise NotImportedError(f"{[list(operand.shape) for operand in operands]} are not matrices")
    shapes = [(*(1,) * (rank - len(operand.shape)), *operand.shape) for operand in operands]
    extra_batch = rank < 3 or any(shape[0] != 1 for shape in shapes)
    arguments: list[Any] = []
    for operand, shape in zip(operands, shapes, strict=True):
        if isinstance(operand, OnnxValue):
            arguments.append(call.arranged(in_shape(operand, shape), tuple(range(rank)), extra_batch=extra_batch))
        else:
            arguments.append(operand.reshape((1, *shape) if extra_batch else shape))
    like = laid(UNKNOWN, result, tuple(range(rank)), result if extra_batch else result[1:])
    return call.operation(NUMPY, "Matmul", {}, arguments, like)


def _matrix(constant: Floats) -> Floats | None:
    if constant.ndim == 1:
        return constant[:, None]
    return constant.reshape(constant.shape[-2:]) if prod(constant.shape[:-2]) == 1 else None


def batch_normalization(call: OnnxCall) -> OnnxValue:
    """BatchNormalization in inference mode."""
    source = call.value(0)
    if call.setting("training_mode", 0) or len([name for name in call.node.outputs if name]) > 1:
        raise NotImportedError("it is in training mode; export the model for use (eval)")
    weights = [call.weights(index) for index in (1, 2, 3, 4)]
    if len(source.shape) < 2 or {weight.shape for weight in weights} != {source.shape[1:2]}:
        raise NotImportedError(f"its weights do not fit {list(source.shape)}")
    placed = call.placed(source, 1)
    config = {"axis": placed.axis(1), "epsilon": call.number("epsilon", None, 1e-5)}
    config["momentum"] = call.number("momentum", None, 0.9)
    return call.layer("BatchNormalization", config, [placed.value], placed.value, weights)


def group_normalization(call: OnnxCall) -> OnnxValue:
    """InstanceNormalization, and GroupNormalization; groups that PyTorch sees as channels are groups of channels."""
    source = call.value(0)
    channels = source.network_shape[-1]
    is_channel_first = source.parts == (channels, prod(source.network_shape[:-1])) and source.order == (1, 0)
    is_joined = is_channel_first and len(source.shape) > 2 and source.shape[0] == 1
    if not is_joined or channels % source.shape[1]:
        source = image(call)
    # Otherwise the channels of an image were joined with its positions, a group of them to each "channel".
    channels, seen = source.network_shape[-1], source.shape[1]
    groups = int(call.setting("num_groups", seen))
    gamma, beta = (call.weights(index).reshape(-1) for index in (1, 2))
    if seen % groups or not gamma.size == beta.size == seen:
        raise NotImportedError(f"its weights in {groups} groups do not fit {list(source.shape)}")
    gamma, beta = (np.repeat(parameter, channels // seen) for parameter in (gamma, beta))
    config = {"groups": groups, "axis": -1, "epsilon": call.number("epsilon", None, 1e-5)}
    return call.layer("GroupNormalization", config, [source], source, [gamma, beta])


def layer_normalization(call: OnnxCall) -> OnnxValue:
    """LayerNormalization over the last axes."""
    source = call.value(0)
    rank = len(source.shape)
    first = int(call.setting("axis", -1)) % rank
    placed = call.placed(source, *range(first, rank))
    axes = [axis for axis in placed.order if axis >= first]
    shape = source.shape[first:]
    gamma = call.weights(1)
    beta = [call.weights(2)] if call.has(2) else []
    order = [axis - first for axis in axes]
    weights = [np.broadcast_to(parameter, shape).transpose(order) for parameter in (gamma, *beta)]
    network_axes = [placed.axis(axis) for axis in axes]
    if len(network_axes) > 1:  # for several axes, Keras expects the weights in the order of these axes
        network_axes = [axis % (len(placed.value.network_shape) + 1) for axis in network_axes]
    config = {"axis": network_axes, "epsilon": call.number("epsilon", None, 1e-5), "center": call.has(2)}
    return call.layer("LayerNormalization", config, [placed.value], placed.value, weights)


def local_response(call: OnnxCall) -> OnnxValue:
    """LRN: division by a power of the sum of squares of neighbouring channels; the sum is a matrix product."""
    source, size = image(call), int(call.setting("size", 1))
    channels = source.shape[1]
    if channels**2 > MOST_IN_CONFIG:
        raise NotImportedError(f"it has {channels} channels")
    far = np.arange(channels)[:, None] - np.arange(channels)
    band = (far <= (size - 1) // 2) & (far >= -(size - 1 - (size - 1) // 2))
    defaults = {"alpha": 1e-4, "beta": 0.75, "bias": 1.0}
    alpha, beta, bias = (call.number(name, None, default) for name, default in defaults.items())
    square = call.layer("Multiply", {}, [[source, source]], source)
    total = call.operation(NUMPY, "Matmul", {}, [square, np.asarray(band.T * (alpha / size), np.float32)], source)
    total = call.operation(NUMPY, "Add", {}, [total, bias], source)
    total = call.operation(NUMPY, "Power", {}, [total, beta], source)
    return call.operation(NUMPY, "Divide", {}, [source, total], source)


def softmax(call: OnnxCall, kind: str) -> OnnxValue:
    """Softmax and LogSoftmax; before opset 13 over all axes from one on, then over one.

    The softmax of a dense layer becomes its `activation`, as in Keras models.
    """
    source = call.value(0)
    early = call.builder.graph.opset < 13
    axis = int(call.setting("axis", 1 if early else -1)) % len(source.shape)
    seen = source
    if early and prod(source.shape[axis + 1 :]) > 1:
        seen, axis = in_shape(source, (prod(source.shape[:axis]), prod(source.shape[axis:]))), 1
    placed = call.placed(seen, axis)
    config = {"axis": placed.axis(axis)}
    maker = call.builder.alone(placed.value)
    if kind == "Softmax" and maker is not None and maker.kind == "Dense" and config == {"axis": -1}:
        call.builder.rewrite(placed.value, maker.configured(activation="softmax"))
        result = placed.value
    elif kind == "Softmax":
        result = call.layer("Softmax", config, [placed.value], placed.value)
    else:
        result = call.operation(NN, "LogSoftmax", config, [placed.value], placed.value)
    return in_shape(result, source.shape)


RULES: Mapping[str, Rule] = {
    "Gemm": gemm,
    "MatMul": matmul,
    "BatchNormalization": batch_normalization,
    "InstanceNormalization": group_normalization,
    "GroupNormalization": group_normalization,
    "LayerNormalization": layer_normalization,
    "LRN": local_response,
    "Softmax": partial(softmax, kind="Softmax"),
    "LogSoftmax": partial(softmax, kind="LogSoftmax"),
    **activations.RULES,
    **elementwise.RULES,
    **recurrent.RULES,
    **resize.RULES,
    **shapes.RULES,
    **convolution.RULES,
}
"""Import rules by operator; all other operators are unsupported."""
