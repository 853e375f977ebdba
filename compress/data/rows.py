"""Rows of a split, in memory or in a memory-mapped file larger than memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024
"""Rows; chosen: 600 MB of photos of 224 x 224 pixels in float32."""


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


class Rows:
    """The destination of samples of one shape: memory, or a file if they are large together.

    Args:
        count: the number of samples.
        large: the size in bytes above which the samples are written to the file.
        path: the .npy file; None: always in memory.
        keep: whether the samples are stored; otherwise only their shape is recorded.
    """

    def __init__(self, count: int, large: int, path: Path | None, *, keep: bool = True) -> None:
        self._count, self._large, self._path, self._keep = count, large, path, keep
        self._array: NDArray[np.float32] | None = None
        self._stream: Any = None
        self.shape: tuple[int, ...] | None = None

    def put(self, index: int, sample: NDArray[np.float32]) -> None:
        """Store the next sample."""
        if self.shape is None:
            self.shape = sample.shape
            shape = (self._count, *sample.shape)
            if not self._keep:
                return
            if self._path is not None and sample.nbytes * self._count > self._large:
                self._stream = self._path.open("wb")
                header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(self._stream, header)
            else:
                self._array = np.empty(shape, np.float32)
        if self._stream is not None:
            self._stream.write(np.ascontiguousarray(sample, "<f4").data)
        elif self._array is not None:
            self._array[index] = sample

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def taken(self) -> NDArray[np.float32] | None:
        """Return the array in memory; None if everything is written to the file."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        return self._array
