"""TensorFlow functions that move, join, slice or reduce tensors, in the graph of a Keras 2 model.

A size of a tensor that the graph asks for (`tf.shape(x)[1]`) is known while the model is built: a whole number,
or None for the batch and for an open dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

from compress.model.importers.common import shape_rules
from compress.model.importers.common.graph_builder import NN, NotImportedError
from compress.model.importers.keras import keras2_operations as operations
from compress.model.importers.keras.keras2_operations import FunctionCall, TfFunction, axes_of, integers, plain

INTERPOLATIONS = ("bilinear", "nearest", "bicubic", "lanczos3", "lanczos5")


def size(step: FunctionCall, x: Any, out_type: Any = None) -> Any:
    """Return the shape of a tensor as a tuple."""
    del out_type  # sizes are numbers of Python
    return tuple(x.shape) if step.computed(x) else plain(x).shape


def _sizes(shape: Any) -> list[int | None]:
    """Return a shape as numbers, some of which may be open."""
    if not isinstance(shape, list | tuple):
        return list(integers(shape))
    flat: list[Any] = []
    for item in shape:
        flat += item if isinstance(item, list | tuple) else [item]
    return [None if dimension is None else integers(dimension)[0] for dimension in flat]


def reshape(step: FunctionCall, x: Any, shape: Any) -> Any:
    """Reshape each sample."""
    sizes = _sizes(shape)
    if not step.computed(x):
        return plain(x).reshape([-1 if dimension is None else dimension for dimension in sizes])
    if not sizes:
        raise NotImportedError("it makes a single number")
    batch, inner = x.shape[0], sizes[1:]
    is_known = None not in x.shape[1:] and None not in inner and -1 not in inner
    keeps_batch = is_known and prod(dimension or 0 for dimension in inner) == prod(x.shape[1:])
    if not (sizes[0] is None or sizes[0] == batch or (sizes[0] == -1 and keeps_batch)):
        raise NotImportedError(f"it mixes the samples of a batch: {list(x.shape)} becomes {sizes}")
    return step.in_shape(x, (batch, *inner))


def transpose(step: FunctionCall, x: Any, perm: Any = None, conjugate: Any = False) -> Any:
    """Permute the axes behind the batch."""
    del conjugate  # real numbers are their own conjugates
    order = integers(perm) if perm is not None else [*range(len(x.shape))][::-1]
    if order[:1] != [0]:
        raise NotImportedError(f"it moves the batch: {order}")
    return shape_rules.transpose(step, x, order)


def expand_dims(step: FunctionCall, x: Any, axis: Any) -> Any:
    """Add an axis of size 1."""
    (axis,) = integers(axis)
    shape = [*x.shape]
    axis += len(shape) + 1 if axis < 0 else 0
    if not 0 < axis <= len(shape):
        raise NotImportedError("it puts an axis before the batch")
    return step.in_shape(x, [*shape[:axis], 1, *shape[axis:]])


def squeeze(step: FunctionCall, x: Any, axis: Any = None) -> Any:
    """Remove axes of size 1."""
    named = [] if axis is None else axes_of(x, axis)
    axes = named or [index for index, dimension in enumerate(x.shape) if dimension == 1]
    if 0 in axes or any(x.shape[index] != 1 for index in axes):
        raise NotImportedError(f"axes {axes} of {list(x.shape)} cannot be removed")
    return step.in_shape(x, [dimension for index, dimension in enumerate(x.shape) if index not in axes])


def concat(step: FunctionCall, values: Any, axis: Any) -> Any:
    """Join tensors along an axis, or sizes into a shape."""
    (axis,), tensors = integers(axis), [value for value in values if step.computed(value)]
    if not tensors:
        return tuple(_sizes(values))
    if len(tensors) != len(values) or axis % len(tensors[0].shape) == 0:
        raise NotImportedError("it concatenates constants, or along the batch")
    return shape_rules.concat(step, tensors, axis % len(tensors[0].shape))


def stack(step: FunctionCall, values: Any, axis: Any = 0) -> Any:
    """Join tensors along a new axis, or sizes into a shape."""
    if not any(step.computed(value) for value in values):
        return tuple(values)
    (axis,) = integers(axis)
    return concat(step, [expand_dims(step, value, axis) for value in values], axis)


def _key(key: Any) -> Any:
    """Return a key as tf_keras stores it in Python's form."""
    if isinstance(key, dict) and set(key) == {"start", "stop", "step"}:
        key = slice(key["start"], key["stop"], key["step"])
    if isinstance(key, slice):
        return slice(*(None if bound is None else integers(bound)[0] for bound in (key.start, key.stop, key.step)))
    if isinstance(key, dict) and "ellipsis" in str(key).lower():
        return Ellipsis
    return key if key is None or key is Ellipsis else integers(key)[0]


def getitem(step: FunctionCall, x: Any, slice_spec: Any) -> Any:
    """`x[...]` with slices, numbers, an ellipsis and new axes."""
    keys = [_key(key) for key in (slice_spec if isinstance(slice_spec, list | tuple) else [slice_spec])]
    if not step.computed(x):
        if len(keys) != 1 or not isinstance(keys[0], int | slice):
            raise NotImportedError("it slices a constant")
        return tuple(x)[keys[0]]
    first = next((key for key in keys if key is not None), Ellipsis)
    is_batch = first is Ellipsis or (isinstance(first, slice) and shape_rules.is_complete(first, None))
    if not is_batch:
        raise NotImportedError("it selects samples of a batch")
    return shape_rules.index(step, x, keys)


def slice_out(step: FunctionCall, x: Any, begin: Any, size: Any) -> Any:
    """tf.slice: begin and size, -1 for the rest."""
    parts = zip(integers(begin), integers(size), strict=True)
    return getitem(step, x, [slice(start, None if count == -1 else start + count) for start, count in parts])


def strided_slice(step: FunctionCall, x: Any, begin: Any, end: Any, strides: Any = None, **masks: int) -> Any:
    """tf.strided_slice, with masks."""
    first = integers(begin)
    steps = [1] * len(first) if strides is None else integers(strides)
    return getitem(step, x, shape_rules.strided_keys(first, integers(end), steps, masks))


def split(step: FunctionCall, x: Any, num_or_size_splits: Any, axis: Any = 0) -> Any:
    """tf.split: a number of equal parts, or the size of each."""
    (axis,) = axes_of(x, axis)
    sizes = integers(num_or_size_splits)
    if axis == 0 or x.shape[axis] is None:
        raise NotImportedError("it splits the batch, or an open dimension")
    if plain(num_or_size_splits).ndim == 0:
        return shape_rules.split_evenly(step, x, axis, sizes[0])
    return shape_rules.split(step, x, axis, sizes)


def unstack(step: FunctionCall, x: Any, num: Any = None, axis: Any = 0) -> Any:
    """tf.unstack: parts of one element, without their axis."""
    del num
    return shape_rules.unstack(step, x, integers(axis)[0])


def pad(step: FunctionCall, x: Any, paddings: Any, mode: str = "CONSTANT", constant_values: Any = 0) -> Any:
    """tf.pad."""
    flat = integers(paddings)
    pads = list(zip(flat[::2], flat[1::2], strict=True))
    if len(pads) != len(x.shape) or any(pads[0]) or min(flat) < 0 or max(flat) > 2**16:
        raise NotImportedError(f"paddings {flat[:16]} do not fit {list(x.shape)}")
    return shape_rules.pad(step, x, pads, mode.lower(), float(plain(constant_values)))


def gather(step: FunctionCall, x: Any, indices: Any, axis: Any = None, batch_dims: Any = 0) -> Any:
    """tf.gather along one axis, by constant indices."""
    (axis,) = axes_of(x, 0 if axis is None else axis)
    array = plain(indices)
    if axis == 0 or int(batch_dims) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise NotImportedError("it selects samples of a batch, or its indices are computed")
    return shape_rules.gather(step, x, axis, array)


def reduced(step: FunctionCall, x: Any, axis: Any = None, keepdims: Any = False, *, kind: str) -> Any:
    """tf.reduce_mean and the like."""
    return shape_rules.reduce(step, x, kind, axes_of(x, axis), keep=bool(keepdims))


def resize(
    step: FunctionCall,
    x: Any,
    size: Any,
    method: Any = "bilinear",
    antialias: Any = False,
    preserve_aspect_ratio: Any = False,
) -> Any:
    """tf.image.resize, which samples at the centres of pixels, as Keras does."""
    if preserve_aspect_ratio:
        raise NotImportedError("it keeps the aspect ratio")
    sizes, name = integers(size), str(getattr(method, "value", method))
    if name not in INTERPOLATIONS:
        raise NotImportedError(f"it resizes to {sizes[:4]} by {name[:20]}")
    return shape_rules.resize(step, x, sizes, name, antialias=bool(antialias))


def old_resize(
    step: FunctionCall, x: Any, size: Any, align_corners: Any = False, half_pixel_centers: Any = False, *, method: str
) -> Any:
    """The resizing of TensorFlow 1: at the centres of pixels only if an argument says so."""
    corners, centers = bool(align_corners), bool(half_pixel_centers)
    return shape_rules.resize(step, x, integers(size), method, align_corners=corners, half_pixel_centers=centers)


def blocks(kind: str) -> operations.Rule:
    """tf.nn.space_to_depth and depth_to_space."""
    return lambda step, x, block_size: step.operation(NN, kind, {"block_size": integers(block_size)[0]}, [x])


def pooling(step: FunctionCall, x: Any, ksize: Any, strides: Any, padding: Any, *, kind: str) -> Any:
    """tf.nn.max_pool2d and avg_pool2d."""
    window, steps = _pair(ksize), _pair(strides)
    if len(x.shape) != 4 or str(padding).upper() not in ("SAME", "VALID"):
        raise NotImportedError(f"its input has {len(x.shape)} dimensions, or its padding is a list")
    config = {"pool_size": window, "strides": steps, "padding": str(padding).lower()}
    return step.layer(f"{kind}Pooling2D", config, [x])


def _pair(value: Any) -> tuple[int, int]:
    """[height, width] of one, two or four values."""
    values = integers(value)
    values = values * 2 if len(values) == 1 else values[1:3] if len(values) == 4 else values
    if len(values) != 2 or not all(0 < side <= 2**16 for side in values):
        raise NotImportedError(f"its window {values[:4]} is invalid")
    return values[0], values[1]


_OLD_RESIZE = "x|images size align_corners half_pixel_centers"
_NAMED: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "reshape": ("x|tensor shape", reshape),
    "transpose": ("x|a perm conjugate", transpose),
    "compat.v1.transpose": ("x|a perm name conjugate", lambda step, name=None, **kwargs: transpose(step, **kwargs)),
    "expand_dims": ("x|input axis|dim", expand_dims),
    "squeeze": ("x|input axis|squeeze_dims", squeeze),
    "concat": ("values axis", concat),
    "stack": ("values axis", stack),
    "unstack": ("x|value num axis", unstack),
    "split": ("x|value num_or_size_splits axis", split),
    "slice": ("x|input_ begin size", slice_out),
    "strided_slice": (
        "x|input_ begin end strides begin_mask end_mask ellipsis_mask new_axis_mask shrink_axis_mask",
        strided_slice,
    ),
    "__operators__.getitem": ("x|tensor slice_spec", getitem),
    "pad": ("x|tensor paddings mode constant_values", pad),
    "tile": ("x|input multiples", lambda step, x, multiples: shape_rules.tile(step, x, integers(multiples))),
    "gather": ("x|params indices validate_indices axis batch_dims", lambda s, validate_indices=0, **a: gather(s, **a)),
    "shape": ("x|input out_type", size),
    "image.resize": ("x|images size method preserve_aspect_ratio antialias", resize),
    "image.resize_bilinear": (_OLD_RESIZE, partial(old_resize, method="bilinear")),
    "image.resize_nearest_neighbor": (_OLD_RESIZE, partial(old_resize, method="nearest")),
    "nn.depth_to_space": ("x|input block_size", blocks("DepthToSpace")),
    "nn.space_to_depth": ("x|input block_size", blocks("SpaceToDepth")),
    "nn.avg_pool2d": ("x|input|value ksize strides padding", partial(pooling, kind="Average")),
    "nn.max_pool2d": ("x|input|value ksize strides padding", partial(pooling, kind="Max")),
    "nn.bias_add": ("x|value y|bias", partial(operations.arithmetic, kind="Add")),
}


RULES: Mapping[str, TfFunction] = {name: TfFunction(rule, names) for name, (names, rule) in _NAMED.items()}
"""Counterparts by the name of the function in TensorFlow."""
