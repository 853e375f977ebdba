"""Conversion between dataclasses and JSON values.

Not by pydantic: names of files and classes may contain unpaired surrogates, which it refuses, and importing the report
must stay fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def decode(kind: type[T], value: object) -> T:
    """Return JSON values as a dataclass. Keys that it has no field for are ignored.

    Raises:
        ValueError: a key without a default is missing, a value has the wrong type, or the dataclass refuses the values.
    """
    return cast(T, _decode(kind, value))


def _decode(kind: Any, value: Any) -> Any:
    if get_origin(kind) is not None:
        return _decode_generic(get_origin(kind), get_args(kind), value)
    if kind is Any:
        return value
    if not is_dataclass(kind):
        return _checked(kind, value)
    content = _checked(dict, value)
    types = get_type_hints(kind)
    known = [field.name for field in fields(kind) if field.name in content]
    required = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    if missing := next((name for name in required if name not in content), None):
        raise ValueError(f"the value of {missing} is missing")
    return cast(Any, kind)(**{name: _decode(types[name], content[name]) for name in known})


def _decode_generic(origin: Any, arguments: Any, value: Any) -> Any:
    """Return a value of a type with arguments: `X | None`, `tuple[X, ...]`, `Mapping[str, X]` or a literal."""
    if origin is UnionType and value is None:
        return None
    if origin is UnionType:
        return _decode(arguments[0], value)
    if origin is tuple:
        return tuple(_decode(arguments[0], item) for item in _checked(list, value))
    if origin is Mapping:
        return {key: _decode(arguments[1], item) for key, item in _checked(dict, value).items()}
    if value not in arguments:
        raise ValueError(f"{value!r:.80} is not one of {arguments}")
    return value


def _checked(kind: type[T], value: object) -> T:
    is_float = kind is float and type(value) is int
    if not is_float and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        raise ValueError(f"{value!r:.80} is not a value of type {kind.__name__}")
    return cast(T, value)


def encode(value: Any) -> Any:
    """Return dataclasses, maps and sequences as JSON values, with None for infinity and NaN."""
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
