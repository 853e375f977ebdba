"""What ONNX operators that move, join, cut or sum up numbers become in Keras.

Reshape, Transpose and their like make no layer at all: see `onnx_layout`.

Source: ONNX' operator specification, opsets 7 to 23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np

from compress.importers.common import shape_rules
from compress.importers.common.graph_builder import UNKNOWN
from compress.importers.common.layer_calls import NN, NUMPY, NotImportedError
from compress.importers.common.shape_rules import GLOBAL_POOLING, axis_of
from compress.importers.onnx.layout import OnnxValue, channel_last, in_shape, laid, transposed
from compress.importers.onnx.network_builder import OnnxCall, Rule, order_of
from compress.importers.onnx.ops.convolution import globally, image, zero_padded
from compress.importers.onnx.ops.elementwise import NUMBERS, small


def reshape(call: OnnxCall) -> OnnxValue:
    """Reshape, Flatten, Squeeze, Unsqueeze: the shape that was inferred."""
    given, shape = call.value(0, *NUMBERS), call.made()
    if prod(given.shape) != prod(shape):
        raise NotImportedError(f"{list(given.shape)} does not fill {list(shape)}")
    return in_shape(given, shape)


def transpose(call: OnnxCall) -> OnnxValue:
    """Transpose."""
    given = call.value(0, *NUMBERS)
    order = tuple(call.integers("perm") or range(len(given.shape))[::-1])
    if sorted(order) != list(range(len(given.shape))):
        raise NotImportedError(f"{list(order)} is no order of {list(given.shape)}")
    made = transposed(given, order)
    if made is None:
        made = transposed(call.straightened(given), order)
    assert made is not None
    return made


def concat(call: OnnxCall) -> OnnxValue:
    """Concat."""
    axis = axis_of(int(call.setting("axis", 1)), call.made())
    return shape_rules.concat(call, _with_constants(call, axis), axis)


def _with_constants(call: OnnxCall, axis: int) -> list[OnnxValue]:
    """What is computed, with the constants around it: these are added where zeros were put first."""
    places = [place for place in range(len(call.node.inputs)) if 0 not in _shape(call, place)]
    computed = [place for place in places if not call.is_constant(place)]
    values = []
    for at, place in enumerate(computed):
        given, end = call.value(place), ([*computed, places[-1] + 1])[at + 1]
        before = [call.weights(each) for each in places if each < place and not at]
        after = [call.weights(each) for each in places if place < each < end]
        if before or after:
            around = [*before, np.zeros(given.shape, np.float32), *after]
            sizes = [sum(each.shape[axis] for each in side) for side in (before, after)]
            pads = [(0, 0)] * len(given.shape)
            pads[axis] = (sizes[0], sizes[1])
            padded = shape_rules.pad_by_operation(call, given, pads)
            given = call.operation(NUMPY, "Add", {}, [padded, small(np.concatenate(around, axis), padded)], padded)
        values.append(given)
    return values


def _shape(call: OnnxCall, place: int) -> tuple[int, ...]:
    return call.builder.graph.shapes.get(call.node.inputs[place], ())


def slice_out(call: OnnxCall) -> OnnxValue:
    """Slice: starts, ends, axes, steps."""
    given = call.value(0)
    starts, ends = call.integers("starts", 1) or [], call.integers("ends", 2) or []
    axes = call.integers("axes", 3) or list(range(len(starts)))
    steps = call.integers("steps", 4) or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise NotImportedError(f"it cuts from {starts} to {ends} along {axes}, in steps of {steps}")
    cuts = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = axis_of(axis, given.shape)
        before_first = step < 0 and end < -given.shape[axis]
        cuts[axis] = slice(start, None if before_first else end, step)
    return shape_rules.cut(call, given, cuts)


def split(call: OnnxCall) -> list[OnnxValue]:
    """Split: parts of one axis, one after another."""
    given = call.value(0)
    axis = axis_of(int(call.setting("axis", 0)), given.shape)
    sizes = [call.made(place)[axis] for place in range(len(call.node.outputs))]
    return shape_rules.split(call, given, axis, sizes)


def gather(call: OnnxCall) -> OnnxValue:
    """Gather of places along a side, by constant indices; rows of a constant, by computed ones, are an embedding."""
    if call.is_constant(0):
        return _embedding(call)
    given, indices = call.value(0), call.constant(1)
    axis = axis_of(int(call.setting("axis", 0)), given.shape)
    size = given.shape[axis]
    steps = set(np.diff(indices.reshape(-1) % size).tolist()) or {1}
    step = int(min(steps))
    if len(steps) > 1 or step <= 0 or not indices.size or indices.min() < -size or indices.max() >= size:
        return in_shape(shape_rules.gather(call, given, axis, indices), call.made())
    first, last = int(indices.flat[0]) % size, int(indices.flat[-1]) % size
    return in_shape(shape_rules.cut(call, given, {axis: slice(first, last + 1, step)}), call.made())


def _embedding(call: OnnxCall) -> OnnxValue:
    """The rows of a table that numbers from 0 on say."""
    table, where = call.weights(0), call.value(1, "INT32", "INT64")
    if call.setting("axis", 0) not in (0, -table.ndim) or not table.size:
        raise NotImportedError(f"it takes computed places of a constant {list(table.shape)}, but not its rows")
    rows = table.reshape(len(table), -1)
    rank = len(where.shape)
    where = call.arranged(where, tuple(range(rank)))
    shape, sides = (*where.shape, rows.shape[1]), (*where.sides, rows.shape[1])
    like = laid(UNKNOWN, shape, tuple(range(rank + 1)), sides)
    config = {"input_dim": len(rows), "output_dim": rows.shape[1]}
    return in_shape(call.layer("Embedding", config, [where], like, [rows]), call.made())


def largest(call: OnnxCall) -> OnnxValue:
    """ArgMax; whole numbers, which only an output of the model may be."""
    given, name = call.value(0), call.node.outputs[0]
    if name not in call.builder.graph.outputs or call.builder.takers[name] > 1:
        raise NotImportedError("other operators use its result; only the last one may make whole numbers")
    axis = axis_of(int(call.setting("axis", 0)), given.shape)
    if call.setting("select_last_index", 0):
        raise NotImportedError("it takes the last of equal ones")
    placed = call.placed(given, axis)
    like = placed.like([1 if each == axis else side for each, side in enumerate(given.shape)])
    config = {"axis": placed.axis(axis), "keepdims": True}
    return in_shape(call.operation(NUMPY, "Argmax", config, [placed.value], like), call.made())


def pad(call: OnnxCall) -> OnnxValue:
    """Pad: zeros around an image as a layer, otherwise an operation; cuts where it pads by less than nothing."""
    given, mode = call.value(0), call.setting("mode", "constant")
    rank = len(given.shape)
    numbers = call.integers("pads", 1) or []
    axes = [axis_of(axis, given.shape) for axis in (call.integers("axes", 3) or range(rank))]
    if len(numbers) != 2 * len(axes):
        raise NotImportedError(f"pads {numbers[:16]} do not fit {list(given.shape)}")
    pads = dict(zip(axes, zip(numbers[: len(axes)], numbers[len(axes) :], strict=True), strict=True))
    cuts = {axis: slice(max(-b, 0), given.shape[axis] - max(-a, 0), 1) for axis, (b, a) in pads.items()}
    given = shape_rules.cut(call, given, cuts)
    widths = [(max(before, 0), max(after, 0)) for before, after in (pads.get(axis, (0, 0)) for axis in range(rank))]
    filler = call.number("value", 2, 0.0)
    if not any(map(any, widths)):
        return given
    order = order_of(given)
    zeros = mode == "constant" and filler == 0 and not any(widths[0])
    if zeros and rank in (3, 4) and not any(widths[1]) and order == channel_last(rank):
        arranged = call.arranged(given, order)
        if len(arranged.sides) == rank - 1:
            return zero_padded(call, arranged, widths[2:])
    if mode == "edge" and max(map(max, widths)) <= 1:
        mode = "symmetric"
    if mode in ("edge", "wrap"):
        return _padded_by_indices(call, given, widths, mode)
    return shape_rules.pad_by_operation(call, given, widths, mode, filler)


def _padded_by_indices(call: OnnxCall, given: OnnxValue, pads: Sequence[tuple[int, int]], mode: str) -> OnnxValue:
    """Repeat the outermost elements of each axis ("edge"), or continue at its other end ("wrap")."""
    for axis, (before, after) in enumerate(pads):
        if before or after:
            size = given.shape[axis]
            indices = np.arange(-before, size + after)
            indices = indices.clip(0, size - 1) if mode == "edge" else indices % size
            given = shape_rules.gather(call, given, axis, indices)
    return given


def reduced(kind: str, before: str = "", after: str = "") -> Rule:
    """ReduceMean, ReduceMax and their like; what is made of the numbers before and after, if anything."""

    def rule(call: OnnxCall) -> OnnxValue:
        given = call.value(0)
        told = call.integers("axes", 1)
        if not told and call.setting("noop_with_empty_axes", 0):
            axes = []
        else:
            axes = sorted({axis_of(axis, given.shape) for axis in (told or range(len(given.shape)))})
        if before == "square":
            given = call.layer("Multiply", {}, [[given, given]], given)
        elif before:
            given = call.operation(NUMPY, before, {}, [given], given)
        made = _reduced(call, kind, given, axes) if axes else given
        return call.operation(NUMPY, after, {}, [made], made) if after else made

    return rule


def _reduced(call: OnnxCall, kind: str, given: OnnxValue, axes: list[int]) -> OnnxValue:
    """Over all places of an image a layer, otherwise an operation."""
    rank = len(given.shape)
    image_like = rank in (3, 4) and given.shape[0] == 1 and order_of(given) == channel_last(rank)
    if kind in GLOBAL_POOLING and image_like and axes == list(range(2, rank)):
        return globally(call, GLOBAL_POOLING[kind], call.arranged(given, channel_last(rank)), call.made())
    return in_shape(shape_rules.reduce_by_operation(call, given, kind, axes, keep=True), call.made())


def expand(call: OnnxCall) -> OnnxValue:
    """Expand and Tile: sides of 1 that grow, and sides that are repeated."""
    given, shape = call.value(0), call.made()
    given = in_shape(given, (*(1,) * (len(shape) - len(given.shape)), *given.shape))
    repeats = [size // before for size, before in zip(shape, given.shape, strict=True)]
    return shape_rules.tile(call, given, repeats)


def depth_to_space(call: OnnxCall) -> OnnxValue:
    """DepthToSpace: as TensorFlow's where blocks come first (DCR), else after channels changed their places."""
    given, size = image(call), int(call.setting("blocksize", 1))
    channels = given.shape[1]
    if call.setting("mode", "DCR") == "CRD":
        places = np.arange(channels).reshape(-1, size * size).T.reshape(-1)
        given = call.operation(NUMPY, "Take", {"axis": -1}, [given, places], given)
    like = laid(UNKNOWN, call.made(), channel_last(4))
    return call.operation(NN, "DepthToSpace", {"block_size": size}, [given], like)


def space_to_depth(call: OnnxCall) -> OnnxValue:
    """SpaceToDepth."""
    given, size = image(call), int(call.setting("blocksize", 1))
    like = laid(UNKNOWN, call.made(), channel_last(4))
    return call.operation(NN, "SpaceToDepth", {"block_size": size}, [given], like)


RULES: Mapping[str, Callable[[OnnxCall], OnnxValue | list[OnnxValue]]] = {
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
    "ReduceMean": reduced("Mean"),
    "ReduceMax": reduced("Max"),
    "ReduceMin": reduced("Min"),
    "ReduceSum": reduced("Sum"),
    "ReduceProd": reduced("Prod"),
    "ReduceL1": reduced("Sum", "Absolute"),
    "ReduceL2": reduced("Sum", "square", after="Sqrt"),
    "ReduceLogSum": reduced("Sum", after="Log"),
    "ReduceLogSumExp": reduced("Logsumexp"),
    "ReduceSumSquare": reduced("Sum", "square"),
}
