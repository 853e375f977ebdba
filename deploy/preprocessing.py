"""The one definition of preprocessing, in numpy: training, calibration, evaluation and the device all use it.

A specification is a list of one-key maps, applied in order to one decoded sample::

    [{"resize": {"size": [32, 32], "filter": "bilinear"}},
     {"scale": {"from": [0, 16], "to": [0, 1]}}]

A sample is an array [height, width, channels] of any integer or float type, or
[height, width] for one channel; the result is float32 [height, width, channels].
Runs on Python 3.7 with numpy alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import keyword
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

VERSION = 1
"""Raised when the same specification would give other numbers than before."""

_LARGEST = float(np.finfo(np.float32).max)
Range = Tuple[float, float]
Array = Any
"""A numpy array. (numpy 1.16, which old boards have, knows no types to say more with.)"""


class PreprocessingError(ValueError):
    """A specification or a sample that cannot be used; says which step and why.

    Attributes:
        step: index of the step in the specification, or None.
    """

    def __init__(self, message: str, step: Any = None) -> None:
        super().__init__(message)
        self.step = step


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        raise PreprocessingError("%s must be a number that float32 can hold, not %r" % (name, value))
    return float(value)


def _numbers(value: Any, name: str, count: Any = None) -> Tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or not value or (count is not None and len(value) != count):
        wanted = "%d numbers" % count if count is not None else "numbers"
        raise PreprocessingError("%s must be a list of %s, not %r" % (name, wanted, value))
    return tuple(_number(item, name) for item in value)


@dataclasses.dataclass(frozen=True)
class Resize:
    """Resizes to `size` = [height, width].

    Pixel centres are at half integers and edges are repeated (TensorFlow's
    `half_pixel_centers`, without antialiasing). `filter` is `bilinear` or `nearest`.
    """

    size: Tuple[int, int]
    filter: str = "bilinear"

    def __post_init__(self) -> None:
        size = _numbers(self.size, "size", 2)
        if any(side != int(side) or not 1 <= side <= 8192 for side in size):
            raise PreprocessingError("size must be two whole numbers from 1 to 8192, not %r" % (self.size,))
        if self.filter not in ("bilinear", "nearest"):
            raise PreprocessingError("filter must be 'bilinear' or 'nearest', not %r" % (self.filter,))
        object.__setattr__(self, "size", (int(size[0]), int(size[1])))

    def __call__(self, image: Array) -> Array:
        """The changed image: float32 [height, width, channels]."""
        for axis in (1, 0):  # width first and all in float32, as TensorFlow does it: equal to the bit
            if image.shape[axis] != self.size[axis]:
                image = self._along(image, axis, self.size[axis])
        return image

    def _along(self, image: Array, axis: int, side: int) -> Array:
        length = image.shape[axis]
        half = np.float32(0.5)
        centres = (np.arange(side, dtype=np.float32) + half) * (np.float32(length) / np.float32(side))
        if self.filter == "nearest":
            return np.take(image, np.minimum(centres.astype(np.int64), length - 1), axis=axis)
        position = centres - half
        below = np.floor(position)
        weight = position - below
        shape = [1] * image.ndim
        shape[axis] = side
        weight = weight.reshape(shape)
        low = np.take(image, np.clip(below, 0, length - 1).astype(np.int64), axis=axis)
        high = np.take(image, np.clip(below + 1, 0, length - 1).astype(np.int64), axis=axis)
        return low + (high - low) * weight


@dataclasses.dataclass(frozen=True)
class Scale:
    """Maps the interval `from` linearly onto the interval `to`. Values outside follow the same line."""

    from_: Range
    to: Range = (0.0, 1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "from_", _numbers(self.from_, "from", 2))
        object.__setattr__(self, "to", _numbers(self.to, "to", 2))
        if self.from_[0] == self.from_[1]:
            raise PreprocessingError("from must be two different numbers, not %r" % (list(self.from_),))
        if not all(abs(value) <= _LARGEST for value in self._line()):
            raise PreprocessingError("from %r and to %r are too far apart for float32" % (self.from_, self.to))

    def _line(self) -> Range:
        (a, b), (c, d) = self.from_, self.to
        factor = (d - c) / (b - a)
        return factor, c - a * factor

    def __call__(self, image: Array) -> Array:
        """The changed image: float32 [height, width, channels]."""
        factor, offset = self._line()
        return image * np.float32(factor) + np.float32(offset)


@dataclasses.dataclass(frozen=True)
class Normalize:
    """Subtracts `mean` and divides by `std`: one number for all channels, or one for each."""

    mean: Tuple[float, ...]
    std: Tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", _numbers(self.mean, "mean"))
        object.__setattr__(self, "std", _numbers(self.std, "std"))
        if any(np.float32(value) <= 0 for value in self.std):
            raise PreprocessingError("std must be larger than 0, not %r" % (list(self.std),))

    def __call__(self, image: Array) -> Array:
        """The changed image: float32 [height, width, channels]."""
        for values in (self.mean, self.std):
            if len(values) not in (1, image.shape[-1]):
                raise PreprocessingError("normalize has %d numbers for %d channels" % (len(values), image.shape[-1]))
        return (image - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)


STEPS: Dict[str, Any] = {"resize": Resize, "scale": Scale, "normalize": Normalize}


def fields(step: Any) -> Dict[str, dataclasses.Field[Any]]:
    """The keys of a step as they stand in a specification, with their dataclass fields."""
    return {field.name.rstrip("_"): field for field in dataclasses.fields(step)}


class Preprocessing:
    """A parsed specification.

    Args:
        specification: a list of one-key maps, as in the module's docstring.

    Raises:
        PreprocessingError: an unknown step or key, or a value that cannot be used.
    """

    def __init__(self, specification: Sequence[Any]) -> None:
        if not isinstance(specification, (list, tuple)):
            raise PreprocessingError("preprocess must be a list of steps, not %r" % (specification,))
        self._steps = [_parse(entry, index) for index, entry in enumerate(specification)]
        self.specification: List[Dict[str, Any]] = json.loads(json.dumps(list(specification)))

    @property
    def digest(self) -> str:
        """SHA-256 of version and steps with every default written out: equal digests, equal numbers."""
        steps = [[type(step).__name__, dataclasses.astuple(step)] for step in self._steps]
        text = json.dumps([VERSION, steps], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __call__(self, sample: Array) -> Array:
        """Preprocesses one sample.

        Raises:
            PreprocessingError: the sample's shape or type does not fit.
        """
        if sample.ndim == 2:
            sample = sample[..., np.newaxis]
        if sample.ndim != 3 or sample.dtype.kind not in "uifb" or 0 in sample.shape:
            raise PreprocessingError(
                "a sample must be numbers [height, width, channels], not %s %r" % (sample.dtype, sample.shape)
            )
        image = sample.astype(np.float32)
        for index, step in enumerate(self._steps):
            try:
                image = step(image)
            except PreprocessingError as error:
                raise PreprocessingError(str(error), index)
        return np.ascontiguousarray(image, dtype=np.float32)


def _parse(entry: Any, index: int) -> Any:
    if not isinstance(entry, dict) or len(entry) != 1:
        raise PreprocessingError("a step must be a map with one key, not %r" % (entry,), index)
    ((name, settings),) = entry.items()
    if name not in STEPS:
        raise PreprocessingError("there is no step %r; allowed: %s" % (name, ", ".join(STEPS)), index)
    known = fields(STEPS[name])
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise PreprocessingError("%s must be a map, not %r" % (name, settings), index)
    for key in settings:
        if key not in known:
            raise PreprocessingError("unknown key %r in %s; allowed: %s" % (key, name, ", ".join(known)), index)
    for key, field in known.items():
        if key not in settings and field.default is dataclasses.MISSING:
            raise PreprocessingError("%s needs the key %r" % (name, key), index)
    try:
        return STEPS[name](**{key + "_" * keyword.iskeyword(key): value for key, value in settings.items()})
    except PreprocessingError as error:
        raise PreprocessingError("%s: %s" % (name, error), index)


def quantize(values: Array, scale: float, zero_point: int, dtype: Any) -> Array:
    """Float values as a model's 8-bit input: round half to even of value / scale + zero_point, saturated."""
    limits = np.iinfo(dtype)
    return np.clip(np.rint(values / np.float32(scale)) + zero_point, limits.min, limits.max).astype(dtype)


def dequantize(stored: Array, scale: float, zero_point: int) -> Array:
    """A model's 8-bit output as float32: scale * (stored - zero_point)."""
    return ((stored.astype(np.float32) - zero_point) * np.float32(scale)).astype(np.float32)
