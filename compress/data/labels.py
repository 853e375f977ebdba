"""Labels as they stand in files, numbers or names, as indices into classes; and the words for splits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from compress.data.types import SPLITS, Split
from compress.errors import DataError

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
"""A class index beyond this, and beyond the number of samples, is no class index."""
MOST_LETTERS = 200
"""Of the name of a class; numpy keeps every name as long as the longest."""

Labels = tuple[NDArray[np.int64], tuple[str, ...]]


def numbered(values: NDArray[np.integer], classes: Sequence[str] | None, where: str) -> Labels:
    """Class indices, and the names of the classes: by default the numbers from 0 to the largest.

    Raises:
        DataError: a number that is no class index.
    """
    largest = int(values.max()) if len(values) else -1
    if classes is None and largest >= max(MOST_CLASSES, len(values)):
        raise DataError(f"label {largest} is out of range", where=where, allowed="class indices from 0")
    return values.astype(np.int64), tuple(classes or map(str, range(largest + 1)))


def named(values: Sequence[str], classes: Sequence[str] | None, where: str) -> Labels:
    """Names of classes as indices into their sorted names, or into `classes`.

    Raises:
        DataError: a name that is not among `classes`.
    """
    names = tuple(classes or sorted(set(values)))
    place = {name: index for index, name in enumerate(names)}
    unknown = sorted(set(values) - place.keys())
    if unknown:
        shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        raise DataError(f"unknown class {unknown[0]!r}", where=where, allowed=shown)
    return np.array([place[value] for value in values], np.int64), names


def check(name: str, where: str) -> None:
    """Refuses what is no name of a class.

    Raises:
        DataError: it is empty, or too long.
    """
    if not 0 < len(name) <= MOST_LETTERS:
        reason = f"has a label of {len(name):,} letters" if name else "has no label"
        raise DataError(reason, where=where, allowed=f"1 to {MOST_LETTERS} letters")


def read(values: Sequence[str], classes: Sequence[str] | None, where: str) -> Labels:
    """Labels from a table: names of classes, or where all are whole numbers (2, or 2.0) and no class is called so,
    indices.

    Raises:
        DataError: they are neither.
    """
    if all(re.fullmatch(r"\d{1,9}(\.0+)?", value) for value in values) and not set(values) <= set(classes or ()):
        return numbered(np.array([int(value.partition(".")[0]) for value in values], np.int64), classes, where)
    return named(values, classes, where)


def splits(words: Iterable[Split | None]) -> dict[Split, NDArray[np.int64]]:
    """Indices of each split, from the split of each sample; samples without one are in none."""
    found = np.array([word or "" for word in words], np.str_)
    return {split: np.flatnonzero(found == split) for split in SPLITS if split in found}


def refuse_parts(names: Sequence[str], of: Sequence[Split | None], where: str) -> None:
    """Nothing, if all files are of a split, or none is.

    Args:
        names: of the files.
        of: the split of each.
        where: what they are in.

    Raises:
        DataError: some are of a split, others of none.
    """
    if None in of and any(of):
        other = names[of.index(None)]
        what = f"{other!r} is of no split, other files are ({of.count(None):,} of {len(of):,})"
        todo = "move or remove them, or have no splits"
        raise DataError(what, where=where, allowed=", ".join(SPLIT_WORDS), todo=todo)


def split_named(word: str, where: str) -> Split:
    """The split that a word means.

    Raises:
        DataError: it means none.
    """
    if word.strip().lower() not in SPLIT_WORDS:
        raise DataError(f"unknown split {word!r}", where=where, allowed=", ".join(SPLIT_WORDS))
    return SPLIT_WORDS[word.strip().lower()]
