"""Import rules for TFLite operators that reshape, concatenate, slice, pad, resize or reduce tensors.

Source: tensorflow/lite/kernels/internal/reference and schema.fbs, version 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from compress.importers.common.layer_calls import IMAGE, NN, NUMPY, NotImportedError
from compress.importers.tflite.network import TfliteCall, TfliteValue, reshaped


def reshape(call: TfliteCall) -> TfliteValue:
    """RESHAPE, SQUEEZE, EXPAND_DIMS: the output shape in the file."""
    return reshaped(call, call.value(0), call.output.shape)


def _permuted(call: TfliteCall, source: TfliteValue, order: list[int]) -> TfliteValue:
    """Transpose a value; as a whole tensor if the first axis moves."""
    if sorted(order) != list(range(len(source.shape))):
        raise NotImportedError(f"{order} is not a permutation of the axes of {list(source.shape)}")
    if order[:1] != [0]:
        source = reshaped(call, source, source.shape, whole=True)
    like = TfliteValue(source.tensor, tuple(source.shape[side] for side in order), source.whole)
    dims = [side + 1 for side in order] if source.whole else order[1:]
    if not dims:
        raise NotImportedError(f"its input has the shape {list(source.shape)}")
    return call.layer("Permute", {"dims": dims}, [source], like)


def transpose(call: TfliteCall) -> TfliteValue:
    """TRANSPOSE."""
    return _permuted(call, call.value(0), call.integers(1))


def flipped(call: TfliteCall, source: TfliteValue) -> TfliteValue:
    """Swap the last two axes."""
    rank = len(source.shape)
    if rank < 2:
        raise NotImportedError(f"its input has the shape {list(source.shape)}")
    return _permuted(call, source, [*range(rank - 2), rank - 1, rank - 2])


def _together(call: TfliteCall, values: list[TfliteValue], axis: int) -> list[TfliteValue]:
    """Return values for a concatenation along an axis, which must not be the network's batch."""
    rank = len(values[0].shape)
    if any(len(value.shape) != rank for value in values) or not -rank <= axis < rank:
        raise NotImportedError(f"its inputs have {sorted({len(value.shape) for value in values})} dimensions")
    whole = axis % rank == 0 or any(value.whole for value in values)
    return [reshaped(call, value, value.shape, whole=whole) for value in values]


def concatenation(call: TfliteCall) -> TfliteValue:
    """CONCATENATION."""
    axis = int(call.option("axis"))
    values = _together(call, call.values(), axis)
    first, axis = values[0], axis % len(values[0].shape)
    rest = {tuple(side for at, side in enumerate(value.shape) if at != axis) for value in values}
    if len(rest) != 1:
        raise NotImportedError(f"{[list(value.shape) for value in values]} do not fit each other")
    shape = [*first.shape]
    shape[axis] = sum(value.shape[axis] for value in values)
    like = TfliteValue(first.tensor, tuple(shape), first.whole)
    if len(values) == 1:
        return call.activated(first)
    last = axis == len(shape) - 1
    result = call.layer("Concatenate", {"axis": -1 if last else first.axis(axis)}, [values], like)
    return call.activated(result)


def pack(call: TfliteCall) -> TfliteValue:
    """PACK: add an axis of 1 to each input, then concatenate."""
    values = call.values()
    shape, result = values[0].shape, call.output.shape
    axis = int(call.option("axis")) % max(len(result), 1)
    if any(value.shape != shape for value in values) or len(result) != len(shape) + 1:
        raise NotImportedError(f"{[list(value.shape) for value in values]} do not give {list(result)}")
    sides = (*shape[:axis], 1, *shape[axis:])
    values = _together(call, [reshaped(call, value, sides) for value in values], axis)
    like = TfliteValue(values[0].tensor, (*shape[:axis], len(values), *shape[axis:]), values[0].whole)
    if len(values) == 1:
        return values[0]
    return call.layer("Concatenate", {"axis": values[0].axis(axis)}, [values], like)


def _cut(call: TfliteCall, source: TfliteValue, cuts: list[slice]) -> TfliteValue:
    """Slice a value; dimensions that are not sliced stay unchanged."""
    shape = tuple(len(range(*cut.indices(side))) for cut, side in zip(cuts, source.shape, strict=True))
    if 0 in shape:
        raise NotImportedError(f"the slice is empty: {list(source.shape)}")
    if shape[0] != source.shape[0] or (cuts[0].step or 1) < 0:
        source = reshaped(call, source, source.shape, whole=True)
    like = TfliteValue(source.tensor, shape, source.whole)
    if shape == source.shape and all((cut.step or 1) > 0 for cut in cuts):
        return source
    everything = slice(None, None, None)
    keys = [
        everything if s == r and (c.step or 1) > 0 else c for c, s, r in zip(cuts, shape, source.shape, strict=True)
    ]
    keys = [everything, *keys] if source.whole else [everything, *keys[1:]]
    return call.operation(NUMPY, "GetItem", {}, [source, keys], like)


def strided_slice(call: TfliteCall) -> TfliteValue:
    """STRIDED_SLICE with begin, end, strides and shrink_axis_mask."""
    source = call.value(0)
    begin, end, strides = (call.integers(place) for place in (1, 2, 3))
    if call.option("ellipsisMask") or call.option("newAxisMask") or not len(begin) == len(end) == len(strides):
        raise NotImportedError("ellipsis_mask and new_axis_mask are not supported")
    if len(begin) > len(source.shape) or 0 in strides:
        raise NotImportedError(f"it slices {len(begin)} dimensions of {list(source.shape)}")
    cuts, kept = [], []
    for axis, side in enumerate(source.shape):
        if axis >= len(begin):
            cuts.append(slice(0, side, 1))
            kept.append(side)
            continue
        bit, first, step = 1 << axis, begin[axis], strides[axis]
        if call.option("shrinkAxisMask") & bit:
            first += side if first < 0 else 0
            cuts.append(slice(first, first + 1, 1))
            continue
        start = None if call.option("beginMask") & bit else first
        stop = None if call.option("endMask") & bit else end[axis] + (first if call.option("offset", False) else 0)
        cuts.append(_within(slice(start, stop, step), side))
        kept.append(len(range(*cuts[-1].indices(side))))
    return reshaped(call, _cut(call, source, cuts), kept)


def _within(cut: slice, side: int) -> slice:
    """Return a slice inside a dimension, in a form with the same meaning in Python and TensorFlow."""
    first, last, step = cut.indices(side)
    return slice(first, None if last < 0 else last, step)


def cut_out(call: TfliteCall) -> TfliteValue:
    """SLICE: begin and size, -1 for the rest."""
    source, begin, size = call.value(0), call.integers(1), call.integers(2)
    if not len(begin) == len(size) == len(source.shape) or min(begin, default=0) < 0:
        raise NotImportedError(f"it slices {len(begin)} dimensions of {list(source.shape)}")
    ends = [
        side if count == -1 else first + count for first, count, side in zip(begin, size, source.shape, strict=True)
    ]
    return _cut(call, source, [slice(first, last, 1) for first, last in zip(begin, ends, strict=True)])


def _parts(call: TfliteCall, source: TfliteValue, axis: int, sizes: list[int]) -> list[TfliteValue]:
    """Split one dimension into consecutive parts."""
    rank = len(source.shape)
    if not -rank <= axis < rank or sum(sizes) != source.shape[axis] or min(sizes, default=0) < 1:
        raise NotImportedError(f"{sizes} along axis {axis} are invalid parts of {list(source.shape)}")
    result, start, axis = [], 0, axis % rank
    for size in sizes:
        cuts = [slice(start, start + size, 1) if at == axis else slice(0, s, 1) for at, s in enumerate(source.shape)]
        result.append(_cut(call, source, cuts))
        start += size
    return result


def split(call: TfliteCall) -> list[TfliteValue]:
    """SPLIT: axis, input; even parts."""
    (axis, *_), source, count = call.integers(0) or [0], call.value(1), len(call.operator.outputs)
    if not -len(source.shape) <= axis < len(source.shape) or source.shape[axis] % count:
        raise NotImportedError(f"{count} parts along axis {axis} do not fit {list(source.shape)}")
    return _parts(call, source, axis, [source.shape[axis] // count] * count)


def split_v(call: TfliteCall) -> list[TfliteValue]:
    """SPLIT_V: input, sizes, axis; one size may be -1 for the rest."""
    source, sizes, (axis, *_) = call.value(0), call.integers(1), call.integers(2) or [0]
    if sizes.count(-1) == 1 and -len(source.shape) <= axis < len(source.shape):
        sizes = [source.shape[axis] - sum(sizes) - 1 if size == -1 else size for size in sizes]
    return _parts(call, source, axis, sizes)


def unpack(call: TfliteCall) -> list[TfliteValue]:
    """UNPACK: parts of size 1, without their axis."""
    source, axis = call.value(0), int(call.option("axis"))
    if not -len(source.shape) <= axis < len(source.shape) or len(call.operator.outputs) != source.shape[axis]:
        raise NotImportedError(f"{len(call.operator.outputs)} parts along axis {axis} are not {list(source.shape)}")
    axis %= len(source.shape)
    shape = (*source.shape[:axis], *source.shape[axis + 1 :])
    return [reshaped(call, part, shape) for part in _parts(call, source, axis, [1] * source.shape[axis])]


def gather(call: TfliteCall) -> TfliteValue:
    """GATHER along one axis with constant indices."""
    source, axis, where = call.value(0), int(call.option("axis")), call.constant(1, "INT32", "INT64")
    if call.option("batchDims") or not -len(source.shape) <= axis < len(source.shape) or where.ndim > 1:
        raise NotImportedError(f"it takes {list(where.shape)} along axis {axis} of {list(source.shape)}")
    axis %= len(source.shape)
    if not where.size or where.min() < 0 or where.max() >= source.shape[axis]:
        raise NotImportedError(f"an index is outside of {list(source.shape)}")
    source = reshaped(call, source, source.shape, whole=source.whole or axis == 0)
    like = TfliteValue(source.tensor, (*source.shape[:axis], where.size, *source.shape[axis + 1 :]), source.whole)
    indices = np.asarray(where.reshape(-1), np.int64)
    result = call.operation(NUMPY, "Take", {"axis": source.axis(axis)}, [source, indices], like)
    return reshaped(call, result, (*source.shape[:axis], *where.shape, *source.shape[axis + 1 :]))


def _pads(call: TfliteCall, source: TfliteValue) -> list[list[int]]:
    pads = call.integers(1)
    if len(pads) != 2 * len(source.shape) or min(pads) < 0 or max(pads) > 2**20:
        raise NotImportedError(f"paddings {pads[:16]} do not fit {list(source.shape)}")
    return [pads[at : at + 2] for at in range(0, len(pads), 2)]


def pad(call: TfliteCall) -> TfliteValue:
    """PAD and PADV2: a layer for zeros around an image, otherwise an operation."""
    source, filler = call.value(0), call.weights(2) if call.count > 2 else np.zeros(1, np.float32)
    pads = _pads(call, source)
    if filler.size != 1 or not np.isfinite(filler).all():
        raise NotImportedError("its fill value is not one finite number")
    if pads[0] != [0, 0]:
        source = reshaped(call, source, source.shape, whole=True)
    shape = tuple(side + low + high for side, (low, high) in zip(source.shape, pads, strict=True))
    like = TfliteValue(source.tensor, shape, source.whole)
    if not filler.any() and not source.whole and len(pads) == 4 and pads[3] == [0, 0]:
        return call.layer("ZeroPadding2D", {"padding": pads[1:3]}, [source], like)
    widths = [[0, 0], *pads] if source.whole else pads
    return call.operation(NUMPY, "Pad", {"pad_width": widths, "mode": "constant"}, [source, float(filler.item())], like)


def mirror_pad(call: TfliteCall) -> TfliteValue:
    """MIRROR_PAD: the image mirrored at its edge, with (SYMMETRIC) or without (REFLECT) the edge itself."""
    source, mode = call.value(0), int(call.option("mode"))
    pads = _pads(call, source)
    if mode not in (0, 1) or pads[0] != [0, 0]:
        raise NotImportedError(f"its mode is number {mode}, or it pads the batch")
    if any(max(each) > side - (mode == 0) for each, side in zip(pads, source.shape, strict=True)):
        raise NotImportedError(f"paddings {pads} are larger than {list(source.shape)}")
    like = TfliteValue(source.tensor, tuple(s + sum(p) for s, p in zip(source.shape, pads, strict=True)), source.whole)
    widths = [[0, 0], *pads] if source.whole else pads
    return call.operation(NUMPY, "Pad", {"pad_width": widths, "mode": ("reflect", "symmetric")[mode]}, [source], like)


def resize(interpolation: str) -> Callable[[TfliteCall], TfliteValue]:
    """RESIZE_BILINEAR and RESIZE_NEAREST_NEIGHBOR, with sampling at pixel centres, as in Keras."""

    def rule(call: TfliteCall) -> TfliteValue:
        source, size = call.batched(0, 4), call.integers(1)
        if len(size) != 2 or not all(0 < side <= 2**15 for side in size):
            raise NotImportedError(f"its size is {size}")
        like = TfliteValue(source.tensor, (source.shape[0], *size, source.shape[3]))
        centres, aligned = bool(call.option("halfPixelCenters", False)), bool(call.option("alignCorners", False))
        times = [after / before for before, after in zip(source.shape[1:3], size, strict=True)]
        whole = all(time == int(time) for time in times) and not aligned
        if times == [1, 1]:
            return source
        if interpolation == "nearest" and whole:
            return call.layer(
                "UpSampling2D", {"size": [int(t) for t in times], "interpolation": "nearest"}, [source], like
            )
        if aligned or not centres:
            raise NotImportedError("Keras samples at pixel centres, and this operator at pixel corners")
        config = {"size": size, "interpolation": interpolation, "antialias": False}
        return call.operation(IMAGE, "Resize", config, [source], like)

    return rule


def blocks(kind: str) -> Callable[[TfliteCall], TfliteValue]:
    """SPACE_TO_DEPTH and DEPTH_TO_SPACE."""

    def rule(call: TfliteCall) -> TfliteValue:
        source, size = call.batched(0, 4), int(call.option("blockSize", 0))
        batch, height, width, channels = source.shape
        if kind == "SpaceToDepth":
            fits = 0 < size <= height and not (height % size or width % size)
            shape = (batch, height // max(size, 1), width // max(size, 1), channels * size**2)
        else:
            fits = 0 < size <= channels and not channels % size**2
            shape = (batch, height * size, width * size, channels // max(size, 1) ** 2)
        if not fits:
            raise NotImportedError(f"blocks of {size} do not fit {list(source.shape)}")
        return call.operation(NN, kind, {"block_size": size}, [source], TfliteValue(source.tensor, shape))

    return rule


GLOBAL = {"Mean": "Average", "Max": "Max"}
"""Reductions over the spatial dimensions with a Keras layer, by operation."""


def reduced(kind: str) -> Callable[[TfliteCall], TfliteValue]:
    """MEAN, SUM, REDUCE_MAX, REDUCE_MIN, REDUCE_PROD: a layer for an image, otherwise an operation."""

    def rule(call: TfliteCall) -> TfliteValue:
        source, keep = call.value(0), bool(call.option("keepDims", False))
        rank = len(source.shape)
        if any(not -rank <= axis < rank for axis in call.integers(1)):
            raise NotImportedError(f"{call.integers(1)} are invalid axes of {list(source.shape)}")
        axes = sorted({axis % rank for axis in call.integers(1)})
        if not axes:
            return source
        if axes[0] == 0:
            source = reshaped(call, source, source.shape, whole=True)
        shape = tuple(1 if at in axes else side for at, side in enumerate(source.shape))
        like = TfliteValue(source.tensor, shape, source.whole)
        if kind in GLOBAL and not source.whole and axes == list(range(1, rank - 1)) and rank in (3, 4):
            left = like if keep else TfliteValue(source.tensor, (shape[0], shape[-1]))
            return call.layer(f"Global{GLOBAL[kind]}Pooling{rank - 2}D", {"keepdims": keep}, [source], left)
        config: dict[str, Any] = {"axis": [source.axis(axis) for axis in axes], "keepdims": True}
        result = call.operation(NUMPY, kind, config, [source], like)
        return result if keep else reshaped(call, result, [s for at, s in enumerate(shape) if at not in axes] or [1])

    return rule


def tile(call: TfliteCall) -> TfliteValue:
    """TILE; BROADCAST_TO is the same where a dimension is 1."""
    source, times = call.value(0), call.integers(1)
    if call.operator.name == "BROADCAST_TO":
        sides = (*(1,) * (len(times) - len(source.shape)), *source.shape)
        if len(sides) != len(times) or any(b not in (1, a) for a, b in zip(times, sides, strict=True)):
            raise NotImportedError(f"{list(source.shape)} cannot be broadcast to {times}")
        source = reshaped(call, source, sides)
        times = [a // b for a, b in zip(times, sides, strict=True)]
    if len(times) != len(source.shape) or min(times, default=0) < 1 or prod(times) > 2**20:
        raise NotImportedError(f"{times} times do not fit {list(source.shape)}")
    if times[0] != 1:
        source = reshaped(call, source, source.shape, whole=True)
    like = TfliteValue(
        source.tensor, tuple(side * time for side, time in zip(source.shape, times, strict=True)), source.whole
    )
    if prod(times) == 1:
        return source
    return call.operation(NUMPY, "Tile", {"repeats": [1, *times] if source.whole else times}, [source], like)


RULES: Mapping[str, Callable[[TfliteCall], TfliteValue | list[TfliteValue]]] = {
    "RESHAPE": reshape,
    "SQUEEZE": reshape,
    "EXPAND_DIMS": reshape,
    "TRANSPOSE": transpose,
    "CONCATENATION": concatenation,
    "PACK": pack,
    "STRIDED_SLICE": strided_slice,
    "SLICE": cut_out,
    "SPLIT": split,
    "SPLIT_V": split_v,
    "UNPACK": unpack,
    "GATHER": gather,
    "PAD": pad,
    "PADV2": pad,
    "MIRROR_PAD": mirror_pad,
    "RESIZE_BILINEAR": resize("bilinear"),
    "RESIZE_NEAREST_NEIGHBOR": resize("nearest"),
    "SPACE_TO_DEPTH": blocks("SpaceToDepth"),
    "DEPTH_TO_SPACE": blocks("DepthToSpace"),
    "MEAN": reduced("Mean"),
    "SUM": reduced("Sum"),
    "REDUCE_MAX": reduced("Max"),
    "REDUCE_MIN": reduced("Min"),
    "REDUCE_PROD": reduced("Prod"),
    "TILE": tile,
    "BROADCAST_TO": tile,
}
