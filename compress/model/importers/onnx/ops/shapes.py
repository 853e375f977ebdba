"""Import rules for ONNX operators that reshape, concatenate, slice, pad or reduce tensors.

Reshape, Transpose and similar operators add no layer: see `layout`.

Source: ONNX' operator specification, opsets 7 to 23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

import numpy as np

from compress.model.importers.common import shape_rules
from compress.model.importers.common.graph_builder import NN, NUMPY, UNKNOWN, NotImportedError
from compress.model.importers.common.shape_rules import GLOBAL_POOLING, axis_of
from compress.model.importers.onnx.layout import OnnxValue, channel_last, in_shape, laid, transposed
from compress.model.importers.onnx.network_builder import OnnxCall, Rule, order_of
from compress.model.importers.onnx.ops.convolution import globally, image, padded_below, zero_padded
from compress.model.importers.onnx.ops.elementwise import NUMBERS, small


def reshape(call: OnnxCall) -> OnnxValue:
    """Reshape, Flatten, Squeeze, Unsqueeze: the inferred output shape."""
    value, shape = call.value(0, *NUMBERS), call.output_shape()
    if prod(value.shape) != prod(shape):
        raise NotImportedError(f"{list(value.shape)} does not have as many values as {list(shape)}")
    return in_shape(value, shape)


def transpose(call: OnnxCall) -> OnnxValue:
    """Transpose."""
    value = call.value(0, *NUMBERS)
    order = tuple(call.integers("perm") or range(len(value.shape))[::-1])
    if sorted(order) != list(range(len(value.shape))):
        raise NotImportedError(f"{list(order)} is not a permutation of the axes of {list(value.shape)}")
    output = transposed(value, order)
    if output is None:
        output = transposed(call.straightened(value), order)
    assert output is not None
    return output


def concat(call: OnnxCall) -> OnnxValue:
    """Concat."""
    axis = axis_of(int(call.setting("axis", 1)), call.output_shape())
    return shape_rules.concat(call, _with_constants(call, axis), axis)


def _with_constants(call: OnnxCall, axis: int) -> list[OnnxValue]:
    """Return the computed inputs of a Concat; constants become a zero padding and an addition."""
    shapes = [call.builder.graph.shapes.get(name, ()) for name in call.node.inputs]
    indices = [index for index, shape in enumerate(shapes) if 0 not in shape]
    computed = [index for index in indices if not call.is_constant(index)]
    values = []
    for at, index in enumerate(computed):
        value, end = call.value(index), ([*computed, indices[-1] + 1])[at + 1]
        before = [call.weights(input_index) for input_index in indices if input_index < index and not at]
        after = [call.weights(input_index) for input_index in indices if index < input_index < end]
        if before or after:
            around = [*before, np.zeros(value.shape, np.float32), *after]
            sizes = [sum(constant.shape[axis] for constant in side) for side in (before, after)]
            pads = [(0, 0)] * len(value.shape)
            pads[axis] = (sizes[0], sizes[1])
            padded = shape_rules.pad_by_operation(call, value, pads)
            value = call.operation(NUMPY, "Add", {}, [padded, small(np.concatenate(around, axis), padded)], padded)
        values.append(value)
    return values


def slice_out(call: OnnxCall) -> OnnxValue:
    """Slice: starts, ends, axes, steps."""
    value = call.value(0)
    starts, ends = call.integers("starts", 1) or [], call.integers("ends", 2) or []
    axes = call.integers("axes", 3) or list(range(len(starts)))
    steps = call.integers("steps", 4) or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise NotImportedError(f"it slices from {starts} to {ends} along the axes {axes}, in steps of {steps}")
    cuts = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = axis_of(axis, value.shape)
        before_first = step < 0 and end < -value.shape[axis]
        cuts[axis] = slice(start, None if before_first else end, step)
    return shape_rules.cut(call, value, cuts)


def split(call: OnnxCall) -> list[OnnxValue]:
    """Split one axis into consecutive parts."""
    value = call.value(0)
    axis = axis_of(int(call.setting("axis", 0)), value.shape)
    sizes = [call.output_shape(index)[axis] for index in range(len(call.node.outputs))]
    return shape_rules.split(call, value, axis, sizes)


def gather(call: OnnxCall) -> OnnxValue:
    """Gather along one axis with constant indices; rows of a constant by computed indices become an Embedding."""
    if call.is_constant(0):
        return _embedding(call)
    value, indices = call.value(0), call.constant(1)
    axis = axis_of(int(call.setting("axis", 0)), value.shape)
    size = value.shape[axis]
    steps = set(np.diff(indices.reshape(-1) % size).tolist()) or {1}
    step = int(min(steps))
    if len(steps) > 1 or step <= 0 or not indices.size or indices.min() < -size or indices.max() >= size:
        return in_shape(shape_rules.gather(call, value, axis, indices), call.output_shape())
    first, last = int(indices.flat[0]) % size, int(indices.flat[-1]) % size
    return in_shape(shape_rules.cut(call, value, {axis: slice(first, last + 1, step)}), call.output_shape())


def _embedding(call: OnnxCall) -> OnnxValue:
    """Add an Embedding: rows of a constant by computed indices."""
    table, where = call.weights(0), call.value(1, "INT32", "INT64")
    if call.setting("axis", 0) not in (0, -table.ndim) or not table.size:
        raise NotImportedError(f"it indexes a constant {list(table.shape)} along an axis that is not 0")
    rows = table.reshape(len(table), -1)
    rank = len(where.shape)
    where = call.arranged(where, tuple(range(rank)))
    shape, network_shape = (*where.shape, rows.shape[1]), (*where.network_shape, rows.shape[1])
    like = laid(UNKNOWN, shape, tuple(range(rank + 1)), network_shape)
    config = {"input_dim": len(rows), "output_dim": rows.shape[1]}
    return in_shape(call.layer("Embedding", config, [where], like, [rows]), call.output_shape())


def largest(call: OnnxCall) -> OnnxValue:
    """ArgMax, only as a model output, because its result is integers."""
    value, name = call.value(0), call.node.outputs[0]
    if name not in call.builder.graph.outputs or call.builder.takers[name] > 1:
        raise NotImportedError("other operators use its result; only a model output may be integers")
    axis = axis_of(int(call.setting("axis", 0)), value.shape)
    if call.setting("select_last_index", 0):
        raise NotImportedError("select_last_index is not supported")
    placed = call.placed(value, axis)
    like = placed.like([1 if dimension == axis else size for dimension, size in enumerate(value.shape)])
    config = {"axis": placed.axis(axis), "keepdims": True}
    return in_shape(call.operation(NUMPY, "Argmax", config, [placed.value], like), call.output_shape())


def pad(call: OnnxCall) -> OnnxValue:
    """Pad: zeros around an image as a layer, otherwise an operation; negative padding becomes a slice."""
    value, mode = call.value(0), call.setting("mode", "constant")
    rank = len(value.shape)
    pad_values = call.integers("pads", 1) or []
    axes = [axis_of(axis, value.shape) for axis in (call.integers("axes", 3) or range(rank))]
    if len(pad_values) != 2 * len(axes):
        raise NotImportedError(f"pads {pad_values[:16]} do not fit {list(value.shape)}")
    pads = dict(zip(axes, zip(pad_values[: len(axes)], pad_values[len(axes) :], strict=True), strict=True))
    cuts = {axis: slice(max(-b, 0), value.shape[axis] - max(-a, 0), 1) for axis, (b, a) in pads.items()}
    value = shape_rules.cut(call, value, cuts)
    widths = [(max(before, 0), max(after, 0)) for before, after in (pads.get(axis, (0, 0)) for axis in range(rank))]
    filler = call.number("value", 2, 0.0)
    if not any(map(any, widths)):
        return value
    order = order_of(value)
    zeros = mode == "constant" and filler == 0 and not any(widths[0])
    below = mode == "constant" and filler == -np.inf and not any(widths[0]) and _is_only_pooled(call)
    if (zeros or below) and rank in (3, 4) and not any(widths[1]) and order == channel_last(rank):
        arranged = call.arranged(value, order)
        if len(arranged.network_shape) == rank - 1:
            return (zero_padded if zeros else padded_below)(call, arranged, widths[2:])
    if mode == "edge" and max(map(max, widths)) <= 1:
        mode = "symmetric"
    if mode in ("edge", "wrap"):
        return _padded_by_indices(call, value, widths, mode)
    return shape_rules.pad_by_operation(call, value, widths, mode, filler)


def _is_only_pooled(call: OnnxCall) -> bool:
    name = call.node.outputs[0]
    readers = [node.operator for node in call.builder.graph.nodes if name in node.inputs]
    return set(readers) == {"MaxPool"} and call.builder.takers[name] == len(readers)


def _padded_by_indices(call: OnnxCall, value: OnnxValue, pads: Sequence[tuple[int, int]], mode: str) -> OnnxValue:
    """Repeat the outermost elements of each axis ("edge"), or continue at its other end ("wrap")."""
    for axis, (before, after) in enumerate(pads):
        if before or after:
            size = value.shape[axis]
            indices = np.arange(-before, size + after)
            indices = indices.clip(0, size - 1) if mode == "edge" else indices % size
            value = shape_rules.gather(call, value, axis, indices)
    return value


def reduced(call: OnnxCall, kind: str, before: str = "", after: str = "") -> OnnxValue:
    """A reduction, with an optional operation before and after it."""
    value = call.value(0)
    stored = call.integers("axes", 1)
    if not stored and call.setting("noop_with_empty_axes", 0):
        axes = []
    else:
        axes = sorted({axis_of(axis, value.shape) for axis in (stored or range(len(value.shape)))})
    if before == "square":
        value = call.layer("Multiply", {}, [[value, value]], value)
    elif before:
        value = call.operation(NUMPY, before, {}, [value], value)
    output = _reduced(call, kind, value, axes) if axes else value
    return call.operation(NUMPY, after, {}, [output], output) if after else output


def _reduced(call: OnnxCall, kind: str, value: OnnxValue, axes: list[int]) -> OnnxValue:
    """Reduce with a layer over the spatial dimensions of an image, otherwise with an operation."""
    rank = len(value.shape)
    image_like = rank in (3, 4) and value.shape[0] == 1 and order_of(value) == channel_last(rank)
    if kind in GLOBAL_POOLING and image_like and axes == list(range(2, rank)):
        return globally(call, GLOBAL_POOLING[kind], call.arranged(value, channel_last(rank)), call.output_shape())
    return in_shape(shape_rules.reduce_by_operation(call, value, kind, axes, keep=True), call.output_shape())


def expand(call: OnnxCall) -> OnnxValue:
    """Expand and Tile: repeat dimensions."""
    value, shape = call.value(0), call.output_shape()
    value = in_shape(value, (*(1,) * (len(shape) - len(value.shape)), *value.shape))
    repeats = [size // before for size, before in zip(shape, value.shape, strict=True)]
    return shape_rules.tile(call, value, repeats)


def depth_to_space(call: OnnxCall) -> OnnxValue:
    """DepthToSpace: TensorFlow's operation (DCR), for CRD after a permutation of the channels."""
    value, size = image(call), int(call.setting("blocksize", 1))
    channels = value.shape[1]
    if call.setting("mode", "DCR") == "CRD":
        indices = np.arange(channels).reshape(-1, size * size).T.reshape(-1)
        value = call.operation(NUMPY, "Take", {"axis": -1}, [value, indices], value)
    like = laid(UNKNOWN, call.output_shape(), channel_last(4))
    return call.operation(NN, "DepthToSpace", {"block_size": size}, [value], like)


def space_to_depth(call: OnnxCall) -> OnnxValue:
    """SpaceToDepth."""
    value, size = image(call), int(call.setting("blocksize", 1))
    like = laid(UNKNOWN, call.output_shape(), channel_last(4))
    return call.operation(NN, "SpaceToDepth", {"block_size": size}, [value], like)


RULES: Mapping[str, Rule] = {
    "Reshape": reshape,
    "Flatten": reshape,
    "Squeeze": reshape,
    "Unsqueeze": reshape,
    "Transpose": transpose,
    "Concat": concat,
    "Slice": slice_out,
    "Split": split,
    "Gather": gather,
    "ArgMax": largest,
    "Pad": pad,
    "Expand": expand,
    "Tile": expand,
    "DepthToSpace": depth_to_space,
    "SpaceToDepth": space_to_depth,
    **{f"Reduce{kind}": partial(reduced, kind=kind) for kind in ("Mean", "Max", "Min", "Sum", "Prod")},
    "ReduceL1": partial(reduced, kind="Sum", before="Absolute"),
    "ReduceL2": partial(reduced, kind="Sum", before="square", after="Sqrt"),
    "ReduceLogSum": partial(reduced, kind="Sum", after="Log"),
    "ReduceLogSumExp": partial(reduced, kind="Logsumexp"),
    "ReduceSumSquare": partial(reduced, kind="Sum", before="square"),
}
