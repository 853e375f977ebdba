"""Arrays that are already in memory: a source for the Python API, not for pipeline.yaml."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import PrivateAttr

from compress.data.source import Samples, Source
from compress.data.types import SPLITS, Split
from compress.errors import DataError

Arrays = tuple[NDArray[Any], NDArray[Any]]
"""Samples [n, ...] and their labels [n]."""


@dataclass(frozen=True)
class _Content:
    """The arrays of all splits, one after the other."""

    samples: tuple[NDArray[Any], ...] = ()
    labels: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    splits: Mapping[Split, NDArray[np.int64]] = field(default_factory=dict)

    def sample(self, index: int) -> NDArray[Any]:
        """Return the sample at an index over all splits."""
        for array in self.samples:
            if index < len(array):
                return np.asarray(array[index])
            index -= len(array)
        raise IndexError(index)


class InMemory(Source):
    """Samples and labels as numpy arrays."""

    name: ClassVar[str] = "in_memory"

    class_names: tuple[str, ...]
    """Names of the classes; a label is an index into them."""
    _content: _Content = PrivateAttr(default_factory=_Content)

    @classmethod
    def of(cls, splits: Mapping[Split, Arrays], class_names: tuple[str, ...]) -> Self:
        """Return a source of some splits.

        Args:
            splits: samples [n, ...] and labels [n] (whole numbers from 0) by split; `train` is required.
            class_names: the names of the classes.

        Raises:
            DataError: samples and labels do not fit together.
        """
        samples: list[NDArray[Any]] = []
        labels: list[NDArray[np.int64]] = []
        indices: dict[Split, NDArray[np.int64]] = {}
        start = 0
        for split in SPLITS:
            if split not in splits:
                continue
            array, classes = (np.asarray(part) for part in splits[split])
            _check(split, array, classes)
            samples.append(array)
            labels.append(classes.astype(np.int64))
            indices[split] = np.arange(start, start + len(array))
            start += len(array)
        source = cls(class_names=class_names)
        source._content = _Content(tuple(samples), np.concatenate(labels), indices)
        return source

    def fingerprint(self) -> dict[str, Any]:
        """Return the digest of all samples and labels."""
        digest = hashlib.sha256()
        for array in (*self._content.samples, self._content.labels):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        sizes = {split: len(indices) for split, indices in self._content.splits.items()}
        return {"sha256": digest.hexdigest(), "classes": list(self.class_names), "splits": sizes}

    def load(self) -> Samples:
        """Return the samples with their splits."""
        content = self._content
        return Samples(content.labels, self.class_names, content.sample, content.splits)


def _check(split: Split, samples: NDArray[Any], labels: NDArray[Any]) -> None:
    if samples.ndim < 2 or samples.dtype.kind not in "biuf":
        raise DataError(
            f"samples are {samples.dtype} {list(samples.shape)}", where=split, allowed="an array of numbers [n, ...]"
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"labels are {labels.dtype} {list(labels.shape)}", where=split, allowed="whole numbers [n]")
    if len(samples) != len(labels):
        raise DataError(f"{len(samples):,} samples have {len(labels):,} labels", where=split, allowed="one for each")
