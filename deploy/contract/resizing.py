"""The steps that change the size of an image: resize, crop, pad. Images are float32 [height, width, channels].

The results are bit-exact on every machine, because the order of additions is fixed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Tuple

import numpy as np

from deploy.contract.step import (
    Array,
    Fill,
    Flag,
    Number,
    Plan,
    PreprocessingError,
    Shape,
    Step,
    Wholes,
    Word,
    count,
    image,
    key,
)

SIDE = 8192
"""The largest height or width of a result."""
LONGEST = 1 << 16
"""The largest height or width of an image for which weights are computed."""
BLOCK_VALUES = 1 << 22
"""The number of values that one block of a resized image needs: 16 MB."""
Size = Tuple[int, int]
Area = Tuple[int, int, int, int]
"""Top, left, height and width, in pixels."""


class ImagePlacement(NamedTuple):
    """The part of an image that a step uses, and the position of this part in the result.

    Attributes:
        source: the part of the image.
        target: the position of the part in the result, after the change of its size.
        size: height and width of the result.
    """

    source: Area
    target: Area
    size: Size


@dataclasses.dataclass(frozen=True)
class Resize(Step):
    """Resize to `size` = [height, width].

    Pixel centres are at half integers, and edges are repeated (`half_pixel_centers` in TensorFlow). The filters
    `bilinear`, `nearest`, `area` and `bicubic` equal those of `tf.image.resize`. With `antialias`, bilinear and bicubic
    equal `tf.image.resize(antialias=True)`; with `levels` in addition, they equal BILINEAR and BICUBIC of Pillow.
    If the image becomes smaller, `area` equals INTER_AREA of OpenCV.
    """

    size: Size = key(Wholes(1, SIDE, 2))
    """Height and width."""
    filter: str = key(Word("bilinear", "nearest", "area", "bicubic"), "bilinear")
    """bilinear, nearest, area (the mean of the area that a new pixel covers) or bicubic (Keys, a = -0.5)."""
    antialias: bool = key(Flag(), False, later=True)
    """Whether bilinear and bicubic use the whole area that a new pixel covers if the image becomes smaller."""
    levels: bool = key(Flag(), False, later=True)
    """Whether the result is rounded to integers from 0 to 255 after each of the two passes (width, then height), as
    Pillow does for 8-bit images. (If the width grows and the height shrinks, Pillow 13 starts with the height.)"""
    fit: str = key(Word("stretch", "crop", "pad", "letterbox"), "stretch", later=True)
    """stretch: the aspect ratio changes. crop: the longer dimension is first cropped at both ends, as in Keras'
    `smart_resize`. pad: the whole image is kept, with `fill` around it, as in `tf.image.resize_with_pad`. letterbox:
    the same, with the sizes of YOLO detectors; see `align`."""
    fill: Any = key(Fill(), 0.0, later=True)
    """The value of the border with `fit: pad` and `fit: letterbox`: one number, or one for each channel. YOLO detectors
    use 114."""
    align: str = key(Word("center", "top_left"), "center", later=True)
    """The position of the image with `fit: letterbox`. center: in the centre, its size rounded, as in Ultralytics' YOLO
    models and YOLOv5 to v9. top_left: at the top left, its size rounded down, as in YOLOX."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.align != "center" and self.fit != "letterbox":
            raise PreprocessingError("align: %s is for `fit: letterbox`, not for `fit: %s`" % (self.align, self.fit))
        if self.antialias and self.filter not in _KERNELS:
            raise PreprocessingError("antialias is for the filters bilinear and bicubic, not for %r" % self.filter)

    def placement(self, height: int, width: int) -> ImagePlacement:
        """Return the part of an image of this height and width that is used, and its position in the result."""
        source = (0, 0, height, width)
        target = (0, 0) + self.size
        if self.fit == "crop":
            rows = max(width * self.size[0] // self.size[1], 1)
            columns = max(height * self.size[1] // self.size[0], 1)
            source = _middle((height, width), (min(height, rows), min(width, columns)))
        elif self.fit == "pad":
            target = _padded((height, width), self.size)
        elif self.fit == "letterbox":
            target = _letterbox((height, width), self.size, self.align)
        return ImagePlacement(source, target, self.size)

    def planned(self, shape: Shape) -> Plan:
        """Return the shape of the result, and the values that are computed at once."""
        height, width, channels = image(shape, "resize")
        placement = self.placement(height, width)
        size = placement.target[2:]
        longest = max(placement.source[2:])
        if longest > LONGEST and self._sums:
            raise PreprocessingError("%s takes a height or width up to %d, not %d" % (self.filter, LONGEST, longest))
        first, second = self._order()
        one_output = size[first] * self._reach(placement.source[2 + second], size[second]) * channels
        values = size[0] * size[1] * channels + 4 * max(one_output, BLOCK_VALUES)
        values += 16 * sum(self._reach(placement.source[2 + axis], size[axis]) * size[axis] for axis in (0, 1))
        if size == self.size:
            return Plan(size + (channels,), values)
        _check_fill(self.fill, channels, "resize")
        return Plan(self.size + (channels,), values + self.size[0] * self.size[1] * channels)

    def __call__(self, sample: Array) -> Array:
        """Return the changed image. It may have any type of numbers: only the pixels that are used are converted."""
        self.planned(sample.shape)
        placement = self.placement(*sample.shape[:2])
        sample = _part(sample, placement.source)
        size = placement.target[2:]
        if sample.shape[:2] != size:
            sample = self._resized(sample, size)
        return sample if size == self.size else _around(sample, placement, self.fill)

    @property
    def _sums(self) -> bool:
        """Whether a new pixel is a weighted sum, not one pixel or an interpolation between two."""
        return self.filter not in ("nearest", "bilinear") or self.antialias

    def _order(self) -> Size:
        """Return the axis that is resized first, and the other one.

        Interpolation between two pixels: width first, in float32, which is bit-exact to TensorFlow. `levels`: width
        first, as in Pillow. Weighted sums: height first, because adding whole rows is several times faster.
        """
        return (0, 1) if self._sums and not self.levels else (1, 0)

    def _reach(self, length: int, side: int) -> int:
        """Return the largest number of pixels along one axis that one new pixel is computed from."""
        if not self._sums or length == side:
            return 2
        return min(length, int(4 * max(length / side, 1)) + 3)

    def _resized(self, sample: Array, size: Size) -> Array:
        """Return the image in another size: float32.

        It is computed in blocks along the second axis, from those rows (or columns) alone that the block needs: an
        image with one extreme side would otherwise be resized along the other one in its full length. The values do
        not depend on the blocks.
        """
        first, second = self._order()
        inner = self._taps(sample.shape[first], size[first])
        outer = self._taps(sample.shape[second], size[second])
        result = np.empty(size + sample.shape[2:], np.float32)
        values_per_line = size[first] * sample.shape[2]
        for start, stop in _blocks(outer, values_per_line):
            lines, block = outer.block(start, stop)
            part = _lines(sample, lines, second)
            if part.size <= BLOCK_VALUES:  # once, not for each tap
                part = part.astype(np.float32, copy=False)
            part = self._leveled(inner.along(part, first), inner)
            _lines(result, slice(start, stop), second)[...] = self._leveled(block.along(part, second), block)
        return result

    def _leveled(self, values: Array, taps: _Taps) -> Array:
        """Apply `levels` to the result of one pass."""
        if not self.levels or taps.keeps:
            return values
        values += np.float32(0.5)
        np.floor(values, out=values)
        return np.clip(values, 0, 255, out=values)

    def _taps(self, length: int, side: int) -> _Taps:
        """Return the pixels of one axis that each new pixel is computed from, and how."""
        if length == side:
            return _Taps(np.arange(side)[np.newaxis], None)
        if self._sums:
            compute = _weights if length <= SIDE else _weights.__wrapped__  # large ones would fill the cache
            return _Taps(*compute(self.filter, self.antialias, length, side))
        half = np.float32(0.5)
        centres = (np.arange(side, dtype=np.float32) + half) * (np.float32(length) / np.float32(side))
        if self.filter == "nearest":
            return _Taps(np.minimum(centres.astype(np.int64), length - 1)[np.newaxis], None)
        position = centres - half
        below = np.floor(position)
        indices = np.clip(np.stack([below, below + 1]), 0, length - 1).astype(np.int64)
        return _Taps(indices, (position - below)[np.newaxis])


class _Taps(NamedTuple):
    """The pixels along one axis that each new pixel is computed from.

    Attributes:
        indices: their indices: int64 [taps, new pixels].
        weights: float32; None: the pixel itself, of one tap. [1, new pixels]: the position between two taps.
            [taps, new pixels]: the weights of a sum.
    """

    indices: Array
    weights: Optional[Array]

    @property
    def keeps(self) -> bool:
        """Whether the new pixels are old ones."""
        return self.weights is None

    def block(self, start: int, stop: int) -> Tuple[Array, _Taps]:
        """Return the pixels that some of the new pixels need, and the taps in these alone."""
        indices = self.indices[:, start:stop]
        lines = np.unique(indices)
        weights = None if self.weights is None else self.weights[:, start:stop]
        return lines, _Taps(np.searchsorted(lines, indices), weights)

    def along(self, sample: Array, axis: int) -> Array:
        """Return the new pixels along an axis: float32. Sums are added one by one: every machine has this order."""
        if self.weights is None:
            return _taken(sample, self.indices[0], axis)
        shape = [1] * sample.ndim
        shape[axis] = -1
        low = _taken(sample, self.indices[0], axis)
        if len(self.weights) < len(self.indices):
            high = _taken(sample, self.indices[1], axis)
            high -= low
            high *= self.weights[0].reshape(shape)
            high += low
            return high
        low *= self.weights[0].reshape(shape)
        for index, weight in zip(self.indices[1:], self.weights[1:]):
            part = _taken(sample, index, axis)
            part *= weight.reshape(shape)
            low += part
        return low


def _taken(sample: Array, indices: Array, axis: int) -> Array:
    return np.take(sample, indices, axis=axis).astype(np.float32, copy=False)


def _lines(sample: Array, lines: Any, axis: int) -> Array:
    """Return some rows (axis 0) or columns (axis 1): a view if all of them follow each other."""
    if not isinstance(lines, slice) and len(lines) == lines[-1] - lines[0] + 1:
        lines = slice(int(lines[0]), int(lines[-1]) + 1)
    return sample[lines] if axis == 0 else sample[:, lines]


def _blocks(taps: _Taps, values_per_line: int) -> Iterator[Tuple[int, int]]:
    """Yield start and end of blocks of new pixels, so that each needs about `BLOCK_VALUES` values at most."""
    count = taps.indices.shape[1]
    per_output = max(int(taps.indices.max()) - int(taps.indices.min()) + 1, count) / count
    lines = max(min(per_output, len(taps.indices)), 1) * values_per_line
    step = max(int(BLOCK_VALUES / lines), 1)
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _triangle(distance: Array) -> Array:
    return np.maximum(1 - np.abs(distance), 0)


def _keys(distance: Array) -> Array:
    """R. G. Keys, Cubic convolution interpolation for digital image processing, 1981; a = -0.5."""
    x = np.abs(distance)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


_KERNELS: Dict[str, Tuple[Callable[[Array], Array], int]] = {"bilinear": (_triangle, 1), "bicubic": (_keys, 2)}
"""The weight as a function of the distance in pixels, and the distance from which it is 0."""


@functools.lru_cache(maxsize=64)
def _weights(method: str, antialias: bool, length: int, side: int) -> Tuple[Array, Array]:
    """Return the source pixels of each new pixel: indices and weights, [taps, size]; weights of a pixel add up to 1."""
    ratio = length / side
    centres = (np.arange(side) + 0.5) * ratio
    stretch = max(ratio, 1.0) if antialias else 1.0
    kernel, radius = _KERNELS.get(method, (_triangle, 0))
    reach = radius * stretch if method in _KERNELS else ratio / 2
    first = np.floor(centres - reach - 0.5).astype(np.int64)
    indices = first + np.arange(int(np.ceil(2 * reach)) + 2)[:, np.newaxis]
    if method == "area":
        overlap = np.minimum(indices + 1, centres + reach) - np.maximum(indices, centres - reach)
        weights = np.maximum(overlap, 0)
    else:
        weights = kernel((indices + 0.5 - centres) / stretch)
    weights = np.where((indices >= 0) & (indices < length), weights, 0.0)
    used = (weights != 0).any(axis=1)
    weights = weights[used] / weights.sum(axis=0)
    return np.clip(indices[used], 0, length - 1), weights.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Crop(Step):
    """Crop an image to its centre: `size` = [height, width], or a `share` of height and width.

    If the number of rows or columns to remove is odd, one more is removed after the centre than before it.
    """

    size: Any = key(Wholes(1, SIDE, 2), None)
    """Height and width of the result."""
    share: Any = key(Number(1e-3, 1.0), None)
    """The fraction of height and width to keep, as in `tf.image.central_crop`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.size is None) == (self.share is None):
            raise PreprocessingError("it needs one of the keys 'size' and 'share'")

    def placement(self, height: int, width: int) -> ImagePlacement:
        """Return the part of an image of this height and width that is kept.

        Raises:
            PreprocessingError: the image is too small.
        """
        dimensions = (height, width)
        if self.share is not None:
            rows, columns = (side - 2 * int((side - side * self.share) / 2) for side in dimensions)
        else:
            rows, columns = self.size
        if height < rows or width < columns:
            sizes = ([rows, columns], list(dimensions))
            raise PreprocessingError("crop to %r: the image has %r; resize or pad it before" % sizes)
        return ImagePlacement(_middle(dimensions, (rows, columns)), (0, 0, rows, columns), (rows, columns))

    def planned(self, shape: Shape) -> Plan:
        """Return the shape of the result, which is a part of the sample."""
        height, width, channels = image(shape, "crop")
        return Plan(self.placement(height, width).size + (channels,), 0)

    def __call__(self, sample: Array) -> Array:
        """Return the changed image."""
        return _part(sample, self.placement(*image(sample.shape, "crop")[:2]).source)


@dataclasses.dataclass(frozen=True)
class Pad(Step):
    """Pad an image to `size` = [height, width], with the image in the centre.

    If the number of rows or columns to add is odd, one more is added after the image than before it.
    """

    size: Size = key(Wholes(1, SIDE, 2))
    """Height and width of the result."""
    fill: Any = key(Fill(), 0.0)
    """The value of the border: one number, or one for each channel."""

    def placement(self, height: int, width: int) -> ImagePlacement:
        """Return the position of an image of this height and width in the result.

        Raises:
            PreprocessingError: the image is too large.
        """
        if height > self.size[0] or width > self.size[1]:
            sizes = (list(self.size), [height, width])
            raise PreprocessingError("pad to %r: the image has %r; resize or crop it before" % sizes)
        target = ((self.size[0] - height) // 2, (self.size[1] - width) // 2, height, width)
        return ImagePlacement((0, 0, height, width), target, self.size)

    def planned(self, shape: Shape) -> Plan:
        """Return the shape of the result, and the number of its values."""
        height, width, channels = image(shape, "pad")
        _check_fill(self.fill, channels, "pad")
        result = self.placement(height, width).size + (channels,)
        return Plan(result, count(result))

    def __call__(self, sample: Array) -> Array:
        """Return the changed image."""
        self.planned(sample.shape)
        return _around(sample, self.placement(*sample.shape[:2]), self.fill)


def _padded(image_size: Size, size: Size) -> Area:
    """Return the largest area with the image's aspect ratio that fits into `size`, in its centre.

    The computation is in float32, as in TensorFlow.
    """
    dimensions = np.array(image_size, np.float32)
    limits = np.array(size, np.float32)
    dimensions = dimensions / (dimensions / limits).max()
    height, width = np.maximum(np.floor(dimensions), 1)
    top, left = np.maximum(np.floor((limits - dimensions) / 2), 0)
    return int(top), int(left), int(height), int(width)


def _letterbox(image_size: Size, size: Size, align: str) -> Area:
    """Return the area of the image in the input of a YOLO detector.

    The computation is in float64 and in this order, as in these programs: the sizes differ by one pixel if it is not.
    Sources: Ultralytics, `ultralytics/data/augment.py`, LetterBox (center); Megvii, `yolox/data/data_augment.py`,
    preproc (top_left).
    """
    ratio = min(size[0] / image_size[0], size[1] / image_size[1])
    if align == "top_left":
        return (0, 0) + (max(int(image_size[0] * ratio), 1), max(int(image_size[1] * ratio), 1))
    height, width = (max(round(side * ratio), 1) for side in image_size)
    top, left = (round((limit - side) / 2 - 0.1) for limit, side in zip(size, (height, width)))
    return top, left, height, width


def _middle(image_size: Size, size: Size) -> Area:
    return ((image_size[0] - size[0]) // 2, (image_size[1] - size[1]) // 2) + tuple(size)  # type: ignore[return-value]


def _part(sample: Array, area: Area) -> Array:
    top, left, height, width = area
    return sample[top : top + height, left : left + width]


def _check_fill(fill: Tuple[float, ...], channels: int, name: str) -> None:
    if len(fill) not in (1, channels):
        raise PreprocessingError("%s has %d fill values for %d channels" % (name, len(fill), channels))


def _around(sample: Array, placement: ImagePlacement, fill: Tuple[float, ...]) -> Array:
    """Return a resized image with a border around it."""
    result = np.empty(tuple(placement.size) + sample.shape[2:], np.float32)
    result[...] = np.asarray(fill, np.float32)
    _part(result, placement.target)[...] = sample
    return result
