"""The summary of a data set, for people who check it before a run."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from compress.artifact import Facts
from compress.data.splits import spread
from compress.data.types import SPLITS, Objects, Split

LOOKED_AT = 256
"""Number of samples of each split whose shapes and ranges are summarized; other samples are only counted."""
MOST_CORRUPT = 100


class Described(Protocol):
    """The interface of a data set that is summarized (`compress.data.dataset.Dataset`)."""

    @property
    def task(self) -> str:
        """The name of the task of the samples."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes."""

    @property
    def corrupt(self) -> list[str]:
        """The samples left out, with the reasons."""

    @property
    def notes(self) -> list[str]:
        """Further notes."""

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Return the label of every sample of a split."""

    def targets(self, split: Split) -> NDArray[np.float32]:
        """Return the targets of every sample, for regression."""

    def objects(self, split: Split) -> list[Objects]:
        """Return the objects of every sample, for detection."""

    def raw(self, split: Split, indices: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return some samples before preprocessing."""


def summary(data: Described) -> Facts:
    """Return the summary as plain values.

    Returns:
        `samples` by split; `counts`: by split, of each class, for detection its objects; `imbalance`: how many the most
        frequent class of the training split has for one of the rarest, None where a class has none; `missing`: the
        classes that it has none of; `shapes`: smallest and largest sample, `range`: smallest and largest value,
        `dtypes`, of `looked_at` samples as they came; `targets`: for regression, the
        range of each; `corrupt`: how many were left out, and the first; `notes`.
    """
    looked = [
        sample
        for split in SPLITS
        for sample in data.raw(split, spread(data.labels(split))[:LOOKED_AT])  # of every class
    ]
    corrupt = data.corrupt
    return {
        "samples": {split: len(data.labels(split)) for split in SPLITS},
        **(_target_ranges(data) if data.task == "regression" else _class_counts(data)),
        **_seen(looked),
        "corrupt": {"count": len(corrupt), "first": corrupt[:MOST_CORRUPT]},
        "notes": data.notes + _about_objects(data),
    }


def _classes(data: Described, split: Split) -> NDArray[np.int64]:
    """Return the class of each sample, or of each object."""
    if data.task != "detection":
        return data.labels(split)
    return np.concatenate([classes for _, classes in data.objects(split)])


def _class_counts(data: Described) -> Facts:
    names = data.class_names
    counts = {split: np.bincount(_classes(data, split), minlength=len(names)) for split in SPLITS}
    train = counts["train"]
    return {
        "counts": {split: found.tolist() for split, found in counts.items()},
        "imbalance": round(float(train.max() / train.min()), 2) if train.min() else None,
        "missing": [names[index] for index in np.flatnonzero(train == 0)],
    }


def _target_ranges(data: Described) -> Facts:
    """Return the range of each target in the training split."""
    train = data.targets("train").astype(np.float64)
    ranges = [
        {"name": name, "least": float(column.min()), "mean": float(column.mean()), "most": float(column.max())}
        for name, column in zip(data.class_names, train.T, strict=True)
    ]
    return {"counts": {}, "imbalance": None, "missing": [], "targets": ranges}


def _about_objects(data: Described) -> list[str]:
    if data.task != "detection":
        return []
    objects = [sample for split in SPLITS for sample in data.objects(split)]
    empty = sum(not len(sample.classes) for sample in objects)
    return [f"classes are counted by objects; {empty:,} of {len(objects):,} images have none"]


def _seen(samples: list[NDArray[Any]]) -> Facts:
    ranks = {sample.ndim for sample in samples}
    same = len(ranks) == 1
    sides = np.array([sample.shape for sample in samples]) if same else np.zeros((0, 0), int)
    full = [sample for sample in samples if sample.size] or [np.zeros(1)]
    return {
        "shapes": [sides.min(axis=0).tolist(), sides.max(axis=0).tolist()] if same else [],
        "range": [float(min(sample.min() for sample in full)), float(max(sample.max() for sample in full))],
        "dtypes": sorted({str(sample.dtype) for sample in samples}),
        "looked_at": len(samples),
    }


def describe(summary: Facts) -> str:
    """Return the summary as a table and lines of text."""
    names, counts = summary["classes"], summary["counts"]
    width = max(len("class"), *(min(len(name), 40) for name in names))
    head = "class" if counts else ""
    lines = [f"{head:<{width}} {'train':>10} {'validation':>10} {'test':>10}"]
    rows = [(name[:40], [counts[split][index] for split in SPLITS]) for index, name in enumerate(names) if counts]
    for name, numbers in [*rows, ("all", list(summary["samples"].values()))]:
        lines.append(f"{name:<{width}} " + " ".join(f"{number:>10,}" for number in numbers))
    for target in summary.get("targets", ()):
        least, mean, most = target["least"], target["mean"], target["most"]
        lines.append(f"target {target['name']}: {least:g} to {most:g}, mean {mean:g}, in the training split")
    if summary["missing"]:
        lines.append(f"no training sample: {', '.join(summary['missing'])}")
    elif summary["imbalance"] is not None:
        lines.append(f"the most frequent class has {summary['imbalance']:g} training samples for one of the rarest")
    shapes = " to ".join(" x ".join(map(str, shape)) for shape in sorted(set(map(tuple, summary["shapes"]))))
    low, high = summary["range"]
    lines.append(
        f"{summary['looked_at']:,} samples looked at: {shapes or 'of different ranks'}, "
        f"{', '.join(summary['dtypes'])}, {low:g} to {high:g}"
    )
    lines += summary["notes"]
    corrupt = summary["corrupt"]
    if corrupt["count"]:
        lines.append(f"{corrupt['count']:,} samples cannot be read, and are not counted:")
        lines += [f"  {reason}" for reason in corrupt["first"]]
    lines += [f"a run would refuse this: {reason}" for reason in summary.get("refused", ())]
    return "\n".join(lines)
