"""Rows of a split, in memory or in a memory-mapped file larger than memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024


def mapped(array: NDArray[Any]) -> bool:
    """Return if an array is a memory map, of which only the requested rows should be in memory."""
    return isinstance(array, np.memmap)


def rows(array: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[Any]:
    """Return some rows of an array. Pages of a memory map are released at once, so that they do not fill the memory."""
    selected: NDArray[Any] = np.take(array, indices, axis=0)  # one call, which leaves the interpreter to other threads
    if not isinstance(array, np.memmap):
        return selected
    array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    return np.asarray(selected)


def blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield an array as a whole, or a memory map in blocks. BLOCK is a multiple of every batch size in use."""
    if not mapped(array):
        yield array
        return
    for start in range(0, len(array), BLOCK):
        yield rows(array, np.arange(start, min(start + BLOCK, len(array))))
