"""Normalization of float graphs: weights as float32 constants, static shapes, and no operators that compute them.

Converters store weights as float16 or 8-bit values before DEQUANTIZE (or the operators dequantize them), and compute
shapes from a dynamic batch. Neither is part of the model's function.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.tflite import comparison
from compress.model.tflite import graph as graphs
from compress.model.tflite.dequantization import INTEGERS, real_values
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import NONE, Graph, Operator

MAX_ELEMENTS = 2**28
"""The most elements of a tensor in a graph that is executed: 1 GiB."""
EIGHT_BITS = ("INT8", "UINT8")
_STATEFUL = ("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL", "MULTINOMIAL", "WHILE", "IF", "CALL", "CALL_ONCE")
"""Operators whose outputs may differ between two runs with the same inputs."""
_SHAPE_ONLY = ("SHAPE", "RANK")
"""Operators whose outputs depend only on the shape of their input."""
_FLOATS = ("FLOAT32", "FLOAT16")


@dataclass(frozen=True)
class Plain:
    """A normalized float graph.

    Attributes:
        graph: the graph, with its own operator indices.
        numbers: for each of its operators, the index in the file.
        input_dtypes: the types of the inputs in the file. An input of integers that the model only casts becomes a
            float input of the same numbers.
    """

    graph: Graph
    numbers: tuple[int, ...]
    notes: tuple[str, ...]
    input_dtypes: tuple[str, ...]


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
            what = f"its input {graph.tensors[index].name!r} has a dynamic shape"
            raise ModelError(what, hint="convert the model again with a fixed input shape")
    known = _weights(graph)
    shapes: dict[int, tuple[int, ...]] = {}
    stored = Counter(graph.tensors[index].dtype for index in sorted(known))
    notes = tuple(f"{count} constants of {dtype} are taken as float32" for dtype, count in stored.items())
    known.update(_dequantized(graph, known))
    fixed = {index for operator in input_independent_operators(graph, known) for index in operator.outputs}
    if any(tensor.dynamic for tensor in graph.tensors) or fixed:
        shapes, values = _seen(graph, fixed)
        known.update(values)
    _refuse_large(graph, shapes)
    casts = _input_casts(graph)
    notes += tuple(
        f"the input {graph.tensors[index].name!r} takes the same numbers as float32, not as "
        f"{graph.tensors[index].dtype}: the model casts them"
        for index in casts
    )
    removed = [cast.index for cast in casts.values()]
    indices = tuple(
        operator.index
        for operator in graph.operators
        if operator.index not in removed and not known.keys() >= set(operator.outputs)
    )
    changed = _without_casts(_changed(graph, known, shapes, indices), casts)
    return Plain(changed, indices, notes, tuple(graph.tensors[index].dtype for index in graph.inputs))


def _input_casts(graph: Graph) -> dict[int, Operator]:
    """Return by input the operators that cast an input of integers and are its only readers."""
    casts = {}
    for index in graph.inputs:
        readers = graph.consumers.get(index, [])
        is_number = graph.tensors[index].dtype in INTEGERS and not graph.tensors[index].quantization
        if not is_number or [reader.name for reader in readers] != ["CAST"] or index in graph.outputs:
            continue
        if graph.output_tensors(readers[0])[0].dtype == "FLOAT32":
            casts[index] = readers[0]
    return casts


def _without_casts(graph: Graph, casts: Mapping[int, Operator]) -> Graph:
    """Return a graph whose inputs are the results of casts, with the names of the inputs before."""
    if not casts:
        return graph
    edit = Edit(graph)
    for position, index in enumerate(graph.inputs):
        if index in casts:
            edit.inputs[position] = casts[index].outputs[0]
            edit.rename(edit.inputs[position], graph.tensors[index].name)
    return edit.graph()


def _refuse_large(graph: Graph, shapes: Mapping[int, tuple[int, ...]]) -> None:
    for tensor in graph.tensors:
        shape = shapes.get(tensor.index, tensor.shape)
        if prod(shape) > MAX_ELEMENTS:
            allowed = f"{MAX_ELEMENTS:,} elements"
            raise ModelError(f"tensor {tensor.name!r} has the shape {list(shape)}", allowed=allowed)


def _weights(graph: Graph) -> dict[int, NDArray[Any]]:
    """Return the constants that a float graph stores in fewer bits, as float32."""
    used = {index for operator in graph.operators for index in operator.inputs if index != NONE}
    tensors = [graph.tensors[index] for index in sorted(used) if graph.tensors[index].is_constant]
    return {
        tensor.index: real_values(tensor) if tensor.dtype in EIGHT_BITS else np.asarray(tensor.array(), np.float32)
        for tensor in tensors
        if tensor.dtype == "FLOAT16" or (tensor.dtype in EIGHT_BITS and tensor.quantization)
    }


def _dequantized(graph: Graph, known: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
    """Return the results of DEQUANTIZE on known constants."""
    return {
        operator.outputs[0]: known[operator.inputs[0]]
        for operator in graph.operators
        if operator.name == "DEQUANTIZE" and operator.outputs and operator.inputs[:1] and operator.inputs[0] in known
    }


def input_independent_operators(
    graph: Graph, known: Collection[int] = (), max_elements: int = MAX_ELEMENTS
) -> list[Operator]:
    """Return the operators whose outputs do not depend on the values of the inputs.

    The values of the tensors in `known` are known already, and the operators that compute them are left out; so are
    operators with an output of more than `max_elements` elements.
    """
    constant = {tensor.index for tensor in graph.tensors if tensor.is_constant} | set(known)
    operators = []
    for operator in graph.operators:
        if operator.custom or operator.name in _STATEFUL or constant.intersection(operator.outputs):
            continue
        if any(tensor.elements > max_elements for tensor in graph.output_tensors(operator)):
            continue
        inputs = {tensor.index for tensor in graph.input_tensors(operator)}
        if operator.name in _SHAPE_ONLY or (inputs and inputs <= constant):
            constant.update(operator.outputs)
            operators.append(operator)
    return operators


def _seen(graph: Graph, value_indices: set[int]) -> tuple[dict[int, tuple[int, ...]], dict[int, NDArray[Any]]]:
    """Run the graph on zeros; return the shapes of computed tensors, and the values of some of them."""
    cut = comparison.without_unknown_customs(graph)
    runner = comparison.Runner(cut, keep=True)
    runner.run([np.zeros(graph.tensors[i].shape, graphs.DTYPES.get(graph.tensors[i].dtype)) for i in graph.inputs], [])
    shapes, values = {}, {}
    for operator in cut.operators:
        for index in operator.outputs:
            value = runner.tensor(index)
            if value is None:
                continue
            shapes[index] = tuple(int(size) for size in value.shape)
            if index in value_indices:
                values[index] = np.array(value)
    return shapes, values


def _changed(
    graph: Graph, known: Mapping[int, NDArray[Any]], shapes: Mapping[int, tuple[int, ...]], indices: tuple[int, ...]
) -> Graph:
    """Return the graph with constants for all known tensors, and only the operators with the given indices."""
    from ai_edge_litert import schema_py_generated as schema

    source = copy.copy(graph.source)
    main = copy.copy(graph.source.subgraphs[0])
    source.buffers = list(source.buffers)
    main.tensors = list(main.tensors)
    for index in {*known, *shapes}:
        tensor = main.tensors[index] = copy.copy(main.tensors[index])
        tensor.shape = list(shapes.get(index, graph.tensors[index].shape))
        tensor.shapeSignature = None
        if index in known:
            value = np.ascontiguousarray(known[index])
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(value.tobytes(), np.uint8)
            tensor.buffer = len(source.buffers)
            tensor.shape = list(value.shape)
            source.buffers.append(buffer)
            if graph.tensors[index].dtype in (*EIGHT_BITS, *_FLOATS):
                tensor.type = schema.TensorType.FLOAT32
                tensor.quantization = None
    main.operators = [main.operators[position] for position in indices]
    source.subgraphs = [main, *source.subgraphs[1:]]
    return graphs.from_source(source)


def operator_title(operator: Operator, number: int, graph: Graph) -> str:
    """Return text about an operator: its name, its index in the file, and its output tensor."""
    outputs = graph.output_tensors(operator)
    name = outputs[0].name if outputs else "nothing"
    return f"{operator.name} (operator {number}, {name if len(name) <= 80 else name[:77] + '...'!r})"
