"""The one definition of preprocessing, in numpy: training, calibration, evaluation and the device all use it.

A specification is a list of one-key maps, applied in order to one decoded sample::

    [{"resize": {"size": [32, 32], "filter": "bilinear"}},
     {"scale": {"from": [0, 16], "to": [0, 1]}}]

A sample is an array of any integer or float type: an image [height, width, channels], or [height, width] for one
channel; a sound or a row of numbers [n]; a series [time, channels], which gets an axis of one channel as an image
does (`squeeze` takes it away). The result is float32. Images are in `resizing`, sounds in `sound`, the rest is here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import keyword
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.resizing import Crop, Pad, Resize
from deploy.contract.sound import Length, LogMel, Mfcc, Spectrogram
from deploy.contract.step import (
    LARGEST,
    Array,
    Numbers,
    PreprocessingError,
    Step,
    Whole,
    Wholes,
    Word,
    fields,
    image,
    key,
    needed,
)

__all__ = [
    "STEPS",
    "VERSION",
    "Array",
    "Preprocessing",
    "PreprocessingError",
    "dequantize",
    "fields",
    "needed",
    "quantize",
]

VERSION = 1
"""Raised when the same specification would give other numbers than before."""

Range = Tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Scale(Step):
    """Maps the interval `from` linearly onto the interval `to`. Values outside follow the same line."""

    from_: Range = key(Numbers(2))
    """Two numbers of the sample."""
    to: Range = key(Numbers(2), (0.0, 1.0))
    """What they become."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.from_[0] == self.from_[1]:
            raise PreprocessingError("from must be two different numbers, not %r" % (list(self.from_),))
        if not all(abs(value) <= LARGEST for value in self._line()):
            raise PreprocessingError("from %r and to %r are too far apart for float32" % (self.from_, self.to))

    def _line(self) -> Range:
        (a, b), (c, d) = self.from_, self.to
        factor = (d - c) / (b - a)
        return factor, c - a * factor

    def __call__(self, sample: Array) -> Array:
        """The changed sample."""
        factor, offset = self._line()
        return sample * np.float32(factor) + np.float32(offset)


@dataclasses.dataclass(frozen=True)
class Normalize(Step):
    """Subtracts `mean` and divides by `std`: one number for all channels, or one for each."""

    mean: Tuple[float, ...] = key(Numbers())
    """What is subtracted."""
    std: Tuple[float, ...] = key(Numbers())
    """What is divided by."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(np.float32(value) <= 0 for value in self.std):
            raise PreprocessingError("std must be larger than 0, not %r" % (list(self.std),))

    def __call__(self, sample: Array) -> Array:
        """The changed sample; channels are its last axis."""
        for values in (self.mean, self.std):
            if len(values) not in (1, sample.shape[-1]):
                raise PreprocessingError("normalize has %d numbers for %d channels" % (len(values), sample.shape[-1]))
        return (sample - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)


@dataclasses.dataclass(frozen=True)
class Clip(Step):
    """Raises what is below the first number of `to`, and lowers what is above the second."""

    to: Range = key(Numbers(2))
    """The smallest and the largest number that stay as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.to[0] < self.to[1]:
            raise PreprocessingError("to must be two numbers that rise, not %r" % (list(self.to),))

    def __call__(self, sample: Array) -> Array:
        """The changed sample."""
        return np.clip(sample, np.float32(self.to[0]), np.float32(self.to[1]))


@dataclasses.dataclass(frozen=True)
class Colour(Step):
    """Brings the channels of an image into another order, makes it grey, or gives a grey one three channels.

    Grey is 0.299 red + 0.587 green + 0.114 blue (ITU-R BT.601), as in Pillow, OpenCV and TensorFlow.
    """

    to: str = key(Word("rgb", "bgr", "grey"))
    """What the model takes."""
    from_: str = key(Word("rgb", "bgr", "grey"), "rgb")
    """What the channels are. Images that Coralline or Pillow decodes are rgb; frames of OpenCV are bgr."""

    def __call__(self, sample: Array) -> Array:
        """The changed image."""
        channels, wanted = image(sample, "colour")[2], 1 if self.from_ == "grey" else 3
        if channels != wanted:
            raise PreprocessingError("colour from %s takes %d channels, not %d" % (self.from_, wanted, channels))
        if self.from_ == self.to:
            return sample
        if self.from_ == "grey":
            return np.repeat(sample, 3, axis=2)
        if self.to != "grey":
            return sample[..., ::-1]
        red, green, blue = (sample[..., index] for index in ((0, 1, 2) if self.from_ == "rgb" else (2, 1, 0)))
        grey = red * np.float32(0.299) + green * np.float32(0.587) + blue * np.float32(0.114)
        return grey[..., np.newaxis]


@dataclasses.dataclass(frozen=True)
class Reshape(Step):
    """Gives a sample the shape `shape`, with the same numbers in the same order."""

    shape: Tuple[int, ...] = key(Wholes(-1, 1 << 24))
    """The sides of the result; one of them may be -1: what is left."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shape) > 6 or self.shape.count(-1) > 1 or 0 in self.shape:
            raise PreprocessingError("shape must have at most 6 sides, no 0, and at most one -1: %r" % (self.shape,))

    def __call__(self, sample: Array) -> Array:
        """The same sample in another shape."""
        try:
            return np.ascontiguousarray(sample).reshape(self.shape)
        except ValueError:
            raise PreprocessingError("%r has not the shape %r" % (list(sample.shape), list(self.shape)))


@dataclasses.dataclass(frozen=True)
class Squeeze(Step):
    """Takes an axis of length 1 away: for models without channels, such as Conv1D on [time, features]."""

    axis: int = key(Whole(-6, 5), -1)
    """Which axis; -1 is the last one."""

    def __call__(self, sample: Array) -> Array:
        """The same sample without this axis."""
        if not -sample.ndim <= self.axis < sample.ndim or sample.shape[self.axis] != 1 or sample.ndim == 1:
            raise PreprocessingError("axis %d of %r is not one of length 1" % (self.axis, list(sample.shape)))
        return np.squeeze(sample, self.axis)


STEPS: Dict[str, Any] = {
    "resize": Resize,
    "crop": Crop,
    "pad": Pad,
    "colour": Colour,
    "scale": Scale,
    "normalize": Normalize,
    "clip": Clip,
    "length": Length,
    "spectrogram": Spectrogram,
    "log_mel": LogMel,
    "mfcc": Mfcc,
    "reshape": Reshape,
    "squeeze": Squeeze,
}


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
    def rate(self) -> Optional[int]:
        """Samples in a second of the sounds that it takes; None where no step says so."""
        return next((step.rate for step in self._steps if isinstance(step, LogMel)), None)

    @property
    def digest(self) -> str:
        """SHA-256 of version and steps with every default written out: equal digests, equal numbers."""
        text = json.dumps([VERSION, [step.told() for step in self._steps]], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __call__(self, sample: Array) -> Array:
        """Preprocesses one sample.

        Raises:
            PreprocessingError: the sample's shape or type does not fit.
        """
        if sample.ndim not in (1, 2, 3) or sample.dtype.kind not in "uifb" or 0 in sample.shape:
            raise PreprocessingError(
                "a sample must be numbers [height, width, channels], or a sound [samples], not %s %r"
                % (sample.dtype, sample.shape)
            )
        values = sample.astype(np.float32)
        if values.ndim == 2:
            values = values[..., np.newaxis]
        if sample.dtype == np.int16 and any(isinstance(step, Spectrogram) for step in self._steps):
            values /= np.float32(32768)
        for index, step in enumerate(self._steps):
            try:
                values = step(values)
            except PreprocessingError as error:
                raise PreprocessingError(str(error), index)
        return np.ascontiguousarray(values, dtype=np.float32)


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
    for given in settings:
        if given not in known:
            raise PreprocessingError("unknown key %r in %s; allowed: %s" % (given, name, ", ".join(known)), index)
    for missing in needed(STEPS[name]):
        if missing not in settings:
            raise PreprocessingError("%s needs the key %r" % (name, missing), index)
    try:
        return STEPS[name](**{given + "_" * keyword.iskeyword(given): value for given, value in settings.items()})
    except PreprocessingError as error:
        raise PreprocessingError("%s: %s" % (name, error), index)


def quantize(values: Array, scale: float, zero_point: int, dtype: Any) -> Array:
    """Float values as a model's 8-bit input: round half to even of value / scale + zero_point, saturated."""
    limits = np.iinfo(dtype)
    return np.clip(np.rint(values / np.float32(scale)) + zero_point, limits.min, limits.max).astype(dtype)


def dequantize(stored: Array, scale: float, zero_point: int) -> Array:
    """A model's 8-bit output as float32: scale * (stored - zero_point)."""
    return ((stored.astype(np.float32) - zero_point) * np.float32(scale)).astype(np.float32)
