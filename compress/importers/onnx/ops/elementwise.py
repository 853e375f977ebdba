"""What ONNX operators that work number by number become in Keras.

A constant that is added to what a convolution or a dense layer makes, or multiplied with it,
channel by channel, becomes part of that layer's weights.

Source: ONNX' operator specification, opsets 7 to 23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.importers.common.graph_builder import UNKNOWN
from compress.importers.common.layer_calls import CORE, NUMPY, NotImportedError
from compress.importers.onnx.layout import OnnxValue, in_shape, laid, natural, sides_of
from compress.importers.onnx.network_builder import FLOAT, OnnxCall, Rule
from compress.importers.onnx.onnx_model import TYPE_NAMES
from compress.ir.keras_graph import Layer

BOOL = "BOOL"
NUMBERS = ("FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", BOOL)
OUT_AXIS = {
    "Conv1D": -1,
    "Conv2D": -1,
    "Conv1DTranspose": -2,
    "Conv2DTranspose": -2,
    "Dense": -1,
    "GroupNormalization": -1,
}
"""Layers with weights, and the axis of the kernel, or scale, that goes over the channels that they make."""
BY_CHANNEL = {**OUT_AXIS, "DepthwiseConv1D": None, "DepthwiseConv2D": None}


def small(numbers: NDArray[Any], like: OnnxValue) -> Any:
    """A constant as an argument: broadcast as in the graph, laid out as in the network, short where it repeats."""
    if numbers.size == 1:
        return np.asarray(numbers, np.float32).item()
    placed = np.asarray(like.placed(numbers), np.float32)[None]
    for axis in range(placed.ndim):
        first = placed.take([0], axis)
        placed = first if (placed == first).all() else placed
    return placed if placed.size > 1 else placed.item()


def together(call: OnnxCall, operands: Sequence[Any], shape: tuple[int, ...]) -> tuple[list[Any], OnnxValue]:
    """Operands (values, and arrays for constants) that fit each other in the network, and a template of the result."""
    values = [each for each in operands if isinstance(each, OnnxValue)]
    if not values:
        raise NotImportedError("it is given constants only")
    leader = max(values, key=lambda value: (value.shape == shape, prod(value.shape)))
    alike = all(replace(each, tensor=leader.tensor) == leader for each in values)
    if alike and leader.shape == shape:
        return [each if isinstance(each, OnnxValue) else small(each, leader) for each in operands], leader
    rank = len(shape)
    grown = [in_shape(each, (*(1,) * (rank - len(each.shape)), *each.shape)) for each in values]
    order = natural(grown[values.index(leader)]) or tuple(range(rank))
    whole = bool(order) and shape[order[0]] != 1
    arranged = iter([call.arranged(each, order, whole=whole) for each in grown])
    like = laid(UNKNOWN, shape, order, sides_of(shape, order, whole=whole) or (1,))
    return [next(arranged) if isinstance(each, OnnxValue) else small(each, like) for each in operands], like


def operands(call: OnnxCall, *types: str) -> list[Any]:
    """All inputs: arrays for constants, values for what is computed."""
    places = [place for place in range(len(call.node.inputs)) if call.has(place)]
    return [call.constant(place) if call.is_constant(place) else call.value(place, *types) for place in places]


def arithmetic(kind: str, layer: bool = True) -> Rule:
    """Two or more operands: a layer for computed tensors, otherwise operations, two by two."""

    def rule(call: OnnxCall) -> OnnxValue:
        given = operands(call)
        if len(given) == 2 and (merged := _merged(call, kind, given)) is not None:
            return merged
        if len(given) == 1 and isinstance(given[0], OnnxValue):
            return given[0]
        made, like = together(call, given, call.made())
        if layer and all(isinstance(each, OnnxValue) for each in made):
            return call.layer(kind, {}, [made], like)
        result = made[0]
        for each in made[1:]:
            result = call.operation(NUMPY, kind, {}, [result, each], like)
        return result if isinstance(result, OnnxValue) else call.operation(NUMPY, kind, {}, [result], like)

    return rule


def _merged(call: OnnxCall, kind: str, given: Sequence[Any]) -> OnnxValue | None:
    """The layer before with other weights, where the constant is one number for each of its channels."""
    value, constant = given if isinstance(given[0], OnnxValue) else given[::-1]
    swapped = not isinstance(given[0], OnnxValue)
    if not isinstance(value, OnnxValue) or isinstance(constant, OnnxValue) or value.shape != call.made():
        return None
    if constant.dtype.kind != "f" or kind not in ("Add", "Subtract", "Multiply", "Divide"):
        return None
    if (swapped and kind in ("Subtract", "Divide")) or (kind == "Add" and _begins_hard_sigmoid(call, constant)):
        return None
    layer = call.builder.alone(value)
    if (
        layer is None
        or layer.kind not in BY_CHANNEL
        or layer.config.get("activation")
        or value.sides != call.builder.shapes[value.tensor]
    ):
        return None
    numbers = np.asarray(small(constant, value), np.float32)
    channels = value.sides[-1]
    if numbers.size not in (1, channels) or (numbers.size > 1 and numbers.shape[-1] != channels):
        return None
    numbers = np.broadcast_to(numbers.reshape(-1), (channels,))
    changed = (_scaled if kind in ("Multiply", "Divide") else _shifted)(layer, numbers, kind)
    if not all(np.isfinite(weight).all() for weight in changed.weights):
        return None
    call.builder.rewrite(value, changed)
    return value


def _begins_hard_sigmoid(call: OnnxCall, constant: NDArray[Any]) -> bool:
    """Whether a sum with 3 is only clipped: then it is better part of an activation than of the weights before."""
    name = call.node.outputs[0]
    alone = constant.size == 1 and constant.item() == 3 and call.builder.takers[name] == 1
    return alone and any(node.operator == "Clip" and name in node.inputs for node in call.builder.graph.nodes)


def _scaled(layer: Layer, numbers: NDArray[np.float32], kind: str) -> Layer:
    with np.errstate(all="ignore"):
        scale = numbers if kind == "Multiply" else np.float32(1) / numbers
        kernel, *bias = layer.weights
        axis = OUT_AXIS.get(layer.kind)
        if axis is None:
            kernel = kernel * scale.reshape(kernel.shape[-2:])
        else:
            kernel = kernel * scale.reshape((-1, *(1,) * (-axis - 1)))
        return replace(layer, weights=(kernel, *(each * scale for each in bias)))


def _shifted(layer: Layer, numbers: NDArray[np.float32], kind: str) -> Layer:
    """With another bias; one that has none yet gets one."""
    kernel, *bias = layer.weights
    added = numbers if kind == "Add" else -numbers
    weights = (kernel, bias[0] + added if bias else np.array(added))
    return replace(layer if "use_bias" not in layer.config else layer.configured(use_bias=True), weights=weights)


def mean(call: OnnxCall) -> OnnxValue:
    """Mean of several."""
    made, like = together(call, operands(call), call.made())
    if all(isinstance(each, OnnxValue) for each in made):
        return call.layer("Average", {}, [made], like) if len(made) > 1 else made[0]
    raise NotImportedError("one of its inputs is a constant")


def power(call: OnnxCall) -> OnnxValue:
    """Pow; squares, which have an 8-bit form only as products, as such."""
    if call.is_constant(1) and call.constant(1).size == 1:
        exponent, given = float(call.constant(1).reshape(-1)[0]), call.value(0)
        if exponent == 2:
            return call.layer("Multiply", {}, [[given, given]], given)
        if exponent in (0.5, 1.0):
            return given if exponent == 1 else call.operation(NUMPY, "Sqrt", {}, [given], given)
    made, like = together(call, operands(call), call.made())
    return call.operation(NUMPY, "Power", {}, made, like)


def unary(module: str, kind: str, **config: Any) -> Rule:
    """One of Keras' operations."""

    def rule(call: OnnxCall) -> OnnxValue:
        given = call.value(0)
        return call.operation(module, kind, config, [given], given)

    return rule


def times(factor: float) -> Rule:
    """A product with a number."""

    def rule(call: OnnxCall) -> OnnxValue:
        given = call.value(0)
        merged = _merged(call, "Multiply", [given, np.array([factor], np.float32)])
        return merged or call.operation(NUMPY, "Multiply", {}, [given, factor], given)

    return rule


def reciprocal(call: OnnxCall) -> OnnxValue:
    """Reciprocal."""
    given = call.value(0)
    return call.operation(NUMPY, "Divide", {}, [1.0, given], given)


def same(call: OnnxCall) -> OnnxValue:
    """Operators that change nothing when a model is used."""
    return call.value(0, *NUMBERS)


def cast(call: OnnxCall) -> OnnxValue:
    """Cast: the network's numbers are floats, whole ones too; what is true becomes 1, what is not 0 true."""
    given, to = call.value(0, *NUMBERS), TYPE_NAMES.get(call.setting("to"), "?")
    kind = call.builder.graph.types[call.node.inputs[0]]
    if kind == to:
        return given
    if to == BOOL:
        return call.operation(NUMPY, "NotEqual", {}, [given, 0.0], given)
    if to != FLOAT and not (to in NUMBERS and np.can_cast(kind.lower(), to.lower())):
        raise NotImportedError("it makes whole numbers")
    return call.operation(CORE, "Cast", {"dtype": "float32"}, [given], given) if kind == BOOL else given


def comparison(kind: str) -> Rule:
    """Equal, Less and their like; of what they make only Where, Cast and each other take something."""

    def rule(call: OnnxCall) -> OnnxValue:
        made, like = together(call, operands(call, FLOAT, BOOL), call.made())
        return call.operation(NUMPY, kind, {}, made, like)

    return rule


def negation(call: OnnxCall) -> OnnxValue:
    """Not."""
    given = call.value(0, BOOL)
    return call.operation(NUMPY, "LogicalNot", {}, [given], given)


def where(call: OnnxCall) -> OnnxValue:
    """Where: a condition, and what to take."""
    if call.is_constant(0):
        raise NotImportedError("its condition is a constant")
    given = [call.value(0, BOOL), *operands(call, BOOL, FLOAT)[1:]]
    made, like = together(call, given, call.made())
    return call.operation(NUMPY, "Where", {}, made, like)


RULES: Mapping[str, Callable[[OnnxCall], OnnxValue | list[OnnxValue]]] = {
    "Add": arithmetic("Add"),
    "Sub": arithmetic("Subtract"),
    "Max": arithmetic("Maximum"),
    "Min": arithmetic("Minimum"),
    "Sum": arithmetic("Add"),
    "Mean": mean,
    "Pow": power,
    "Abs": unary(NUMPY, "Absolute"),
    "Neg": times(-1.0),
    "Reciprocal": reciprocal,
    "Sqrt": unary(NUMPY, "Sqrt"),
    "Exp": unary(NUMPY, "Exp"),
    "Log": unary(NUMPY, "Log"),
    "Floor": unary(NUMPY, "Floor"),
    "Ceil": unary(NUMPY, "Ceil"),
    "Round": unary(NUMPY, "Round"),
    "Sign": unary(NUMPY, "Sign"),
    "Sin": unary(NUMPY, "Sin"),
    "Cos": unary(NUMPY, "Cos"),
    "Identity": same,
    "Dropout": same,
    "Cast": cast,
    "Equal": comparison("Equal"),
    "Greater": comparison("Greater"),
    "GreaterOrEqual": comparison("GreaterEqual"),
    "Less": comparison("Less"),
    "LessOrEqual": comparison("LessEqual"),
    "And": comparison("LogicalAnd"),
    "Or": comparison("LogicalOr"),
    "Not": negation,
    "Where": where,
}
