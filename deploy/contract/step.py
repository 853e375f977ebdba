"""The base class of preprocessing steps, and the types of their settings.

A step is a frozen dataclass. Its fields, created by `key`, are the keys of its specification. Its `__call__` converts
a float32 sample to another float32 sample.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
MOST_BYTES = 1 << 30
"""The most memory for the preprocessing of one sample. Specifications and samples are untrusted."""
Array = Any
"""A numpy array. numpy 1.16, which old boards have, has no type annotations."""
Shape = Tuple[int, ...]


class Plan(NamedTuple):
    """The result of a step for a sample of some shape, before it is computed.

    Attributes:
        shape: the shape of the result.
        values: the float32 values that the step holds at once, including its result, without its input.
    """

    shape: Shape
    values: int


class PreprocessingError(ValueError):
    """A specification or a sample is invalid.

    Attributes:
        step: the index of the step in the specification, or None.
    """

    def __init__(self, message: str, step: Any = None) -> None:
        super().__init__(message)
        self.step = step


def number(value: Any, name: str) -> float:
    """Return a value as a float.

    Raises:
        PreprocessingError: the value is not a number, or too large for float32.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise PreprocessingError("%s must be a number that float32 can hold, not %r" % (name, value))
    return float(value)


class Number:
    """A number from `low` to `high`."""

    def __init__(self, low: float = -LARGEST, high: float = LARGEST) -> None:
        self.low, self.high = low, high

    def __call__(self, value: Any, name: str) -> Any:
        """Return the value as a float.

        Raises:
            PreprocessingError: the value is not allowed.
        """
        checked = number(value, name)
        if not self.low <= checked <= self.high:
            raise PreprocessingError("%s must be a number from %g to %g, not %r" % (name, self.low, self.high, value))
        return checked

    def schema(self) -> Dict[str, Any]:
        """Return the JSON schema of the values."""
        limits = (("minimum", self.low, -LARGEST), ("maximum", self.high, LARGEST))
        bounds = {name: value for name, value, unlimited in limits if value != unlimited}
        return dict({"type": "number"}, **bounds)


class Whole(Number):
    """A whole number from `low` to `high`."""

    def __call__(self, value: Any, name: str) -> Any:
        """Return the value as an int; 8.0 is allowed too."""
        checked = number(value, name)
        if checked != int(checked) or not self.low <= checked <= self.high:
            facts = (name, self.low, self.high, value)
            raise PreprocessingError("%s must be a whole number from %d to %d, not %r" % facts)
        return int(checked)

    def schema(self) -> Dict[str, Any]:
        """Return the JSON schema of the values."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


class Numbers:
    """A list of `count` numbers; by default one or more."""

    def __init__(self, count: Any = None) -> None:
        self.count = count

    def __call__(self, value: Any, name: str) -> Any:
        """Return the values as a tuple of floats."""
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        if not is_list or self.count not in (None, len(value)):
            allowed = "numbers" if self.count is None else "%d numbers" % self.count
            raise PreprocessingError("%s must be a list of %s, not %r" % (name, allowed, value))
        return tuple(number(item, name) for item in value)

    def schema(self) -> Dict[str, Any]:
        """Return the JSON schema of the values."""
        length = {} if self.count is None else {"minItems": self.count, "maxItems": self.count}
        return dict({"type": "array", "items": {"type": "number"}}, **length)


class Wholes(Numbers):
    """A list of whole numbers from `low` to `high`."""

    def __init__(self, low: int, high: int, count: Any = None) -> None:
        super().__init__(count)
        self.low, self.high = low, high

    def __call__(self, value: Any, name: str) -> Any:
        """Return the values as a tuple of ints."""
        values = super().__call__(value, name)
        if any(item != int(item) or not self.low <= item <= self.high for item in values):
            count = "two " if self.count == 2 else ""
            facts = (name, count, self.low, self.high, value)
            raise PreprocessingError("%s must be %swhole numbers from %d to %d, not %r" % facts)
        return tuple(map(int, values))


class Fill(Numbers):
    """One number for all channels, or a list with one number for each channel."""

    def __call__(self, value: Any, name: str) -> Any:
        """Return the values as a tuple of floats."""
        return super().__call__(value if isinstance(value, (list, tuple)) else [value], name)

    def schema(self) -> Dict[str, Any]:
        """Return the JSON schema of the values."""
        return {"anyOf": [{"type": "number"}, super().schema()]}


class Word:
    """One of several words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __call__(self, value: Any, name: str) -> Any:
        """Return the word."""
        if not isinstance(value, str) or value not in self.words:
            allowed = " or ".join(", ".join(map(repr, self.words)).rsplit(", ", 1))
            raise PreprocessingError("%s must be %s, not %r" % (name, allowed, value))
        return value

    def schema(self) -> Dict[str, Any]:
        """Return the JSON schema of the values."""
        return {"enum": list(self.words)}


class Flag:
    """A boolean."""

    def __call__(self, value: Any, name: str) -> Any:
        """Return the boolean."""
        if not isinstance(value, bool):
            raise PreprocessingError("%s must be true or false, not %r" % (name, value))
        return value

    def schema(self) -> Dict[str, Any]:
        """Return the JSON schema of the values."""
        return {"type": "boolean"}


def key(kind: Any, *default: Any, later: bool = False) -> Any:
    """Return a field of a step.

    Args:
        kind: the allowed values: an instance of one of the classes above.
        default: the value if the specification has none; None for no value. Without a default, the key is required.
        later: whether a release added the key to an existing step. Such a key is part of the digest only if its value
            is not the default, so the digests of older specifications do not change.
    """
    metadata = {"kind": kind, "needed": not default, "later": later}
    return dataclasses.field(default=default[0] if default else None, metadata=metadata)


def fields(step: Any) -> Dict[str, dataclasses.Field[Any]]:
    """Return the dataclass fields of a step by their key in a specification."""
    return {field.name.rstrip("_"): field for field in dataclasses.fields(step)}


def needed(step: Any) -> List[str]:
    """Return the required keys of a step."""
    return [name for name, field in fields(step).items() if field.metadata["needed"]]


@dataclasses.dataclass(frozen=True)
class Step:
    """The base class of all steps: values are checked when a step is created."""

    def __post_init__(self) -> None:
        for name, field in fields(self).items():
            value = getattr(self, field.name)
            if value is not None or field.default is not None or field.metadata["needed"]:
                object.__setattr__(self, field.name, field.metadata["kind"](value, name))

    def digest_entry(self) -> List[Any]:
        """Return the part of the digest: the class, its values in order, and the keys that a later release added."""
        values, added = [], {}
        for name, field in fields(self).items():
            value = getattr(self, field.name)
            if not field.metadata["later"]:
                values.append(value)
            elif value != field.metadata["kind"](field.default, name):
                added[name] = value
        return [type(self).__name__, values] + ([added] if added else [])

    def planned(self, shape: Shape) -> Plan:
        """Return the shape of the result for a sample of this shape, and the values that the step holds at once.

        Raises:
            PreprocessingError: a sample of this shape is not suitable.
        """
        return Plan(shape, count(shape))

    def __call__(self, sample: Array) -> Array:
        """Return the changed sample, float32.

        Raises:
            PreprocessingError: the sample is not suitable.
        """
        raise NotImplementedError


def image(shape: Shape, name: str) -> Tuple[int, int, int]:
    """Return height, width and channels of a sample.

    Raises:
        PreprocessingError: the sample is not an image.
    """
    if len(shape) != 3:
        raise PreprocessingError("%s takes an image [height, width, channels], not %r" % (name, list(shape)))
    return shape[0], shape[1], shape[2]


def count(shape: Sequence[int]) -> int:
    """Return the number of values of an array."""
    product = 1
    for side in shape:
        product *= int(side)
    return product
