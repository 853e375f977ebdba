"""numpy files of unknown origin: the exceptions that they cause, and shapes without reading the arrays."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
)
"""Exceptions of zipfile and numpy for damaged files, besides OSError; numpy evaluates the header of an array."""


def headers(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and data type of each array in an .npz file.

    Raises:
        OSError: the file cannot be opened or read.
        ERRORS: it is damaged.
    """
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as stream:
                version = np.lib.format.read_magic(stream)
                read = np.lib.format.read_array_header_1_0
                if version != (1, 0):
                    read = np.lib.format.read_array_header_2_0
                shape, _, dtype = read(stream)
                arrays[name.removesuffix(".npy")] = shape, dtype
    return arrays
