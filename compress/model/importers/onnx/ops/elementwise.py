"""Import rules for element-wise ONNX operators.

A constant that is added to the output of a convolution or a dense layer, or multiplied with it, channel by channel, is
folded into the weights of that layer.

Source: ONNX' operator specification, opsets 7 to 23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.importers.common.graph_builder import CORE, NUMPY, UNKNOWN, NotImportedError, selection_as_sum
from compress.model.importers.onnx.layout import OnnxValue, in_shape, laid, natural, network_shape_of
from compress.model.importers.onnx.network_builder import FLOAT, OnnxCall, Rule
from compress.model.importers.onnx.onnx_model import TYPE_NAMES
from compress.model.ir.keras_graph import Layer
from compress.model.ir.layer_specs import GROUP_NORM, spec_of

BOOL = "BOOL"
NUMBERS = ("FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", BOOL)
COMMUTATIVE = ("Add", "Multiply")


def small(constant: NDArray[Any], like: OnnxValue) -> Any:
    """Return a constant in the network's layout, with size 1 along axes where its values repeat."""
    if constant.size == 1:
        return np.asarray(constant, np.float32).item()
    placed = np.asarray(like.placed(constant), np.float32)[None]
    for axis in range(placed.ndim):
        first = placed.take([0], axis)
        placed = first if (placed == first).all() else placed
    return _unlike_bias(placed, like.network_shape) if placed.size > 1 else placed.item()


def _unlike_bias(placed: NDArray[Any], network_shape: Sequence[int]) -> NDArray[Any]:
    """Return a constant that Keras does not take for a bias of another axis than its own.

    `keras.ops.add` with TensorFlow (3.15) adds a constant with one dimension above 1 to the last axis, or to the first
    after the batch, if the size is the same, wherever that dimension is: in square maps these are different axes.
    """
    varying = [axis for axis, dim in enumerate(placed.shape) if dim > 1]
    if len(varying) != 1:
        return placed
    size = placed.shape[varying[0]]
    for axis in (len(network_shape), 1):
        if network_shape[axis - 1] == size:
            return placed if axis == varying[0] else np.repeat(placed, size, axis)
    return placed


def together(call: OnnxCall, operands: Sequence[Any], shape: tuple[int, ...]) -> tuple[list[Any], OnnxValue]:
    """Return operands that can be broadcast in the network (values, or arrays for constants), and a template."""
    values = [operand for operand in operands if isinstance(operand, OnnxValue)]
    if not values:
        raise NotImportedError("all of its inputs are constants")
    leader = max(values, key=lambda value: (value.shape == shape, prod(value.shape)))
    alike = all(replace(value, tensor=leader.tensor) == leader for value in values)
    if alike and leader.shape == shape:
        return [operand if isinstance(operand, OnnxValue) else small(operand, leader) for operand in operands], leader
    rank = len(shape)
    grown = [in_shape(value, (*(1,) * (rank - len(value.shape)), *value.shape)) for value in values]
    order = natural(grown[values.index(leader)]) or tuple(range(rank))
    extra_batch = bool(order) and shape[order[0]] != 1
    arranged = iter([call.arranged(value, order, extra_batch=extra_batch) for value in grown])
    like = laid(UNKNOWN, shape, order, network_shape_of(shape, order, extra_batch=extra_batch) or (1,))
    return [next(arranged) if isinstance(operand, OnnxValue) else small(operand, like) for operand in operands], like


def operands(call: OnnxCall, *types: str) -> list[Any]:
    """Return all inputs: arrays for constants, values for computed tensors."""
    indices = [index for index in range(len(call.node.inputs)) if call.has(index)]
    return [call.constant(index) if call.is_constant(index) else call.value(index, *types) for index in indices]


def arithmetic(call: OnnxCall, kind: str, layer: bool = True) -> OnnxValue:
    """Two or more operands: a layer for computed tensors, otherwise an operation for each pair."""
    source = operands(call)
    if len(source) == 2 and (merged := _merged(call, kind, source)) is not None:
        return merged
    if len(source) == 1 and isinstance(source[0], OnnxValue):
        return source[0]
    arguments, like = together(call, source, call.output_shape())
    if layer and all(isinstance(argument, OnnxValue) for argument in arguments):
        return call.layer(kind, {}, [arguments], like)
    result = arguments[0]
    for argument in arguments[1:]:
        result = call.operation(NUMPY, kind, {}, [result, argument], like)
    return result if isinstance(result, OnnxValue) else call.operation(NUMPY, kind, {}, [result], like)


def _merged(call: OnnxCall, kind: str, source: Sequence[Any]) -> OnnxValue | None:
    """Fold a scalar or per-channel constant into the weights of the previous layer, if possible."""
    constant_first = not isinstance(source[0], OnnxValue)
    if kind not in (COMMUTATIVE if constant_first else (*COMMUTATIVE, "Subtract", "Divide")):
        return None
    constant, value = source if constant_first else source[::-1]
    if not isinstance(value, OnnxValue) or isinstance(constant, OnnxValue) or constant.dtype.kind != "f":
        return None
    if value.shape != call.output_shape() or (kind == "Add" and _begins_hard_sigmoid(call, constant)):
        return None
    layer = _layer_to_change(call, value)
    constants = _by_channel(constant, value)
    if layer is None or constants is None:
        return None
    changed = (_scaled if kind in ("Multiply", "Divide") else _shifted)(layer, constants, kind)
    if not all(np.isfinite(weight).all() for weight in changed.weights):
        return None
    call.builder.rewrite(value, changed)
    return value


def _layer_to_change(call: OnnxCall, value: OnnxValue) -> Layer | None:
    """Return the layer that computes a value, if its weights can be scaled or shifted without other effects."""
    layer = call.builder.alone(value)
    if layer is None or layer.config.get("activation"):
        return None
    if spec_of(layer).kernel is None and spec_of(layer) != GROUP_NORM:
        return None
    return layer if value.network_shape == call.builder.shapes[value.tensor] else None


def _by_channel(constant: NDArray[Any], value: OnnxValue) -> NDArray[np.float32] | None:
    """Return a constant as one number for each channel of a value; None if it differs between positions."""
    constants = np.asarray(small(constant, value), np.float32)
    channels = value.network_shape[-1]
    if constants.size not in (1, channels) or (constants.size > 1 and constants.shape[-1] != channels):
        return None
    return np.broadcast_to(constants.reshape(-1), (channels,))


def _begins_hard_sigmoid(call: OnnxCall, constant: NDArray[Any]) -> bool:
    """Whether x + 3 is only clipped: then it is part of an activation, and is not folded into weights."""
    name = call.node.outputs[0]
    alone = constant.size == 1 and constant.item() == 3 and call.builder.takers[name] == 1
    return alone and any(node.operator == "Clip" and name in node.inputs for node in call.builder.graph.nodes)


def _scaled(layer: Layer, constants: NDArray[np.float32], kind: str) -> Layer:
    with np.errstate(all="ignore"):
        scale = (constants if kind == "Multiply" else np.float32(1) / constants).astype(np.float64)
        kernel, *bias = layer.weights
        axes = spec_of(layer).kernel
        scaled = [kernel * scale if axes is None else axes.times_outputs(kernel, scale)]
        scaled += [bias_vector * scale for bias_vector in bias]
        return replace(layer, weights=tuple(weight.astype(np.float32) for weight in scaled))


def _shifted(layer: Layer, constants: NDArray[np.float32], kind: str) -> Layer:
    kernel, *bias = layer.weights
    added = constants if kind == "Add" else -constants
    weights = (kernel, bias[0] + added if bias else np.array(added))
    return replace(layer if "use_bias" not in layer.config else layer.configured(use_bias=True), weights=weights)


def mean(call: OnnxCall) -> OnnxValue:
    """Mean of several tensors."""
    arguments, like = together(call, operands(call), call.output_shape())
    if all(isinstance(argument, OnnxValue) for argument in arguments):
        return call.layer("Average", {}, [arguments], like) if len(arguments) > 1 else arguments[0]
    raise NotImportedError("one of its inputs is a constant")


def power(call: OnnxCall) -> OnnxValue:
    """Pow; a square becomes a product, because only a product has an 8-bit kernel."""
    if call.is_constant(1) and call.constant(1).size == 1:
        exponent, source = float(call.constant(1).reshape(-1)[0]), call.value(0)
        if exponent == 2:
            return call.layer("Multiply", {}, [[source, source]], source)
        if exponent in (0.5, 1.0):
            return source if exponent == 1 else call.operation(NUMPY, "Sqrt", {}, [source], source)
    return broadcast(call, "Power", operands(call))


def broadcast(call: OnnxCall, kind: str, source: Sequence[Any]) -> OnnxValue:
    """Add an operation on operands (values, or arrays for constants) that are broadcast."""
    arguments, like = together(call, source, call.output_shape())
    return call.operation(NUMPY, kind, {}, arguments, like)


def unary(call: OnnxCall, module: str, kind: str, types: Sequence[str] = ()) -> OnnxValue:
    """An operation of Keras with one input, which is float or of one of these types."""
    source = call.value(0, *types)
    return call.operation(module, kind, {}, [source], source)


def negative(call: OnnxCall) -> OnnxValue:
    """Neg as a product, which a layer before it can take over."""
    source = call.value(0)
    merged = _merged(call, "Multiply", [source, np.array([-1.0], np.float32)])
    return merged or call.operation(NUMPY, "Multiply", {}, [source, -1.0], source)


def reciprocal(call: OnnxCall) -> OnnxValue:
    """Reciprocal."""
    source = call.value(0)
    return call.operation(NUMPY, "Divide", {}, [1.0, source], source)


def same(call: OnnxCall) -> OnnxValue:
    """Operators without effect in inference mode."""
    return call.value(0, *NUMBERS)


def cast(call: OnnxCall) -> OnnxValue:
    """Cast: the network has integers as floats; true becomes 1, and a nonzero value becomes true."""
    source, to = call.value(0, *NUMBERS), TYPE_NAMES.get(call.setting("to"), "?")
    kind = call.builder.graph.types[call.node.inputs[0]]
    if kind == to:
        return source
    if to == BOOL:
        return call.operation(NUMPY, "NotEqual", {}, [source, 0.0], source)
    if to != FLOAT and not (to in NUMBERS and np.can_cast(kind.lower(), to.lower())):
        raise NotImportedError("a cast to integers is not supported")
    return call.operation(CORE, "Cast", {"dtype": "float32"}, [source], source) if kind == BOOL else source


def comparison(call: OnnxCall, kind: str) -> OnnxValue:
    """Equal, Less and similar; only Where, Cast and logical operators can use the result."""
    return broadcast(call, kind, operands(call, FLOAT, BOOL))


def where(call: OnnxCall) -> OnnxValue:
    """Where; with a constant condition as products and a sum, which have 8-bit operators: the mask of an attention."""
    if call.is_constant(0):
        terms, constant = selection_as_sum(call.constant(0).astype(bool), *operands(call, FLOAT)[1:])
        total, *others = [_combined(call, "Multiply", value, factor) for value, factor in terms]
        for term in (*others, constant):
            total = _combined(call, "Add", total, term)
        return total
    return broadcast(call, "Where", [call.value(0, BOOL), *operands(call, BOOL, FLOAT)[1:]])


def _combined(call: OnnxCall, kind: str, value: OnnxValue, term: Any) -> OnnxValue:
    """Return an operation with another term, in the shape of the result; the value itself if nothing changes."""
    neutral = 1.0 if kind == "Multiply" else 0.0
    if not isinstance(term, OnnxValue) and (term == neutral).all() and value.shape == call.output_shape():
        return value
    return broadcast(call, kind, [value, term])


UNARY = ("Sqrt", "Exp", "Log", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos")
COMPARISONS = {"Equal": "Equal", "Greater": "Greater", "GreaterOrEqual": "GreaterEqual", "Less": "Less"}
COMPARISONS |= {"LessOrEqual": "LessEqual", "And": "LogicalAnd", "Or": "LogicalOr"}
RULES: Mapping[str, Rule] = {
    "Add": partial(arithmetic, kind="Add"),
    "Sub": partial(arithmetic, kind="Subtract"),
    "Max": partial(arithmetic, kind="Maximum"),
    "Min": partial(arithmetic, kind="Minimum"),
    "Sum": partial(arithmetic, kind="Add"),
    "Mean": mean,
    "Pow": power,
    "Abs": partial(unary, module=NUMPY, kind="Absolute"),
    **{name: partial(unary, module=NUMPY, kind=name) for name in UNARY},
    "Neg": negative,
    "Reciprocal": reciprocal,
    "Identity": same,
    "Dropout": same,
    "Cast": cast,
    **{name: partial(comparison, kind=kind) for name, kind in COMPARISONS.items()},
    "Not": partial(unary, module=NUMPY, kind="LogicalNot", types=(BOOL,)),
    "Where": where,
}
