"""The steps that change an image's size: resize, crop, pad. Images are float32 [height, width, channels].

The results are equal to the bit on every machine: sums have a fixed order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Dict, Tuple

import numpy as np

from deploy.contract.step import Array, Fill, Flag, Number, PreprocessingError, Step, Wholes, Word, image, key, small

SIDE = 8192
"""Longest side that may be asked for."""
LONGEST = 1 << 16
"""Longest side of an image that weights are computed for."""
Size = Tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Resize(Step):
    """Resizes to `size` = [height, width].

    Pixel centres are at half integers and edges are repeated (TensorFlow's `half_pixel_centers`). `bilinear`,
    `nearest`, `area` and `bicubic` are those of `tf.image.resize`; with `antialias`, bilinear and bicubic are
    those of `tf.image.resize(antialias=True)`, and with `levels` too those of Pillow's BILINEAR and BICUBIC.
    `area` is OpenCV's INTER_AREA where the image becomes smaller.
    """

    size: Size = key(Wholes(1, SIDE, 2))
    """Height and width."""
    filter: str = key(Word("bilinear", "nearest", "area", "bicubic"), "bilinear")
    """bilinear, nearest, area (the mean of what a pixel covers) or bicubic (Keys, a = -0.5)."""
    antialias: bool = key(Flag(), False, later=True)
    """Whether bilinear and bicubic look at all that a pixel covers where the image becomes smaller."""
    levels: bool = key(Flag(), False, later=True)
    """Whether each of two passes, first width, then height, is rounded to whole numbers from 0 to 255, as Pillow does
    with images of 8 bits. (Of an image whose width grows and height shrinks, Pillow 13 does the height first.)"""
    fit: str = key(Word("stretch", "crop", "pad"), "stretch", later=True)
    """stretch: the sides' ratio changes. crop: what is too long is cut off both ends first, as Keras' `smart_resize`
    does it. pad: all is kept, and `fill` is put around it, as `tf.image.resize_with_pad` does it."""
    fill: Any = key(Fill(), 0.0, later=True)
    """What `fit: pad` puts around: a number, or one for each channel."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.antialias and self.filter not in _KERNELS:
            raise PreprocessingError("antialias is for the filters bilinear and bicubic, not for %r" % self.filter)

    def __call__(self, sample: Array) -> Array:
        """The changed image."""
        height, width, channels = image(sample, "resize")
        size, place = self.size, (0, 0)
        if self.fit == "crop":
            rows, columns = (max(a * b // c, 1) for a, b, c in ((width, size[0], size[1]), (height, size[1], size[0])))
            sample = _middle(sample, (min(height, rows), min(width, columns)))
        elif self.fit == "pad":
            size, place = _inside((height, width), size)
        small((height, size[1], channels), "resize")
        small(size + (channels,), "resize")
        summed = self.filter not in ("nearest", "bilinear") or self.antialias
        # Two neighbours: width first and all in float32, as TensorFlow does it: equal to the bit. Levels: width first,
        # as Pillow. Sums: height first, because whole rows are added several times faster than pixels.
        for axis in (0, 1) if summed and not self.levels else (1, 0):
            if sample.shape[axis] != size[axis]:
                sample = self._along(sample, axis, size[axis])
                if self.levels:
                    sample = np.clip(np.floor(sample + np.float32(0.5)), 0, 255)
        return sample if size == self.size else _around(sample, (self.size, place), self.fill, "resize")

    def _along(self, sample: Array, axis: int, side: int) -> Array:
        length = sample.shape[axis]
        half = np.float32(0.5)
        centres = (np.arange(side, dtype=np.float32) + half) * (np.float32(length) / np.float32(side))
        if self.filter == "nearest":
            return np.take(sample, np.minimum(centres.astype(np.int64), length - 1), axis=axis)
        if self.filter != "bilinear" or self.antialias:
            if length > LONGEST:
                raise PreprocessingError("%s takes sides up to %d, not %d" % (self.filter, LONGEST, length))
            return _summed(sample, axis, *_weights(self.filter, self.antialias, length, side))
        position = centres - half
        below = np.floor(position)
        weight = position - below
        shape = [1] * sample.ndim
        shape[axis] = side
        weight = weight.reshape(shape)
        low = np.take(sample, np.clip(below, 0, length - 1).astype(np.int64), axis=axis)
        high = np.take(sample, np.clip(below + 1, 0, length - 1).astype(np.int64), axis=axis)
        return low + (high - low) * weight


def _triangle(distance: Array) -> Array:
    return np.maximum(1 - np.abs(distance), 0)


def _keys(distance: Array) -> Array:
    """R. G. Keys, Cubic convolution interpolation for digital image processing, 1981; a = -0.5."""
    x = np.abs(distance)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


_KERNELS: Dict[str, Tuple[Callable[[Array], Array], int]] = {"bilinear": (_triangle, 1), "bicubic": (_keys, 2)}
"""Weight at a distance in pixels, and the distance at which it ends."""


@functools.lru_cache(maxsize=64)
def _weights(method: str, antialias: bool, length: int, side: int) -> Tuple[Array, Array]:
    """Return the pixels that each new pixel is the sum of: indices and weights, [taps, size]; weights sum to 1."""
    ratio = length / side
    centres = (np.arange(side) + 0.5) * ratio
    stretch = max(ratio, 1.0) if antialias else 1.0
    kernel, radius = _KERNELS.get(method, (_triangle, 0))
    reach = radius * stretch if method in _KERNELS else ratio / 2
    first = np.floor(centres - reach - 0.5).astype(np.int64)
    places = first + np.arange(int(np.ceil(2 * reach)) + 2)[:, np.newaxis]
    if method == "area":
        ends = np.minimum(places + 1, centres + reach), np.maximum(places, centres - reach)
        weights = np.maximum(ends[0] - ends[1], 0)
    else:
        weights = kernel((places + 0.5 - centres) / stretch)
    weights = np.where((places >= 0) & (places < length), weights, 0.0)
    used = (weights != 0).any(axis=1)
    weights, places = weights[used] / weights.sum(axis=0), places[used]
    return np.clip(places, 0, length - 1), weights.astype(np.float32)


def _summed(sample: Array, axis: int, places: Array, weights: Array) -> Array:
    """The weighted sums along one axis, tap by tap: no other order on another machine."""
    shape = [1] * sample.ndim
    shape[axis] = -1
    result = np.take(sample, places[0], axis=axis) * weights[0].reshape(shape)
    for place, weight in zip(places[1:], weights[1:]):
        part = np.take(sample, place, axis=axis)
        part *= weight.reshape(shape)
        result += part
    return result


@dataclasses.dataclass(frozen=True)
class Crop(Step):
    """Keeps the middle of an image: `size` = [height, width], or a `share` of each side.

    Where it cannot be in the middle, a row or column less is cut off before it than after it.
    """

    size: Any = key(Wholes(1, SIDE, 2), None)
    """Height and width of what is kept."""
    share: Any = key(Number(1e-3, 1.0), None)
    """Of each side, what is kept, as `tf.image.central_crop` does it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.size is None) == (self.share is None):
            raise PreprocessingError("it needs one of the keys 'size' and 'share'")

    def __call__(self, sample: Array) -> Array:
        """The changed image."""
        sides = image(sample, "crop")[:2]
        if self.share is not None:
            height, width = (side - 2 * int((side - side * self.share) / 2) for side in sides)
            return _middle(sample, (height, width))
        if sides[0] < self.size[0] or sides[1] < self.size[1]:
            sizes = (list(self.size), list(sides))
            raise PreprocessingError("crop to %r: the image has %r; resize or pad it before" % sizes)
        return _middle(sample, self.size)


@dataclasses.dataclass(frozen=True)
class Pad(Step):
    """Puts a frame around an image, so that it has `size` = [height, width].

    Where the image cannot be in the middle, the frame has a row or column less before it than after it.
    """

    size: Size = key(Wholes(1, SIDE, 2))
    """Height and width of the result."""
    fill: Any = key(Fill(), 0.0)
    """What the frame is of: a number, or one for each channel."""

    def __call__(self, sample: Array) -> Array:
        """The changed image."""
        sides = image(sample, "pad")[:2]
        if sides[0] > self.size[0] or sides[1] > self.size[1]:
            sizes = (list(self.size), list(sides))
            raise PreprocessingError("pad to %r: the image has %r; resize or crop it before" % sizes)
        place = (self.size[0] - sides[0]) // 2, (self.size[1] - sides[1]) // 2
        return _around(sample, (self.size, place), self.fill, "pad")


def _inside(given: Size, size: Size) -> Tuple[Size, Size]:
    """The largest sides of the same ratio that fit into `size`, and where they begin; in float32, as TensorFlow."""
    exact, ends = np.array(given, np.float32), np.array(size, np.float32)
    exact = exact / (exact / ends).max()
    sides, place = np.floor(exact), np.floor((ends - exact) / 2)
    return (max(int(sides[0]), 1), max(int(sides[1]), 1)), (max(int(place[0]), 0), max(int(place[1]), 0))


def _middle(sample: Array, size: Size) -> Array:
    top, left = (sample.shape[0] - size[0]) // 2, (sample.shape[1] - size[1]) // 2
    return sample[top : top + size[0], left : left + size[1]]


def _around(sample: Array, frame: Tuple[Size, Size], fill: Tuple[float, ...], name: str) -> Array:
    """The image at its place in a frame: (size, place)."""
    (size, (top, left)), (height, width, channels) = frame, sample.shape
    if len(fill) not in (1, channels):
        raise PreprocessingError("%s has %d numbers to fill %d channels with" % (name, len(fill), channels))
    small(tuple(size) + (channels,), name)
    result = np.empty(tuple(size) + (channels,), np.float32)
    result[...] = np.asarray(fill, np.float32)
    result[top : top + height, left : left + width] = sample
    return result
