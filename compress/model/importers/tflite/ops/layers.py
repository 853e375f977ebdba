"""Import rules for TFLite operators with weights and for element-wise operators.

The arithmetic of every operator is that of TFLite's reference kernels
(tensorflow/lite/kernels/internal/reference) and of its schema.fbs, version 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.importers.common.graph_builder import MATH, NN, NUMPY, NotImportedError, selection_as_sum
from compress.model.importers.common.shape_rules import bias_of, kernel_of
from compress.model.importers.tflite.network import Rule, TfliteCall, TfliteValue, reshaped
from compress.model.importers.tflite.ops import shapes
from compress.model.importers.tflite.ops.shapes import last_two_swapped

PADDINGS = ("same", "valid")
WITH_LAYER = {"Add", "Subtract", "Multiply", "Maximum", "Minimum"}
LARGEST_STRIDE = 1024
"""A damaged value would make Keras allocate for it."""


def _pair(call: TfliteCall, height: str, width: str) -> list[int]:
    """[height, width] of two options."""
    pair = [int(call.option(name, 1)) for name in (height, width)]
    if not all(0 < option <= LARGEST_STRIDE for option in pair):
        raise NotImportedError(f"its {height} and {width} are {pair}")
    return pair


def _strides(call: TfliteCall) -> list[int]:
    return _pair(call, "strideH", "strideW")


def _window(call: TfliteCall) -> dict[str, Any]:
    """Return strides, dilation and padding of a convolution as Keras settings."""
    strides, dilation = _strides(call), _pair(call, "dilationHFactor", "dilationWFactor")
    if max(strides) > 1 and max(dilation) > 1:
        raise NotImportedError(f"it has both strides {strides} and dilation {dilation}")
    return {"strides": strides, "dilation_rate": dilation, "padding": _padding(call)}


def _padding(call: TfliteCall) -> str:
    number = call.option("padding")
    if number not in (0, 1):
        raise NotImportedError(f"its padding is number {number}")
    return PADDINGS[number]


def _like(source: TfliteValue, window: Mapping[str, Any], kernel: tuple[int, ...], channels: int) -> TfliteValue:
    """Return a template with the output shape of a window over an image."""
    batch, *dims, _ = source.shape
    dilations = window.get("dilation_rate", (1, 1))
    result = [
        -(-size // stride) if window["padding"] == "same" else (size - (reach - 1) * dilation - 1) // stride + 1
        for size, reach, stride, dilation in zip(dims, kernel, window["strides"], dilations, strict=True)
    ]
    if min(result) < 1:
        raise NotImportedError(f"a window of {list(kernel)} does not fit {list(source.shape)}")
    return TfliteValue(source.tensor, (batch, *result, channels))


def _bias(call: TfliteCall, index: int, count: int) -> list[NDArray[np.float32]]:
    return bias_of(call.weights(index), count) if call.count > index else []


def conv_2d(call: TfliteCall) -> TfliteValue:
    """CONV_2D: weights [out, height, width, in / groups]."""
    source, kernel, window = call.batched(0, 4), kernel_of(call.weights(1), 4), _window(call)
    groups, left = divmod(source.shape[3], kernel.shape[3])
    if left or not groups or kernel.shape[0] % groups:
        raise NotImportedError(f"weights {list(kernel.shape)} do not fit {source.shape[3]} channels")
    size = kernel.shape[1:3]
    weights = [kernel.transpose(1, 2, 3, 0), *_bias(call, 2, kernel.shape[0])]
    config = {**window, "filters": kernel.shape[0], "kernel_size": list(size), "groups": groups}
    config["use_bias"] = len(weights) > 1
    like = _like(source, window, size, kernel.shape[0])
    return call.activated(call.layer("Conv2D", config, [source], like, weights))


def depthwise_conv_2d(call: TfliteCall) -> TfliteValue:
    """DEPTHWISE_CONV_2D: weights [1, height, width, in * multiplier]; a grouped convolution if the strides differ."""
    source, kernel, window = call.batched(0, 4), kernel_of(call.weights(1), 4), _window(call)
    channels, out, size = source.shape[3], kernel.shape[3], kernel.shape[1:3]
    if kernel.shape[0] != 1 or out % channels:
        raise NotImportedError(f"weights {list(kernel.shape)} do not fit {channels} channels")
    bias = _bias(call, 2, out)
    config = {**window, "kernel_size": list(size), "use_bias": bool(bias)}
    like = _like(source, window, size, out)
    if window["strides"][0] == window["strides"][1]:
        weights = [kernel.reshape(*size, channels, out // channels), *bias]
        result = call.layer("DepthwiseConv2D", {**config, "depth_multiplier": out // channels}, [source], like, weights)
    else:
        weights = [kernel.reshape(*size, 1, out), *bias]
        result = call.layer("Conv2D", {**config, "filters": out, "groups": channels}, [source], like, weights)
    return call.activated(result)


def transpose_conv(call: TfliteCall) -> TfliteValue:
    """TRANSPOSE_CONV: output shape, weights [out, height, width, in], input, bias."""
    output_shape = call.integers(0)
    kernel = kernel_of(call.weights(1), 4)
    source = call.batched(2, 4)
    strides = _strides(call)
    padding = _padding(call)
    if len(output_shape) != 4 or kernel.shape[3] != source.shape[3]:
        raise NotImportedError(f"weights {list(kernel.shape)} do not fit {list(source.shape)}")
    usual, extra = True, []
    for size, reach, stride, out in zip(source.shape[1:3], kernel.shape[1:3], strides, output_shape[1:3], strict=True):
        least = (size - 1) * stride + (reach % 2 if padding == "same" else reach)
        usual = usual and out == (size * stride if padding == "same" else least + max(stride - reach, 0))
        extra.append(out - least)
    if not usual and not all(0 <= excess < stride for excess, stride in zip(extra, strides, strict=True)):
        raise NotImportedError(f"Keras cannot compute its output {output_shape} from {list(source.shape)}")
    weights = [kernel.transpose(1, 2, 0, 3), *_bias(call, 3, kernel.shape[0])]
    config = {"filters": kernel.shape[0], "kernel_size": list(kernel.shape[1:3]), "strides": strides}
    config |= {"padding": padding, "use_bias": len(weights) > 1, "output_padding": None if usual else extra}
    like = TfliteValue(source.tensor, (source.shape[0], *output_shape[1:3], kernel.shape[0]))
    return call.activated(call.layer("Conv2DTranspose", config, [source], like, weights))


def fully_connected(call: TfliteCall) -> TfliteValue:
    """FULLY_CONNECTED: weights [out, in]; the dimensions before the last one are kept or merged."""
    source, weights = call.value(0), call.weights(1)
    if weights.ndim != 2 or weights.size == 0 or call.option("weightsFormat"):
        raise NotImportedError(
            f"its weights have the shape {list(weights.shape)}; the default format with two dimensions is supported"
        )
    out, taken = weights.shape
    if not source.shape or source.shape[-1] != taken:
        if prod(source.shape) % taken:
            raise NotImportedError(f"weights {list(weights.shape)} do not fit {list(source.shape)}")
        source = reshaped(call, source, (prod(source.shape) // taken, taken))
    bias = _bias(call, 2, out)
    like = TfliteValue(source.tensor, (*source.shape[:-1], out), source.extra_batch)
    if len(like.network_shape) < 1:
        raise NotImportedError(f"its input has the shape {list(source.shape)}")
    result = call.layer("Dense", {"units": out, "use_bias": bool(bias)}, [source], like, [weights.T, *bias])
    return reshaped(call, call.activated(result), call.output.shape)


def pool(call: TfliteCall, kind: str) -> TfliteValue:
    """AVERAGE_POOL_2D and MAX_POOL_2D; the average is over the values inside the image."""
    source = call.batched(0, 4)
    size = [int(call.option("filterHeight", 1)), int(call.option("filterWidth", 1))]
    if not all(0 < dim <= 2**20 for dim in size):
        raise NotImportedError(f"its window {size} is invalid")
    window = {"strides": _strides(call), "padding": _padding(call)}
    like = _like(source, window, (size[0], size[1]), source.shape[3])
    return call.activated(call.layer(kind, {**window, "pool_size": size}, [source], like))


def _broadcast(call: TfliteCall, indices: tuple[int, ...]) -> tuple[list[Any], TfliteValue]:
    """Return the operands with the same rank, and a template with the broadcast shape."""
    operands: list[Any] = [call.weights(index) if call.is_constant(index) else call.value(index) for index in indices]
    computed = [operand for operand in operands if isinstance(operand, TfliteValue)]
    if not computed:
        raise NotImportedError("all of its inputs are constants")
    shapes = [tuple(operand.shape) for operand in operands]
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError as error:
        listed = " and ".join(str(list(operand_shape)) for operand_shape in shapes)
        raise NotImportedError(f"{listed} do not fit each other") from error
    extra_batch = any(operand.extra_batch for operand in computed) or shape[:1] != (call.builder.batch,)
    for position, operand in enumerate(operands):
        if isinstance(operand, TfliteValue):
            dims = (*(1,) * (len(shape) - len(operand.shape)), *operand.shape)
            operands[position] = reshaped(call, operand, dims, extra_batch=extra_batch)
        elif not extra_batch and operand.ndim == len(shape) and operand.shape[0] not in (1,):
            raise NotImportedError("its constant differs from sample to sample")
    return operands, TfliteValue(computed[0].tensor, shape, extra_batch)


def arithmetic(call: TfliteCall, kind: str) -> TfliteValue:
    """Two operands: a layer for two computed tensors, if Keras has a layer, otherwise an operation."""
    operands, like = _broadcast(call, (0, 1))
    if kind in WITH_LAYER and all(isinstance(operand, TfliteValue) for operand in operands):
        return call.activated(call.layer(kind, {}, [operands], like))
    return call.activated(call.operation(NUMPY, kind, {}, operands, like))


def comparison(call: TfliteCall, kind: str) -> TfliteValue:
    """EQUAL, LESS and similar; only SELECT and logical operators can use the result."""
    operands, like = _broadcast(call, (0, 1))
    return call.operation(NUMPY, kind, {}, operands, like)


def select(call: TfliteCall) -> TfliteValue:
    """SELECT and SELECT_V2: values of the second input where the first one is true, otherwise of the third one."""
    if call.is_constant(0):
        return _selected(call, call.constant(0, "BOOL"))
    operands, like = _broadcast(call, (0, 1, 2))
    return call.operation(NUMPY, "Where", {}, operands, like)


def _selected(call: TfliteCall, condition: NDArray[np.bool_]) -> TfliteValue:
    """Return a selection by a constant as products and a sum, which have 8-bit operators: the mask of an attention."""
    operands, like = _broadcast(call, (1, 2))
    shape = (*(1,) * (len(like.shape) - condition.ndim), *condition.shape)
    if like.shape != call.output.shape or len(shape) != len(like.shape) or (shape[0] > 1 and not like.extra_batch):
        raise NotImportedError(f"its condition {list(condition.shape)} does not fit {list(call.output.shape)}")
    terms, constant = selection_as_sum(condition.reshape(shape), *operands)
    total, *others = [
        value if factor.all() else call.operation(NUMPY, "Multiply", {}, [value, factor], like)
        for value, factor in terms
    ]
    for term in (*others, *([constant] if constant.any() else [])):
        total = call.operation(NUMPY, "Add", {}, [total, term], like)
    return total


def squared_difference(call: TfliteCall) -> TfliteValue:
    """SQUARED_DIFFERENCE."""
    operands, like = _broadcast(call, (0, 1))
    difference = call.operation(NUMPY, "Subtract", {}, operands, like)
    return call.layer("Multiply", {}, [[difference, difference]], like)


def square(call: TfliteCall) -> TfliteValue:
    """SQUARE as a product, because SQUARE has no 8-bit kernel."""
    source = call.value(0)
    return call.layer("Multiply", {}, [[source, source]], source)


def negative(call: TfliteCall) -> TfliteValue:
    """NEG as a product, because NEG has no 8-bit kernel."""
    source = call.value(0)
    return call.operation(NUMPY, "Multiply", {}, [source, -1.0], source)


def unary(call: TfliteCall, module: str, kind: str, **config: Any) -> TfliteValue:
    """An element-wise operation of Keras."""
    source = call.value(0)
    return call.operation(module, kind, config, [source], source)


def activation(call: TfliteCall, name: str) -> TfliteValue:
    """An activation by its Keras name."""
    return call.activation(name, call.value(0))


def gelu(call: TfliteCall) -> TfliteValue:
    """GELU."""
    source = call.value(0)
    return call.operation(NN, "Gelu", {"approximate": bool(call.option("approximate", False))}, [source], source)


def leaky_relu(call: TfliteCall) -> TfliteValue:
    """LEAKY_RELU."""
    source, slope = call.value(0), float(call.option("alpha", 0.0))
    if not np.isfinite(slope) or slope < 0:
        raise NotImportedError(f"its slope is {slope}")
    return call.layer("LeakyReLU", {"negative_slope": slope}, [source], source)


def prelu(call: TfliteCall) -> TfliteValue:
    """PRELU: a slope for each channel, or for each value of a sample."""
    source, alpha = call.value(0), call.weights(1)
    dims = (*(1,) * (len(source.network_shape) - alpha.ndim), *alpha.shape)[-len(source.network_shape) :]
    fits = len(dims) == len(source.network_shape) and prod(dims) == alpha.size
    if not fits or any(a not in (1, b) for a, b in zip(dims, source.network_shape, strict=True)):
        raise NotImportedError(f"slopes {list(alpha.shape)} do not fit {list(source.shape)}")
    shared = [axis + 1 for axis, dim in enumerate(dims) if dim == 1 and source.network_shape[axis] != 1]
    return call.layer("PReLU", {"shared_axes": shared or None}, [source], source, [alpha.reshape(dims)])


def softmax(call: TfliteCall) -> TfliteValue:
    """SOFTMAX over the last dimension."""
    source, beta = call.value(0), float(call.option("beta", 1.0))
    if beta != 1.0:
        source = call.operation(NUMPY, "Multiply", {}, [source, beta], source)
    return call.layer("Softmax", {"axis": -1}, [source], source)


def normalization(call: TfliteCall) -> TfliteValue:
    """L2_NORMALIZATION over the last dimension."""
    source = call.value(0)
    return call.activated(call.layer("UnitNormalization", {"axis": -1}, [source], source))


def batch_matmul(call: TfliteCall) -> TfliteValue:
    """BATCH_MATMUL; with one constant matrix on the right, a dense layer."""
    flips = [bool(call.option(name, False)) for name in ("adjX", "adjY")]
    if call.is_constant(1) and call.stored(1).elements == prod(call.stored(1).shape[-2:]):
        source, right = call.value(0), call.weights(1).reshape(call.stored(1).shape[-2:])
        right, source = right.T if flips[1] else right, last_two_swapped(call, source) if flips[0] else source
        if len(source.network_shape) < 2 or right.ndim != 2 or source.shape[-1] != right.shape[0]:
            raise NotImportedError(f"{list(source.shape)} and {list(right.shape)} do not fit each other")
        like = TfliteValue(source.tensor, (*source.shape[:-1], right.shape[1]), source.extra_batch)
        result = call.layer("Dense", {"units": right.shape[1], "use_bias": False}, [source], like, [right])
        return reshaped(call, result, call.output.shape)
    operands = [call.value(index) for index in (0, 1)]
    operands = [
        last_two_swapped(call, operand) if flip else operand for operand, flip in zip(operands, flips, strict=True)
    ]
    first, second = operands
    fits = len(first.shape) == len(second.shape) > 1 and first.extra_batch == second.extra_batch
    if not fits or first.shape[-1] != second.shape[-2] or first.shape[:-2] != second.shape[:-2]:
        raise NotImportedError(f"{list(first.shape)} and {list(second.shape)} do not fit each other")
    like = TfliteValue(first.tensor, (*first.shape[:-1], second.shape[-1]), first.extra_batch)
    if len(first.shape) == 2 and not first.extra_batch:
        raise NotImportedError("it mixes the samples of a batch")
    return call.operation(NUMPY, "Matmul", {}, operands, like)


COMPARISONS = {"EQUAL": "Equal", "NOT_EQUAL": "NotEqual", "GREATER": "Greater", "GREATER_EQUAL": "GreaterEqual"}
COMPARISONS |= {"LESS": "Less", "LESS_EQUAL": "LessEqual", "LOGICAL_AND": "LogicalAnd", "LOGICAL_OR": "LogicalOr"}
ARITHMETIC = {"ADD": "Add", "SUB": "Subtract", "MUL": "Multiply", "DIV": "Divide", "POW": "Power"}
ARITHMETIC |= {"MAXIMUM": "Maximum", "MINIMUM": "Minimum"}
UNARY = {"ABS": "Absolute", "LOGICAL_NOT": "LogicalNot"} | {
    name: name.title() for name in ("EXP", "LOG", "SQRT", "SIN", "COS", "FLOOR", "CEIL", "SIGN")
}
ACTIVATIONS = {"LOGISTIC": "sigmoid", "HARD_SWISH": "hard_silu"} | {
    name: name.lower() for name in ("RELU", "RELU6", "RELU_N1_TO_1", "TANH", "ELU", "LOG_SOFTMAX")
}
RULES: Mapping[str, Rule] = {
    "CONV_2D": conv_2d,
    "DEPTHWISE_CONV_2D": depthwise_conv_2d,
    "TRANSPOSE_CONV": transpose_conv,
    "FULLY_CONNECTED": fully_connected,
    "AVERAGE_POOL_2D": partial(pool, kind="AveragePooling2D"),
    "MAX_POOL_2D": partial(pool, kind="MaxPooling2D"),
    **{name: partial(arithmetic, kind=kind) for name, kind in ARITHMETIC.items()},
    **{name: partial(comparison, kind=kind) for name, kind in COMPARISONS.items()},
    "SELECT": select,
    "SELECT_V2": select,
    "SQUARED_DIFFERENCE": squared_difference,
    **{name: partial(activation, name=keras_name) for name, keras_name in ACTIVATIONS.items()},
    "RELU_0_TO_1": partial(unary, module=NUMPY, kind="Clip", x_min=0.0, x_max=1.0),
    "GELU": gelu,
    "LEAKY_RELU": leaky_relu,
    "PRELU": prelu,
    "SOFTMAX": softmax,
    "L2_NORMALIZATION": normalization,
    "BATCH_MATMUL": batch_matmul,
    "RSQRT": partial(unary, module=MATH, kind="Rsqrt"),
    **{name: partial(unary, module=NUMPY, kind=kind) for name, kind in UNARY.items()},
    "SQUARE": square,
    "NEG": negative,
    **shapes.RULES,
}
"""Import rules by operator; all other operators are unsupported."""
