"""Samples that occur twice: in two splits, so that the measured quality is too high, or in two classes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
"""128 bits: two different samples among millions never have the same digest by chance."""
FEWEST_VALUES = 64
"""Number of values below which equal samples do not indicate a mistake, such as rows of a table."""
MOST_BYTES = 4 << 30
"""A split that was decoded by an earlier run and is larger than this is not read again."""
MAX_NAMED = 10
"""Number of pairs of equal samples that a warning names."""
SHARED = 0.01
"""Share of the test samples from which there is a warning."""


def fingerprint(sample: NDArray[Any]) -> bytes:
    """Return a digest of a sample; empty for one that shows too little: few values, or all the same."""
    if sample.size < FEWEST_VALUES or sample.min() == sample.max():
        return b""
    return hashlib.blake2b(np.ascontiguousarray(sample).tobytes(), digest_size=DIGEST_BYTES).digest()


def shared(test: Mapping[int, bytes], *others: Mapping[int, bytes]) -> list[int]:
    """Return the indices of the test samples that are in other splits, too, from the fingerprints of each split."""
    known: set[bytes] = set().union(*(split.values() for split in others)) - {b""}
    return sorted(index for index, digest in test.items() if digest in known)


def contradictory(digests: Mapping[int, bytes], labels: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return pairs of the indices of equal samples with different labels, from the fingerprints of some samples and
    the labels of all."""
    first: dict[bytes, int] = {}
    pairs = ((first.setdefault(digest, index), index) for index, digest in sorted(digests.items()) if digest)
    return [(one, other) for one, other in pairs if labels[one] != labels[other]]
