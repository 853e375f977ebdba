"""The base of preprocessing steps: keys with their allowed values, and the error that names a wrong one.

A step is a frozen dataclass with the keys of its specification as fields, made by `key`, and a `__call__` from
float32 to float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
MOST_VALUES = 1 << 28
"""Of what a step gives: an image of 8192 x 8192 with four channels. A specification may come from anywhere."""
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


def number(value: Any, name: str) -> float:
    """A value as a float.

    Raises:
        PreprocessingError: it is no number, or none that float32 can hold.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise PreprocessingError("%s must be a number that float32 can hold, not %r" % (name, value))
    return float(value)


class Number:
    """A number from `low` to `high`."""

    def __init__(self, low: float = -LARGEST, high: float = LARGEST) -> None:
        self.low, self.high = low, high

    def __call__(self, value: Any, name: str) -> Any:
        """The value as it is kept.

        Raises:
            PreprocessingError: it is not allowed.
        """
        found = number(value, name)
        if not self.low <= found <= self.high:
            raise PreprocessingError("%s must be a number from %g to %g, not %r" % (name, self.low, self.high, value))
        return found

    def schema(self) -> Dict[str, Any]:
        """The same as a JSON schema."""
        limits = (("minimum", self.low, -LARGEST), ("maximum", self.high, LARGEST))
        return dict({"type": "number"}, **{name: value for name, value, none in limits if value != none})


class Whole(Number):
    """A whole number from `low` to `high`."""

    def __call__(self, value: Any, name: str) -> Any:
        """The value as an int; 8.0 is whole too."""
        found = number(value, name)
        if found != int(found) or not self.low <= found <= self.high:
            wanted = (name, self.low, self.high, value)
            raise PreprocessingError("%s must be a whole number from %d to %d, not %r" % wanted)
        return int(found)

    def schema(self) -> Dict[str, Any]:
        """The same as a JSON schema."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


class Numbers:
    """A list of numbers: `count` of them, or any number but none."""

    def __init__(self, count: Any = None) -> None:
        self.count = count

    def __call__(self, value: Any, name: str) -> Any:
        """The values as a tuple of floats."""
        wrong = not isinstance(value, (list, tuple)) or not value
        if wrong or (self.count is not None and len(value) != self.count):
            wanted = "%d numbers" % self.count if self.count is not None else "numbers"
            raise PreprocessingError("%s must be a list of %s, not %r" % (name, wanted, value))
        return tuple(number(item, name) for item in value)

    def schema(self) -> Dict[str, Any]:
        """The same as a JSON schema."""
        length = {} if self.count is None else {"minItems": self.count, "maxItems": self.count}
        return dict({"type": "array", "items": {"type": "number"}}, **length)


class Wholes(Numbers):
    """A list of whole numbers from `low` to `high`."""

    def __init__(self, low: int, high: int, count: Any = None) -> None:
        super().__init__(count)
        self.low, self.high = low, high

    def __call__(self, value: Any, name: str) -> Any:
        """The values as a tuple of ints."""
        found = super().__call__(value, name)
        if any(each != int(each) or not self.low <= each <= self.high for each in found):
            count = "two " if self.count == 2 else ""
            wanted = (name, count, self.low, self.high, value)
            raise PreprocessingError("%s must be %swhole numbers from %d to %d, not %r" % wanted)
        return tuple(int(each) for each in found)


class Fill(Numbers):
    """One number for all channels, or a list with one for each."""

    def __call__(self, value: Any, name: str) -> Any:
        """The values as a tuple of floats."""
        return super().__call__(value if isinstance(value, (list, tuple)) else [value], name)

    def schema(self) -> Dict[str, Any]:
        """The same as a JSON schema."""
        return {"anyOf": [{"type": "number"}, super().schema()]}


class Word:
    """One of some words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __call__(self, value: Any, name: str) -> Any:
        """The word."""
        if not isinstance(value, str) or value not in self.words:
            wanted = " or ".join(", ".join(map(repr, self.words)).rsplit(", ", 1))
            raise PreprocessingError("%s must be %s, not %r" % (name, wanted, value))
        return value

    def schema(self) -> Dict[str, Any]:
        """The same as a JSON schema."""
        return {"enum": list(self.words)}


class Flag:
    """true or false."""

    def __call__(self, value: Any, name: str) -> Any:
        """The flag."""
        if not isinstance(value, bool):
            raise PreprocessingError("%s must be true or false, not %r" % (name, value))
        return value

    def schema(self) -> Dict[str, Any]:
        """The same as a JSON schema."""
        return {"type": "boolean"}


def key(kind: Any, *default: Any, later: bool = False) -> Any:
    """A field of a step.

    Args:
        kind: what it may hold: one of the classes above.
        default: its value where the specification has none; None stands for nothing. Without it the key is needed.
        later: the step stood without it in an earlier release: the digest tells it only where it is not the default,
            so that what a specification of that time is called stays.
    """
    settled = {"kind": kind, "needed": not default, "later": later}
    return dataclasses.field(default=default[0] if default else None, metadata=settled)


def fields(step: Any) -> Dict[str, dataclasses.Field[Any]]:
    """The keys of a step as they stand in a specification, with their dataclass fields."""
    return {field.name.rstrip("_"): field for field in dataclasses.fields(step)}


def needed(step: Any) -> List[str]:
    """The keys that a specification must have."""
    return [name for name, field in fields(step).items() if field.metadata["needed"]]


@dataclasses.dataclass(frozen=True)
class Step:
    """The base class of all steps: values are checked when a step is created."""

    def __post_init__(self) -> None:
        for name, field in fields(self).items():
            value = getattr(self, field.name)
            if value is not None or field.default is not None or field.metadata["needed"]:
                object.__setattr__(self, field.name, field.metadata["kind"](value, name))

    def told(self) -> List[Any]:
        """What the digest is made of: the class, its values in their order, and what a later release added."""
        values, added = [], {}
        for name, field in fields(self).items():
            value = getattr(self, field.name)
            if not field.metadata["later"]:
                values.append(value)
            elif value != field.metadata["kind"](field.default, name):
                added[name] = value
        return [type(self).__name__, values] + ([added] if added else [])

    def __call__(self, sample: Array) -> Array:
        """The changed sample, float32.

        Raises:
            PreprocessingError: it does not fit.
        """
        raise NotImplementedError


def image(sample: Array, name: str) -> Tuple[int, int, int]:
    """The height, the width and the channels of a sample.

    Raises:
        PreprocessingError: it is no image.
    """
    if sample.ndim != 3:
        raise PreprocessingError("%s takes an image [height, width, channels], not %r" % (name, list(sample.shape)))
    return sample.shape  # type: ignore[no-any-return]


def small(shape: Sequence[int], name: str) -> None:
    """Refuses what would not fit into memory.

    Raises:
        PreprocessingError: an array of this shape has too many values.
    """
    count = 1
    for side in shape:
        count *= int(side)
    if count > MOST_VALUES:
        raise PreprocessingError("%s would give %r, which is more than %d values" % (name, list(shape), MOST_VALUES))
