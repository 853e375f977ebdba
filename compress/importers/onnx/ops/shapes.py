"""Import rules for ONNX operators that reshape, concatenate, slice, pad or reduce tensors.

Reshape, Transpose and their like make no layer at all: see `onnx_layout`.

Source: ONNX' operator specification, opsets 7 to 23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.importers.common.graph_builder import UNKNOWN
from compress.importers.common.layer_calls import MATH, NN, NUMPY, NotImportedError
from compress.importers.onnx.layout import OnnxValue, channel_last, in_shape, laid, transposed
from compress.importers.onnx.network_builder import OnnxCall, Placed, Rule
from compress.importers.onnx.ops.convolution import globally, image, zero_padded
from compress.importers.onnx.ops.elementwise import NUMBERS, order_of, small

GLOBAL = {"Mean": "Average", "Max": "Max"}
"""Reductions over the spatial dimensions with a Keras layer, by operation."""


def reshape(call: OnnxCall) -> OnnxValue:
    """Reshape, Flatten, Squeeze, Unsqueeze: the inferred output shape."""
    source, shape = call.value(0, *NUMBERS), call.output_shape()
    if prod(source.shape) != prod(shape):
        raise NotImportedError(f"{list(source.shape)} does not have as many values as {list(shape)}")
    return in_shape(source, shape)


def transpose(call: OnnxCall) -> OnnxValue:
    """Transpose."""
    source = call.value(0, *NUMBERS)
    order = tuple(call.integers("perm") or range(len(source.shape))[::-1])
    if sorted(order) != list(range(len(source.shape))):
        raise NotImportedError(f"{list(order)} is not a permutation of the axes of {list(source.shape)}")
    result = transposed(source, order)
    if result is None:
        result = transposed(call.straightened(source), order)
    assert result is not None
    return result


def _axis(call: OnnxCall, axis: int, shape: Sequence[int]) -> int:
    if not -len(shape) <= axis < len(shape):
        raise NotImportedError(f"axis {axis} is invalid for {list(shape)}")
    return axis % len(shape)


def concat(call: OnnxCall) -> OnnxValue:
    """Concat."""
    axis = _axis(call, int(call.setting("axis", 1)), call.output_shape())
    values = _with_constants(call, axis)
    if len(values) == 1:
        return values[0]
    leader = max(values, key=lambda value: prod(value.shape))
    order = order_of(leader)
    whole = order[0] == axis or any(value.shape[order[0]] != 1 for value in values)
    values = [call.arranged(value, order, whole=whole) for value in values]
    placed = Placed(values[0], order, whole)
    return call.layer("Concatenate", {"axis": placed.axis(axis)}, [values], placed.like(call.output_shape()))


def _with_constants(call: OnnxCall, axis: int) -> list[OnnxValue]:
    """Return the computed inputs of a Concat; constants become a zero padding and an addition."""
    places = [place for place in range(len(call.node.inputs)) if 0 not in _shape(call, place)]
    computed = [place for place in places if not call.is_constant(place)]
    values = []
    for at, place in enumerate(computed):
        source, end = call.value(place), ([*computed, places[-1] + 1])[at + 1]
        before = [call.weights(each) for each in places if each < place and not at]
        after = [call.weights(each) for each in places if place < each < end]
        if before or after:
            around = [*before, np.zeros(source.shape, np.float32), *after]
            sizes = [sum(each.shape[axis] for each in side) for side in (before, after)]
            padded = _padded(call, source, {axis: (sizes[0], sizes[1])}, "constant", 0.0)
            source = call.operation(NUMPY, "Add", {}, [padded, small(np.concatenate(around, axis), padded)], padded)
        values.append(source)
    return values


def _shape(call: OnnxCall, place: int) -> tuple[int, ...]:
    return call.builder.graph.shapes.get(call.node.inputs[place], ())


def cut(call: OnnxCall, source: OnnxValue, cuts: Mapping[int, slice]) -> OnnxValue:
    """Slice some dimensions; the others stay unchanged."""
    cuts = {axis: each for axis, each in cuts.items() if range(source.shape[axis])[each] != range(source.shape[axis])}
    if not cuts:
        return source
    shape = [len(range(side)[cuts[axis]]) if axis in cuts else side for axis, side in enumerate(source.shape)]
    if 0 in shape:
        raise NotImportedError(f"the slice is empty: {list(source.shape)}")
    placed = call.plain(source, *cuts)
    everything = slice(None, None, None)
    keys = [cuts.get(axis, everything) for axis in (placed.order if placed.whole else placed.order[1:])]
    return call.operation(NUMPY, "GetItem", {}, [placed.value, [everything, *keys]], placed.like(shape))


def _within(start: int, stop: int, step: int, side: int) -> slice:
    """Return a slice inside a dimension, in a form with the same meaning in Python and TensorFlow."""
    first, last, step = slice(start, stop, step).indices(side)
    return slice(first, None if last < 0 else last, step)


def slice_out(call: OnnxCall) -> OnnxValue:
    """Slice: starts, ends, axes, steps."""
    source = call.value(0)
    starts, ends = call.integers("starts", 1) or [], call.integers("ends", 2) or []
    axes = call.integers("axes", 3) or list(range(len(starts)))
    steps = call.integers("steps", 4) or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise NotImportedError(f"it cuts from {starts} to {ends} along {axes}, in steps of {steps}")
    cuts = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = _axis(call, axis, source.shape)
        end = None if step < 0 and end < -source.shape[axis] else end  # type: ignore[assignment]
        cuts[axis] = _within(start, end, step, source.shape[axis])
    return cut(call, source, cuts)


def split(call: OnnxCall) -> list[OnnxValue]:
    """Split one dimension into consecutive parts."""
    source, axis = call.value(0), int(call.setting("axis", 0))
    axis, start, result = _axis(call, axis, source.shape), 0, []
    for place in range(len(call.node.outputs)):
        size = call.output_shape(place)[axis]
        result.append(cut(call, source, {axis: slice(start, start + size, 1)}))
        start += size
    return result


def gather(call: OnnxCall) -> OnnxValue:
    """Gather along one axis with constant indices; rows of a constant by computed indices become an Embedding."""
    if call.is_constant(0):
        return _embedding(call)
    source, where = call.value(0), call.constant(1)
    axis = _axis(call, int(call.setting("axis", 0)), source.shape)
    side = source.shape[axis]
    if not where.size or where.min() < -side or where.max() >= side:
        raise NotImportedError(f"an index is outside of {list(source.shape)}")
    places = np.asarray(where.reshape(-1), np.int64) % side
    steps = {*np.diff(places).tolist()} or {1}
    if len(steps) == 1 and (step := steps.pop()) > 0:
        result = cut(call, source, {axis: slice(int(places[0]), int(places[-1]) + 1, step)})
    else:
        result = _taken(call, source, axis, places)
    return in_shape(result, call.output_shape())


def _taken(call: OnnxCall, source: OnnxValue, axis: int, places: NDArray[np.int64]) -> OnnxValue:
    """Take these indices along one axis."""
    placed = call.plain(source, axis)
    like = placed.like((*source.shape[:axis], places.size, *source.shape[axis + 1 :]))
    return call.operation(NUMPY, "Take", {"axis": placed.axis(axis)}, [placed.value, places], like)


def _embedding(call: OnnxCall) -> OnnxValue:
    """Add an Embedding: rows of a constant by computed indices."""
    table, where = call.weights(0), call.value(1, "INT32", "INT64")
    if call.setting("axis", 0) not in (0, -table.ndim) or not table.size:
        raise NotImportedError(f"it indexes a constant {list(table.shape)} along an axis that is not 0")
    rows = table.reshape(len(table), -1)
    rank = len(where.shape)
    where = call.arranged(where, tuple(range(rank)))
    shape, sides = (*where.shape, rows.shape[1]), (*where.sides, rows.shape[1])
    like = laid(UNKNOWN, shape, tuple(range(rank + 1)), sides)
    config = {"input_dim": len(rows), "output_dim": rows.shape[1]}
    return in_shape(call.layer("Embedding", config, [where], like, [rows]), call.output_shape())


def largest(call: OnnxCall) -> OnnxValue:
    """ArgMax, only as a model output, because its result is integers."""
    source, name = call.value(0), call.node.outputs[0]
    if name not in call.builder.graph.outputs or call.builder.takers[name] > 1:
        raise NotImportedError("other operators use its result; only a model output may be integers")
    axis = _axis(call, int(call.setting("axis", 0)), source.shape)
    if call.setting("select_last_index", 0):
        raise NotImportedError("select_last_index is not supported")
    placed = call.plain(source, axis)
    like = placed.like([1 if each == axis else side for each, side in enumerate(source.shape)])
    config = {"axis": placed.axis(axis), "keepdims": True}
    return in_shape(call.operation(NUMPY, "Argmax", config, [placed.value], like), call.output_shape())


def pad(call: OnnxCall) -> OnnxValue:
    """Pad: zeros around an image as a layer, otherwise an operation; negative padding becomes a slice."""
    source, mode = call.value(0), call.setting("mode", "constant")
    rank = len(source.shape)
    numbers = call.integers("pads", 1) or []
    axes = [_axis(call, axis, source.shape) for axis in (call.integers("axes", 3) or range(rank))]
    if len(numbers) != 2 * len(axes):
        raise NotImportedError(f"pads {numbers[:16]} do not fit {list(source.shape)}")
    pads = {a: (b, c) for a, b, c in zip(axes, numbers[: len(axes)], numbers[len(axes) :], strict=True)}
    less = {axis: slice(max(-b, 0), source.shape[axis] - max(-a, 0), 1) for axis, (b, a) in pads.items()}
    source = cut(call, source, less)
    pads = {axis: (max(b, 0), max(a, 0)) for axis, (b, a) in pads.items() if b > 0 or a > 0}
    filler = call.number("value", 2, 0.0)
    if not pads:
        return source
    order = order_of(source)
    if mode == "constant" and filler == 0 and rank in (3, 4) and min(pads) >= 2 and order == channel_last(rank):
        arranged = call.arranged(source, order)
        if len(arranged.sides) == rank - 1:
            return zero_padded(call, arranged, [pads.get(axis, (0, 0)) for axis in range(2, rank)])
    return _padded(call, source, pads, mode, filler)


def _padded(
    call: OnnxCall, source: OnnxValue, pads: Mapping[int, tuple[int, int]], mode: str, filler: float
) -> OnnxValue:
    most = {axis: max(each) for axis, each in pads.items()}
    if mode == "edge" and max(most.values()) <= 1:
        mode = "symmetric"
    if mode in ("edge", "wrap"):
        for axis, (before, after) in pads.items():
            side = source.shape[axis]
            places = np.arange(-before, side + after)
            source = _taken(call, source, axis, places.clip(0, side - 1) if mode == "edge" else places % side)
        return source
    if mode not in ("constant", "reflect", "symmetric") or not np.isfinite(filler):
        raise NotImportedError(f"it pads with {mode if mode != 'constant' else filler}")
    if mode != "constant" and any(more >= source.shape[axis] + (mode == "symmetric") for axis, more in most.items()):
        raise NotImportedError(f"its pads are larger than {list(source.shape)}")
    placed = call.plain(source, *pads)
    shape = [side + sum(pads.get(axis, (0, 0))) for axis, side in enumerate(source.shape)]
    kept = placed.order if placed.whole else placed.order[1:]
    widths = [[0, 0], *(list(pads.get(axis, (0, 0))) for axis in kept)]
    arguments = [placed.value, filler] if mode == "constant" else [placed.value]
    return call.operation(NUMPY, "Pad", {"pad_width": widths, "mode": mode}, arguments, placed.like(shape))


def reduced(kind: str, before: str = "", after: str = "") -> Rule:
    """Return a rule for a reduction, with an optional operation before and after it."""

    def rule(call: OnnxCall) -> OnnxValue:
        source = call.value(0)
        told = call.integers("axes", 1)
        if not told and call.setting("noop_with_empty_axes", 0):
            axes = []
        else:
            axes = sorted({_axis(call, axis, source.shape) for axis in (told or range(len(source.shape)))})
        if before == "square":
            source = call.layer("Multiply", {}, [[source, source]], source)
        elif before:
            source = call.operation(NUMPY, before, {}, [source], source)
        result = _reduced(call, kind, source, axes) if axes else source
        return call.operation(NUMPY, after, {}, [result], result) if after else result

    return rule


def _reduced(call: OnnxCall, kind: str, source: OnnxValue, axes: list[int]) -> OnnxValue:
    """Reduce with a layer over the spatial dimensions of an image, otherwise with an operation."""
    rank = len(source.shape)
    image_like = rank in (3, 4) and source.shape[0] == 1 and order_of(source) == channel_last(rank)
    if kind in GLOBAL and image_like and axes == list(range(2, rank)):
        return globally(call, GLOBAL[kind], call.arranged(source, channel_last(rank)), call.output_shape())
    placed = call.plain(source, *axes)
    shape = [1 if axis in axes else side for axis, side in enumerate(source.shape)]
    config: dict[str, Any] = {"axis": [placed.axis(axis) for axis in axes], "keepdims": True}
    result = call.operation(MATH if kind == "Logsumexp" else NUMPY, kind, config, [placed.value], placed.like(shape))
    return in_shape(result, call.output_shape())


def expand(call: OnnxCall) -> OnnxValue:
    """Expand and Tile: repeat dimensions."""
    source, shape = call.value(0), call.output_shape()
    source = in_shape(source, (*(1,) * (len(shape) - len(source.shape)), *source.shape))
    times = {axis: side // source.shape[axis] for axis, side in enumerate(shape) if side != source.shape[axis]}
    if not times:
        return source
    placed = call.plain(source, *times)
    kept = placed.order if placed.whole else placed.order[1:]
    repeats = [1, *(times.get(axis, 1) for axis in kept)]
    return call.operation(NUMPY, "Tile", {"repeats": repeats}, [placed.value], placed.like(shape))


def depth_to_space(call: OnnxCall) -> OnnxValue:
    """DepthToSpace: TensorFlow's operation (DCR), for CRD after a permutation of the channels."""
    source, size = image(call), int(call.setting("blocksize", 1))
    channels = source.shape[1]
    if call.setting("mode", "DCR") == "CRD":
        places = np.arange(channels).reshape(-1, size * size).T.reshape(-1)
        source = call.operation(NUMPY, "Take", {"axis": -1}, [source, places], source)
    like = laid(UNKNOWN, call.output_shape(), channel_last(4))
    return call.operation(NN, "DepthToSpace", {"block_size": size}, [source], like)


def space_to_depth(call: OnnxCall) -> OnnxValue:
    """SpaceToDepth."""
    source, size = image(call), int(call.setting("blocksize", 1))
    like = laid(UNKNOWN, call.output_shape(), channel_last(4))
    return call.operation(NN, "SpaceToDepth", {"block_size": size}, [source], like)


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
