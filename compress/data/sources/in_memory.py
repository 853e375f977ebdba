"""Arrays that are already in memory: a source for the Python API, not for pipeline.yaml."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
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


class InMemory(Source):
    """Samples and labels as numpy arrays."""

    name: ClassVar[str] = "in_memory"

    class_names: tuple[str, ...]
    """Names of the classes, a label is an index into them; or of the targets."""
    _arrays: dict[Split, Arrays] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, splits: Mapping[Split, Arrays], class_names: tuple[str, ...]) -> Self:
        """Return a source of samples and labels by split, of which `train` is required.

        Raises:
            DataError: samples and labels do not fit together.
        """
        source = cls(class_names=class_names)
        for split in SPLITS:
            if split in splits:
                samples, labels = splits[split]
                source._arrays[split] = np.asarray(samples), None if labels is None else np.asarray(labels)
                _check(split, *source._arrays[split])
        if len({labels is None for _, labels in source._arrays.values()}) > 1:
            raise DataError("one split has labels, and another has none", allowed="labels for all splits, or for none")
        return source

    def task_name(self) -> str:
        """Return the task that the labels say."""
        labels = self._labels
        if labels is None:
            return "outputs"
        return "classification" if _are_classes(labels) else "regression"

    @property
    def _labels(self) -> NDArray[Any] | None:
        """The labels of all samples, split after split; None without labels."""
        parts = [labels for _, labels in self._arrays.values() if labels is not None]
        return np.concatenate(parts) if parts else None

    def fingerprint(self) -> dict[str, Any]:
        """Return the digest of all samples and labels."""
        digest = hashlib.sha256()
        labels = self._labels
        samples = [samples for samples, _ in self._arrays.values()]
        for array in (*samples, *([] if labels is None else [labels])):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        sizes = {split: len(samples) for split, (samples, _) in self._arrays.items()}
        return {"sha256": digest.hexdigest(), "classes": list(self.class_names), "splits": sizes}

    def load(self) -> Samples:
        """Return the samples with their splits."""
        arrays = [samples for samples, _ in self._arrays.values()]
        starts = np.cumsum([0, *map(len, arrays)])
        splits = dict(zip(self._arrays, np.split(np.arange(starts[-1]), starts[1:-1]), strict=True))

        def read(index: int) -> NDArray[Any]:
            part = int(np.searchsorted(starts, index, side="right")) - 1
            return np.asarray(arrays[part][index - starts[part]])

        labels = self._labels
        if labels is not None and _are_classes(labels):
            return Samples(labels.astype(np.int64), self.class_names, read, splits)
        names = self.class_names
        if labels is not None and labels.dtype.kind == "f":
            labels = (labels[:, np.newaxis] if labels.ndim == 1 else labels).astype(np.float32)
            names = names or tuple(f"target_{number}" for number in range(labels.shape[1]))
        return Samples(
            np.zeros(starts[-1], np.int64),
            names,
            read,
            splits,
            divide=at_random,
            targets=labels,
            has_labels=labels is not None,
        )


def _are_classes(labels: NDArray[Any]) -> bool:
    """Return whether labels are one class for each sample."""
    return labels.ndim == 1 and labels.dtype.kind in "iu"


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
