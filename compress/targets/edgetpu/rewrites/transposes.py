"""Transposes: moved behind the operators that follow them, until they meet and cancel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from compress.targets.edgetpu.rewrites.elementwise import is_per_tensor_8bit, replace_operator
from compress.targets.edgetpu.rewrites.shapes import BINARY, UNARY
from compress.tflite.dilation import only_consumer
from compress.tflite.edit import Edit, reshape
from compress.tflite.graph import Graph, Operator

_TO_LAST = (0, 2, 3, 1)
"""From channels first to channels last."""
_ALONG_AXES = {"PAD": (1,), "PADV2": (1,), "SLICE": (1, 2), "STRIDED_SLICE": (1, 2, 3)}
"""Operators with constants that have an entry for each axis, and the positions of these inputs."""


def transposes(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Move TRANSPOSE operators behind the operators that follow them, and cancel those that meet."""
    order, x, out = _order(operator, graph), graph.input_tensors(operator)[0], graph.output_tensors(operator)[0]
    if order is None:
        return
    before = graph.producer.get(x.index)
    if before is not None and before.name == "TRANSPOSE" and (first := _order(before, graph)) is not None:
        yield _merge(before, operator, [first[axis] for axis in order], graph)
        return
    if [axis for axis in order if x.shape[axis] > 1] == [axis for axis in range(len(order)) if x.shape[axis] > 1]:
        edit, _, _ = replace_operator(operator, graph)
        reshape(edit, x.index, out.index, out.shape)
        yield edit
        return
    for after in graph.consumers.get(out.index, ()):
        if after.name in (*UNARY, *BINARY, "CONCATENATION"):
            yield from _move_behind(after, order, graph)
        elif after.name in (*_ALONG_AXES, "SPLIT"):
            yield from _move_behind_axis_operator(after, order, graph)


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
    edit, back = Edit(graph), [int(axis) for axis in np.argsort(order)]
    inputs = []
    for tensor in graph.input_tensors(operator):
        before = graph.producer.get(tensor.index)
        if before is not None and before.name == "TRANSPOSE" and _order(before, graph) == order:
            if only_consumer(graph, before):
                edit.remove(before)
            inputs.append(before.inputs[0])
        elif tensor.is_constant and tensor.elements == 1:
            inputs.append(tensor.index)
        elif tensor.is_constant and len(tensor.shape) <= len(order):
            values = tensor.array().reshape((1,) * (len(order) - len(tensor.shape)) + tensor.shape).transpose(back)
            inputs.append(edit.like(tensor, "transposed", shape=values.shape, values=np.ascontiguousarray(values)))
        else:
            return
    out = graph.output_tensors(operator)[0]
    if len(out.shape) != len(order):
        return
    output = edit.like(out, "transposed", shape=[out.shape[axis] for axis in back])
    changed = {"axis": order[operator.option("axis") % len(order)]} if operator.name == "CONCATENATION" else None
    edit.change(operator, inputs=inputs, outputs=[output], options=changed)
    edit.add("TRANSPOSE", [output, edit.integers("order", *order)], [out.index], edit.options("TransposeOptions"))
    yield edit


def _move_behind_axis_operator(operator: Operator, order: list[int], graph: Graph) -> Iterator[Edit]:
    """Move the transpose before an operator with axes behind the operator."""
    operands = graph.input_tensors(operator)
    constants = [tensor for tensor in operands if tensor.is_constant]
    (before,) = (graph.producer.get(tensor.index) for tensor in operands if not tensor.is_constant)
    masks = [name for name in vars(operator.options or operator) if name.endswith("Mask")]
    dropped = [name for name in masks if name not in ("beginMask", "endMask") and operator.option(name, 0)]
    kept = all(len(out.shape) == len(order) for out in graph.output_tensors(operator))
    if before is None or len(constants) != len(operands) - 1 or dropped or not kept:
        return
    edit, back = Edit(graph), [int(axis) for axis in np.argsort(order)]
    inputs = [before.inputs[0] if index == before.outputs[0] else index for index in operator.inputs]
    for position in _ALONG_AXES.get(operator.name, ()):
        tensor = graph.tensors[operator.inputs[position]]
        inputs[position] = edit.like(tensor, "transposed", values=tensor.array()[back])
    if operator.name == "SPLIT":
        axis = operands[0]
        values = np.asarray(order[axis.array().item()], np.int32)
        inputs[0] = edit.like(axis, "transposed", shape=(), values=values)
    changed = {
        name: sum((operator.option(name) >> axis & 1) << order[axis] for axis in range(len(order))) for name in masks
    }
    if only_consumer(graph, before):
        edit.remove(before)
    outputs = [
        edit.like(out, "transposed", shape=[out.shape[axis] for axis in back]) for out in graph.output_tensors(operator)
    ]
    edit.change(operator, inputs=inputs, outputs=outputs, options=changed)
    for transposed, out in zip(outputs, operator.outputs, strict=True):
        edit.add("TRANSPOSE", [transposed, edit.integers("order", *order)], [out], edit.options("TransposeOptions"))
    yield edit


def _order(operator: Operator, graph: Graph) -> list[int] | None:
    order = graph.tensors[operator.inputs[1]]
    return [int(axis) for axis in order.array().ravel()] if order.is_constant else None
