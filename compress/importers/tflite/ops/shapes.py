"""What the TFLite operators that move, join, cut or sum numbers become in Keras (`tflite_network` calls these).

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
    """RESHAPE, SQUEEZE, EXPAND_DIMS: the shape that the file says."""
    return reshaped(call, call.value(0), call.made.shape)


def _permuted(call: TfliteCall, given: TfliteValue, order: list[int]) -> TfliteValue:
    """The sides in another order; as a whole tensor where the first one moves."""
    if sorted(order) != list(range(len(given.shape))):
        raise NotImportedError(f"{order} is not a permutation of the axes of {list(given.shape)}")
    if order[:1] != [0]:
        given = reshaped(call, given, given.shape, whole=True)
    like = TfliteValue(given.tensor, tuple(given.shape[side] for side in order), given.whole)
    dims = [side + 1 for side in order] if given.whole else order[1:]
    if not dims:
        raise NotImportedError(f"its input has the shape {list(given.shape)}")
    return call.layer("Permute", {"dims": dims}, [given], like)


def transpose(call: TfliteCall) -> TfliteValue:
    """TRANSPOSE."""
    return _permuted(call, call.value(0), call.integers(1))


def flipped(call: TfliteCall, given: TfliteValue) -> TfliteValue:
    """The last two sides exchanged."""
    rank = len(given.shape)
    if rank < 2:
        raise NotImportedError(f"its input has the shape {list(given.shape)}")
    return _permuted(call, given, [*range(rank - 2), rank - 1, rank - 2])


def _together(call: TfliteCall, values: list[TfliteValue], axis: int) -> list[TfliteValue]:
    """Values alike but for one axis, which is not the network's batch."""
    rank = len(values[0].shape)
    if any(len(value.shape) != rank for value in values) or not -rank <= axis < rank:
        raise NotImportedError(f"its inputs have {sorted({len(value.shape) for value in values})} sides")
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
    made = call.layer("Concatenate", {"axis": -1 if last else first.axis(axis)}, [values], like)
    return call.activated(made)


def pack(call: TfliteCall) -> TfliteValue:
    """PACK: each with a side of 1, then joined."""
    values = call.values()
    shape, made = values[0].shape, call.made.shape
    axis = int(call.option("axis")) % max(len(made), 1)
    if any(value.shape != shape for value in values) or len(made) != len(shape) + 1:
        raise NotImportedError(f"{[list(value.shape) for value in values]} do not give {list(made)}")
    sides = (*shape[:axis], 1, *shape[axis:])
    values = _together(call, [reshaped(call, value, sides) for value in values], axis)
    like = TfliteValue(values[0].tensor, (*shape[:axis], len(values), *shape[axis:]), values[0].whole)
    if len(values) == 1:
        return values[0]
    return call.layer("Concatenate", {"axis": values[0].axis(axis)}, [values], like)


def _cut(call: TfliteCall, given: TfliteValue, cuts: list[slice]) -> TfliteValue:
    """Part of each side; whole sides are left alone."""
    shape = tuple(len(range(*cut.indices(side))) for cut, side in zip(cuts, given.shape, strict=True))
    if 0 in shape:
        raise NotImportedError(f"the slice is empty: {list(given.shape)}")
    if shape[0] != given.shape[0] or (cuts[0].step or 1) < 0:
        given = reshaped(call, given, given.shape, whole=True)
    like = TfliteValue(given.tensor, shape, given.whole)
    if shape == given.shape and all((cut.step or 1) > 0 for cut in cuts):
        return given
    everything = slice(None, None, None)
    keys = [everything if s == r and (c.step or 1) > 0 else c for c, s, r in zip(cuts, shape, given.shape, strict=True)]
    keys = [everything, *keys] if given.whole else [everything, *keys[1:]]
    return call.operation(NUMPY, "GetItem", {}, [given, keys], like)


def strided_slice(call: TfliteCall) -> TfliteValue:
    """STRIDED_SLICE with begin, end and strides, and sides that it takes away."""
    given = call.value(0)
    begin, end, strides = (call.integers(place) for place in (1, 2, 3))
    if call.option("ellipsisMask") or call.option("newAxisMask") or not len(begin) == len(end) == len(strides):
        raise NotImportedError("ellipsis_mask and new_axis_mask are not supported")
    if len(begin) > len(given.shape) or 0 in strides:
        raise NotImportedError(f"it slices {len(begin)} dimensions of {list(given.shape)}")
    cuts, kept = [], []
    for axis, side in enumerate(given.shape):
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
    return reshaped(call, _cut(call, given, cuts), kept)


def _within(cut: slice, side: int) -> slice:
    """A cut within a side, written so that Python and TensorFlow read it alike."""
    first, last, step = cut.indices(side)
    return slice(first, None if last < 0 else last, step)


def cut_out(call: TfliteCall) -> TfliteValue:
    """SLICE: begin and size, -1 for all that is left."""
    given, begin, size = call.value(0), call.integers(1), call.integers(2)
    if not len(begin) == len(size) == len(given.shape) or min(begin, default=0) < 0:
        raise NotImportedError(f"it slices {len(begin)} dimensions of {list(given.shape)}")
    ends = [side if count == -1 else first + count for first, count, side in zip(begin, size, given.shape, strict=True)]
    return _cut(call, given, [slice(first, last, 1) for first, last in zip(begin, ends, strict=True)])


def _parts(call: TfliteCall, given: TfliteValue, axis: int, sizes: list[int]) -> list[TfliteValue]:
    """The parts of one side, one after another."""
    rank = len(given.shape)
    if not -rank <= axis < rank or sum(sizes) != given.shape[axis] or min(sizes, default=0) < 1:
        raise NotImportedError(f"{sizes} along axis {axis} are invalid parts of {list(given.shape)}")
    made, start, axis = [], 0, axis % rank
    for size in sizes:
        cuts = [slice(start, start + size, 1) if at == axis else slice(0, s, 1) for at, s in enumerate(given.shape)]
        made.append(_cut(call, given, cuts))
        start += size
    return made


def split(call: TfliteCall) -> list[TfliteValue]:
    """SPLIT: axis, input; even parts."""
    (axis, *_), given, count = call.integers(0) or [0], call.value(1), len(call.operator.outputs)
    if not -len(given.shape) <= axis < len(given.shape) or given.shape[axis] % count:
        raise NotImportedError(f"{count} parts along axis {axis} do not fit {list(given.shape)}")
    return _parts(call, given, axis, [given.shape[axis] // count] * count)


def split_v(call: TfliteCall) -> list[TfliteValue]:
    """SPLIT_V: input, sizes, axis; one size may be -1 for what is left."""
    given, sizes, (axis, *_) = call.value(0), call.integers(1), call.integers(2) or [0]
    if sizes.count(-1) == 1 and -len(given.shape) <= axis < len(given.shape):
        sizes = [given.shape[axis] - sum(sizes) - 1 if size == -1 else size for size in sizes]
    return _parts(call, given, axis, sizes)


def unpack(call: TfliteCall) -> list[TfliteValue]:
    """UNPACK: parts of one, without their side."""
    given, axis = call.value(0), int(call.option("axis"))
    if not -len(given.shape) <= axis < len(given.shape) or len(call.operator.outputs) != given.shape[axis]:
        raise NotImportedError(f"{len(call.operator.outputs)} parts along axis {axis} are not {list(given.shape)}")
    axis %= len(given.shape)
    shape = (*given.shape[:axis], *given.shape[axis + 1 :])
    return [reshaped(call, part, shape) for part in _parts(call, given, axis, [1] * given.shape[axis])]


def gather(call: TfliteCall) -> TfliteValue:
    """GATHER of some places along one side, by constant indices."""
    given, axis, where = call.value(0), int(call.option("axis")), call.constant(1, "INT32", "INT64")
    if call.option("batchDims") or not -len(given.shape) <= axis < len(given.shape) or where.ndim > 1:
        raise NotImportedError(f"it takes {list(where.shape)} along axis {axis} of {list(given.shape)}")
    axis %= len(given.shape)
    if not where.size or where.min() < 0 or where.max() >= given.shape[axis]:
        raise NotImportedError(f"an index is outside of {list(given.shape)}")
    given = reshaped(call, given, given.shape, whole=given.whole or axis == 0)
    like = TfliteValue(given.tensor, (*given.shape[:axis], where.size, *given.shape[axis + 1 :]), given.whole)
    indices = np.asarray(where.reshape(-1), np.int64)
    made = call.operation(NUMPY, "Take", {"axis": given.axis(axis)}, [given, indices], like)
    return reshaped(call, made, (*given.shape[:axis], *where.shape, *given.shape[axis + 1 :]))


def _pads(call: TfliteCall, given: TfliteValue) -> list[list[int]]:
    pads = call.integers(1)
    if len(pads) != 2 * len(given.shape) or min(pads) < 0 or max(pads) > 2**20:
        raise NotImportedError(f"paddings {pads[:16]} do not fit {list(given.shape)}")
    return [pads[at : at + 2] for at in range(0, len(pads), 2)]


def pad(call: TfliteCall) -> TfliteValue:
    """PAD and PADV2: around an image a layer, otherwise an operation."""
    given, filler = call.value(0), call.weights(2) if call.count > 2 else np.zeros(1, np.float32)
    pads = _pads(call, given)
    if filler.size != 1 or not np.isfinite(filler).all():
        raise NotImportedError("its fill value is not one finite number")
    if pads[0] != [0, 0]:
        given = reshaped(call, given, given.shape, whole=True)
    shape = tuple(side + low + high for side, (low, high) in zip(given.shape, pads, strict=True))
    like = TfliteValue(given.tensor, shape, given.whole)
    if not filler.any() and not given.whole and len(pads) == 4 and pads[3] == [0, 0]:
        return call.layer("ZeroPadding2D", {"padding": pads[1:3]}, [given], like)
    widths = [[0, 0], *pads] if given.whole else pads
    return call.operation(NUMPY, "Pad", {"pad_width": widths, "mode": "constant"}, [given, float(filler.item())], like)


def mirror_pad(call: TfliteCall) -> TfliteValue:
    """MIRROR_PAD: the image mirrored at its edge, with (SYMMETRIC) or without (REFLECT) the edge itself."""
    given, mode = call.value(0), int(call.option("mode"))
    pads = _pads(call, given)
    if mode not in (0, 1) or pads[0] != [0, 0]:
        raise NotImportedError(f"its mode is number {mode}, or it pads the batch")
    if any(max(each) > side - (mode == 0) for each, side in zip(pads, given.shape, strict=True)):
        raise NotImportedError(f"paddings {pads} are larger than {list(given.shape)}")
    like = TfliteValue(given.tensor, tuple(s + sum(p) for s, p in zip(given.shape, pads, strict=True)), given.whole)
    widths = [[0, 0], *pads] if given.whole else pads
    return call.operation(NUMPY, "Pad", {"pad_width": widths, "mode": ("reflect", "symmetric")[mode]}, [given], like)


def resize(interpolation: str) -> Callable[[TfliteCall], TfliteValue]:
    """RESIZE_BILINEAR and RESIZE_NEAREST_NEIGHBOR, as Keras samples images: at the centres of pixels."""

    def rule(call: TfliteCall) -> TfliteValue:
        given, size = call.batched(0, 4), call.integers(1)
        if len(size) != 2 or not all(0 < side <= 2**15 for side in size):
            raise NotImportedError(f"its size is {size}")
        like = TfliteValue(given.tensor, (given.shape[0], *size, given.shape[3]))
        centres, aligned = bool(call.option("halfPixelCenters", False)), bool(call.option("alignCorners", False))
        times = [after / before for before, after in zip(given.shape[1:3], size, strict=True)]
        whole = all(time == int(time) for time in times) and not aligned
        if times == [1, 1]:
            return given
        if interpolation == "nearest" and whole:
            return call.layer(
                "UpSampling2D", {"size": [int(t) for t in times], "interpolation": "nearest"}, [given], like
            )
        if aligned or not centres:
            raise NotImportedError("Keras samples at pixel centres, and this operator at pixel corners")
        config = {"size": size, "interpolation": interpolation, "antialias": False}
        return call.operation(IMAGE, "Resize", config, [given], like)

    return rule


def blocks(kind: str) -> Callable[[TfliteCall], TfliteValue]:
    """SPACE_TO_DEPTH and DEPTH_TO_SPACE."""

    def rule(call: TfliteCall) -> TfliteValue:
        given, size = call.batched(0, 4), int(call.option("blockSize", 0))
        batch, height, width, channels = given.shape
        if kind == "SpaceToDepth":
            fits = 0 < size <= height and not (height % size or width % size)
            shape = (batch, height // max(size, 1), width // max(size, 1), channels * size**2)
        else:
            fits = 0 < size <= channels and not channels % size**2
            shape = (batch, height * size, width * size, channels // max(size, 1) ** 2)
        if not fits:
            raise NotImportedError(f"blocks of {size} do not fit {list(given.shape)}")
        return call.operation(NN, kind, {"block_size": size}, [given], TfliteValue(given.tensor, shape))

    return rule


GLOBAL = {"Mean": "Average", "Max": "Max"}
"""What of an image's places a layer of Keras sums up."""


def reduced(kind: str) -> Callable[[TfliteCall], TfliteValue]:
    """MEAN, SUM, REDUCE_MAX, REDUCE_MIN, REDUCE_PROD: over all places of an image a layer, otherwise an operation."""

    def rule(call: TfliteCall) -> TfliteValue:
        given, keep = call.value(0), bool(call.option("keepDims", False))
        rank = len(given.shape)
        if any(not -rank <= axis < rank for axis in call.integers(1)):
            raise NotImportedError(f"{call.integers(1)} are invalid axes of {list(given.shape)}")
        axes = sorted({axis % rank for axis in call.integers(1)})
        if not axes:
            return given
        if axes[0] == 0:
            given = reshaped(call, given, given.shape, whole=True)
        shape = tuple(1 if at in axes else side for at, side in enumerate(given.shape))
        like = TfliteValue(given.tensor, shape, given.whole)
        if kind in GLOBAL and not given.whole and axes == list(range(1, rank - 1)) and rank in (3, 4):
            left = like if keep else TfliteValue(given.tensor, (shape[0], shape[-1]))
            return call.layer(f"Global{GLOBAL[kind]}Pooling{rank - 2}D", {"keepdims": keep}, [given], left)
        config: dict[str, Any] = {"axis": [given.axis(axis) for axis in axes], "keepdims": True}
        made = call.operation(NUMPY, kind, config, [given], like)
        return made if keep else reshaped(call, made, [s for at, s in enumerate(shape) if at not in axes] or [1])

    return rule


def tile(call: TfliteCall) -> TfliteValue:
    """TILE; BROADCAST_TO is the same where a side of 1 grows."""
    given, times = call.value(0), call.integers(1)
    if call.operator.name == "BROADCAST_TO":
        sides = (*(1,) * (len(times) - len(given.shape)), *given.shape)
        if len(sides) != len(times) or any(b not in (1, a) for a, b in zip(times, sides, strict=True)):
            raise NotImportedError(f"{list(given.shape)} cannot be broadcast to {times}")
        given = reshaped(call, given, sides)
        times = [a // b for a, b in zip(times, sides, strict=True)]
    if len(times) != len(given.shape) or min(times, default=0) < 1 or prod(times) > 2**20:
        raise NotImportedError(f"{times} times do not fit {list(given.shape)}")
    if times[0] != 1:
        given = reshaped(call, given, given.shape, whole=True)
    like = TfliteValue(
        given.tensor, tuple(side * time for side, time in zip(given.shape, times, strict=True)), given.whole
    )
    if prod(times) == 1:
        return given
    return call.operation(NUMPY, "Tile", {"repeats": [1, *times] if given.whole else times}, [given], like)


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
