"""Rewrites of a whole graph: static shapes, constant folding, and the types of inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.tflite.comparison import (
    Difference,
    Feed,
    Runner,
    random_feed,
    record_tensors,
    steps,
    summarize,
    without_unknown_customs,
)
from compress.model.tflite.edit import Edit
from compress.model.tflite.float_graph import input_independent_operators
from compress.model.tflite.graph import DTYPES, Graph, Quantization, Tensor
from compress.targets.edgetpu.rewrites.elementwise import is_per_tensor_8bit, scale_and_zero_point
from deploy.contract.preprocessing import dequantize, quantize

LARGEST_CONSTANT = 1 << 20
"""The most elements of a constant that replaces operators."""


def fixed_shapes(graph: Graph) -> Graph | None:
    """Set a dynamic batch to 1, and fix every shape that depends on it."""
    stored = graph.source.subgraphs[0].tensors
    signatures = [() if tensor.shapeSignature is None else list(tensor.shapeSignature) for tensor in stored]
    dynamic = [index for index, signature in enumerate(signatures) if -1 in signature]
    if not dynamic:
        return None
    for index in graph.inputs:
        if graph.tensors[index].dynamic:
            raise ModelError(
                f"the input {graph.tensors[index].name} has dynamic dimensions other than the batch",
                hint="fix every dimension before you convert the model",
            )
    edit = Edit(graph)
    for index in graph.inputs:
        edit.fix_shape(index, graph.tensors[index].shape)
    runnable = without_unknown_customs(edit.graph())
    runner = Runner(runnable, keep=True)
    runner.run(random_feed(graph, np.random.default_rng(0)), ())
    for index in dynamic:
        known = index in runnable.consumers or index in runnable.producer
        edit.fix_shape(index, runner.shape(index) if known else graph.tensors[index].shape)
    return edit.graph()


def folded_constants(graph: Graph) -> Graph | None:
    """Replace operators whose outputs never change (shapes, and functions of constants) by constants."""
    folded = input_independent_operators(graph, max_elements=LARGEST_CONSTANT)
    outputs = [index for operator in folded for index in operator.outputs]
    if not outputs or set(outputs) & set(graph.outputs):
        return None
    (values,) = record_tensors(graph, [random_feed(graph, np.random.default_rng(0))], outputs)
    edit = Edit(graph)
    edit.remove(*folded)
    constants = {}
    for index, value in values.items():
        constants[index] = edit.like(graph.tensors[index], "constant", shape=value.shape, values=value)
    for operator in graph.operators:
        if operator not in folded and not constants.keys().isdisjoint(operator.inputs):
            edit.change(operator, inputs=[constants.get(index, index) for index in operator.inputs])
    return edit.graph()


def integer_interface(graph: Graph, dtype: str | None) -> Graph | None:
    """Make float inputs before QUANTIZE, and float outputs after DEQUANTIZE, int8 or uint8.

    `dtype` is "INT8" or "UINT8", the type of all inputs and outputs; with None, they have the type inside the model.
    """
    edit = Edit(graph)
    for position, index in enumerate(graph.inputs):
        _integer_input(edit, position, graph.tensors[index], dtype)
    for position, index in enumerate(graph.outputs):
        _integer_output(edit, position, graph.tensors[index], dtype)
    changed = edit.inputs != list(graph.inputs) or edit.outputs != list(graph.outputs)
    return edit.graph() if changed else None


def _integer_input(edit: Edit, position: int, tensor: Tensor, dtype: str | None) -> None:
    inside, consumers = tensor, edit.before.consumers.get(tensor.index, [])
    if tensor.dtype == "FLOAT32" and len(consumers) == 1 and consumers[0].name == "QUANTIZE":
        inside = edit.before.output_tensors(consumers[0])[0]
        if not is_per_tensor_8bit(inside) or inside.index in edit.before.outputs:
            return
        edit.remove(consumers[0])
    elif not is_per_tensor_8bit(tensor):
        return
    end = _other_type(edit, inside, dtype, tensor.name)
    if end != inside.index:
        edit.add("QUANTIZE", [end], [inside.index], edit.options("QuantizeOptions"))
    edit.inputs[position] = end


def _integer_output(edit: Edit, position: int, tensor: Tensor, dtype: str | None) -> None:
    inside, producer = tensor, edit.before.producer.get(tensor.index)
    if producer is None or tensor.index in edit.before.inputs:
        return
    if tensor.dtype == "FLOAT32" and producer.name == "DEQUANTIZE":
        inside = edit.before.input_tensors(producer)[0]
        if (
            not is_per_tensor_8bit(inside)
            or inside.index in (*edit.before.inputs, *edit.before.outputs)
            or inside.is_constant
        ):
            return
        if not edit.before.consumers.get(tensor.index):
            edit.remove(producer)
    elif not is_per_tensor_8bit(tensor):
        return
    end = _other_type(edit, inside, dtype, tensor.name)
    if end in edit.outputs[:position] and end != tensor.index:  # the same values were put out twice, as two tensors
        edit.rename(end, edit.before.tensors[edit.before.outputs[edit.outputs.index(end)]].name)
        edit.outputs[position] = edit.tensor(tensor.name, inside.shape, inside.dtype, inside.quantization)
        edit.add("RESHAPE", [end, edit.integers("shape", *inside.shape)], [edit.outputs[position]])
        return
    if end != inside.index:
        edit.add("QUANTIZE", [inside.index], [end], edit.options("QuantizeOptions"))
    edit.outputs[position] = end


def _other_type(edit: Edit, tensor: Tensor, dtype: str | None, name: str) -> int:
    """Return a tensor with the same values in the requested type, or the tensor itself, under the given name."""
    if dtype in (None, tensor.dtype):
        edit.rename(tensor.index, name)
        return tensor.index
    scale, zero_point = scale_and_zero_point(tensor)
    shift = 128 if dtype == "UINT8" else -128
    edit.rename(tensor.index, f"{name}/inside")
    return edit.tensor(name, tensor.shape, str(dtype), Quantization((scale,), (zero_point + shift,), 0))


def dequantized_feed(graph: Graph, feed: Feed) -> list[NDArray[Any]]:
    """Return the inputs of a graph as real numbers: quantized inputs are dequantized."""
    pairs = zip((graph.tensors[index] for index in graph.inputs), feed, strict=True)
    return [_real(tensor, value) if np.issubdtype(value.dtype, np.integer) else value for tensor, value in pairs]


def quantized_feed(graph: Graph, values: Feed) -> list[NDArray[Any]]:
    """Return real numbers as inputs of a graph: quantized if the graph's inputs are."""
    feed = []
    for index, value in zip(graph.inputs, values, strict=True):
        tensor, dtype = graph.tensors[index], np.dtype(DTYPES[graph.tensors[index].dtype])
        plain = is_per_tensor_8bit(tensor) and np.issubdtype(value.dtype, np.floating)
        feed.append(quantize(value, *scale_and_zero_point(tensor), dtype.type) if plain else value.astype(dtype))
    return feed


def output_difference(before: Graph, after: Graph, values: Sequence[Feed]) -> Difference:
    """Return the difference of two graphs' outputs in steps of their scales; the types may differ."""
    before, after = without_unknown_customs(before), without_unknown_customs(after)
    first, second = Runner(before), Runner(after)
    differences = []
    for feed in values:
        pairs = zip(first.run(quantized_feed(before, feed)), second.run(quantized_feed(after, feed)), strict=True)
        for (one, other), i, j in zip(pairs, before.outputs, after.outputs, strict=True):
            differences.append(_steps_of_scale(before.tensors[i], one, after.tensors[j], other).reshape(-1))
    difference = summarize(differences, len(values))
    return replace(difference, largest=round(difference.largest, 3))


def _steps_of_scale(
    tensor: Tensor, value: NDArray[Any], other_tensor: Tensor, other: NDArray[Any]
) -> NDArray[np.float64]:
    a = _real(tensor, value)
    b = _real(other_tensor, other)
    quantized = next(filter(is_per_tensor_8bit, (tensor, other_tensor)), None)
    if quantized is None or a.shape != b.shape:
        return steps(a, b)
    return np.asarray(np.abs(a - b) / scale_and_zero_point(quantized)[0])


def _real(tensor: Tensor, value: NDArray[Any]) -> NDArray[Any]:
    if not is_per_tensor_8bit(tensor):
        return value
    scale, zero_point = scale_and_zero_point(tensor)
    return np.asarray(dequantize(value, scale, zero_point))
