"""Labels in files, integers or names, as class indices; and the names of splits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError, nearest
from compress.data.types import SPLITS, Split

SPLIT_WORDS: dict[str, Split] = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "training": "train",
    "dev": "validation",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
MOST_CLASSES = 10_000
"""A label larger than this, and larger than the number of samples, is not a class index."""
MAX_INDEX_DIGITS = 6
"""Longest class index in a file; more digits are certainly a mistake."""
MOST_LETTERS = 200
"""Longest class name: numpy stores every name with the length of the longest."""

MOST_SHOWN = 20
"""Number of class names in a message."""

Labels = tuple[NDArray[np.int64], tuple[str, ...]]
Location = Callable[[int], str]
"""The location of the label at an index, for messages."""


def numbered(
    values: NDArray[np.integer], classes: Sequence[str] | None, location: Location, origin: str = ""
) -> Labels:
    """Return class indices and class names; the default names are the integers from 0 to the largest.

    Raises:
        DataError: a number that is not a class index.
    """
    largest = int(values.max()) if len(values) else -1
    index = int(values.argmax()) if len(values) else 0
    if classes is None and largest >= max(MOST_CLASSES, len(values)):
        raise DataError(f"label {largest} is out of range", where=location(index), allowed="class indices from 0")
    if classes is not None and largest >= len(classes):
        allowed = f"0 to {len(classes) - 1} ({len(classes)} classes: {_shown(classes)}{origin})"
        raise DataError(f"the label {largest} is out of range", where=location(index), allowed=allowed)
    return values.astype(np.int64), tuple(classes or map(str, range(largest + 1)))


def named(values: Sequence[str], classes: Sequence[str] | None, location: Location, origin: str = "") -> Labels:
    """Return class names as indices into the sorted names, or into `classes`, whose `origin` is named in messages.

    Raises:
        DataError: a name that is not among `classes`.
    """
    names = tuple(classes or sorted(set(values)))
    positions = {name: index for index, name in enumerate(names)}
    unknown = min(set(values) - positions.keys(), default=None)
    if unknown is not None:
        where = location(list(values).index(unknown))
        allowed = _shown(names) + origin
        raise DataError(f"unknown class {unknown!r}", where=where, allowed=allowed, hint=alike(unknown, names))
    return np.array([positions[value] for value in values], np.int64), names


def of_array(values: NDArray[Any], classes: Sequence[str] | None, location: Location) -> Labels:
    """Return labels [n], class names or class indices, as indices."""
    if values.dtype.kind == "U":
        return named(values.tolist(), classes, location)
    return numbered(values, classes, location)


def alike(name: str, names: Iterable[str]) -> str:
    """Return what to do about an unknown name: one may differ only in case, blanks, underscores or hyphens, or be
    similar."""
    known = list(names)
    similar = next((other for other in known if _plain(other) == _plain(name)), None)
    if similar:
        return f"{similar!r} differs only in case, blanks or underscores: rename one of the two"
    return nearest(name, known) or "correct the label, or add the name to `classes`"


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_SHOWN]) + (", ..." if len(names) > MOST_SHOWN else "")


def check(name: str, where: str, what: str = "label") -> None:
    """Refuse an invalid class name, or name of a group."""
    if not name:
        raise DataError(f"has no {what}", where=where, hint="add it, or remove the line")
    if len(name) > MOST_LETTERS:
        reason = f"has a {what} of {len(name):,} letters"
        raise DataError(reason, where=where, allowed=f"1 to {MOST_LETTERS} letters", hint="check data.source")


def read(values: Sequence[str], classes: Sequence[str] | None, location: Location, origin: str = "") -> Labels:
    """Return labels from a table as indices. Labels are class names, or indices if all are integers (2 or 2.0) and no
    class has such a name.
    """
    if all(re.fullmatch(r"\d{1,9}(\.0+)?", value) for value in values) and not set(values) <= set(classes or ()):
        return numbered(
            np.array([int(value.partition(".")[0]) for value in values], np.int64), classes, location, origin
        )
    return named(values, classes, location, origin)


def splits(words: Iterable[Split | None]) -> dict[Split, NDArray[np.int64]]:
    """Return the indices of each split from the split of each sample. Samples without a split are in none."""
    split_names = np.array([word or "" for word in words], np.str_)
    return {split: np.flatnonzero(split_names == split) for split in SPLITS if split in split_names}


def refuse_parts(names: Sequence[str], of: Sequence[Split | None], where: str) -> None:
    """Refuse files of which only some belong to a split.

    Raises:
        DataError: some are of a split, others of none.
    """
    if None in of and any(of):
        other = names[of.index(None)]
        what = f"{other!r} is of no split, other files are ({of.count(None):,} of {len(of):,})"
        hint = "move or remove them, or have no splits"
        raise DataError(what, where=where, allowed=", ".join(SPLIT_WORDS), hint=hint)


def split_of_folders(name: str) -> Split | None:
    """Return the split that a folder in the path of a file is named after, such as `val` or `val2017`."""
    words = (re.sub(r"[\d_-]+$", "", part).lower() for part in name.split("/")[:-1])
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def split_named(word: str, where: str) -> Split:
    """Return the split for a word."""
    if word.strip().lower() not in SPLIT_WORDS:
        raise DataError(f"unknown split {word!r}", where=where, allowed=", ".join(SPLIT_WORDS))
    return SPLIT_WORDS[word.strip().lower()]
