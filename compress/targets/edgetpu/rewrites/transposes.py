"""Transposes: moved behind the operators that follow them, until they meet and cancel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from compress.model.tflite.dilation import only_consumer
from compress.model.tflite.edit import Edit, reshape
from compress.model.tflite.graph import Graph, Operator
from compress.targets.edgetpu.rewrites.elementwise import is_per_tensor_8bit, replace_operator
from compress.targets.edgetpu.rewrites.shapes import BINARY, UNARY

_TO_LAST = (0, 2, 3, 1)
"""From channels first to channels last."""
_MASKS = ("beginMask", "endMask")
"""Options of STRIDED_SLICE with one bit for each axis."""
_AXIS_MASKS = ("ellipsisMask", "newAxisMask", "shrinkAxisMask")
"""Options of STRIDED_SLICE that add or remove axes."""
_MOVABLE = frozenset({*UNARY, *BINARY, "CONCATENATION", "SPLIT", "PAD", "PADV2", "SLICE", "STRIDED_SLICE"})
"""Operators that can run before a transpose instead of after it."""
_ALONG_AXES = {"PAD": (1,), "PADV2": (1,), "SLICE": (1, 2), "STRIDED_SLICE": (1, 2, 3)}
"""Operators with constants that have an entry for each axis, and the positions of these inputs."""


def transposes(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Move TRANSPOSE operators behind the operators that follow them, and cancel those that meet."""
    order = _order(operator, graph)
    if order is None:
        return
    x = graph.input_tensors(operator)[0]
    out = graph.output_tensors(operator)[0]
    before = graph.producer.get(x.index)
    first = _order(before, graph)
    if before is not None and first is not None:
        yield _merge(before, operator, [first[axis] for axis in order], graph)
        return
    moved = [axis for axis in order if x.shape[axis] > 1]
    if moved == sorted(moved):
        edit, _, _ = replace_operator(operator, graph)
        reshape(edit, x.index, out.index, out.shape)
        yield edit
        return
    for after in graph.consumers.get(out.index, ()):
        if after.name in _MOVABLE:
            yield from _move_behind(after, order, graph)


def with_channels_last_inputs(graph: Graph) -> Graph:
    """Return the graph with channels-last inputs, each followed by a transpose to channels first."""
    edit, transposed = Edit(graph), {}
    for position, index in enumerate(graph.inputs):
        tensor = graph.tensors[index]
        if len(tensor.shape) == 4 and is_per_tensor_8bit(tensor) and index not in graph.outputs:
            last = edit.like(tensor, "channels last", shape=[tensor.shape[axis] for axis in _TO_LAST])
            edit.inputs[position], transposed[index] = last, edit.like(tensor, "channels first")
            order = edit.integers("order", *np.argsort(_TO_LAST).tolist())
            edit.add("TRANSPOSE", [last, order], [transposed[index]], edit.options("TransposeOptions"))
    for operator in graph.operators:
        if not transposed.keys().isdisjoint(operator.inputs):
            edit.change(operator, inputs=[transposed.get(index, index) for index in operator.inputs])
    return edit.graph()


def with_original_inputs(graph: Graph, original: Graph) -> Graph:
    """Return the graph with the original inputs, each followed by a transpose to channels last.

    A transpose of an input may stay on the CPU. After the first Edge TPU operator it would end the partition.
    """
    edit = Edit(graph)
    for position, (index, last) in enumerate(zip(original.inputs, graph.inputs, strict=True)):
        if index != last:
            edit.inputs[position] = index
            order = edit.integers("order", *_TO_LAST)
            edit.add("TRANSPOSE", [index, order], [last], edit.options("TransposeOptions"))
    return edit.graph()


# --- parts ------------------------------------------------------------------------------


def _merge(first: Operator, second: Operator, order: list[int], graph: Graph) -> Edit:
    """Merge two transposes into one, or none; the first one stays if other operators use its output."""
    edit = Edit(graph)
    edit.remove(second, *([first] if only_consumer(graph, first) else []))
    x, out = graph.input_tensors(first)[0], graph.output_tensors(second)[0]
    if order != sorted(order):
        edit.add("TRANSPOSE", [x.index, edit.integers("order", *order)], [out.index], edit.options("TransposeOptions"))
        return edit
    for consumer in graph.consumers.get(out.index, ()):
        edit.change(consumer, inputs=[x.index if index == out.index else index for index in consumer.inputs])
    if out.index in graph.outputs:
        reshape(edit, x.index, out.index, out.shape)
    return edit


def _move_behind(operator: Operator, order: list[int], graph: Graph) -> Iterator[Edit]:
    """Move the transposes of an operator's inputs behind the operator."""
    outputs = graph.output_tensors(operator)
    changes_axes = any(operator.option(mask, 0) for mask in _AXIS_MASKS)
    if changes_axes or any(len(out.shape) != len(order) for out in outputs):
        return
    edit = Edit(graph)
    inputs = []
    for position in range(len(operator.inputs)):
        index = _input_before_transpose(edit, operator, position, order)
        if index is None:
            return
        inputs.append(index)
    shapes = [[out.shape[axis] for axis in np.argsort(order)] for out in outputs]
    transposed = [edit.like(out, "transposed", shape=shape) for out, shape in zip(outputs, shapes, strict=True)]
    edit.change(operator, inputs=inputs, outputs=transposed, options=_options_before_transpose(operator, order))
    for index, out in zip(transposed, outputs, strict=True):
        edit.add("TRANSPOSE", [index, edit.integers("order", *order)], [out.index], edit.options("TransposeOptions"))
    yield edit


def _input_before_transpose(edit: Edit, operator: Operator, position: int, order: list[int]) -> int | None:
    """Return an input of an operator that runs before the transpose; None if it has to stay after it."""
    graph = edit.before
    tensor = graph.tensors[operator.inputs[position]]
    if not tensor.is_constant:
        before = graph.producer.get(tensor.index)
        if before is None or _order(before, graph) != order:
            return None
        if only_consumer(graph, before):
            edit.remove(before)
        return before.inputs[0]
    if position in _ALONG_AXES.get(operator.name, ()):
        return edit.like(tensor, "transposed", values=tensor.array()[np.argsort(order)])
    if operator.name == "SPLIT":
        axis = np.asarray(order[tensor.array().item()], np.int32)
        return edit.like(tensor, "transposed", shape=(), values=axis)
    if tensor.elements == 1:
        return tensor.index
    if len(tensor.shape) > len(order):
        return None
    aligned = tensor.array().reshape((1,) * (len(order) - len(tensor.shape)) + tensor.shape)
    values = np.ascontiguousarray(aligned.transpose(np.argsort(order)))
    return edit.like(tensor, "transposed", shape=values.shape, values=values)


def _options_before_transpose(operator: Operator, order: list[int]) -> dict[str, int]:
    """Return the options with axes of an operator that runs before the transpose."""
    if operator.name == "CONCATENATION":
        return {"axis": order[operator.option("axis") % len(order)]}
    if operator.name != "STRIDED_SLICE" or operator.options is None:
        return {}
    options = {}
    for mask in _MASKS:
        bits = operator.option(mask, 0)
        options[mask] = sum((bits >> axis & 1) << order[axis] for axis in range(len(order)))
    return options


def _order(operator: Operator | None, graph: Graph) -> list[int] | None:
    """Return the order of a TRANSPOSE if it is constant; None for other operators."""
    if operator is None or operator.name != "TRANSPOSE":
        return None
    order = graph.tensors[operator.inputs[1]]
    return [int(axis) for axis in order.array().ravel()] if order.is_constant else None
