"""The preprocessing in numpy that training, calibration, evaluation and the device share.

A specification is a list of one-key maps, applied in order to one decoded sample::

    [{"resize": {"size": [32, 32], "filter": "bilinear"}},
     {"scale": {"from": [0, 16], "to": [0, 1]}}]

A sample is an array of an integer or float type: an image [height, width, channels], or [height, width] with one
channel; a sound or a row of numbers [n]; a series [time, channels]; a text, uint8 [bytes]. A sample with two axes gets
a third axis of length 1, which `squeeze` removes. The result is float32. The steps for images are in `resizing`, those
for sounds in `sound`, that for texts in `text`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.resizing import Crop, Pad, Resize
from deploy.contract.sound import Length, LogMel, Mfcc, Spectrogram
from deploy.contract.step import (
    LARGEST,
    MOST_BYTES,
    Array,
    Numbers,
    Plan,
    PreprocessingError,
    Shape,
    Step,
    Whole,
    Wholes,
    Word,
    count,
    fields,
    image,
    key,
    needed,
)
from deploy.contract.text import Tokens

__all__ = [
    "MOST_BYTES",
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
"""The version of the results. It increases when the same specification gives different values than before."""

Range = Tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Scale(Step):
    """Map the interval `from` linearly to the interval `to`. Values outside of it follow the same line."""

    from_: Range = key(Numbers(2))
    """Two values of the sample."""
    to: Range = key(Numbers(2), (0.0, 1.0))
    """The values after the step."""

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
        """Return the changed sample."""
        factor, offset = self._line()
        result = sample * np.float32(factor)
        result += np.float32(offset)
        return result


@dataclasses.dataclass(frozen=True)
class Normalize(Step):
    """Subtract `mean`, and divide by `std`: one number for all channels, or one for each channel."""

    mean: Tuple[float, ...] = key(Numbers())
    """The numbers to subtract."""
    std: Tuple[float, ...] = key(Numbers())
    """The numbers to divide by."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(np.float32(value) <= 0 for value in self.std):
            raise PreprocessingError("std must be larger than 0, not %r" % (list(self.std),))

    def planned(self, shape: Shape) -> Plan:
        """Return the same shape."""
        for values in (self.mean, self.std):
            if len(values) not in (1, shape[-1]):
                raise PreprocessingError("normalize has %d numbers for %d channels" % (len(values), shape[-1]))
        return super().planned(shape)

    def __call__(self, sample: Array) -> Array:
        """Return the changed sample; its last axis is the channels."""
        result = sample - np.asarray(self.mean, np.float32)
        result /= np.asarray(self.std, np.float32)
        return result


@dataclasses.dataclass(frozen=True)
class Clip(Step):
    """Clip values to the interval `to`."""

    to: Range = key(Numbers(2))
    """The smallest and the largest value of the result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.to[0] < self.to[1]:
            raise PreprocessingError("to must be two increasing numbers, not %r" % (list(self.to),))

    def __call__(self, sample: Array) -> Array:
        """Return the changed sample."""
        return np.clip(sample, np.float32(self.to[0]), np.float32(self.to[1]))


@dataclasses.dataclass(frozen=True)
class Colour(Step):
    """Reorder the channels of an image, or convert between colour and grey.

    Grey is 0.299 red + 0.587 green + 0.114 blue (ITU-R BT.601), as in Pillow, OpenCV and TensorFlow.
    """

    to: str = key(Word("rgb", "bgr", "grey"))
    """The channels that the model takes."""
    from_: str = key(Word("rgb", "bgr", "grey"), "rgb")
    """The channels of the sample. Images that Coralline or Pillow decodes are rgb; frames of OpenCV are bgr."""

    def planned(self, shape: Shape) -> Plan:
        """Return the shape of the result."""
        height, width, channels = image(shape, "colour")
        expected = 1 if self.from_ == "grey" else 3
        if channels != expected:
            raise PreprocessingError("colour from %s takes %d channels, not %d" % (self.from_, expected, channels))
        return Plan((height, width, 1 if self.to == "grey" else 3), 3 * height * width)

    def __call__(self, sample: Array) -> Array:
        """Return the changed image."""
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
    """Reshape a sample; the order of its values does not change."""

    shape: Tuple[int, ...] = key(Wholes(-1, 1 << 24))
    """The dimensions of the result; one of them may be -1, as in numpy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shape) > 6 or self.shape.count(-1) > 1 or 0 in self.shape:
            raise PreprocessingError(
                "shape must have at most 6 dimensions, no 0, and at most one -1: %r" % (self.shape,)
            )

    def planned(self, shape: Shape) -> Plan:
        """Return the new shape."""
        known = abs(count(self.shape))  # without the -1
        quotient, rest = divmod(count(shape), known)
        if rest or (quotient != 1 and -1 not in self.shape):
            raise PreprocessingError("%r cannot be reshaped to %r" % (list(shape), list(self.shape)))
        return Plan(tuple(quotient if side == -1 else side for side in self.shape), count(shape))

    def __call__(self, sample: Array) -> Array:
        """Return the sample in the new shape."""
        return np.ascontiguousarray(sample).reshape(self.planned(sample.shape).shape)


@dataclasses.dataclass(frozen=True)
class Squeeze(Step):
    """Remove an axis of length 1, for models without channels, such as Conv1D on [time, features]."""

    axis: int = key(Whole(-6, 5), -1)
    """The index of the axis; -1 is the last one."""

    def planned(self, shape: Shape) -> Plan:
        """Return the shape without this axis."""
        rank = len(shape)
        if not -rank <= self.axis < rank or shape[self.axis] != 1 or rank == 1:
            raise PreprocessingError("axis %d of %r is not one of length 1" % (self.axis, list(shape)))
        return Plan(shape[: self.axis % rank] + shape[self.axis % rank + 1 :], 0)

    def __call__(self, sample: Array) -> Array:
        """Return the sample without this axis."""
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
    "tokens": Tokens,
    "reshape": Reshape,
    "squeeze": Squeeze,
}


_SAMPLE = "a sample must be numbers [height, width, channels], or a sound [samples]"
SELECTING = (Resize, Crop)
"""The steps that take images of any type of numbers, and convert the pixels that they use: a photo as float32 would
take four times its memory."""


class Preprocessing:
    """A parsed specification.

    Args:
        specification: a list of one-key maps, as in the module's docstring.

    Attributes:
        steps: the steps, in their order.
        specification: the list, as plain values.

    Raises:
        PreprocessingError: a step or key is unknown, or a value is invalid.
    """

    def __init__(self, specification: Sequence[Any]) -> None:
        if not isinstance(specification, (list, tuple)):
            raise PreprocessingError("preprocess must be a list of steps, not %r" % (specification,))
        self.steps = [_parse(entry, index) for index, entry in enumerate(specification)]
        self.specification: List[Dict[str, Any]] = json.loads(json.dumps(list(specification)))

    @property
    def rate(self) -> Optional[int]:
        """The sampling rate of the sounds in Hz; None if no step defines it."""
        return next((step.rate for step in self.steps if isinstance(step, LogMel)), None)

    @property
    def digest(self) -> str:
        """The SHA-256 of the version and of the steps with all defaults. Equal digests mean equal results."""
        text = json.dumps([VERSION, [step.digest_entry() for step in self.steps]], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def result_shape(self, shape: Shape, most_bytes: int = MOST_BYTES) -> Shape:
        """Return the shape of the result for a sample of this shape. Nothing is allocated.

        Args:
            shape: the shape of the sample.
            most_bytes: the most memory that a step may use for its input, its result and what is between them.

        Raises:
            PreprocessingError: a sample of this shape is not suitable, or a step would need too much memory.
        """
        has_rank = 1 <= len(shape) <= 3 or (len(shape) > 3 and not self.steps)
        if not has_rank or 0 in shape:
            raise PreprocessingError("%s, not %r" % (_SAMPLE, tuple(shape)))
        shape = _with_channels(shape)
        for index, step in enumerate(self.steps):
            try:
                plan: Plan = step.planned(shape)
            except PreprocessingError as error:
                raise PreprocessingError(str(error), index)
            needed_bytes = 4 * (count(shape) + plan.values)
            if needed_bytes > most_bytes:
                facts = (list(shape), needed_bytes >> 20, most_bytes >> 20)
                raise PreprocessingError("a sample of %r needs %d MB of memory here; allowed: %d MB" % facts, index)
            shape = plan.shape
        return shape

    def __call__(self, sample: Array, between: Callable[[], None] = lambda: None) -> Array:
        """Return one preprocessed sample, float32.

        Args:
            sample: the sample.
            between: a function that is called before each step; an exception that it raises ends the work.

        Raises:
            PreprocessingError: the sample's shape or type does not fit, or it would need too much memory.
        """
        if sample.dtype.kind not in "uifb":
            raise PreprocessingError("%s, not %s %r" % (_SAMPLE, sample.dtype, sample.shape))
        self.result_shape(sample.shape)
        values = sample.reshape(_with_channels(sample.shape))
        if sample.dtype == np.int16 and any(isinstance(step, Spectrogram) for step in self.steps):
            values = values.astype(np.float32)
            values /= np.float32(32768)
        for index, step in enumerate(self.steps):
            between()
            if not isinstance(step, SELECTING):
                values = values.astype(np.float32, copy=False)
            try:
                values = step(values)
            except PreprocessingError as error:
                raise PreprocessingError(str(error), index)
        values = np.ascontiguousarray(values, dtype=np.float32)
        return values.copy() if np.may_share_memory(values, sample) else values


def _with_channels(shape: Shape) -> Shape:
    """Return the shape of a sample with its channels: two axes get a third one."""
    return tuple(shape) + (1,) if len(shape) == 2 else tuple(shape)


def _parse(entry: Any, index: int) -> Any:
    if not isinstance(entry, dict) or len(entry) != 1:
        raise PreprocessingError("a step must be a map with one key, not %r" % (entry,), index)
    ((name, stored),) = entry.items()
    if name not in STEPS:
        raise PreprocessingError("unknown step %r; allowed: %s" % (name, ", ".join(STEPS)), index)
    settings = {} if stored is None else stored
    _check_keys(name, settings, index)
    known = fields(STEPS[name])
    try:
        return STEPS[name](**{known[setting].name: value for setting, value in settings.items()})
    except PreprocessingError as error:
        raise PreprocessingError("%s: %s" % (name, error), index)


def _check_keys(name: str, settings: Any, index: int) -> None:
    if not isinstance(settings, dict):
        raise PreprocessingError("%s must be a map, not %r" % (name, settings), index)
    known = fields(STEPS[name])
    unknown = [setting for setting in settings if setting not in known]
    if unknown:
        raise PreprocessingError("unknown key %r in %s; allowed: %s" % (unknown[0], name, ", ".join(known)), index)
    missing = [setting for setting in needed(STEPS[name]) if setting not in settings]
    if missing:
        raise PreprocessingError("%s needs the key %r" % (name, missing[0]), index)


def quantize(values: Array, scale: float, zero_point: int, dtype: Any) -> Array:
    """Return the 8-bit input of a model: values / scale + zero_point, rounded half to even, saturated."""
    limits = np.iinfo(dtype)
    return np.clip(np.rint(values / np.float32(scale)) + zero_point, limits.min, limits.max).astype(dtype)


def dequantize(stored: Array, scale: float, zero_point: int) -> Array:
    """Return the 8-bit output of a model as float32: scale * (stored - zero_point)."""
    return ((stored.astype(np.float32) - zero_point) * np.float32(scale)).astype(np.float32)
