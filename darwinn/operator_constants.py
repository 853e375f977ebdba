"""The constants that the instructions of an operator hold, computed from the scales and zero points of its tensors.

All arithmetic is float32; the reciprocal of an output's scale is rounded before it is multiplied. Zero points are those
of uint8 (of int8: plus 128). Source: observed in 29 compiled models, in which each rule is exact for all instructions
of its kind (`benchmarks/relink.py` counts them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

import numpy as np

from compress.model.tflite.graph import Graph, Operator, Tensor
from darwinn.instructions import (
    ADD,
    FIXED_POINT,
    MULTIPLY,
    NEGATE,
    PAIR,
    POOL_AVERAGE,
    Constants,
    VectorInstruction,
)

_F32 = np.float32
INT8_OFFSET = 128
"""The array computes with uint8: an int8 value plus 128."""
_STEPS = 255
"""Steps between the smallest and the largest value of 8 bits."""
_ONE = _F32(1)
ONE_BITS, INFINITY_BITS, MINUS_INFINITY_BITS = 0x3F800000, 0x7F800000, 0xFF800000
_LARGEST_FACTOR = 32767
"""The factors of an addition have 15 bits."""
_RELU, _RELU_N1_TO_1, _RELU6 = 1, 2, 3
_CLAMPED = {_RELU: (0.0, None), _RELU_N1_TO_1: (-1.0, 1.0), _RELU6: (0.0, 6.0)}
TABLE_LIMITS = {"LOGISTIC": 0x41265904, "TANH": 0x40DBFE6B}
"""Bits of the largest input of each function by table: 10.3967 and 6.8748. Read from the clamps in compiled models."""
EXPONENTIAL_LIMIT = 0xC1509C0D
"""Bits of the smallest input of the exponential in a softmax: -13.0381. Read from the clamps in compiled models."""
_SIGN = 0x80000000
"""The sign bit of a float32."""
_MOVE = Constants(ONE_BITS, INFINITY_BITS, MINUS_INFINITY_BITS, 0, 0, 0, 0)
"""Moves and maxima without a clamp."""
_SUM_OF_EXPONENTIALS = Constants(0x37800080, INFINITY_BITS, MINUS_INFINITY_BITS, 0, 0, 0, 0)
_RECIPROCAL = Constants(0x37800080, 0x47000000, 0, 0, 0, 0, 0)
_PROBABILITY = Constants(0x34000157, 0x437F0000, 0, 0, 0, 0, 0)
"""The last steps of a softmax, read from compiled models: their scales are fixed, as the output's."""
_EMPTY = Constants(0, 0, 0, 0, 0, 0, 0)
"""Without a multiplier nothing is computed: bundles that only look like an instruction, in 10 compiled models."""
_INDEPENDENT = (
    (frozenset({0x10}), _EMPTY),
    (frozenset({0x60, PAIR, POOL_AVERAGE}), _MOVE),
    (frozenset({ADD}), _SUM_OF_EXPONENTIALS),
    (frozenset({FIXED_POINT}), _RECIPROCAL),
    (frozenset({FIXED_POINT}), _PROBABILITY),
)
WEIGHTED = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"})
"""Operators with weights whose instruction is always predicted, and is never one of another operator."""
DATA_MOVEMENT = frozenset(
    {
        *("CONCATENATION", "EXPAND_DIMS", "PACK", "PAD", "QUANTIZE", "RESHAPE", "SLICE", "SPACE_TO_DEPTH", "SPLIT"),
        *("SQUEEZE", "STRIDED_SLICE", "TRANSPOSE"),
    }
)
"""Operators that copy values; where nothing must be rescaled, the compiler may do it without an instruction."""


@dataclass(frozen=True)
class Form:
    """The constants of one kind of instruction that an operator can have.

    Attributes:
        name: the name of the kind of instruction, which is equal for the same operator in another model.
        kinds: the possible values of `VectorInstruction.kind`.
        weights_per_channel: whether the zero points of the weights are in the parameters.
    """

    name: str
    kinds: frozenset[int]
    constants: Constants
    weights_per_channel: bool = False
    factors: tuple[int, int] | None = None


@dataclass(frozen=True)
class _TensorScale:
    """The quantization of one tensor: its scale as float32 and its zero point as unsigned number."""

    scale: np.float32
    zero_point: int

    @property
    def reciprocal(self) -> np.float32:
        return _F32(_ONE / self.scale)


def is_activation(tensor: Tensor) -> bool:
    """Return whether a tensor is an 8-bit activation with one scale."""
    quantization = tensor.quantization
    is_8_bit = tensor.dtype in ("INT8", "UINT8")
    return is_8_bit and not tensor.is_constant and quantization is not None and len(quantization.scale) == 1


def unsigned_zero_point(tensor: Tensor) -> int:
    """Return the first zero point of a quantized tensor as that of uint8."""
    quantization = tensor.quantization
    stored = quantization.first_zero_point if quantization else 0
    return stored + (INT8_OFFSET if tensor.dtype == "INT8" else 0)


def quantization_of(tensor: Tensor) -> tuple[float, int]:
    """Return the scale of an activation, and its zero point as that of uint8."""
    assert tensor.quantization is not None
    return tensor.quantization.scale[0], unsigned_zero_point(tensor)


def activation_quantizations(graph: Graph, operator: Operator) -> list[tuple[float, int]]:
    """Return the scale and the zero point, as that of uint8, of each activation that an operator reads or writes."""
    tensors = (*graph.input_tensors(operator), *graph.output_tensors(operator))
    return [quantization_of(tensor) for tensor in tensors if is_activation(tensor)]


def forms(graph: Graph, operator: Operator) -> tuple[Form, ...]:
    """Return the kinds of instructions that an operator can have, with their constants; none for an unknown one."""
    function = _FORMS.get(operator.name)
    if function is None:
        return ()
    with np.errstate(all="ignore"):
        return tuple(function(graph, operator))


def is_independent(instruction: VectorInstruction) -> bool:
    """Return whether an instruction is one of those that depend on no scale or zero point of a model."""
    kind, constants = instruction.kind, instruction.constants
    return any(kind in kinds and constants == fixed_constants for kinds, fixed_constants in _INDEPENDENT)


def _scale(tensor: Tensor) -> _TensorScale:
    assert tensor.quantization is not None
    return _TensorScale(_F32(tensor.quantization.scale[0]), unsigned_zero_point(tensor))


def _bits(value: np.float32) -> int:
    return int(_F32(value).view(np.uint32))


def _clamps(output: _TensorScale, activation: int = 0) -> tuple[int, int]:
    """Return the bits of the upper and lower clamp of an output with a fused activation."""
    upper = _F32(_F32(_STEPS - output.zero_point) * output.scale)
    lower = _F32(_F32(-output.zero_point) * output.scale)
    low, high = _CLAMPED.get(activation, (None, None))
    if low is not None:
        lower = max(lower, _F32(low))
    if high is not None:
        upper = min(upper, _F32(high))
    low_bits = _bits(_F32(lower * output.reciprocal))
    return _bits(_F32(upper * output.reciprocal)), 0 if low_bits == _SIGN else low_bits


def _constants(
    multiplier: np.float32,
    output: _TensorScale,
    *,
    inputs: int = 0,
    weights: int = 0,
    offset: int = 0,
    activation: int = 0,
) -> Constants:
    upper, lower = _clamps(output, activation)
    return Constants(_bits(multiplier), upper, lower, offset, output.zero_point, inputs, weights)


def _activations(graph: Graph, operator: Operator) -> tuple[list[_TensorScale], list[_TensorScale]]:
    """Return the scales of all inputs and outputs that are activations; no outputs if another one is not."""
    inputs = [_scale(tensor) for tensor in graph.input_tensors(operator) if is_activation(tensor)]
    outputs = graph.output_tensors(operator)
    return inputs, [_scale(tensor) for tensor in outputs] if all(map(is_activation, outputs)) else []


def _fused(operator: Operator) -> int:
    return int(operator.option("fusedActivationFunction", 0) or 0)


def _weighted(graph: Graph, operator: Operator) -> list[Form]:
    """CONV_2D, DEPTHWISE_CONV_2D, FULLY_CONNECTED: one multiplier, or one for each output in the parameters."""
    inputs, outputs = _activations(graph, operator)
    weights = graph.tensors[operator.inputs[1]]
    if not inputs or not outputs or weights.quantization is None:
        return []
    output = outputs[0]
    quantization = weights.quantization
    scaled = _F32(_F32(inputs[0].scale * _F32(quantization.scale[0])) * output.reciprocal)
    multiplier = scaled if quantization.one_scale else _ONE
    constants = _constants(
        multiplier,
        output,
        inputs=inputs[0].zero_point,
        weights=0 if quantization.per_channel else unsigned_zero_point(weights),
        activation=_fused(operator),
    )
    return [Form("weights", MULTIPLY, constants, quantization.per_channel)]


def _product(graph: Graph, operator: Operator) -> list[Form]:
    """MUL of two tensors, of which any can come first; or by a vector, with multipliers in the parameters."""
    inputs, outputs = _activations(graph, operator)
    inputs += [_scale(tensor) for tensor in graph.input_tensors(operator) if _is_constant_map(tensor)]
    if len(inputs) == 1 and outputs and len(operator.inputs) == 2:
        constants = _constants(_ONE, outputs[0], inputs=inputs[0].zero_point, activation=_fused(operator))
        return [Form("product with a constant", MULTIPLY, constants)]
    if len(inputs) != 2 or len(operator.inputs) != 2 or not outputs:
        return []
    first, second = inputs
    multiplier = _F32(_F32(first.scale * second.scale) * outputs[0].reciprocal)
    fused = _fused(operator)
    return [
        Form(
            name,
            frozenset({PAIR}),
            _constants(multiplier, outputs[0], inputs=a.zero_point, weights=b.zero_point, activation=fused),
        )
        for name, a, b in (("product", first, second), ("product, second input first", second, first))
    ]


def _is_constant_map(tensor: Tensor) -> bool:
    """Return whether a tensor is an 8-bit constant with several dimensions, which is handled as an activation."""
    is_8_bit = tensor.is_constant and tensor.dtype in ("INT8", "UINT8") and tensor.quantization is not None
    return is_8_bit and sum(size > 1 for size in tensor.shape) > 1


def _sum(graph: Graph, operator: Operator) -> list[Form]:
    """ADD. Of two activations, each is multiplied by an integer factor, so that both have one scale."""
    inputs, outputs = _activations(graph, operator)
    if len(inputs) == 1 and outputs and len(operator.inputs) == 2:
        rescaled = _F32(inputs[0].scale * outputs[0].reciprocal)
        constants = _constants(rescaled, outputs[0], inputs=inputs[0].zero_point, activation=_fused(operator))
        return [Form("sum with a constant", MULTIPLY, constants)]
    if len(inputs) != 2 or len(operator.inputs) != 2 or not outputs:
        return []
    first, second = inputs
    scales = float(first.scale), float(second.scale)
    ratio = Fraction(min(scales) / max(scales)).limit_denominator(_LARGEST_FACTOR)
    if not ratio.numerator:
        return []
    factors = (ratio.denominator, ratio.numerator) if scales[0] >= scales[1] else (ratio.numerator, ratio.denominator)
    unit = _F32(max(first.scale, second.scale) / _F32(max(factors)))
    offset = -(first.zero_point * factors[0] + second.zero_point * factors[1])
    constants = _constants(_F32(unit * outputs[0].reciprocal), outputs[0], offset=offset, activation=_fused(operator))
    return [Form("sum", frozenset({ADD}), constants, factors=factors)]


def _mean(graph: Graph, operator: Operator) -> list[Form]:
    """AVERAGE_POOL_2D without padding, and MEAN over height and width.

    Old compilers do not clamp if input and output have one scale: 9 compiled models for runtimes 10 and 12.
    """
    inputs, outputs = _activations(graph, operator)
    count = _averaged(graph, operator)
    if len(inputs) != 1 or not outputs or count is None:
        return []
    weight = _F32(_ONE / _F32(count))
    multiplier = _F32(_F32(inputs[0].scale * weight) * outputs[0].reciprocal)
    constants = _constants(multiplier, outputs[0], weights=inputs[0].zero_point, activation=_fused(operator))
    kinds = frozenset({POOL_AVERAGE})
    means = [Form("mean", kinds, constants)]
    if inputs[0] == outputs[0] and not _fused(operator):
        free = replace(constants, multiplier=_bits(weight), upper=INFINITY_BITS, lower=MINUS_INFINITY_BITS)
        means.append(Form("mean, not clamped", kinds, free))
    return means


def _averaged(graph: Graph, operator: Operator) -> int | None:
    """Return the number of values that each output averages; None if it is not the same for all."""
    tensor, output = graph.tensors[operator.inputs[0]], graph.output_tensors(operator)[0]
    if len(tensor.shape) != 4:
        return None
    if operator.name == "MEAN":
        same_channels = output.elements == tensor.shape[0] * tensor.shape[3]
        return prod(tensor.shape[1:3]) if same_channels else None
    window = (int(operator.option("filterHeight", 1)), int(operator.option("filterWidth", 1)))
    strides = (operator.option("strideH", 1), operator.option("strideW", 1))
    for length, positions, size, stride in zip(tensor.shape[1:3], output.shape[1:3], window, strides, strict=True):
        if (positions - 1) * stride + size > length:
            return None
    return prod(window)


def _largest(graph: Graph, operator: Operator) -> list[Form]:
    """MAX_POOL_2D; compilers before 2.0 do not clamp."""
    inputs, outputs = _activations(graph, operator)
    if len(inputs) != 1 or not outputs:
        return []
    zero_point = inputs[0].zero_point
    multiplier = _F32(inputs[0].scale * outputs[0].reciprocal)
    clamped = _constants(multiplier, outputs[0], inputs=zero_point, offset=-zero_point)
    free = Constants(
        clamped.multiplier, INFINITY_BITS, MINUS_INFINITY_BITS, -zero_point, outputs[0].zero_point, zero_point, 0
    )
    kinds = frozenset({PAIR})
    return [Form("largest", kinds, clamped), Form("largest, not clamped", kinds, free)]


def _copy(graph: Graph, operator: Operator) -> list[Form]:
    """Operators that copy values."""
    inputs, outputs = _activations(graph, operator)
    rescaled = operator.name in ("CONCATENATION", "QUANTIZE")
    copies = []
    for index, input_tensor in enumerate(inputs):
        for number, output in enumerate(outputs):
            copies += _copies(f"copy {index} to {number}", input_tensor, output, exact=not rescaled)
    return copies


def _copies(name: str, source: _TensorScale, output: _TensorScale, *, exact: bool) -> list[Form]:
    """Return the forms of a copy: multiplied by one weight, or with the zero point as a weight.

    The product of a scale and its own reciprocal can be the float32 below 1. Concatenations use it. Whether other
    operators use it or 1 was never seen (`exact`): both are possible, and a model in which they differ is ambiguous.
    """
    multipliers = {"": _F32(source.scale * output.reciprocal)}
    if exact:
        multipliers[", exactly"] = _ONE
    copies = []
    for suffix, multiplier in multipliers.items():
        plain = _constants(multiplier, output, inputs=source.zero_point)
        shifted = _constants(multiplier, output, weights=source.zero_point, offset=-source.zero_point)
        copies.append(Form(f"{name}{suffix}", MULTIPLY, plain))
        copies.append(Form(f"{name}, shifted{suffix}", MULTIPLY, shifted))
    return copies


def _function(graph: Graph, operator: Operator) -> list[Form]:
    """LOGISTIC, TANH: the function of the input times its scale, by table. TFLite fixes the output's scale."""
    inputs, outputs = _activations(graph, operator)
    if len(inputs) != 1 or not outputs:
        return []
    limit = TABLE_LIMITS[operator.name]
    constants = Constants(
        _bits(inputs[0].scale), limit, limit | _SIGN, 0, outputs[0].zero_point, inputs[0].zero_point, 0
    )
    return [Form("function", MULTIPLY, constants)]


def _softmax(graph: Graph, operator: Operator) -> list[Form]:
    """SOFTMAX: copies of the input, the largest one negated, and exponentials of (input - largest) * scale.

    The scale is in the instruction, or in the parameters with 1 in the instruction.
    """
    inputs, _ = _activations(graph, operator)
    if len(inputs) != 1 or operator.option("beta", 1.0) != 1.0:
        return []
    source = inputs[0]
    negated = _TensorScale(source.scale, _STEPS)
    softmax_forms = _copies("copy", source, source, exact=True)
    for suffix, multiplier in (("", _F32(source.scale * source.reciprocal)), (", exactly", _ONE)):
        first = _constants(multiplier, negated, weights=1)
        again = _constants(multiplier, negated, inputs=_STEPS)
        softmax_forms.append(Form(f"negated{suffix}", frozenset({ADD, NEGATE}), first))
        softmax_forms.append(Form(f"negated again{suffix}", MULTIPLY, again))
    for name, scale in (("exponential", source.scale), ("exponential, scaled before", _ONE)):
        constants = Constants(_bits(scale), 0, EXPONENTIAL_LIMIT, 0, 0, _STEPS, 0)
        softmax_forms.append(Form(name, MULTIPLY, constants))
    return softmax_forms


_FORMS: dict[str, Callable[[Graph, Operator], list[Form]]] = {
    "ADD": _sum,
    "AVERAGE_POOL_2D": _mean,
    "CONV_2D": _weighted,
    "DEPTHWISE_CONV_2D": _weighted,
    "FULLY_CONNECTED": _weighted,
    "LOGISTIC": _function,
    "MAX_POOL_2D": _largest,
    "MEAN": _mean,
    "MUL": _product,
    "SOFTMAX": _softmax,
    "TANH": _function,
    **dict.fromkeys(DATA_MOVEMENT, _copy),
}
