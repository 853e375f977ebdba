"""Normalization of float graphs: weights as float32 constants, static shapes, and no operators that compute them.

Converters store weights as float16 or 8-bit values before DEQUANTIZE (or the operators dequantize them), and compute
shapes from a dynamic batch. Neither is part of the model's function.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.tflite import comparison
from compress.tflite import graph as graphs
from compress.tflite.graph import NONE, Graph, Operator, Tensor

MAX_ELEMENTS = 2**28
"""The most elements of a tensor in a graph that is executed: 1 GiB."""
EIGHT_BITS = ("INT8", "UINT8")
_CHANCE = ("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL", "MULTINOMIAL")
_FLOATS = ("FLOAT32", "FLOAT16")


@dataclass(frozen=True)
class Plain:
    """A normalized float graph.

    Attributes:
        graph: the graph, with its own operator indices.
        numbers: for each of its operators, the index in the file.
        notes: messages about the changes.
    """

    graph: Graph
    numbers: tuple[int, ...]
    notes: tuple[str, ...]


def is_float(graph: Graph) -> bool:
    """Return whether a graph has float operators and no quantized ones."""
    computed = [graph.tensors[index] for index in graph.inputs]
    computed += [tensor for operator in graph.operators for tensor in graph.output_tensors(operator)]
    dtypes = {tensor.dtype for tensor in computed}
    quantized = {tensor.dtype for tensor in computed if tensor.quantization} & {*EIGHT_BITS, "INT16"}
    return "FLOAT32" in dtypes and not quantized


def plain(graph: Graph) -> Plain:
    """Normalize a float graph.

    Raises:
        ModelError: a tensor or its value is invalid, or an input has a dynamic shape.
    """
    for index in graph.inputs:
        if graph.tensors[index].dynamic:
            raise ModelError(
                f"its input {graph.tensors[index].name!r} has a dynamic shape",
                todo="convert the model again with a fixed input shape",
            )
    known, shapes = _weights(graph), dict[int, tuple[int, ...]]()
    stored = [tensor for index, tensor in enumerate(graph.tensors) if index in known]
    notes = [_note(dtype, stored) for dtype in dict.fromkeys(tensor.dtype for tensor in stored)]
    known.update(_dequantized(graph, known))
    fixed = _fixed(graph, known)
    if any(tensor.dynamic for tensor in graph.tensors) or fixed:
        shapes, values = _seen(graph, fixed)
        known.update(values)
    for tensor in graph.tensors:
        shape = shapes.get(tensor.index, tensor.shape)
        if prod(shape) > MAX_ELEMENTS:
            raise ModelError(f"tensor {tensor.name!r} has the shape {list(shape)}", allowed=f"{MAX_ELEMENTS:,} numbers")
    numbers = tuple(op.index for op in graph.operators if not all(index in known for index in op.outputs))
    return Plain(_changed(graph, known, shapes, numbers), numbers, tuple(notes))


def _note(dtype: str, stored: list[Tensor]) -> str:
    count = sum(tensor.dtype == dtype for tensor in stored)
    return f"{count} constants of {dtype} are taken as float32"


def _weights(graph: Graph) -> dict[int, NDArray[Any]]:
    """Return the constants that a float graph stores in fewer bits, as float32."""
    used = {index for operator in graph.operators for index in operator.inputs if index != NONE}
    tensors = [graph.tensors[index] for index in sorted(used) if graph.tensors[index].is_constant]
    return {
        tensor.index: _as_float(tensor)
        for tensor in tensors
        if tensor.dtype == "FLOAT16" or (tensor.dtype in EIGHT_BITS and tensor.quantization)
    }


def _as_float(tensor: Tensor) -> NDArray[np.float32]:
    """Return the real values of a constant.

    Raises:
        ModelError: its scales do not fit its shape.
    """
    values, quantization = tensor.array(), tensor.quantization
    if tensor.dtype not in EIGHT_BITS or quantization is None:
        return np.asarray(values, np.float32)
    scale = np.asarray(quantization.scale, np.float32)
    zero = np.asarray(quantization.zero_point or [0], np.float32)
    if len(scale) > 1:
        axis = quantization.axis
        if not 0 <= axis < values.ndim or values.shape[axis] != len(scale) or len(zero) not in (1, len(scale)):
            raise ModelError(f"tensor {tensor.name!r}: {len(scale)} scales do not fit {list(tensor.shape)}")
        sides = [-1 if side == axis else 1 for side in range(values.ndim)]
        scale, zero = scale.reshape(sides), zero.reshape(sides) if len(zero) > 1 else zero
    return np.asarray((values.astype(np.float32) - zero) * scale, np.float32)


def _dequantized(graph: Graph, known: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
    """Return the constants after DEQUANTIZE."""
    return {
        operator.outputs[0]: known[operator.inputs[0]]
        for operator in graph.operators
        if operator.name == "DEQUANTIZE" and operator.outputs and operator.inputs[:1] and operator.inputs[0] in known
    }


def _fixed(graph: Graph, known: Mapping[int, Any]) -> set[int]:
    """Return the computed tensors that do not depend on the values of the inputs."""
    fixed: set[int] = set()
    for operator in graph.operators:
        inputs = [index for index in operator.inputs if index != NONE]
        constant = all(graph.tensors[index].is_constant or index in known or index in fixed for index in inputs)
        settled = operator.name in ("SHAPE", "RANK") or (inputs and constant)
        stateful = operator.custom or operator.name in _CHANCE or operator.name.startswith(("WHILE", "IF", "CALL"))
        if settled and not stateful and not any(index in known for index in operator.outputs):
            fixed.update(operator.outputs)
    return fixed


def _seen(graph: Graph, value_indices: set[int]) -> tuple[dict[int, tuple[int, ...]], dict[int, NDArray[Any]]]:
    """Run the graph on zeros; return the shapes of computed tensors, and the values of some of them."""
    cut = comparison.without_unknown_customs(graph)
    runner = comparison.Runner(cut, keep=True)
    runner.run([np.zeros(graph.tensors[i].shape, graphs.DTYPES.get(graph.tensors[i].dtype)) for i in graph.inputs], [])
    shapes, values = {}, {}
    for operator in cut.operators:
        for index in operator.outputs:
            try:
                value = runner.interpreter.get_tensor(index)
            except ValueError:  # a resource, or a tensor that no operator has filled
                continue
            shapes[index] = tuple(int(side) for side in value.shape)
            if index in value_indices:
                values[index] = np.array(value)
    return shapes, values


def _changed(
    graph: Graph, known: Mapping[int, NDArray[Any]], shapes: Mapping[int, tuple[int, ...]], numbers: tuple[int, ...]
) -> Graph:
    """Return the graph with constants for all known tensors, and only the operators with the given indices."""
    from ai_edge_litert import schema_py_generated as schema

    source, main = copy.copy(graph.source), copy.copy(graph.source.subgraphs[0])
    source.buffers, main.tensors = list(source.buffers), list(main.tensors)
    for index in {*known, *shapes}:
        tensor = main.tensors[index] = copy.copy(main.tensors[index])
        tensor.shape, tensor.shapeSignature = list(shapes.get(index, graph.tensors[index].shape)), None
        if index in known:
            value = np.ascontiguousarray(known[index])
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(value.tobytes(), np.uint8)
            tensor.buffer, tensor.shape = len(source.buffers), list(value.shape)
            source.buffers.append(buffer)
            if graph.tensors[index].dtype in (*EIGHT_BITS, *_FLOATS):
                tensor.type, tensor.quantization = schema.TensorType.FLOAT32, None
    main.operators = [main.operators[number] for number in numbers]
    source.subgraphs = [main, *source.subgraphs[1:]]
    return graphs.from_source(source)


def operator_title(operator: Operator, number: int, graph: Graph) -> str:
    """Return text about an operator: its name, its index in the file, and its output tensor."""
    outputs = graph.output_tensors(operator)
    name = outputs[0].name if outputs else "nothing"
    return f"{operator.name} (operator {number}, {name if len(name) <= 80 else name[:77] + '...'!r})"
