"""Import rules for operators that reshape, concatenate, slice, pad, resize or reduce tensors, for all graph formats.

A rule of a format reads the attributes of its operator and calls a function of this module. Axes are those of the
graph's tensor; `LayerFactory.placed` finds the dimensions of the network. An open dimension is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from compress.model.importers.common.graph_builder import IMAGE, MATH, NUMPY, LayerFactory, NotImportedError
from compress.model.importers.common.guarded_calls import MOST_ELEMENTS

ValueT = TypeVar("ValueT", bound=Any)  # needs the attribute `shape` alone
Widths = tuple[int, int]
"""Padding before and after an axis."""
COMPLETE = slice(None, None, None)
GLOBAL_POOLING = {"Mean": "Average", "Max": "Max"}
"""Reductions over all positions of an image for which Keras has a layer."""
LARGEST_SIZE = 2**15
"""The largest side after a resize: a damaged file could ask for more memory than the machine has."""


def kernel_of(weights: NDArray[np.float32], rank: int) -> NDArray[np.float32]:
    """Return the weights of a convolution, which must have this rank and at least one value."""
    if weights.ndim != rank or weights.size == 0:
        raise NotImportedError(f"its weights have the shape {list(weights.shape)}")
    return weights


def bias_of(weights: NDArray[np.float32], count: int) -> list[NDArray[np.float32]]:
    """Return a bias, which must have a value for each of the channels, as a list of weights."""
    if weights.size != count:
        raise NotImportedError(f"it has {weights.size} biases for {count} channels")
    return [weights.reshape(-1)]


def axis_of(axis: int, shape: Sequence[int | None]) -> int:
    """Return an axis counted from the front."""
    if not -len(shape) <= axis < len(shape):
        raise NotImportedError(f"axis {axis} is invalid for {list(shape)}")
    return axis % len(shape)


def replaced(shape: Sequence[Any], axis: int, *sizes: Any) -> tuple[Any, ...]:
    """Return a shape with other sizes, or none, in the place of one axis."""
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


def transpose(call: LayerFactory[ValueT], value: ValueT, order: Sequence[int]) -> ValueT:
    """Permute the axes of a value whose dimensions are in the order of the graph."""
    rank = len(value.shape)
    if sorted(order) != list(range(rank)):
        raise NotImportedError(f"{list(order)} is not a permutation of the axes of {list(value.shape)}")
    placed = call.placed(value) if order[:1] == [0] else call.placed(value, 0)
    dims = [axis + placed.extra_batch for axis in order if axis + placed.extra_batch]
    if not dims:
        raise NotImportedError(f"its input has the shape {list(value.shape)}")
    return call.layer("Permute", {"dims": dims}, [placed.value], placed.like([value.shape[axis] for axis in order]))


def concat(call: LayerFactory[ValueT], values: Sequence[ValueT], axis: int) -> ValueT:
    """Concatenate values along an axis."""
    if len(values) == 1:
        return values[0]
    placed = call.aligned(values, axis)
    sizes = [value.shape[axis] for value in values]
    shape = replaced(values[0].shape, axis, None if None in sizes else sum(sizes))
    tensors = [operand.value for operand in placed]
    return call.layer("Concatenate", {"axis": placed[0].axis(axis)}, [tensors], placed[0].like(shape))


def stack(call: LayerFactory[ValueT], values: Sequence[ValueT], axis: int) -> ValueT:
    """Concatenate values along a new axis."""
    shape = values[0].shape
    return concat(call, [call.in_shape(value, (*shape[:axis], 1, *shape[axis:])) for value in values], axis)


def cut(call: LayerFactory[ValueT], value: ValueT, cuts: Mapping[int, slice]) -> ValueT:
    """Slice some axes; a slice that takes everything adds no operation."""
    kept = {axis: _within(part, value.shape[axis]) for axis, part in cuts.items()}
    kept = {axis: part for axis, part in kept.items() if not is_complete(part, value.shape[axis])}
    if not kept:
        return value
    shape = [_size(kept.get(axis, COMPLETE), size) for axis, size in enumerate(value.shape)]
    if 0 in shape:
        raise NotImportedError(f"the slice is empty: {list(value.shape)}")
    placed = call.placed(value, *kept)
    keys = placed.per_dimension([kept.get(axis, COMPLETE) for axis in range(len(shape))], COMPLETE)
    return call.operation(NUMPY, "GetItem", {}, [placed.value, keys], placed.like(shape))


def _within(part: slice, size: int | None) -> slice:
    """Return a slice that Python and TensorFlow read alike: within the axis, if its size is known."""
    if size is None:
        return part
    first, last, step = part.indices(size)
    return slice(first, None if last < 0 else last, step)


def _size(part: slice, size: int | None) -> Any:
    return None if size is None else len(range(size)[part])


def is_complete(part: slice, size: int | None) -> bool:
    """Return True if a slice takes every element in its order."""
    if size is None:
        return part.start in (None, 0) and part.stop is None and part.step in (None, 1)
    return range(size)[part] == range(size)


def index(call: LayerFactory[ValueT], value: ValueT, keys: Sequence[Any]) -> ValueT:
    """Take a part by numpy's basic indexing: slices, whole numbers, None for a new axis, an ellipsis."""
    shape = value.shape
    missing = len(shape) - sum(key is not None and key is not Ellipsis for key in keys)
    if missing < 0:
        raise NotImportedError(f"it slices {len(shape) - missing} dimensions of {list(shape)}")
    full = list(keys) if Ellipsis in keys else [*keys, Ellipsis]
    at = full.index(Ellipsis)
    full[at : at + 1] = [COMPLETE] * missing
    cuts: dict[int, slice] = {}
    result = []
    for key in full:
        if key is None:
            result.append(1)
            continue
        axis = len(cuts)
        cuts[axis] = key if isinstance(key, slice) else slice(key, key + 1 or None, 1)
        if isinstance(key, slice):
            result.append(_size(_within(key, shape[axis]), shape[axis]))
    return call.in_shape(cut(call, value, cuts), result)


def strided_keys(
    begin: Sequence[int], end: Sequence[int], strides: Sequence[int], masks: Mapping[str, int], *, offset: bool = False
) -> list[Any]:
    """Return the keys of TensorFlow's strided slice for `index`.

    `masks` have a bit for each key, by TensorFlow's name of the mask (`shrink_axis_mask`). With `offset`, an end counts
    from its begin.
    """
    keys: list[Any] = []
    for position, (first, last, step) in enumerate(zip(begin, end, strides, strict=True)):
        bits = {name for name, mask in masks.items() if int(mask or 0) >> position & 1}
        if "ellipsis_mask" in bits:
            keys.append(Ellipsis)
        elif "new_axis_mask" in bits:
            keys.append(None)
        elif "shrink_axis_mask" in bits:
            keys.append(first)
        else:
            start = None if "begin_mask" in bits else first
            stop = None if "end_mask" in bits else last + (first if offset else 0)
            keys.append(slice(start, stop, step))
    return keys


def split(call: LayerFactory[ValueT], value: ValueT, axis: int, sizes: Sequence[int]) -> list[ValueT]:
    """Cut one axis into parts of these sizes."""
    axis = axis_of(axis, value.shape)
    if sum(sizes) != value.shape[axis] or min(sizes) < 1:
        raise NotImportedError(f"{list(sizes[:9])} along axis {axis} are invalid parts of {list(value.shape)}")
    parts = []
    start = 0
    for size in sizes:
        parts.append(cut(call, value, {axis: slice(start, start + size, 1)}))
        start += size
    return parts


def split_evenly(call: LayerFactory[ValueT], value: ValueT, axis: int, count: int) -> list[ValueT]:
    """Cut one axis into parts of the same size."""
    size = value.shape[axis_of(axis, value.shape)]
    if not size or not 0 < count <= size or size % count:
        raise NotImportedError(f"{count} parts along axis {axis} do not fit {list(value.shape)}")
    return split(call, value, axis, [size // count] * count)


def unstack(call: LayerFactory[ValueT], value: ValueT, axis: int) -> list[ValueT]:
    """Cut one axis into parts of one element, and drop the axis."""
    axis = axis_of(axis, value.shape)
    shape = replaced(value.shape, axis)
    return [call.in_shape(part, shape) for part in split_evenly(call, value, axis, value.shape[axis] or 0)]


def gather(call: LayerFactory[ValueT], value: ValueT, axis: int, indices: NDArray[Any]) -> ValueT:
    """Take elements along an axis by constant indices, which may have any number of dimensions."""
    axis = axis_of(axis, value.shape)
    size = value.shape[axis]
    if not indices.size or (size is not None and (indices.min() < -size or indices.max() >= size)):
        raise NotImportedError(f"an index is outside of {list(value.shape)}")
    flat = np.asarray(indices.reshape(-1), np.int64)
    flat = flat if size is None else flat % size
    placed = call.placed(value, axis)
    like = placed.like(replaced(value.shape, axis, flat.size))
    taken = call.operation(NUMPY, "Take", {"axis": placed.axis(axis)}, [placed.value, flat], like)
    return call.in_shape(taken, replaced(value.shape, axis, *indices.shape))


def pad(
    call: LayerFactory[ValueT], value: ValueT, pads: Sequence[Widths], mode: str = "constant", filler: float = 0.0
) -> ValueT:
    """Pad each axis: zeros around a channel-last image with a layer, anything else with an operation.

    `mode` is numpy's name: constant (with the value `filler`), reflect or symmetric.
    """
    is_image = len(pads) == 4 and not any(pads[0]) and not any(pads[3]) and not call.placed(value).extra_batch
    if not is_image or mode != "constant" or filler != 0:
        return pad_by_operation(call, value, pads, mode, filler)
    padding = [list(widths) for widths in pads[1:3]]
    return call.layer("ZeroPadding2D", {"padding": padding}, [value], call.placed(value).like(_padded(value, pads)))


def pad_by_operation(
    call: LayerFactory[ValueT], value: ValueT, pads: Sequence[Widths], mode: str = "constant", filler: float = 0.0
) -> ValueT:
    """Pad each axis with an operation; arguments as in `pad`."""
    _check_padding(value.shape, pads, mode, filler)
    placed = call.placed(value, *(axis for axis, widths in enumerate(pads) if any(widths)))
    config = {"pad_width": [list(widths) for widths in placed.per_dimension(pads, (0, 0))], "mode": mode}
    arguments = [placed.value, filler] if mode == "constant" else [placed.value]
    return call.operation(NUMPY, "Pad", config, arguments, placed.like(_padded(value, pads)))


def _check_padding(shape: Sequence[int | None], pads: Sequence[Widths], mode: str, filler: float) -> None:
    """Refuse an unsupported mode, and reflections that are larger than the axis."""
    if mode not in ("constant", "reflect", "symmetric") or not np.isfinite(filler):
        raise NotImportedError(f"it pads with {mode if mode != 'constant' else filler}")
    if mode == "constant":
        return
    for size, widths in zip(shape, pads, strict=True):
        if size is not None and max(widths) > size - (mode == "reflect"):
            raise NotImportedError(f"its pads are larger than {list(shape)}")


def _padded(value: Any, pads: Sequence[Widths]) -> list[Any]:
    return [None if size is None else size + sum(widths) for size, widths in zip(value.shape, pads, strict=True)]


def tile(call: LayerFactory[ValueT], value: ValueT, repeats: Sequence[int]) -> ValueT:
    """Repeat each axis."""
    if len(repeats) != len(value.shape) or min(repeats, default=0) < 1:
        raise NotImportedError(f"its repeats {list(repeats[:9])} do not fit {list(value.shape)}")
    if prod(repeats) * prod(size or 1 for size in value.shape[1:]) > MOST_ELEMENTS:
        raise NotImportedError(
            f"{list(repeats[:9])} times {list(value.shape)} are more than {MOST_ELEMENTS:,} elements"
        )
    repeated = [axis for axis, count in enumerate(repeats) if count != 1]
    if not repeated:
        return value
    placed = call.placed(value, *repeated)
    sizes: list[Any] = [None if size is None else size * n for size, n in zip(value.shape, repeats, strict=True)]
    config = {"repeats": placed.per_dimension(repeats, 1)}
    return call.operation(NUMPY, "Tile", config, [placed.value], placed.like(sizes))


def reduce(call: LayerFactory[ValueT], value: ValueT, kind: str, axes: Sequence[int], *, keep: bool) -> ValueT:
    """Reduce some axes: all positions of a channel-last image with a pooling layer, anything else with an operation.

    `kind` is Keras' name of the operation: Mean, Sum, Max. With `keep`, reduced axes remain with size 1.
    """
    axes = sorted({axis_of(axis, value.shape) for axis in axes})
    rank = len(value.shape)
    if not axes:
        return value
    if kind not in GLOBAL_POOLING or rank not in (3, 4) or axes != list(range(1, rank - 1)):
        return reduce_by_operation(call, value, kind, axes, keep=keep)
    placed = call.placed(value, *axes)
    if placed.extra_batch:
        return reduce_by_operation(call, value, kind, axes, keep=keep)
    like = placed.like([value.shape[0], *[1] * len(axes), value.shape[-1]])
    like = like if keep else call.template([value.shape[0], value.shape[-1]])
    return call.layer(f"Global{GLOBAL_POOLING[kind]}Pooling{rank - 2}D", {"keepdims": keep}, [placed.value], like)


def reduce_by_operation(
    call: LayerFactory[ValueT], value: ValueT, kind: str, axes: Sequence[int], *, keep: bool
) -> ValueT:
    """Reduce some axes, all of them counted from the front, with an operation."""
    placed = call.placed(value, *axes)
    keepdims = keep or None not in value.shape  # a reshape cannot leave several dimensions open
    config = {"axis": [placed.axis(axis) for axis in axes], "keepdims": keepdims}
    like = placed.like([1 if axis in axes else size for axis, size in enumerate(value.shape)])
    reduced = call.operation(MATH if kind == "Logsumexp" else NUMPY, kind, config, [placed.value], like)
    if keepdims == keep:
        return reduced
    return call.in_shape(reduced, [size for axis, size in enumerate(value.shape) if axis not in axes] or [1])


def resize(
    call: LayerFactory[ValueT],
    value: ValueT,
    size: Sequence[int],
    interpolation: str,
    *,
    align_corners: bool = False,
    half_pixel_centers: bool = True,
    antialias: bool = False,
) -> ValueT:
    """Resize images [batch, height, width, channels] as TensorFlow does, where Keras samples the same points."""
    if len(size) != 2 or not all(0 < side <= LARGEST_SIZE for side in size):
        raise NotImportedError(f"its size is {list(size[:4])}")
    _, height, width, _ = value.shape
    like = call.template((value.shape[0], *size, value.shape[3]))
    if (height, width) == tuple(size):
        return value
    known = None not in (height, width)
    if interpolation == "nearest" and not align_corners and known and not (size[0] % height or size[1] % width):
        times = [size[0] // height, size[1] // width]
        return call.layer("UpSampling2D", {"size": times, "interpolation": "nearest"}, [value], like)
    if align_corners or not half_pixel_centers:
        raise NotImportedError("Keras samples at pixel centres, and this operator at pixel corners")
    config = {"size": list(size), "interpolation": interpolation, "antialias": antialias}
    return call.operation(IMAGE, "Resize", config, [value], like)
