"""What activations of ONNX become in Keras, also those that exporters write as several operators.

Source: ONNX' operator specification, opsets 7 to 23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import numpy as np

from compress.importers.common.layer_calls import MATH, NN, NUMPY, NotImportedError
from compress.importers.onnx.layout import OnnxValue
from compress.importers.onnx.network_builder import OnnxCall, Rule
from compress.importers.onnx.ops.elementwise import arithmetic, operands, small, unary
from compress.ir.keras_graph import LayerOutput, tensors_in

SQRT_HALF = 0.5**0.5


def activation(name: str) -> Rule:
    """An activation by Keras' name."""

    def rule(call: OnnxCall) -> OnnxValue:
        given = call.value(0)
        return call.layer("Activation", {"activation": name}, [given], given)

    return rule


def clip(call: OnnxCall) -> OnnxValue:
    """Clip; between 0 and 6 and above 0 by their names, where only one limit is told a maximum or minimum."""
    given = call.value(0)
    low, high = call.number("min", 1, -np.inf), call.number("max", 2, np.inf)
    low, high = (limit if abs(limit) < 3e38 else np.copysign(np.inf, limit) for limit in (low, high))
    if low == 0 and high in (6, np.inf):
        return call.layer("Activation", {"activation": "relu6" if high == 6 else "relu"}, [given], given)
    if low == -np.inf and high == np.inf:
        return given
    if np.inf in (-low, high):
        kind, limit = ("Maximum", low) if high == np.inf else ("Minimum", high)
        return call.operation(NUMPY, kind, {}, [given, float(limit)], given)
    if low > high:
        raise NotImportedError(f"its limits are {low} and {high}")
    return call.operation(NUMPY, "Clip", {"x_min": float(low), "x_max": float(high)}, [given], given)


def leaky_relu(call: OnnxCall) -> OnnxValue:
    """LeakyRelu."""
    given = call.value(0)
    return call.layer("LeakyReLU", {"negative_slope": call.number("alpha", None, 0.01)}, [given], given)


def prelu(call: OnnxCall) -> OnnxValue:
    """PRelu: a slope for each channel, or for each number."""
    given = call.placed(call.value(0)).value
    slopes = np.asarray(small(call.weights(1), given), np.float32)
    sides = slopes.shape[1:] if slopes.ndim else (1,) * len(given.sides)
    shared = [axis + 1 for axis, side in enumerate(sides) if side == 1 and given.sides[axis] != 1]
    if slopes.size == 1:  # a slope for each channel can be followed when channels are removed
        sides, shared = (*(1,) * (len(sides) - 1), given.sides[-1]), list(range(1, len(sides)))
        slopes = np.full(sides, slopes)
    return call.layer("PReLU", {"shared_axes": shared or None}, [given], given, [slopes.reshape(sides)])


def elu(call: OnnxCall) -> OnnxValue:
    """Elu."""
    given = call.value(0)
    return call.layer("ELU", {"alpha": call.number("alpha", None, 1.0)}, [given], given)


def celu(call: OnnxCall) -> OnnxValue:
    """Celu."""
    given = call.value(0)
    return call.operation(NN, "Celu", {"alpha": call.number("alpha", None, 1.0)}, [given], given)


def selu(call: OnnxCall) -> OnnxValue:
    """Selu, with the numbers that it was defined with."""
    given = call.value(0)
    alpha, gamma = call.number("alpha", None, 1.6732632), call.number("gamma", None, 1.0507010)
    if not np.allclose((alpha, gamma), (1.6732632, 1.0507010), rtol=1e-5):
        raise NotImportedError(f"its alpha and gamma are {alpha} and {gamma}")
    return call.layer("Activation", {"activation": "selu"}, [given], given)


def hard_sigmoid(call: OnnxCall) -> OnnxValue:
    """HardSigmoid; that of Keras where it is the same one."""
    given = call.value(0)
    slope, shift = call.number("alpha", None, 0.2), call.number("beta", None, 0.5)
    if abs(slope - 1 / 6) < 1e-6 and shift == 0.5:
        return call.layer("Activation", {"activation": "hard_sigmoid"}, [given], given)
    made = call.operation(NUMPY, "Multiply", {}, [given, slope], given)
    made = call.operation(NUMPY, "Add", {}, [made, shift], given)
    return call.operation(NUMPY, "Clip", {"x_min": 0.0, "x_max": 1.0}, [made], given)


def gelu(call: OnnxCall) -> OnnxValue:
    """Gelu."""
    given = call.value(0)
    return call.operation(NN, "Gelu", {"approximate": call.setting("approximate", "none") == "tanh"}, [given], given)


def multiplication(call: OnnxCall) -> OnnxValue:
    """Mul; that of a tensor with its own sigmoid is SiLU, with its own hard sigmoid hard SiLU, with 1 + erf GELU."""
    given = operands(call)
    if len(given) == 2 and all(isinstance(each, OnnxValue) for each in given):
        for one, other in (given, given[::-1]):
            if (gated := _gated(call, one, other)) is not None:
                return gated
    return _recognized(call, arithmetic("Multiply")(call))


def division(call: OnnxCall) -> OnnxValue:
    """Div; the last of the operators that a hard sigmoid or a hard SiLU is written as may be one."""
    return _recognized(call, arithmetic("Divide", layer=False)(call))


def _recognized(call: OnnxCall, made: OnnxValue | list[OnnxValue]) -> OnnxValue:
    """A product, or the activation that it is."""
    assert isinstance(made, OnnxValue)
    if (taken := _gelu_of(call, made)) is not None:
        return call.operation(NN, "Gelu", {"approximate": False}, [taken], made)
    number, factors = _factors(call, made.tensor)
    for place, gate in enumerate(factors) if np.isclose(number, 1 / 6, rtol=1e-4) else ():
        taken, others = _within_relu6(call, gate), [*factors[:place], *factors[place + 1 :]]
        if taken is not None and others in ([], [taken]):
            return call.layer("Activation", {"activation": "hard_silu" if others else "hard_sigmoid"}, [taken], made)
    return made


def _within_relu6(call: OnnxCall, gate: LayerOutput) -> LayerOutput | None:
    """x, where a tensor is x + 3 between 0 and 6."""
    clipped = call.builder.layers.get(gate.layer)
    if clipped is None or clipped.config.get("activation") != "relu6" or clipped.kind != "Activation":
        return None
    return _plus(call, clipped.given()[0], 3.0)


def _plus(call: OnnxCall, tensor: LayerOutput, number: float) -> LayerOutput | None:
    """x, where a tensor is x and this number."""
    layer = call.builder.layers.get(tensor.layer)
    if layer is None or layer.kind != "Add" or not layer.calls:
        return None
    numbers = [each for each in layer.calls[0]["args"] if isinstance(each, float)]
    return layer.given()[0] if numbers == [number] else None


def _gated(call: OnnxCall, one: OnnxValue, gate: OnnxValue) -> OnnxValue | None:
    """A tensor times its own sigmoid or hard sigmoid."""
    layer = call.builder.alone(gate)
    name = layer.config.get("activation") if layer is not None and layer.kind == "Activation" else None
    if layer is None or name not in ("sigmoid", "hard_sigmoid") or layer.given() != [one.tensor]:
        return None
    if replace(gate, tensor=one.tensor) != one:
        return None
    call.builder.rewrite(gate, layer.configured(activation=str(name).replace("sigmoid", "silu")))
    return gate


def _gelu_of(call: OnnxCall, made: OnnxValue) -> LayerOutput | None:
    """The tensor that a product is the GELU of: x / 2 * (1 + erf(x / sqrt 2)), in the ways that exporters write it."""
    half, factors = _factors(call, made.tensor)
    for taken, other in (factors, factors[::-1]) if len(factors) == 2 else ():
        more = _plus(call, other, 1.0)
        inner = None if more is None else call.builder.layers.get(more.layer)
        if inner is None or inner.kind != "Erf":
            continue
        scale, given = _factors(call, inner.given()[0])
        if given == [taken] and np.allclose((half, scale), (0.5, SQRT_HALF), rtol=1e-4):
            return taken
    return None


def _factors(call: OnnxCall, tensor: LayerOutput) -> tuple[float, list[LayerOutput]]:
    """What a tensor is the product of: a number, and other tensors."""
    layer = call.builder.layers.get(tensor.layer)  # none, where an operator before it is refused
    if layer is None or layer.kind not in ("Multiply", "Divide") or not layer.calls:
        return 1.0, [tensor]
    arguments = [*tensors_in(layer.calls[0]["args"])]
    numbers = [each for each in layer.calls[0]["args"] if isinstance(each, float)]
    if layer.kind == "Divide" and (len(numbers) != 1 or layer.calls[0]["args"][1:] != numbers):
        return 1.0, [tensor]
    if len(numbers) + len(arguments) != 2:
        return 1.0, [tensor]
    number = prod(numbers) if layer.kind == "Multiply" else 1 / (numbers[0] or 1.0)
    found: list[LayerOutput] = []
    for each in arguments:
        more, inner = _factors(call, each)
        number, found = number * more, found + inner
    return number, found


RULES: Mapping[str, Callable[[OnnxCall], OnnxValue | list[OnnxValue]]] = {
    "Relu": activation("relu"),
    "Sigmoid": activation("sigmoid"),
    "Tanh": activation("tanh"),
    "Softplus": activation("softplus"),
    "Softsign": activation("softsign"),
    "Mish": activation("mish"),
    "HardSwish": activation("hard_silu"),
    "HardSigmoid": hard_sigmoid,
    "Clip": clip,
    "LeakyRelu": leaky_relu,
    "PRelu": prelu,
    "Elu": elu,
    "Celu": celu,
    "Selu": selu,
    "Gelu": gelu,
    "Mul": multiplication,
    "Div": division,
    "Erf": unary(MATH, "Erf"),
}
