"""Samples that are in two splits: the quality that is measured on them is too high."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
FEWEST_VALUES = 64
"""Number of values below which equal samples do not indicate a mistake, such as rows of a table."""
MOST_BYTES = 4 << 30
"""A split that was decoded by an earlier run and is larger than this is not read again."""
SHARED = 0.01
"""Share of the test samples from which there is a warning."""


def fingerprint(sample: NDArray[np.float32]) -> bytes:
    """Return a digest of a preprocessed sample; empty for one that shows too little: few values, or all the same."""
    if sample.size < FEWEST_VALUES or sample.min() == sample.max():
        return b""
    return hashlib.blake2b(np.ascontiguousarray(sample).tobytes(), digest_size=DIGEST_BYTES).digest()


def shared(test: Mapping[int, bytes], *others: Mapping[int, bytes]) -> list[int]:
    """Return the indices of the test samples that are in other splits, too.

    Args:
        test: the fingerprints of the test split, by index.
        others: those of the other splits.
    """
    known: set[bytes] = set().union(*(split.values() for split in others)) - {b""}
    return sorted(index for index, digest in test.items() if digest in known)
