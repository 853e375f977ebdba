"""Samples that occur twice: in two splits, so that the measured quality is too high, or in two classes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.data.source import Samples

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


def about_shared(
    test: Mapping[int, bytes], others: Iterable[Mapping[int, bytes]], samples: Samples, indices: NDArray[np.int64]
) -> list[str]:
    """Warn of test samples that are also in another split.

    Args:
        test: the fingerprints of the test split, by position.
        others: the fingerprints of the other splits.
        samples: all samples.
        indices: the index of each sample of the test split.
    """
    known: set[bytes] = set().union(*(split.values() for split in others)) - {b""}
    repeated = sorted(position for position, digest in test.items() if digest in known)
    if not samples.has_labels or not repeated or len(repeated) < SHARED * len(indices):
        return []
    return [
        f"{len(repeated):,} of {len(indices):,} test samples are also in the training or validation split, for example "
        f"{samples.describe(int(indices[repeated[0]]))}: the measured quality is too high; remove them from one of the "
        "splits"
    ]


def about_contradictory(digests: Mapping[int, bytes], samples: Samples) -> list[str]:
    """Warn of equal samples in two classes, from the fingerprints of some samples by index."""
    first: dict[bytes, int] = {}
    labels = samples.labels
    equal = [(first.setdefault(digest, index), index) for index, digest in sorted(digests.items()) if digest]
    pairs = [pair for pair in equal if labels[pair[0]] != labels[pair[1]]]
    if not pairs:
        return []

    def named(index: int) -> str:
        return f"{samples.describe(index)} ({samples.class_names[labels[index]]})"

    texts = [f"{named(one)} and {named(other)}" for one, other in pairs[:MAX_NAMED]]
    texts += [f"{len(pairs) - len(texts):,} more"] * (len(pairs) > len(texts))
    return [f"equal samples are in two classes: {'; '.join(texts)}: remove each from the wrong class"]
