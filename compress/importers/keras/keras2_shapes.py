"""TensorFlow functions that move, join, cut or sum numbers, in the graph of a Keras 2 model (see `keras2_operations`).

A size of a tensor that the graph asks for (`tf.shape(x)[1]`) is known while the model is built: a whole number,
or None for the batch and for a side that is open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from compress.importers.keras import keras2_operations as operations
from compress.importers.keras.keras2_operations import (
    IMAGE,
    NN,
    NUMPY,
    FunctionCall,
    NotRebuiltError,
    TfFunction,
    integers,
    plain,
)


def size(step: FunctionCall, x: Any, out_type: Any = None) -> Any:
    """The shape of a tensor, as a tuple."""
    del out_type  # numbers of Python
    return tuple(x.shape) if step.computed(x) else plain(x).shape


def _sides(shape: Any) -> list[int | None]:
    """A shape given as numbers, some of which may be open."""
    if isinstance(shape, list | tuple):
        flat = [each for item in shape for each in (item if isinstance(item, list | tuple) else [item])]
        return [None if each is None else integers(each)[0] for each in flat]
    return list(integers(shape))


def reshape(step: FunctionCall, x: Any, shape: Any) -> Any:
    """The same numbers in another shape, sample by sample."""
    sides = _sides(shape)
    if not step.computed(x):
        return plain(x).reshape([-1 if side is None else side for side in sides])
    if not sides:
        raise NotRebuiltError("it makes a single number")
    batch, inner = x.shape[0], sides[1:]
    open_sides = sum(side in (None, -1) for side in inner)
    whole = None not in x.shape[1:] and not open_sides and prod(side or 0 for side in inner) == prod(x.shape[1:])
    if not (sides[0] is None or sides[0] == batch or (sides[0] == -1 and whole)):
        raise NotRebuiltError(f"it mixes the samples of a batch: {list(x.shape)} becomes {sides}")
    return step.reshaped(x, (batch, *inner))


def transpose(step: FunctionCall, x: Any, perm: Any = None, conjugate: Any = False) -> Any:
    """The sides in another order, the batch first."""
    del conjugate  # of real numbers: nothing
    order = integers(perm) if perm is not None else [*range(len(x.shape))][::-1]
    if order[:1] != [0] or sorted(order) != list(range(len(x.shape))):
        raise NotRebuiltError(f"it moves the batch: {order}")
    return step.layer("Permute", x, dims=order[1:])


def expand_dims(step: FunctionCall, x: Any, axis: Any) -> Any:
    """One more side."""
    (axis,) = integers(axis)
    sides = [*x.shape]
    axis += len(sides) + 1 if axis < 0 else 0
    if not 0 < axis <= len(sides):
        raise NotRebuiltError("it puts a side before the batch")
    return step.reshaped(x, [*sides[:axis], 1, *sides[axis:]])


def squeeze(step: FunctionCall, x: Any, axis: Any = None) -> Any:
    """Sides of 1 taken away."""
    named = [] if axis is None else operations.axes_of(x, axis)
    axes = named or [place for place, side in enumerate(x.shape) if side == 1]
    if 0 in axes or any(x.shape[place] != 1 for place in axes):
        raise NotRebuiltError(f"axes {axes} of {list(x.shape)} cannot be taken away")
    return step.reshaped(x, [side for place, side in enumerate(x.shape) if place not in axes])


def concat(step: FunctionCall, values: Any, axis: Any) -> Any:
    """Joined along a side."""
    (axis,), tensors = integers(axis), [each for each in values if step.computed(each)]
    if not tensors:
        return tuple(side for each in values for side in (each if isinstance(each, list | tuple) else [each]))
    if len(tensors) != len(values) or axis % len(tensors[0].shape) == 0:
        raise NotRebuiltError("it joins constants, or samples")
    return step.layer("Concatenate", tensors, axis=axis) if len(tensors) > 1 else tensors[0]


def stack(step: FunctionCall, values: Any, axis: Any = 0) -> Any:
    """Joined along a new side."""
    if not any(step.computed(each) for each in values):
        return tuple(values)
    (axis,) = integers(axis)
    return concat(step, [expand_dims(step, each, axis) for each in values], axis)


def _cut(step: FunctionCall, x: Any, cuts: Sequence[slice], shape: Sequence[int | None] | None = None) -> Any:
    """A part of each side, the batch whole; then sides taken away or added."""
    everything = slice(None, None, None)
    if any(
        each not in (everything, slice(0, None, 1), slice(None, None, 1), slice(0, None, None)) for each in cuts[:1]
    ):
        raise NotRebuiltError("it takes samples out of a batch")
    keys = [everything, *cuts[1:]]
    trivial = all(each == everything for each in keys)
    made = x if trivial else step.operation(NUMPY, "GetItem", x, tuple(keys))
    return made if shape is None else step.reshaped(made, shape)


def _slice(key: Any) -> Any:
    """A part of a side as tf_keras stores it."""
    if isinstance(key, dict) and set(key) == {"start", "stop", "step"}:
        return slice(key["start"], key["stop"], key["step"])
    return Ellipsis if isinstance(key, dict) and "ellipsis" in str(key).lower() else key


def getitem(step: FunctionCall, x: Any, slice_spec: Any) -> Any:
    """`x[...]` with slices, numbers, an ellipsis and new sides."""
    keys = [_slice(key) for key in (slice_spec if isinstance(slice_spec, list | tuple) else [slice_spec])]
    if not step.computed(x):
        found = tuple(x)[keys[0]] if len(keys) == 1 and isinstance(keys[0], int | slice) else None
        if not isinstance(keys[0], int | slice) or len(keys) != 1:
            raise NotRebuiltError("it takes a part of a constant")
        return found
    taken = sum(key is not None and key is not Ellipsis for key in keys)
    missing = [slice(None)] * (len(x.shape) - taken)
    if Ellipsis in keys:
        place = keys.index(Ellipsis)
        keys[place : place + 1] = missing
    else:
        keys += missing
    cuts: list[slice] = []
    shape: list[int | None] = []
    for key in keys:
        if key is None:
            shape.append(1)
            continue
        side = x.shape[len(cuts)]
        cuts.append(_one(key))
        if isinstance(key, slice):
            shape.append(_left(cuts[-1], side))
    return _cut(step, x, cuts, shape if None in keys or any(isinstance(key, int) for key in keys) else None)


def _one(key: Any) -> slice:
    """A key as a slice: a number takes one."""
    if isinstance(key, slice):
        parts = [None if each is None else integers(each)[0] for each in (key.start, key.stop, key.step)]
        return slice(*parts)
    (number,) = integers(key)
    return slice(number, number + 1 or None, None)


def _left(cut: slice, side: int | None) -> int | None:
    """Return the remaining size of a dimension."""
    if side is None:
        return None
    return len(range(*cut.indices(side)))


def cut_out(step: FunctionCall, x: Any, begin: Any, size: Any) -> Any:
    """tf.slice: begin and size, -1 for all that is left."""
    starts, sizes = integers(begin), integers(size)
    ends = [None if count == -1 else start + count for start, count in zip(starts, sizes, strict=True)]
    return _cut(step, x, [slice(start or None, end) for start, end in zip(starts, ends, strict=True)])


def strided_slice(step: FunctionCall, x: Any, begin: Any, end: Any, strides: Any = None, **masks: int) -> Any:
    """The general cut, with a bit for every side that is taken whole or away."""
    starts, ends = integers(begin), integers(end)
    steps = [1] * len(starts) if strides is None else integers(strides)
    keys: list[Any] = []
    for place, (start, stop, every) in enumerate(zip(starts, ends, steps, strict=True)):
        bits = {name for name, mask in masks.items() if int(mask or 0) >> place & 1}
        if "ellipsis_mask" in bits:
            keys.append(Ellipsis)
        elif "new_axis_mask" in bits:
            keys.append(None)
        elif "shrink_axis_mask" in bits:
            keys.append(start)
        else:
            low, high = None if "begin_mask" in bits else start, None if "end_mask" in bits else stop
            keys.append(slice(low, high, every if every != 1 else None))
    return getitem(step, x, keys)


def split(step: FunctionCall, x: Any, num_or_size_splits: Any, axis: Any = 0) -> Any:
    """Parts of one side, one after another."""
    (axis,) = operations.axes_of(x, axis)
    side, sizes = x.shape[axis], integers(num_or_size_splits)
    if axis == 0 or side is None:
        raise NotRebuiltError("it splits the batch, or a side that is open")
    if plain(num_or_size_splits).ndim == 0:
        sizes = [side // max(sizes[0], 1)] * min(max(sizes[0], 1), side)
    if sum(sizes) != side or min(sizes) < 1:
        raise NotRebuiltError(f"{sizes[:9]} are no parts of {side}")
    made, start = [], 0
    for count in sizes:
        cuts = [slice(None)] * len(x.shape)
        cuts[axis] = slice(start, start + count)
        made.append(_cut(step, x, cuts))
        start += count
    return made


def unstack(step: FunctionCall, x: Any, num: Any = None, axis: Any = 0) -> Any:
    """Parts of one, without their side."""
    del num
    (axis,) = operations.axes_of(x, axis)
    shape = [side for place, side in enumerate(x.shape) if place != axis]
    return [step.reshaped(each, shape) for each in split(step, x, [1] * (x.shape[axis] or 0), axis)]


def pad(step: FunctionCall, x: Any, paddings: Any, mode: str = "CONSTANT", constant_values: Any = 0) -> Any:
    """Around an image a layer, otherwise an operation."""
    flat = integers(paddings)
    pads = [flat[at : at + 2] for at in range(0, len(flat), 2)]
    if len(pads) != len(x.shape) or pads[0] != [0, 0] or min(flat) < 0 or max(flat) > 2**16:
        raise NotRebuiltError(f"paddings {flat[:16]} do not fit {list(x.shape)}")
    filler = float(plain(constant_values))
    if mode.upper() == "CONSTANT":
        if not filler and len(pads) == 4 and pads[3] == [0, 0]:
            return step.layer("ZeroPadding2D", x, padding=tuple(map(tuple, pads[1:3])))
        return step.operation(NUMPY, "Pad", x, filler, pad_width=pads, mode="constant")
    return step.operation(NUMPY, "Pad", x, pad_width=pads, mode=mode.lower())


def tile(step: FunctionCall, x: Any, multiples: Any) -> Any:
    """A tensor several times over."""
    times = integers(multiples)
    if len(times) != len(x.shape) or times[0] != 1 or min(times) < 1 or prod(times) > 2**20:
        raise NotRebuiltError(f"{times[:9]} times do not fit {list(x.shape)}")
    return step.operation(NUMPY, "Tile", x, repeats=times)


def gather(step: FunctionCall, x: Any, indices: Any, axis: Any = None, batch_dims: Any = 0) -> Any:
    """Some places along one side."""
    (axis,) = operations.axes_of(x, 0 if axis is None else axis)
    where = plain(indices)
    if axis == 0 or int(batch_dims) or where.ndim != 1 or where.dtype.kind not in "iu":
        raise NotRebuiltError("it takes samples, or places that are computed")
    return step.operation(NUMPY, "Take", x, where, axis=axis)


def reduced(kind: str) -> operations.Rule:
    """A sum or the like: over all places of an image a layer, otherwise an operation."""

    def rule(step: FunctionCall, x: Any, axis: Any = None, keepdims: Any = False) -> Any:
        axes, rank, keep = operations.axes_of(x, axis), len(x.shape), bool(keepdims)
        if 0 in axes:
            raise NotRebuiltError("it mixes the samples of a batch")
        if not axes:
            return x
        pooling = {"Mean": "Average", "Max": "Max"}.get(kind)
        if pooling and axes == list(range(1, rank - 1)) and rank in (3, 4):
            return step.layer(f"Global{pooling}Pooling{rank - 2}D", x, keepdims=keep)
        return step.operation(NUMPY, kind, x, axis=axes, keepdims=keep)

    return rule


def resize(step: FunctionCall, x: Any, size: Any, method: Any = "bilinear", antialias: Any = False) -> Any:
    """tf.image.resize, which samples at the centres of pixels, as Keras does."""
    sides, name = integers(size), str(getattr(method, "value", method))
    known = {"bilinear": "bilinear", "nearest": "nearest", "bicubic": "bicubic", "lanczos3": "lanczos3"}
    known |= {"lanczos5": "lanczos5"}
    if name not in known or len(sides) != 2 or not all(0 < side <= 2**15 for side in sides):
        raise NotRebuiltError(f"it resizes to {sides[:4]} by {name[:20]}")
    return step.operation(IMAGE, "Resize", x, size=tuple(sides), interpolation=known[name], antialias=bool(antialias))


def old_resize(method: str) -> operations.Rule:
    """The resizing of TensorFlow 1: at the centres of pixels only where it says so."""

    def rule(step: FunctionCall, x: Any, size: Any, align_corners: Any = False, half_pixel_centers: Any = False) -> Any:
        sides = integers(size)
        times = [after / (before or 1) for before, after in zip(x.shape[1:3], sides, strict=True)]
        if method == "nearest" and not align_corners and all(each == int(each) for each in times):
            return step.layer("UpSampling2D", x, size=tuple(map(int, times)), interpolation="nearest")
        if align_corners or not half_pixel_centers:
            raise NotRebuiltError("Keras samples at the centres of pixels, and this one at their corners")
        return resize(step, x, sides, method)

    return rule


def blocks(kind: str) -> operations.Rule:
    """tf.nn.space_to_depth and depth_to_space."""
    return lambda step, x, block_size: step.operation(NN, kind, x, block_size=integers(block_size)[0])


def pooling(kind: str) -> operations.Rule:
    """tf.nn.max_pool2d and avg_pool2d."""

    def rule(step: FunctionCall, x: Any, ksize: Any, strides: Any, padding: Any) -> Any:
        window, steps = _pair(ksize), _pair(strides)
        if len(x.shape) != 4 or str(padding).upper() not in ("SAME", "VALID"):
            raise NotRebuiltError(f"its input has {len(x.shape)} sides, or its padding is listed")
        return step.layer(f"{kind}Pooling2D", x, pool_size=window, strides=steps, padding=str(padding).lower())

    return rule


def _pair(value: Any) -> tuple[int, int]:
    """[height, width] of one, two or four numbers."""
    numbers = integers(value)
    numbers = numbers * 2 if len(numbers) == 1 else numbers[1:3] if len(numbers) == 4 else numbers
    if len(numbers) != 2 or not all(0 < each <= 2**16 for each in numbers):
        raise NotRebuiltError(f"its window is {numbers[:4]}")
    return numbers[0], numbers[1]


def bias_add(step: FunctionCall, x: Any, y: Any) -> Any:
    """A number for each channel."""
    return operations.arithmetic("Add")(step, x, y)


_NAMED: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "reshape": ("x|tensor shape", reshape),
    "transpose": ("x|a perm conjugate", transpose),
    "compat.v1.transpose": ("x|a perm name conjugate", lambda step, name=None, **given: transpose(step, **given)),
    "expand_dims": ("x|input axis|dim", expand_dims),
    "squeeze": ("x|input axis|squeeze_dims", squeeze),
    "concat": ("values axis", concat),
    "stack": ("values axis", stack),
    "unstack": ("x|value num axis", unstack),
    "split": ("x|value num_or_size_splits axis", split),
    "slice": ("x|input_ begin size", cut_out),
    "strided_slice": (
        "x|input_ begin end strides begin_mask end_mask ellipsis_mask new_axis_mask shrink_axis_mask",
        strided_slice,
    ),
    "__operators__.getitem": ("x|tensor slice_spec", getitem),
    "pad": ("x|tensor paddings mode constant_values", pad),
    "tile": ("x|input multiples", tile),
    "gather": ("x|params indices validate_indices axis batch_dims", lambda s, validate_indices=0, **a: gather(s, **a)),
    "shape": ("x|input out_type", size),
    "image.resize": ("x|images size method preserve_aspect_ratio antialias", lambda s, **a: _resize(s, **a)),
    "image.resize_bilinear": ("x|images size align_corners half_pixel_centers", old_resize("bilinear")),
    "image.resize_nearest_neighbor": ("x|images size align_corners half_pixel_centers", old_resize("nearest")),
    "nn.depth_to_space": ("x|input block_size", blocks("DepthToSpace")),
    "nn.space_to_depth": ("x|input block_size", blocks("SpaceToDepth")),
    "nn.avg_pool2d": ("x|input|value ksize strides padding", pooling("Average")),
    "nn.max_pool2d": ("x|input|value ksize strides padding", pooling("Max")),
    "nn.bias_add": ("x|value y|bias", bias_add),
}


def _resize(step: FunctionCall, x: Any, size: Any, preserve_aspect_ratio: Any = False, **given: Any) -> Any:
    if preserve_aspect_ratio:
        raise NotRebuiltError("it keeps the aspect ratio")
    return resize(step, x, size, **given)


RULES: Mapping[str, TfFunction] = {name: TfFunction(rule, names) for name, (names, rule) in _NAMED.items()}
"""By TensorFlow's name of a function what becomes of it."""
