"""Arrays that are already in memory: a source for the Python API, not for pipeline.yaml."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import PrivateAttr

from compress.core.errors import DataError
from compress.data.source import Samples, Source
from compress.data.splits import at_random
from compress.data.types import SPLITS, Split

Arrays = tuple[NDArray[Any], NDArray[Any] | None]
"""Samples [n, ...] and their labels: [n] for classes, [n, ...] for other targets, or None."""


@dataclass(frozen=True)
class _Content:
    """The arrays of all splits, one after the other.

    Attributes:
        samples: by split.
        labels: of all samples; None without labels.
        splits: indices by split.
    """

    samples: tuple[NDArray[Any], ...] = ()
    labels: NDArray[Any] | None = None
    splits: Mapping[Split, NDArray[np.int64]] = field(default_factory=dict)

    def sample(self, index: int) -> NDArray[Any]:
        """Return the sample at an index over all splits."""
        for array in self.samples:
            if index < len(array):
                return np.asarray(array[index])
            index -= len(array)
        raise IndexError(index)

    @property
    def has_classes(self) -> bool:
        """Whether each sample has one class."""
        return self.labels is not None and self.labels.ndim == 1 and self.labels.dtype.kind in "iu"


class InMemory(Source):
    """Samples and labels as numpy arrays."""

    name: ClassVar[str] = "in_memory"

    class_names: tuple[str, ...]
    """Names of the classes, a label is an index into them; or of the targets."""
    _content: _Content = PrivateAttr(default_factory=_Content)

    @classmethod
    def of(cls, splits: Mapping[Split, Arrays], class_names: tuple[str, ...]) -> Self:
        """Return a source of some splits.

        Args:
            splits: samples and labels by split; `train` is required.
            class_names: the names of the classes or targets.

        Raises:
            DataError: samples and labels do not fit together.
        """
        samples: list[NDArray[Any]] = []
        labels: list[NDArray[Any]] = []
        indices: dict[Split, NDArray[np.int64]] = {}
        start = 0
        for split in SPLITS:
            if split not in splits:
                continue
            array = np.asarray(splits[split][0])
            answers = splits[split][1]
            _check(split, array, None if answers is None else np.asarray(answers))
            samples.append(array)
            if answers is not None:
                labels.append(np.asarray(answers))
            indices[split] = np.arange(start, start + len(array))
            start += len(array)
        if labels and len(labels) < len(samples):
            raise DataError("one split has labels, and another has none", allowed="labels for all splits, or for none")
        source = cls(class_names=class_names)
        source._content = _Content(tuple(samples), np.concatenate(labels) if labels else None, indices)
        return source

    def task_name(self) -> str:
        """Return the task that the labels say."""
        if self._content.labels is None:
            return "outputs"
        return "classification" if self._content.has_classes else "regression"

    def fingerprint(self) -> dict[str, Any]:
        """Return the digest of all samples and labels."""
        digest = hashlib.sha256()
        labels = self._content.labels
        for array in (*self._content.samples, *([] if labels is None else [labels])):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        sizes = {split: len(indices) for split, indices in self._content.splits.items()}
        return {"sha256": digest.hexdigest(), "classes": list(self.class_names), "splits": sizes}

    def load(self) -> Samples:
        """Return the samples with their splits."""
        content = self._content
        if content.has_classes:
            assert content.labels is not None
            return Samples(content.labels.astype(np.int64), self.class_names, content.sample, content.splits)
        count = sum(map(len, content.samples))
        targets = content.labels
        names = self.class_names
        if targets is not None and targets.dtype.kind == "f":
            columns = targets[:, np.newaxis] if targets.ndim == 1 else targets
            targets = columns.astype(np.float32)
            names = names or tuple(f"target_{number}" for number in range(columns.shape[1]))
        return Samples(
            np.zeros(count, np.int64),
            names,
            content.sample,
            content.splits,
            divide=at_random,
            targets=targets,
            has_labels=targets is not None,
        )


def _check(split: Split, samples: NDArray[Any], labels: NDArray[Any] | None) -> None:
    if samples.ndim < 2 or samples.dtype.kind not in "biuf":
        raise DataError(
            f"samples are {samples.dtype} {list(samples.shape)}", where=split, allowed="an array of numbers [n, ...]"
        )
    if labels is None:
        return
    if labels.ndim < 1 or labels.dtype.kind not in "biuf":
        raise DataError(
            f"labels are {labels.dtype} {list(labels.shape)}", where=split, allowed="numbers [n] or [n, ...]"
        )
    if len(samples) != len(labels):
        raise DataError(f"{len(samples):,} samples have {len(labels):,} labels", where=split, allowed="one for each")
    if not np.isfinite(labels).all():
        raise DataError("labels have values that are NaN or infinite", where=split, allowed="finite numbers")
