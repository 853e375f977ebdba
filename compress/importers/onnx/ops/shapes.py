"""What ONNX operators that move, join, cut or sum up numbers become in Keras.

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
"""What of an image's places a layer of Keras sums up."""


def reshape(call: OnnxCall) -> OnnxValue:
    """Reshape, Flatten, Squeeze, Unsqueeze: the shape that was inferred."""
    given, shape = call.value(0, *NUMBERS), call.made()
    if prod(given.shape) != prod(shape):
        raise NotImportedError(f"{list(given.shape)} does not have as many values as {list(shape)}")
    return in_shape(given, shape)


def transpose(call: OnnxCall) -> OnnxValue:
    """Transpose."""
    given = call.value(0, *NUMBERS)
    order = tuple(call.integers("perm") or range(len(given.shape))[::-1])
    if sorted(order) != list(range(len(given.shape))):
        raise NotImportedError(f"{list(order)} is not a permutation of the axes of {list(given.shape)}")
    made = transposed(given, order)
    if made is None:
        made = transposed(call.straightened(given), order)
    assert made is not None
    return made


def _axis(call: OnnxCall, axis: int, shape: Sequence[int]) -> int:
    if not -len(shape) <= axis < len(shape):
        raise NotImportedError(f"axis {axis} is invalid for {list(shape)}")
    return axis % len(shape)


def concat(call: OnnxCall) -> OnnxValue:
    """Concat."""
    axis = _axis(call, int(call.setting("axis", 1)), call.made())
    values = _with_constants(call, axis)
    if len(values) == 1:
        return values[0]
    leader = max(values, key=lambda value: prod(value.shape))
    order = order_of(leader)
    whole = order[0] == axis or any(value.shape[order[0]] != 1 for value in values)
    values = [call.arranged(value, order, whole=whole) for value in values]
    placed = Placed(values[0], order, whole)
    return call.layer("Concatenate", {"axis": placed.axis(axis)}, [values], placed.like(call.made()))


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
            padded = _padded(call, given, {axis: (sizes[0], sizes[1])}, "constant", 0.0)
            given = call.operation(NUMPY, "Add", {}, [padded, small(np.concatenate(around, axis), padded)], padded)
        values.append(given)
    return values


def _shape(call: OnnxCall, place: int) -> tuple[int, ...]:
    return call.builder.graph.shapes.get(call.node.inputs[place], ())


def cut(call: OnnxCall, given: OnnxValue, cuts: Mapping[int, slice]) -> OnnxValue:
    """Part of some sides; whole sides are left alone."""
    cuts = {axis: each for axis, each in cuts.items() if range(given.shape[axis])[each] != range(given.shape[axis])}
    if not cuts:
        return given
    shape = [len(range(side)[cuts[axis]]) if axis in cuts else side for axis, side in enumerate(given.shape)]
    if 0 in shape:
        raise NotImportedError(f"the slice is empty: {list(given.shape)}")
    placed = call.plain(given, *cuts)
    everything = slice(None, None, None)
    keys = [cuts.get(axis, everything) for axis in (placed.order if placed.whole else placed.order[1:])]
    return call.operation(NUMPY, "GetItem", {}, [placed.value, [everything, *keys]], placed.like(shape))


def _within(start: int, stop: int, step: int, side: int) -> slice:
    """A cut within a side, written so that Python and TensorFlow read it alike."""
    first, last, step = slice(start, stop, step).indices(side)
    return slice(first, None if last < 0 else last, step)


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
        axis = _axis(call, axis, given.shape)
        end = None if step < 0 and end < -given.shape[axis] else end  # type: ignore[assignment]
        cuts[axis] = _within(start, end, step, given.shape[axis])
    return cut(call, given, cuts)


def split(call: OnnxCall) -> list[OnnxValue]:
    """Split: parts of one side, one after another."""
    given, axis = call.value(0), int(call.setting("axis", 0))
    axis, start, made = _axis(call, axis, given.shape), 0, []
    for place in range(len(call.node.outputs)):
        size = call.made(place)[axis]
        made.append(cut(call, given, {axis: slice(start, start + size, 1)}))
        start += size
    return made


def gather(call: OnnxCall) -> OnnxValue:
    """Gather of places along a side, by constant indices; rows of a constant, by computed ones, are an embedding."""
    if call.is_constant(0):
        return _embedding(call)
    given, where = call.value(0), call.constant(1)
    axis = _axis(call, int(call.setting("axis", 0)), given.shape)
    side = given.shape[axis]
    if not where.size or where.min() < -side or where.max() >= side:
        raise NotImportedError(f"an index is outside of {list(given.shape)}")
    places = np.asarray(where.reshape(-1), np.int64) % side
    steps = {*np.diff(places).tolist()} or {1}
    if len(steps) == 1 and (step := steps.pop()) > 0:
        made = cut(call, given, {axis: slice(int(places[0]), int(places[-1]) + 1, step)})
    else:
        made = _taken(call, given, axis, places)
    return in_shape(made, call.made())


def _taken(call: OnnxCall, given: OnnxValue, axis: int, places: NDArray[np.int64]) -> OnnxValue:
    """These places along a side."""
    placed = call.plain(given, axis)
    like = placed.like((*given.shape[:axis], places.size, *given.shape[axis + 1 :]))
    return call.operation(NUMPY, "Take", {"axis": placed.axis(axis)}, [placed.value, places], like)


def _embedding(call: OnnxCall) -> OnnxValue:
    """The rows of a table that numbers from 0 on say."""
    table, where = call.weights(0), call.value(1, "INT32", "INT64")
    if call.setting("axis", 0) not in (0, -table.ndim) or not table.size:
        raise NotImportedError(f"it indexes a constant {list(table.shape)} along an axis that is not 0")
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
        raise NotImportedError("other operators use its result; only a model output may be integers")
    axis = _axis(call, int(call.setting("axis", 0)), given.shape)
    if call.setting("select_last_index", 0):
        raise NotImportedError("select_last_index is not supported")
    placed = call.plain(given, axis)
    like = placed.like([1 if each == axis else side for each, side in enumerate(given.shape)])
    config = {"axis": placed.axis(axis), "keepdims": True}
    return in_shape(call.operation(NUMPY, "Argmax", config, [placed.value], like), call.made())


def pad(call: OnnxCall) -> OnnxValue:
    """Pad: zeros around an image as a layer, otherwise an operation; cuts where it pads by less than nothing."""
    given, mode = call.value(0), call.setting("mode", "constant")
    rank = len(given.shape)
    numbers = call.integers("pads", 1) or []
    axes = [_axis(call, axis, given.shape) for axis in (call.integers("axes", 3) or range(rank))]
    if len(numbers) != 2 * len(axes):
        raise NotImportedError(f"pads {numbers[:16]} do not fit {list(given.shape)}")
    pads = {a: (b, c) for a, b, c in zip(axes, numbers[: len(axes)], numbers[len(axes) :], strict=True)}
    less = {axis: slice(max(-b, 0), given.shape[axis] - max(-a, 0), 1) for axis, (b, a) in pads.items()}
    given = cut(call, given, less)
    pads = {axis: (max(b, 0), max(a, 0)) for axis, (b, a) in pads.items() if b > 0 or a > 0}
    filler = call.number("value", 2, 0.0)
    if not pads:
        return given
    order = order_of(given)
    if mode == "constant" and filler == 0 and rank in (3, 4) and min(pads) >= 2 and order == channel_last(rank):
        arranged = call.arranged(given, order)
        if len(arranged.sides) == rank - 1:
            return zero_padded(call, arranged, [pads.get(axis, (0, 0)) for axis in range(2, rank)])
    return _padded(call, given, pads, mode, filler)


def _padded(
    call: OnnxCall, given: OnnxValue, pads: Mapping[int, tuple[int, int]], mode: str, filler: float
) -> OnnxValue:
    most = {axis: max(each) for axis, each in pads.items()}
    if mode == "edge" and max(most.values()) <= 1:
        mode = "symmetric"
    if mode in ("edge", "wrap"):
        for axis, (before, after) in pads.items():
            side = given.shape[axis]
            places = np.arange(-before, side + after)
            given = _taken(call, given, axis, places.clip(0, side - 1) if mode == "edge" else places % side)
        return given
    if mode not in ("constant", "reflect", "symmetric") or not np.isfinite(filler):
        raise NotImportedError(f"it pads with {mode if mode != 'constant' else filler}")
    if mode != "constant" and any(more >= given.shape[axis] + (mode == "symmetric") for axis, more in most.items()):
        raise NotImportedError(f"its pads are larger than {list(given.shape)}")
    placed = call.plain(given, *pads)
    shape = [side + sum(pads.get(axis, (0, 0))) for axis, side in enumerate(given.shape)]
    kept = placed.order if placed.whole else placed.order[1:]
    widths = [[0, 0], *(list(pads.get(axis, (0, 0))) for axis in kept)]
    arguments = [placed.value, filler] if mode == "constant" else [placed.value]
    return call.operation(NUMPY, "Pad", {"pad_width": widths, "mode": mode}, arguments, placed.like(shape))


def reduced(kind: str, before: str = "", after: str = "") -> Rule:
    """ReduceMean, ReduceMax and their like; what is made of the numbers before and after, if anything."""

    def rule(call: OnnxCall) -> OnnxValue:
        given = call.value(0)
        told = call.integers("axes", 1)
        if not told and call.setting("noop_with_empty_axes", 0):
            axes = []
        else:
            axes = sorted({_axis(call, axis, given.shape) for axis in (told or range(len(given.shape)))})
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
    if kind in GLOBAL and image_like and axes == list(range(2, rank)):
        return globally(call, GLOBAL[kind], call.arranged(given, channel_last(rank)), call.made())
    placed = call.plain(given, *axes)
    shape = [1 if axis in axes else side for axis, side in enumerate(given.shape)]
    config: dict[str, Any] = {"axis": [placed.axis(axis) for axis in axes], "keepdims": True}
    made = call.operation(MATH if kind == "Logsumexp" else NUMPY, kind, config, [placed.value], placed.like(shape))
    return in_shape(made, call.made())


def expand(call: OnnxCall) -> OnnxValue:
    """Expand and Tile: sides of 1 that grow, and sides that are repeated."""
    given, shape = call.value(0), call.made()
    given = in_shape(given, (*(1,) * (len(shape) - len(given.shape)), *given.shape))
    times = {axis: side // given.shape[axis] for axis, side in enumerate(shape) if side != given.shape[axis]}
    if not times:
        return given
    placed = call.plain(given, *times)
    kept = placed.order if placed.whole else placed.order[1:]
    repeats = [1, *(times.get(axis, 1) for axis in kept)]
    return call.operation(NUMPY, "Tile", {"repeats": repeats}, [placed.value], placed.like(shape))


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
