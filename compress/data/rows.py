"""Rows of a split by their places, whether it is in memory or a map of a file that is larger than memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024


def mapped(array: NDArray[Any]) -> bool:
    """Whether an array is a map of a file, of which only what is asked for should be in memory."""
    return isinstance(array, np.memmap)


def rows(array: NDArray[Any], places: NDArray[np.int64]) -> NDArray[Any]:
    """Some rows of an array; of a map of a file, pages are let go at once, so that they do not fill the memory."""
    found: NDArray[Any] = np.take(array, places, axis=0)  # one call, which leaves the interpreter to other threads
    if not isinstance(array, np.memmap):
        return found
    array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    return np.asarray(found)


def blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """An array in one piece, or a map of a file piece by piece; BLOCK is a multiple of every batch that is used."""
    if not mapped(array):
        yield array
        return
    for start in range(0, len(array), BLOCK):
        yield rows(array, np.arange(start, min(start + BLOCK, len(array))))
