"""Import rules for TFLite operators that reshape, concatenate, slice, pad, resize or reduce tensors.

Source: tensorflow/lite/kernels/internal/reference and schema.fbs, version 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from compress.model.importers.common import shape_rules
from compress.model.importers.common.graph_builder import NN, NotImportedError
from compress.model.importers.common.shape_rules import axis_of
from compress.model.importers.tflite.network import Rule, TfliteCall, TfliteValue

MODES = ("reflect", "symmetric")
"""Modes of MIRROR_PAD. Source: schema.fbs, MirrorPadMode."""
MASKS = {"begin_mask": "beginMask", "end_mask": "endMask", "ellipsis_mask": "ellipsisMask"}
MASKS |= {"new_axis_mask": "newAxisMask", "shrink_axis_mask": "shrinkAxisMask"}
"""Options of STRIDED_SLICE by TensorFlow's name of the mask."""
LARGEST_PAD = 2**20
"""A damaged value would make Keras allocate a tensor of many gigabytes."""


def reshape(call: TfliteCall) -> TfliteValue:
    """RESHAPE, SQUEEZE, EXPAND_DIMS: the output shape in the file."""
    return call.in_shape(call.value(0), call.output.shape)


def transpose(call: TfliteCall) -> TfliteValue:
    """TRANSPOSE."""
    return shape_rules.transpose(call, call.value(0), call.integers(1))


def last_two_swapped(call: TfliteCall, value: TfliteValue) -> TfliteValue:
    """Transpose the matrices in the last two axes."""
    rank = len(value.shape)
    if rank < 2:
        raise NotImportedError(f"its input has the shape {list(value.shape)}")
    return shape_rules.transpose(call, value, [*range(rank - 2), rank - 1, rank - 2])


def _same_rank(values: list[TfliteValue]) -> list[TfliteValue]:
    ranks = sorted({len(value.shape) for value in values})
    if len(ranks) != 1:
        raise NotImportedError(f"its inputs have {ranks} dimensions")
    return values


def concatenation(call: TfliteCall) -> TfliteValue:
    """CONCATENATION."""
    values = _same_rank(call.values())
    axis = axis_of(int(call.option("axis")), values[0].shape)
    return call.activated(shape_rules.concat(call, values, axis))


def pack(call: TfliteCall) -> TfliteValue:
    """PACK: concatenate along a new axis."""
    return shape_rules.stack(call, _same_rank(call.values()), axis_of(int(call.option("axis")), call.output.shape))


def strided_slice(call: TfliteCall) -> TfliteValue:
    """STRIDED_SLICE: begin, end and strides, with masks."""
    value = call.value(0)
    begin, end, strides = (call.integers(index) for index in (1, 2, 3))
    if not len(begin) == len(end) == len(strides) or 0 in strides:
        raise NotImportedError(f"it slices {len(begin)} dimensions of {list(value.shape)}")
    masks = {name: call.option(option) for name, option in MASKS.items()}
    keys = shape_rules.strided_keys(begin, end, strides, masks, offset=bool(call.option("offset", False)))
    return shape_rules.index(call, value, keys)


def slice_out(call: TfliteCall) -> TfliteValue:
    """SLICE: begin and size, -1 for the rest."""
    value, begin, size = call.value(0), call.integers(1), call.integers(2)
    if not len(begin) == len(size) == len(value.shape) or min(begin, default=0) < 0:
        raise NotImportedError(f"it slices {len(begin)} dimensions of {list(value.shape)}")
    ends = [None if count == -1 else first + count for first, count in zip(begin, size, strict=True)]
    return shape_rules.cut(call, value, dict(enumerate(map(slice, begin, ends))))


def reverse(call: TfliteCall) -> TfliteValue:
    """REVERSE_V2: slices from the last element to the first one."""
    value, axes = call.value(0), call.integers(1)
    return shape_rules.cut(call, value, {axis_of(axis, value.shape): slice(None, None, -1) for axis in axes})


def split(call: TfliteCall) -> list[TfliteValue]:
    """SPLIT: axis, input; equal parts."""
    axis = (call.integers(0) or [0])[0]
    return shape_rules.split_evenly(call, call.value(1), axis, len(call.operator.outputs))


def split_v(call: TfliteCall) -> list[TfliteValue]:
    """SPLIT_V: input, sizes, axis; one size may be -1 for the rest."""
    value, sizes = call.value(0), call.integers(1)
    axis = axis_of((call.integers(2) or [0])[0], value.shape)
    if sizes.count(-1) == 1:
        rest = value.shape[axis] - sum(sizes) - 1
        sizes = [rest if size == -1 else size for size in sizes]
    return shape_rules.split(call, value, axis, sizes)


def unpack(call: TfliteCall) -> list[TfliteValue]:
    """UNPACK: parts of one element, without their axis."""
    return shape_rules.unstack(call, call.value(0), int(call.option("axis")))


def gather(call: TfliteCall) -> TfliteValue:
    """GATHER along one axis, by constant indices."""
    value, axis, indices = call.value(0), int(call.option("axis")), call.constant(1, "INT32", "INT64")
    if call.option("batchDims") or indices.ndim > 1:
        raise NotImportedError(f"it takes {list(indices.shape)} indices along axis {axis} of {list(value.shape)}")
    if indices.min(initial=0) < 0:
        raise NotImportedError(f"an index is outside of {list(value.shape)}")
    return shape_rules.gather(call, value, axis, indices)


def _pads(call: TfliteCall, value: TfliteValue) -> list[tuple[int, int]]:
    widths = call.integers(1)
    if len(widths) != 2 * len(value.shape) or min(widths) < 0 or max(widths) > LARGEST_PAD:
        raise NotImportedError(f"paddings {widths[:16]} do not fit {list(value.shape)}")
    return list(zip(widths[::2], widths[1::2], strict=True))


def pad(call: TfliteCall) -> TfliteValue:
    """PAD and PADV2."""
    value, filler = call.value(0), call.weights(2) if call.count > 2 else np.zeros(1, np.float32)
    if filler.size != 1 or not np.isfinite(filler).all():
        raise NotImportedError("its fill value is not one finite number")
    return shape_rules.pad(call, value, _pads(call, value), "constant", float(filler.item()))


def mirror_pad(call: TfliteCall) -> TfliteValue:
    """MIRROR_PAD: mirror at the edge, with (SYMMETRIC) or without (REFLECT) the edge itself."""
    value, mode = call.value(0), int(call.option("mode"))
    pads = _pads(call, value)
    if mode not in (0, 1) or any(pads[0]):
        raise NotImportedError(f"its mode is number {mode}, or it pads the batch")
    return shape_rules.pad(call, value, pads, MODES[mode])


def resize(call: TfliteCall, interpolation: str) -> TfliteValue:
    """RESIZE_BILINEAR and RESIZE_NEAREST_NEIGHBOR, as Keras samples images: at the centres of pixels."""
    return shape_rules.resize(
        call,
        call.batched(0, 4),
        call.integers(1),
        interpolation,
        align_corners=bool(call.option("alignCorners", False)),
        half_pixel_centers=bool(call.option("halfPixelCenters", False)),
    )


def space_to_depth(call: TfliteCall) -> TfliteValue:
    """SPACE_TO_DEPTH."""
    value, size = call.batched(0, 4), int(call.option("blockSize", 0))
    batch, height, width, channels = value.shape
    if not 0 < size <= height or height % size or width % size:
        raise NotImportedError(f"blocks of {size} do not fit {list(value.shape)}")
    like = call.template((batch, height // size, width // size, channels * size**2))
    return call.operation(NN, "SpaceToDepth", {"block_size": size}, [value], like)


def depth_to_space(call: TfliteCall) -> TfliteValue:
    """DEPTH_TO_SPACE."""
    value, size = call.batched(0, 4), int(call.option("blockSize", 0))
    batch, height, width, channels = value.shape
    if not 0 < size <= channels or channels % size**2:
        raise NotImportedError(f"blocks of {size} do not fit {list(value.shape)}")
    like = call.template((batch, height * size, width * size, channels // size**2))
    return call.operation(NN, "DepthToSpace", {"block_size": size}, [value], like)


def reduced(call: TfliteCall, kind: str) -> TfliteValue:
    """MEAN, SUM, REDUCE_MAX, REDUCE_MIN, REDUCE_PROD."""
    keep = bool(call.option("keepDims", False))
    return shape_rules.reduce(call, call.value(0), kind, call.integers(1), keep=keep)


def tile(call: TfliteCall) -> TfliteValue:
    """TILE."""
    return shape_rules.tile(call, call.value(0), call.integers(1))


def broadcast_to(call: TfliteCall) -> TfliteValue:
    """BROADCAST_TO: repeat axes of size 1."""
    value, shape = call.value(0), call.integers(1)
    before = (*(1,) * (len(shape) - len(value.shape)), *value.shape)
    if len(before) != len(shape) or any(size not in (1, after) for size, after in zip(before, shape, strict=True)):
        raise NotImportedError(f"{list(value.shape)} does not grow to {shape}")
    repeats = [after // size for size, after in zip(before, shape, strict=True)]
    return shape_rules.tile(call, call.in_shape(value, before), repeats)


RULES: Mapping[str, Rule] = {
    "RESHAPE": reshape,
    "SQUEEZE": reshape,
    "EXPAND_DIMS": reshape,
    "TRANSPOSE": transpose,
    "CONCATENATION": concatenation,
    "PACK": pack,
    "STRIDED_SLICE": strided_slice,
    "SLICE": slice_out,
    "REVERSE_V2": reverse,
    "SPLIT": split,
    "SPLIT_V": split_v,
    "UNPACK": unpack,
    "GATHER": gather,
    "PAD": pad,
    "PADV2": pad,
    "MIRROR_PAD": mirror_pad,
    "RESIZE_BILINEAR": partial(resize, interpolation="bilinear"),
    "RESIZE_NEAREST_NEIGHBOR": partial(resize, interpolation="nearest"),
    "SPACE_TO_DEPTH": space_to_depth,
    "DEPTH_TO_SPACE": depth_to_space,
    "MEAN": partial(reduced, kind="Mean"),
    "SUM": partial(reduced, kind="Sum"),
    "REDUCE_MAX": partial(reduced, kind="Max"),
    "REDUCE_MIN": partial(reduced, kind="Min"),
    "REDUCE_PROD": partial(reduced, kind="Prod"),
    "TILE": tile,
    "BROADCAST_TO": broadcast_to,
}
