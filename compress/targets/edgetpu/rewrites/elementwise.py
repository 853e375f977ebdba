"""Rewrites of element-wise functions and arithmetic that the Edge TPU does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import Graph, Operator, Quantization, Tensor

ISLAND_OPERATORS = ("ADD", "SUB", "MUL", "MEAN", "RELU", "RELU6")
"""Operators that can be 8-bit with any scales."""
EXACT_OPERATORS = ("DEQUANTIZE", "RESHAPE", "TRANSPOSE", "EXPAND_DIMS", "SQUEEZE", "SLICE", "STRIDED_SLICE")
"""Operators that do not round values."""
RELU6 = 3
"""The fused activation's value in the TFLite schema."""


def hard_swish(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace HARD_SWISH by x * (relu6(x + 3) / 6): ADD, MUL, MUL."""
    edit, x, out = replace_operator(operator, graph)
    three = scalar_constant(edit, x, 3.0)
    gate = edit.like(x, "relu6", quantization=quantization_for_range(x, 0.0, 6.0))
    edit.add("ADD", [x.index, three], [gate], edit.options("AddOptions", fusedActivationFunction=RELU6))
    sixth = edit.like(x, "gate", quantization=quantization_for_range(x, 0.0, 1.0))
    edit.add("MUL", [gate, scalar_constant(edit, x, 1 / 6)], [sixth], edit.options("MulOptions"))
    edit.add("MUL", [x.index, sixth], [out.index], edit.options("MulOptions"))
    yield edit


def leaky_relu(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace LEAKY_RELU by PRELU with one slope, or max(x, slope * x): MUL, MAXIMUM."""
    slope = float(operator.option("alpha", 0.0))
    edit, x, out = replace_operator(operator, graph)
    if len(x.shape) <= 4:  # TFLite of 2021 aborts on PRELU of more
        channels = x.shape[-1] if x.shape else 1
        code, quantization = exact_constant(x, slope)
        shape = (1, 1, channels) if len(x.shape) == 4 else (channels,)
        slopes = edit.tensor(f"{out.name}/slopes", shape, x.dtype, quantization, np.full(shape, code))
        edit.add("PRELU", [x.index, slopes], [out.index])
        yield edit
    if 0 <= slope <= 1:
        edit, x, out = replace_operator(operator, graph)
        scaled = edit.like(out, "scaled")
        edit.add("MUL", [x.index, scalar_constant(edit, x, slope)], [scaled], edit.options("MulOptions"))
        edit.add("MAXIMUM", [requantize_like(edit, x, out), scaled], [out.index], edit.options("MaximumMinimumOptions"))
        yield edit


def gelu(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace GELU by x * sigmoid(k * x), or x * sigmoid(x * (1.596 + 0.0714 * x * x)) where that is too coarse."""
    edit, x, out = replace_operator(operator, graph)
    values = all_values(x)
    cubic = values + 0.044715 * values**3
    exact = values * (0.5 + 0.5 * np.tanh(np.sqrt(2 / np.pi) * cubic))  # within 0.0005 of the exact form

    def max_error(k: float) -> float:
        return float(np.abs(values * sigmoid(k * values) - exact).max())

    yield _gated(edit, x, add_rescaling(edit, x, float(min(np.arange(1.4, 2.0, 0.002), key=max_error))), out)
    edit, x, out = replace_operator(operator, graph)
    limit = float(np.abs(values).max())
    options = edit.options("MulOptions")
    squared = edit.like(x, "square", quantization=quantization_for_range(x, 0.0, limit**2))
    edit.add("MUL", [x.index, x.index], [squared], options)
    cube, first = 0.044715 * np.sqrt(8 / np.pi), np.sqrt(8 / np.pi)
    weighted = edit.like(x, "weighted", quantization=quantization_for_range(x, 0.0, limit**2 * cube))
    edit.add("MUL", [squared, scalar_constant(edit, x, cube)], [weighted], options)
    factor = edit.like(x, "factor", quantization=quantization_for_range(x, 0.0, limit**2 * cube + first))
    edit.add("ADD", [weighted, scalar_constant(edit, x, first)], [factor], edit.options("AddOptions"))
    inside = edit.like(x, "inside", quantization=quantization_for_range(x, -8.0, 8.0))
    edit.add("MUL", [x.index, factor], [inside], options)
    yield _gated(edit, x, inside, out)


def elu(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace ELU by max(x, 0.748 tanh(0.576 x) + 0.252 tanh(1.926 x)): two TANH, ADD, MAXIMUM."""
    edit, x, out = replace_operator(operator, graph)
    parts = []
    for weight, steepness in ((0.748098, 0.576222), (0.251902, 1.925825)):  # least error over x < 0: 0.0043
        curve = edit.like(x, "tanh", quantization=symmetric_quantization(x, 1 / 128))
        edit.add("TANH", [add_rescaling(edit, x, steepness)], [curve])
        part = edit.like(x, "weighted", quantization=symmetric_quantization(x, weight / 128))
        edit.add("MUL", [curve, scalar_constant(edit, x, weight)], [part], edit.options("MulOptions"))
        parts.append(part)
    below = edit.like(out, "below")
    edit.add("ADD", parts, [below], edit.options("AddOptions"))
    edit.add("MAXIMUM", [requantize_like(edit, x, out), below], [out.index], edit.options("MaximumMinimumOptions"))
    yield edit


def absolute(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace ABS by max(x, -x): MUL, MAXIMUM."""
    edit, x, out = replace_operator(operator, graph)
    negative = edit.like(out, "negative")
    edit.add("MUL", [x.index, scalar_constant(edit, x, -1.0)], [negative], edit.options("MulOptions"))
    edit.add("MAXIMUM", [requantize_like(edit, x, out), negative], [out.index], edit.options("MaximumMinimumOptions"))
    yield edit


def negative(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace NEG by a multiplication by -1."""
    edit, x, out = replace_operator(operator, graph)
    edit.add("MUL", [x.index, scalar_constant(edit, x, -1.0)], [out.index], edit.options("MulOptions"))
    yield edit


def square(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace SQUARE by x * x."""
    edit, x, out = replace_operator(operator, graph)
    edit.add("MUL", [x.index, x.index], [out.index], edit.options("MulOptions"))
    yield edit


def relu_0_to_1(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace RELU_0_TO_1 by MAXIMUM and MINIMUM with constants."""
    edit, x, out = replace_operator(operator, graph)
    bounded = edit.like(out, "above")
    options = edit.options("MaximumMinimumOptions")
    low, high = (edit.like(out, "limit", shape=(), values=code_of(out, limit)) for limit in (0.0, 1.0))
    edit.add("MAXIMUM", [requantize_like(edit, x, out), low], [bounded], options)
    edit.add("MINIMUM", [bounded, high], [out.index], options)
    yield edit


def squared_difference(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace SQUARED_DIFFERENCE, for compilers before 16.0, by a difference multiplied by itself: SUB, MUL."""
    edit, a, out = replace_operator(operator, graph)
    b = eight_bit_input(edit, operator.inputs[1])
    limit = max(abs(bound) for bound in (*difference_range(a, b),))
    difference = edit.like(out, "difference", quantization=quantization_for_range(out, -limit, limit))
    edit.add("SUB", [a.index, b.index], [difference], edit.options("SubOptions"))
    edit.add("MUL", [difference, difference], [out.index], edit.options("MulOptions"))
    yield edit


def divide(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace DIV with a constant divisor by MUL; with a square root as divisor (normalizations), by RSQRT and MUL."""
    edit, x, out = replace_operator(operator, graph)
    divisor = eight_bit_input(edit, operator.inputs[1])
    options = edit.options("MulOptions", fusedActivationFunction=operator.option("fusedActivationFunction", 0))
    if divisor.is_constant:
        values = dequantized_constant(divisor)
        if not values.all():
            return
        inverse = 1 / values
        limit = float(np.abs(inverse).max())
        step = symmetric_quantization(x, limit / 127)
        codes = np.round(inverse / step.scale[0]) + step.zero_point[0]
        constant = edit.tensor(f"{divisor.name}/inverse", divisor.shape, x.dtype, step, clip_to_dtype(codes, x.dtype))
        edit.add("MUL", [x.index, constant], [out.index], options)
        yield edit
        return
    root = graph.producer.get(divisor.index)
    if root is None or root.name != "SQRT" or len(graph.consumers[divisor.index]) > 1:
        return
    inside = graph.tensors[root.inputs[0]]
    positive = all_values(inside)[all_values(inside) > 0]
    if not positive.size:
        return
    inverse_root = edit.like(
        divisor, "inverse", quantization=quantization_for_range(inside, 0.0, float(1 / np.sqrt(positive.min())))
    )
    edit.remove(root)
    edit.add("RSQRT", [inside.index], [inverse_root])
    edit.add("MUL", [x.index, inverse_root], [out.index], options)
    yield edit


def requantized(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace DEQUANTIZE, operators that only move values, and QUANTIZE by the same in 8 bits and one QUANTIZE."""
    chain = [operator]
    while chain[-1].name in EXACT_OPERATORS:
        after = graph.consumers.get(chain[-1].outputs[0], [])
        if len(after) != 1 or len(chain[-1].outputs) != 1 or chain[-1].outputs[0] in graph.outputs:
            return
        chain.append(after[0])
    x, out = graph.input_tensors(operator)[0], graph.output_tensors(chain[-1])[0]
    if (
        operator.name != "DEQUANTIZE"
        or chain[-1].name != "QUANTIZE"
        or not (is_per_tensor_8bit(x) and is_per_tensor_8bit(out))
    ):
        return
    edit, index = Edit(graph), x.index
    edit.remove(*chain)
    for middle in chain[1:-1]:
        moved = edit.like(x, "moved", shape=graph.output_tensors(middle)[0].shape)
        edit.add(middle.name, [index, *middle.inputs[1:]], [moved], middle.options)
        index = moved
    edit.add("QUANTIZE", [index], [out.index], edit.options("QuantizeOptions"))
    yield edit


def float_island(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace a float operator between DEQUANTIZE and QUANTIZE by an 8-bit operator."""
    if graph.output_tensors(operator)[0].dtype != "FLOAT32":
        return
    edit, _, out = replace_operator(operator, graph)
    inputs = []
    for index in operator.inputs:
        tensor = graph.tensors[index]
        if tensor.dtype == "FLOAT32" and tensor.is_constant:
            values = tensor.array()
            quantization = quantization_for_range(out, min(float(values.min()), 0.0), max(float(values.max()), 0.0))
            codes = clip_to_dtype(np.round(values / quantization.scale[0]) + quantization.zero_point[0], out.dtype)
            inputs.append(edit.tensor(f"{tensor.name}/codes", tensor.shape, out.dtype, quantization, codes))
        elif tensor.dtype == "FLOAT32":
            inputs.append(eight_bit_input(edit, index).index)
        else:
            inputs.append(index)
    edit.add(operator.name, inputs, [out.index], operator.options)
    yield edit


# --- parts ------------------------------------------------------------------------------


def _gated(edit: Edit, x: Tensor, inside: int, out: Tensor) -> Edit:
    """Return an edit with the product of x and sigmoid(inside)."""
    gate = edit.like(x, "gate", quantization=logistic_output(x))
    edit.add("LOGISTIC", [inside], [gate])
    edit.add("MUL", [x.index, gate], [out.index], edit.options("MulOptions"))
    return edit


class NotEightBitError(Exception):
    """An operator is neither 8-bit, nor alone between a DEQUANTIZE and a QUANTIZE."""


def replace_operator(operator: Operator, graph: Graph) -> tuple[Edit, Tensor, Tensor]:
    """Return an edit that removes an operator, with the operator's first input and its output.

    The DEQUANTIZE and QUANTIZE around a float operator are removed too, so that input and output are 8-bit.

    Raises:
        NotEightBitError: the input or the output is not 8-bit.
    """
    edit = Edit(graph)
    edit.remove(operator)
    x, out = eight_bit_input(edit, operator.inputs[0]), graph.output_tensors(operator)[0]
    after = graph.consumers.get(out.index, [])
    if out.dtype == "FLOAT32" and len(after) == 1 and after[0].name == "QUANTIZE" and out.index not in graph.outputs:
        edit.remove(after[0])
        out = graph.output_tensors(after[0])[0]
    if not is_per_tensor_8bit(out):
        raise NotEightBitError
    return edit, x, out


def eight_bit_input(edit: Edit, index: int) -> Tensor:
    """Return an input of a removed operator, before the DEQUANTIZE whose output only this operator uses."""
    graph = edit.before
    tensor, before = graph.tensors[index], graph.producer.get(index)
    if before is not None and before.name == "DEQUANTIZE" and tensor.dtype == "FLOAT32":
        readers = {reader.index for reader in graph.consumers[index]}
        if readers <= edit.removed and index not in graph.outputs:
            edit.remove(before)
            tensor = graph.input_tensors(before)[0]
    if not is_per_tensor_8bit(tensor):
        raise NotEightBitError
    return tensor


def is_per_tensor_8bit(tensor: Tensor) -> bool:
    """Return whether a tensor is 8-bit and quantized per tensor."""
    quantization = tensor.quantization
    return tensor.dtype in ("INT8", "UINT8") and quantization is not None and not quantization.per_channel


def scale_and_zero_point(tensor: Tensor) -> tuple[float, int]:
    """Return scale and zero point of a tensor that is quantized per tensor."""
    assert tensor.quantization is not None
    zero_points = tensor.quantization.zero_point
    return tensor.quantization.scale[0], zero_points[0] if zero_points else 0


def dequantized_constant(tensor: Tensor) -> NDArray[np.float64]:
    """Return the real values of a constant that is quantized per tensor."""
    scale, zero_point = scale_and_zero_point(tensor)
    return np.asarray(scale * (tensor.array().astype(np.float64) - zero_point))


def clip_to_dtype(codes: NDArray[np.float64], dtype: str) -> NDArray[np.generic]:
    """Return codes as an array of an 8-bit type, clipped to its range."""
    limits = np.iinfo(np.int8 if dtype == "INT8" else np.uint8)
    return np.clip(codes, limits.min, limits.max).astype(limits.dtype)


def all_values(tensor: Tensor) -> NDArray[np.float64]:
    """Return the 256 real values of an 8-bit tensor that is quantized per tensor, ascending."""
    scale, zero_point = scale_and_zero_point(tensor)
    lowest = -128 if tensor.dtype == "INT8" else 0
    return np.asarray(scale * (np.arange(lowest, lowest + 256) - zero_point), np.float64)


def code_of(tensor: Tensor, value: float) -> NDArray[np.generic]:
    """Return the code of a value in a tensor's quantization."""
    scale, zero_point = scale_and_zero_point(tensor)
    return clip_to_dtype(np.asarray(np.round(value / scale) + zero_point), tensor.dtype)


def symmetric_quantization(tensor: Tensor, scale: float) -> Quantization:
    """Return the quantization of a tensor's type in which 0 is the middle of the range."""
    return Quantization((scale,), (0 if tensor.dtype == "INT8" else 128,), 0)


def quantization_for_range(tensor: Tensor, low: float, high: float) -> Quantization:
    """Return the quantization in which the codes of a tensor's type cover the range from `low` to `high`."""
    scale = (high - low) / 255
    lowest = -128 if tensor.dtype == "INT8" else 0
    return Quantization((scale,), (round(lowest - low / scale),), 0)


def logistic_output(tensor: Tensor) -> Quantization:
    """Return the quantization that TFLite requires for the output of LOGISTIC."""
    return Quantization((1 / 256,), (-128 if tensor.dtype == "INT8" else 0,), 0)


def difference_range(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the minimum and the maximum of a - b."""
    first, second = (
        dequantized_constant(operand).ravel() if operand.is_constant else all_values(operand) for operand in (a, b)
    )
    return float(first.min() - second.max()), float(first.max() - second.min())


def exact_constant(tensor: Tensor, value: float) -> tuple[NDArray[np.generic], Quantization]:
    """Return the code and the quantization of a constant of a tensor's type, without rounding error."""
    if tensor.dtype == "INT8":
        return np.asarray(127 if value >= 0 else -127, np.int8), Quantization((abs(value) / 127 or 1.0,), (0,), 0)
    zero_point = 0 if value >= 0 else 255
    return np.asarray(255 - zero_point, np.uint8), Quantization((abs(value) / 255 or 1.0,), (zero_point,), 0)


def scalar_constant(edit: Edit, tensor: Tensor, value: float) -> int:
    """Add a scalar constant of a tensor's type, without rounding error, and return its index."""
    code, quantization = exact_constant(tensor, value)
    if value == 0:
        code = np.zeros_like(code)
    return edit.tensor(f"constant {value:g}", (), tensor.dtype, quantization, code)


def add_rescaling(edit: Edit, tensor: Tensor, factor: float) -> int:
    """Multiply a tensor by a positive factor without rounding: the codes stay the same, only their scale changes."""
    scale, zero_point = scale_and_zero_point(tensor)
    rescaled = edit.like(tensor, "multiplied", quantization=Quantization((scale * factor,), (zero_point,), 0))
    edit.add("MUL", [tensor.index, scalar_constant(edit, tensor, factor)], [rescaled], edit.options("MulOptions"))
    return rescaled


def requantize_like(edit: Edit, tensor: Tensor, reference: Tensor) -> int:
    """Requantize a tensor to the scale of a reference, and return its index; the tensor itself if they agree."""
    if scale_and_zero_point(tensor) == scale_and_zero_point(reference):
        return tensor.index
    requantized = edit.like(reference, "requantized", shape=tensor.shape)
    edit.add("QUANTIZE", [tensor.index], [requantized], edit.options("QuantizeOptions"))
    return requantized


def sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-values)))


Rewrite = Callable[[Operator, Graph], Iterator[Edit]]
"""A function that proposes edits, the best first; none if it does not apply."""
