"""Rows of a split by their places, whether it is in memory or a map of a file that is larger than memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024


def mapped(array: NDArray[Any]) -> bool:
    """Whether an array is a map of a file, of which only what is asked for should be in memory."""
    return isinstance(array, np.memmap)


def rows(array: NDArray[Any], places: NDArray[np.int64]) -> NDArray[Any]:
    """Some rows of an array; those of a whole map of a file are read, so that pages of it do not fill the memory."""
    if not isinstance(array, np.memmap):
        found: NDArray[Any] = array[places]
        return found
    result = np.empty((len(places), *array.shape[1:]), array.dtype)
    parts = result.reshape(len(places), -1).view(np.uint8)
    size = parts.shape[1]
    handle = os.open(str(array.filename), os.O_RDONLY | os.O_CLOEXEC)
    try:
        for part, place in zip(parts, places.tolist(), strict=True):
            if os.preadv(handle, [part.data], array.offset + place * size) != size:
                raise OSError(f"{array.filename} has become shorter")
    finally:
        os.close(handle)
    return result


def blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """An array in one piece, or a map of a file piece by piece; BLOCK is a multiple of every batch that is used."""
    if not mapped(array):
        yield array
        return
    for start in range(0, len(array), BLOCK):
        yield rows(array, np.arange(start, min(start + BLOCK, len(array))))
