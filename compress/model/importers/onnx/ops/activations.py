"""Import rules for ONNX activations, including those that exporters write as several operators.

Source: ONNX' operator specification, opsets 7 to 23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

from compress.model.importers.common.graph_builder import LAYERS, MATH, NN, NUMPY, NotImportedError
from compress.model.importers.onnx.layout import OnnxValue
from compress.model.importers.onnx.network_builder import OnnxCall, Rule
from compress.model.importers.onnx.ops.elementwise import arithmetic, operands, small, unary
from compress.model.ir.keras_graph import LayerOutput, tensors_in

SQRT_HALF = 0.5**0.5
"""GELU is x / 2 * (1 + erf(x * sqrt(1/2)))."""


def activation(call: OnnxCall, name: str) -> OnnxValue:
    """An activation by its Keras name."""
    source = call.value(0)
    return call.layer("Activation", {"activation": name}, [source], source)


def clip(call: OnnxCall) -> OnnxValue:
    """Clip; ReLU or ReLU6 for these limits, a maximum or minimum for a single limit."""
    source = call.value(0)
    low, high = call.number("min", 1, -np.inf), call.number("max", 2, np.inf)
    low, high = (limit if abs(limit) < 3e38 else np.copysign(np.inf, limit) for limit in (low, high))
    if low == 0 and high in (6, np.inf):
        return call.layer("Activation", {"activation": "relu6" if high == 6 else "relu"}, [source], source)
    if low == -np.inf and high == np.inf:
        return source
    if np.inf in (-low, high):
        kind, limit = ("Maximum", low) if high == np.inf else ("Minimum", high)
        return call.operation(NUMPY, kind, {}, [source, float(limit)], source)
    if low > high:
        raise NotImportedError(f"its limits are {low} and {high}")
    return call.operation(NUMPY, "Clip", {"x_min": float(low), "x_max": float(high)}, [source], source)


def scaled(call: OnnxCall, kind: str, option: str, default: float, module: str = LAYERS) -> OnnxValue:
    """LeakyRelu, Elu and Celu: one option, which ONNX calls alpha."""
    source = call.value(0)
    return call.operation(module, kind, {option: call.number("alpha", None, default)}, [source], source)


def prelu(call: OnnxCall) -> OnnxValue:
    """PRelu: a slope for each channel, or for each value."""
    source = call.placed(call.value(0)).value
    slopes = np.asarray(small(call.weights(1), source), np.float32)
    dims = slopes.shape[1:] if slopes.ndim else (1,) * len(source.network_shape)
    shared = [axis + 1 for axis, dim in enumerate(dims) if dim == 1 and source.network_shape[axis] != 1]
    if slopes.size == 1:  # a slope for each channel can be followed when channels are removed
        dims, shared = (*(1,) * (len(dims) - 1), source.network_shape[-1]), list(range(1, len(dims)))
        slopes = np.full(dims, slopes)
    return call.layer("PReLU", {"shared_axes": shared or None}, [source], source, [slopes.reshape(dims)])


def selu(call: OnnxCall) -> OnnxValue:
    """Selu, only with its standard constants."""
    source = call.value(0)
    alpha, gamma = call.number("alpha", None, 1.6732632), call.number("gamma", None, 1.0507010)
    if not np.allclose((alpha, gamma), (1.6732632, 1.0507010), rtol=1e-5):
        raise NotImportedError(f"its alpha and gamma are {alpha} and {gamma}")
    return call.layer("Activation", {"activation": "selu"}, [source], source)


def hard_sigmoid(call: OnnxCall) -> OnnxValue:
    """HardSigmoid; the Keras activation if its slope and shift are the same."""
    source = call.value(0)
    slope, shift = call.number("alpha", None, 0.2), call.number("beta", None, 0.5)
    if abs(slope - 1 / 6) < 1e-6 and shift == 0.5:
        return call.layer("Activation", {"activation": "hard_sigmoid"}, [source], source)
    result = call.operation(NUMPY, "Multiply", {}, [source, slope], source)
    result = call.operation(NUMPY, "Add", {}, [result, shift], source)
    return call.operation(NUMPY, "Clip", {"x_min": 0.0, "x_max": 1.0}, [result], source)


def gelu(call: OnnxCall) -> OnnxValue:
    """Gelu."""
    source = call.value(0)
    return call.operation(NN, "Gelu", {"approximate": call.setting("approximate", "none") == "tanh"}, [source], source)


def multiplication(call: OnnxCall) -> OnnxValue:
    """Mul; x * sigmoid(x) becomes SiLU, x * hard_sigmoid(x) hard SiLU, and x / 2 * (1 + erf(x / sqrt 2)) GELU."""
    source = operands(call)
    if len(source) == 2 and all(isinstance(operand, OnnxValue) for operand in source):
        for one, other in (source, source[::-1]):
            if (gated := _gated(call, one, other)) is not None:
                return gated
    return _recognized(call, arithmetic(call, "Multiply"))


def division(call: OnnxCall) -> OnnxValue:
    """Div; it can be the last operator of a hard sigmoid or a hard SiLU."""
    return _recognized(call, arithmetic(call, "Divide", layer=False))


def _recognized(call: OnnxCall, result: OnnxValue) -> OnnxValue:
    """Replace a product by an activation with the same formula, if there is one."""
    if (taken := _gelu_of(call, result)) is not None:
        return call.operation(NN, "Gelu", {"approximate": False}, [taken], result)
    number, factors = _factors(call, result.tensor)
    for index, gate in enumerate(factors) if np.isclose(number, 1 / 6, rtol=1e-4) else ():
        taken, others = _within_relu6(call, gate), [*factors[:index], *factors[index + 1 :]]
        if taken is not None and others in ([], [taken]):
            return call.layer("Activation", {"activation": "hard_silu" if others else "hard_sigmoid"}, [taken], result)
    return result


def _within_relu6(call: OnnxCall, gate: LayerOutput) -> LayerOutput | None:
    """Return x if a tensor is relu6(x + 3)."""
    clipped = call.builder.layers.get(gate.layer)
    if clipped is None or clipped.config.get("activation") != "relu6" or clipped.kind != "Activation":
        return None
    return _plus(call, clipped.inputs()[0], 3.0)


def _plus(call: OnnxCall, tensor: LayerOutput, number: float) -> LayerOutput | None:
    layer = call.builder.layers.get(tensor.layer)
    if layer is None or layer.kind != "Add" or not layer.calls:
        return None
    numbers = [argument for argument in layer.calls[0]["args"] if isinstance(argument, float)]
    return layer.inputs()[0] if numbers == [number] else None


def _gated(call: OnnxCall, one: OnnxValue, gate: OnnxValue) -> OnnxValue | None:
    """Replace x * sigmoid(x) or x * hard_sigmoid(x) by an activation."""
    layer = call.builder.alone(gate)
    name = layer.config.get("activation") if layer is not None and layer.kind == "Activation" else None
    if layer is None or name not in ("sigmoid", "hard_sigmoid") or layer.inputs() != [one.tensor]:
        return None
    if replace(gate, tensor=one.tensor) != one:
        return None
    call.builder.rewrite(gate, layer.configured(activation=str(name).replace("sigmoid", "silu")))
    return gate


def _gelu_of(call: OnnxCall, result: OnnxValue) -> LayerOutput | None:
    """Return x if a product is x / 2 * (1 + erf(x / sqrt 2)), in any form that exporters write."""
    half, factors = _factors(call, result.tensor)
    for taken, other in (factors, factors[::-1]) if len(factors) == 2 else ():
        more = _plus(call, other, 1.0)
        inner = None if more is None else call.builder.layers.get(more.layer)
        if inner is None or inner.kind != "Erf":
            continue
        scale, source = _factors(call, inner.inputs()[0])
        if source == [taken] and np.allclose((half, scale), (0.5, SQRT_HALF), rtol=1e-4):
            return taken
    return None


def _factors(call: OnnxCall, tensor: LayerOutput) -> tuple[float, list[LayerOutput]]:
    """Return the factors of a product: a number, and tensors."""
    layer = call.builder.layers.get(tensor.layer)  # None after an unsupported operator
    if layer is None or layer.kind not in ("Multiply", "Divide") or not layer.calls:
        return 1.0, [tensor]
    arguments = [*tensors_in(layer.calls[0]["args"])]
    numbers = [argument for argument in layer.calls[0]["args"] if isinstance(argument, float)]
    if layer.kind == "Divide" and (len(numbers) != 1 or layer.calls[0]["args"][1:] != numbers):
        return 1.0, [tensor]
    if len(numbers) + len(arguments) != 2:
        return 1.0, [tensor]
    number = prod(numbers) if layer.kind == "Multiply" else 1 / (numbers[0] or 1.0)
    tensors: list[LayerOutput] = []
    for argument in arguments:
        more, inner = _factors(call, argument)
        number, tensors = number * more, tensors + inner
    return number, tensors


KERAS_NAMES = {"HardSwish": "hard_silu"} | {
    name: name.lower() for name in ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Mish")
}
RULES: Mapping[str, Rule] = {
    **{name: partial(activation, name=keras_name) for name, keras_name in KERAS_NAMES.items()},
    "HardSigmoid": hard_sigmoid,
    "Clip": clip,
    "LeakyRelu": partial(scaled, kind="LeakyReLU", option="negative_slope", default=0.01),
    "PRelu": prelu,
    "Elu": partial(scaled, kind="ELU", option="alpha", default=1.0),
    "Celu": partial(scaled, kind="Celu", option="alpha", default=1.0, module=NN),
    "Selu": selu,
    "Gelu": gelu,
    "Mul": multiplication,
    "Div": division,
    "Erf": partial(unary, module=MATH, kind="Erf"),
}
