"""A quantized graph as a float graph that gives the same answers, except for the rounding.

Every quantized constant becomes the real values that it stands for, biases included. QUANTIZE and DEQUANTIZE disappear,
and so does the CAST of an integer input to float.
Integer arithmetic has two properties that the float graph keeps:

- A bias is added to products of input and weight. So its scale is the product of their scales, whatever the file says.
- An output cannot leave the range of its type. If the zero point is the lowest value, this works as a ReLU; if the
  range also ends at 6, as a ReLU6. Some converters write no other activation.

One property is not kept: saturation at the upper end of another range (3.1, for example). It is an error of the
quantization, and would stop the training of the values that reach it.

`operator_differences` compares the two graphs operator by operator, each from the same inputs.

Source: TensorFlow Lite 8-bit quantization specification; Jacob et al., Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference, 2018, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.tflite import comparison
from compress.model.tflite.comparison import Feed
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import DTYPES, NONE, Graph, Operator, Tensor

CODES = {"INT8": (-128, 127), "UINT8": (0, 255), "INT16": (-32768, 32767)}
"""The lowest and the highest code of each type of quantized tensors."""
WITH_BIAS = {
    "CONV_2D": (0, 1, 2),
    "DEPTHWISE_CONV_2D": (0, 1, 2),
    "FULLY_CONNECTED": (0, 1, 2),
    "TRANSPOSE_CONV": (2, 1, 3),
}
"""For operators with a bias: the indices of input, weights and bias among their inputs."""
BIAS_TYPES = ("INT32", "INT64")
INTEGERS = ("INT8", "UINT8", "INT16", "INT32")
CONVERSIONS = ("QUANTIZE", "DEQUANTIZE")
SATURATING = (*WITH_BIAS, "ADD", "SUB", "MUL", "DIV")
"""Operators whose results can leave the range of their output. All of them can have a fused activation."""
NO_ACTIVATION, RELU, RELU6 = 0, 1, 3
"""Source: schema.fbs, ActivationFunctionType."""


@dataclass(frozen=True)
class InputRange:
    """The lowest and the highest real value of a quantized input, and the difference between adjacent values."""

    name: str
    low: float
    high: float
    step: float


@dataclass(frozen=True)
class Dequantized:
    """A quantized graph in float.

    Attributes:
        graph: the float graph. Its tensors have the indices of the original; inputs and outputs have the same order.
        ranges: the real values of each quantized input.
        activations: the number of operators whose range is now an activation.
    """

    original: Graph
    graph: Graph
    ranges: tuple[InputRange, ...]
    activations: int


@dataclass(frozen=True)
class OperatorDifference:
    """The difference between an operator of the quantized graph and its float form, in steps of the output."""

    operator: Operator
    largest: float
    mean: float


def is_quantized(tensor: Tensor) -> bool:
    """Whether a tensor holds integers that stand for real values."""
    return tensor.dtype in CODES and tensor.quantization is not None and bool(tensor.quantization.scale)


def value_range(tensor: Tensor) -> tuple[float, float]:
    """Return the lowest and the highest real value of a tensor with one scale."""
    low, high = CODES[tensor.dtype]
    scale, zero = _scale_and_zero(tensor)
    return float((low - zero) * scale), float((high - zero) * scale)


def input_limits(graph: Graph) -> tuple[float, float] | None:
    """Return the lowest and the highest real value that the only input of a graph can hold.

    A float input that is quantized by the first operator has the range of that operator's result. None for several
    inputs, and for inputs without quantization.
    """
    if len(graph.inputs) != 1:
        return None
    tensor = graph.tensors[quantized_input(graph)]
    return value_range(tensor) if is_quantized(tensor) else None


def quantized_input(graph: Graph) -> int:
    """Return the first input; if it is float, and the first operator quantizes it, the result of that operator."""
    index = graph.inputs[0]
    readers = graph.consumers.get(index, [])
    quantizes = graph.tensors[index].dtype == "FLOAT32" and len(readers) == 1 and readers[0].name == "QUANTIZE"
    return readers[0].outputs[0] if quantizes else index


def codes(values: NDArray[Any], tensor: Tensor) -> NDArray[Any]:
    """Return real values as the integers of a quantized tensor, rounded and limited to its range."""
    scale, zero = _scale_and_zero(tensor)
    rounded = np.round(np.asarray(values, np.float64) / scale) + zero
    return np.clip(rounded, *CODES[tensor.dtype]).astype(DTYPES[tensor.dtype])


def dequantize(graph: Graph) -> Dequantized:
    """Return a quantized graph in float.

    Raises:
        ModelError: a constant or its scales are invalid, or a weight with a bias is computed.
    """
    edit = Edit(graph)
    for index, values in _constants(graph).items():
        edit.to_float(index, values)
    casts = _casts_of_inputs(graph)
    for tensor in graph.tensors:
        if (is_quantized(tensor) and not tensor.is_constant) or tensor.index in casts.values():
            edit.to_float(tensor.index)
    moved: dict[int, int] = {}
    activations = 0
    for operator in graph.operators:
        inputs = [moved.get(index, index) for index in operator.inputs]
        if operator.index in casts:
            edit.remove(operator)
            moved[operator.outputs[0]] = inputs[0]
            continue
        if _is_conversion(operator, graph):
            edit.remove(operator)
            if _cuts_negative_values(operator, graph):
                edit.add("RELU", inputs, operator.outputs, version=1)
                activations += 1
            else:
                moved[operator.outputs[0]] = inputs[0]
            continue
        activation = _activation_of_range(operator, graph)
        if activation is not None:
            edit.change(operator, inputs=inputs, options={"fusedActivationFunction": activation})
            activations += 1
        elif inputs != list(operator.inputs):
            edit.change(operator, inputs=inputs)
    edit.outputs = [moved.get(index, index) for index in graph.outputs]
    inputs_with_range = [graph.tensors[index] for index in graph.inputs if is_quantized(graph.tensors[index])]
    ranges = tuple(
        InputRange(tensor.name, *value_range(tensor), _scale_and_zero(tensor)[0]) for tensor in inputs_with_range
    )
    return Dequantized(graph, edit.graph(), ranges, activations)


def _scale_and_zero(tensor: Tensor) -> tuple[float, int]:
    """Return the scale and the zero point of a quantized tensor; several or invalid scales raise a ModelError."""
    quantization = tensor.quantization
    assert quantization is not None  # the caller has checked that the tensor is quantized
    scales, zeros = quantization.scale, quantization.zero_point or (0,)
    if len(scales) != 1 or len(zeros) != 1 or not 0 < scales[0] < np.inf:
        raise ModelError(f"tensor {tensor.name!r} has the scales {list(scales)[:3]} and zero points {list(zeros)[:3]}")
    return scales[0], zeros[0]


def _constants(graph: Graph) -> dict[int, NDArray[np.float32]]:
    values = {
        tensor.index: real_values(tensor) for tensor in graph.tensors if tensor.is_constant and is_quantized(tensor)
    }
    for operator in graph.operators:
        for index in range(len(operator.inputs)):
            bias = _bias(operator, index, graph)
            if bias is not None:
                values[bias.index] = _real_bias(operator, bias, graph)
    return values


def _bias(operator: Operator, index: int, graph: Graph) -> Tensor | None:
    """Return an input of an operator if it is a constant bias of a quantized operator."""
    indices = WITH_BIAS.get(operator.name)
    if indices is None or index != indices[2] or operator.inputs[index] == NONE:
        return None
    tensor = graph.tensors[operator.inputs[index]]
    source = graph.tensors[operator.inputs[indices[0]]]
    return tensor if tensor.is_constant and tensor.dtype in BIAS_TYPES and is_quantized(source) else None


def _real_bias(operator: Operator, bias: Tensor, graph: Graph) -> NDArray[np.float32]:
    """Return the real values of a bias: the scale of a bias is the product of the scales of input and weights."""
    input_index, weights_index, _ = WITH_BIAS[operator.name]
    weights = graph.tensors[operator.inputs[weights_index]]
    if not is_quantized(weights):
        raise ModelError(f"the weights {weights.name!r} of a quantized {operator.name} are {weights.dtype}")
    assert weights.quantization is not None
    scale, _ = _scale_and_zero(graph.tensors[operator.inputs[input_index]])
    scales = np.asarray(weights.quantization.scale, np.float64) * scale
    values = bias.array().astype(np.float64)
    if scales.size not in (1, values.size):
        raise ModelError(f"the weights {weights.name!r} have {scales.size} scales, and the bias {values.size} values")
    return np.asarray(values * scales, np.float32)


def constant_values(tensor: Tensor) -> NDArray[np.float32]:
    """Return the values of a constant of floats, or the real values of a quantized one; errors as in `real_values`."""
    is_stored = tensor.quantization is None or tensor.dtype == "FLOAT32"
    return tensor.array().astype(np.float32) if is_stored else real_values(tensor)


def real_values(tensor: Tensor) -> NDArray[np.float32]:
    """Return the real values of a quantized constant.

    Raises:
        ModelError: the scales do not fit the shape, or a value is not finite.
    """
    quantization = tensor.quantization
    assert quantization is not None
    values = tensor.array().astype(np.float64)
    scale = np.asarray(quantization.scale, np.float64)
    zero = np.asarray(quantization.zero_point or [0], np.float64)
    if scale.size > 1:
        axis = quantization.axis
        if not 0 <= axis < values.ndim or values.shape[axis] != scale.size or zero.size not in (1, scale.size):
            raise ModelError(f"tensor {tensor.name!r}: {scale.size} scales do not fit {list(tensor.shape)}")
        shape = [1] * values.ndim
        shape[axis] = -1
        scale = scale.reshape(shape)
        zero = np.broadcast_to(zero, scale.size).reshape(shape)
    real = (values - zero) * scale
    if not np.isfinite(real).all():
        raise ModelError(f"tensor {tensor.name!r} has values that are not finite")
    return real.astype(np.float32)


def _is_conversion(operator: Operator, graph: Graph) -> bool:
    """Whether an operator only converts between real values and integers that stand for them."""
    if operator.name not in CONVERSIONS or len(operator.inputs) != 1 or len(operator.outputs) != 1:
        return False
    ends = [graph.tensors[operator.inputs[0]], graph.tensors[operator.outputs[0]]]
    return any(map(is_quantized, ends)) and all(is_quantized(end) or end.dtype == "FLOAT32" for end in ends)


def _cuts_negative_values(operator: Operator, graph: Graph) -> bool:
    """Whether the output of a conversion starts at 0, and its input at a negative value."""
    source, result = graph.tensors[operator.inputs[0]], graph.tensors[operator.outputs[0]]
    if not (is_quantized(source) and is_quantized(result)):
        return False
    return value_range(result)[0] == 0 and value_range(source)[0] < -_scale_and_zero(result)[0]


def _casts_of_inputs(graph: Graph) -> dict[int, int]:
    """Return the operators that only cast an integer input of the graph to float, with the index of the input."""
    readers: dict[int, list[Operator]] = {index: [] for index in graph.inputs}
    for operator in graph.operators:
        for index in operator.inputs:
            readers.get(index, []).append(operator)
    return {
        operator.index: index
        for index, operators in readers.items()
        if graph.tensors[index].dtype in INTEGERS and not is_quantized(graph.tensors[index])
        if all(reader.name == "CAST" and graph.tensors[reader.outputs[0]].dtype == "FLOAT32" for reader in operators)
        for operator in operators
    }


def _activation_of_range(operator: Operator, graph: Graph) -> int | None:
    """Return the activation that the range of an output stands for; None for an operator with an activation."""
    if operator.name not in SATURATING or operator.option("fusedActivationFunction", NO_ACTIVATION) != NO_ACTIVATION:
        return None
    result = graph.tensors[operator.outputs[0]]
    if not is_quantized(result):
        return None
    low, high = value_range(result)
    if low < 0:
        return None
    return RELU6 if abs(high - 6) < _scale_and_zero(result)[0] else RELU


def operator_differences(dequantized: Dequantized, feeds: Sequence[Feed]) -> list[OperatorDifference]:
    """Compare each operator in integers with its float form, both from the same inputs.

    The quantized graph runs with its own runtime. The float operators read the real values of its tensors, so that no
    difference adds up over several operators. `feeds` are inputs of the quantized graph, in its own types.

    Raises:
        ModelError: the interpreter rejects one of the graphs.
    """
    graph = dequantized.original
    separate, sources, results = _separate_operators(dequantized)
    runner, floats = comparison.Runner(graph, keep=True), comparison.Runner(separate)
    producers = {index: operator for operator in graph.operators for index in operator.outputs}
    differences: dict[int, list[NDArray[np.float64]]] = {index: [] for index in results}
    for feed in feeds:
        recorded = runner.run(feed, [*sources, *results])
        stored = dict(zip([*sources, *results], recorded, strict=True))
        inputs = [_real(stored[index], graph.tensors[index]) for index in sources]
        for index, actual in zip(results, floats.run(inputs), strict=True):
            differences[index].append(_steps(stored[index], actual, graph.tensors[index]))
    return [
        OperatorDifference(
            producers[index], max(map(np.max, steps)), float(np.mean([np.mean(feed_steps) for feed_steps in steps]))
        )
        for index, steps in differences.items()
    ]


def _separate_operators(dequantized: Dequantized) -> tuple[Graph, list[int], list[int]]:
    """Return the float graph with separate operators, and the tensors that are its inputs and its outputs.

    Every operator reads inputs of the graph instead of the results of other operators.
    """
    graph, original = dequantized.graph, dequantized.original
    edit = Edit(graph)
    in_integers = {operator.outputs[:1]: operator for operator in original.operators}
    copies: dict[int, int] = {}
    for operator in graph.operators:
        inputs = []
        for index in in_integers[operator.outputs[:1]].inputs:  # those before a conversion are not rounded yet
            if index != NONE and not graph.tensors[index].is_constant and index not in copies:
                copies[index] = edit.like(graph.tensors[index], "value")
            inputs.append(copies.get(index, index))
        edit.change(operator, inputs=inputs)
    edit.inputs = [*copies.values()]
    results = [
        index for operator in graph.operators for index in operator.outputs if is_quantized(original.tensors[index])
    ]
    edit.outputs = results
    return edit.graph(), [*copies], results


def _real(values: NDArray[Any], tensor: Tensor) -> NDArray[Any]:
    """Return the real values of a computed tensor; values that are not quantized stay as they are."""
    if not is_quantized(tensor):
        return values
    scale, zero = _scale_and_zero(tensor)
    return ((values.astype(np.float64) - zero) * scale).astype(np.float32)


def _steps(expected: NDArray[Any], actual: NDArray[Any], tensor: Tensor) -> NDArray[np.float64]:
    """Return the difference between codes and real values of a tensor, in steps; both are limited to its range."""
    scale, zero = _scale_and_zero(tensor)
    low, high = CODES[tensor.dtype]
    positions = np.clip(actual.astype(np.float64) / scale + zero, low, high)
    return np.abs(positions - expected.astype(np.float64))
