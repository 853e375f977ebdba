"""The summary and the examination of a data set, for people who check it before a run (`python -m compress data`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.core.errors import DataError
from compress.core.progress import Progress
from compress.data.source import MAX_NAMED
from compress.data.splits import spread
from compress.data.types import SPLITS, Data
from deploy.contract.image_geometry import NO_CLASS

if TYPE_CHECKING:
    from compress.data.dataset import Dataset

SCHEMA_VERSION = 1

LOOKED_AT = 256
"""Number of samples of each split whose shapes and ranges are summarized; other samples are only counted."""
MAX_DISTORTION = 2.0
"""Typical change of the aspect ratio of images from which there is a warning."""
SHAPING_STEPS = frozenset({"resize", "crop", "pad"})
"""Preprocessing steps that change height and width of an image."""
MOST_CLASSES_SHOWN = 10
_ADJECTIVES = {"train": "training", "validation": "validation", "test": "test"}


class Described(Data, Protocol):
    """The interface of a data set that is summarized (`compress.data.dataset.Dataset`)."""

    @property
    def corrupt(self) -> list[str]:
        """The samples left out, with the reasons."""

    @property
    def notes(self) -> list[str]:
        """Further notes."""

    @property
    def warnings(self) -> list[str]:
        """The probable mistakes in the data."""

    @property
    def has_objects(self) -> bool:
        """Whether the samples have objects with boxes."""


def examine(data: Dataset, progress: Progress) -> tuple[Facts, bool]:
    """Read and preprocess every sample as a run would, and summarize the data.

    Returns:
        Plain values: `classes`, the data's summary with everything that cannot be read, and `refused`: what else a run
        would refuse. And whether a run would refuse the data.

    Raises:
        DataError: the data is missing, or not what it should be.
    """
    tolerant = data.tolerant()
    tolerant.work_in(None, progress)
    refused = []
    for split in SPLITS:
        try:
            tolerant.try_out(split)
        except DataError as error:
            refused.append(str(error))
    summary = tolerant.summary()
    summary["notes"] += tolerant.observed
    report = {
        "schema_version": SCHEMA_VERSION,
        "source": data.source.name,
        "classes": list(tolerant.class_names),
        **summary,
        "refused": refused,
    }
    corrupt = bool(tolerant.corrupt) and getattr(data.source, "corrupt", "refuse") == "refuse"
    return report, corrupt or bool(refused)


def summary(data: Described) -> Facts:
    """Return the summary as plain values.

    Returns:
        `samples`: the number of samples of each split. `counts`: for each split, the number of samples of each class;
        for detection, of its objects. `imbalance`: the largest class of the training split divided by the smallest;
        None if a class is empty. `missing`: the classes without training samples;
        `without_samples`: those of each split. `shapes`: the smallest and the
        largest shape; `range`: the smallest and the largest value; `dtypes`: all three of `looked_at` samples before
        preprocessing. `targets`: for regression, the range of each target. `corrupt`: the number of samples that were
        left out, and the first of them. `notes`: further notes. `warnings`: what is probably wrong.
    """
    looked = [
        sample
        for split in SPLITS
        for sample in data.raw(split, spread(data.labels(split))[:LOOKED_AT])  # samples of every class
    ]
    corrupt = data.corrupt
    masks = _about_masks(data)
    return {
        "samples": {split: len(data.labels(split)) for split in SPLITS},
        **_label_counts(data),
        **_seen(looked),
        "corrupt": {"count": len(corrupt), "first": corrupt[:MAX_NAMED]},
        "notes": data.notes + _about_objects(data) + masks[0],
        "warnings": data.warnings + _about_distortion(looked, data.preprocessing) + masks[1],
    }


def _label_counts(data: Described) -> Facts:
    """Return the counts of classes, or the ranges of targets, or nothing of samples without labels."""
    nothing: Facts = {"counts": {}, "imbalance": None, "missing": [], "without_samples": {}}
    if data.has_targets:
        targets = data.targets("train")
        return _target_ranges(data) if targets.shape[1:] == (len(data.class_names),) else nothing
    return _class_counts(data) if data.class_names else nothing


def _class_counts(data: Described) -> Facts:
    """Return the number of samples, or of objects, of each class."""
    names = data.class_names
    counts = {}
    for split in SPLITS:
        labels = data.labels(split)
        if data.has_objects:
            labels = np.concatenate([classes for _, classes in data.objects(split)])
        counts[split] = np.bincount(labels, minlength=len(names))
    train = counts["train"]
    without = {split: [names[index] for index in np.flatnonzero(count == 0)] for split, count in counts.items()}
    return {
        "counts": {split: count.tolist() for split, count in counts.items()},
        "imbalance": round(float(train.max() / train.min()), 2) if train.min() else None,
        "missing": without["train"],
        "without_samples": without,
    }


def _target_ranges(data: Described) -> Facts:
    train = data.targets("train").astype(np.float64)
    ranges = [
        {"name": name, "least": float(column.min()), "mean": float(column.mean()), "most": float(column.max())}
        for name, column in zip(data.class_names, train.T, strict=True)
    ]
    return {"counts": {}, "imbalance": None, "missing": [], "without_samples": {}, "targets": ranges}


def _about_objects(data: Described) -> list[str]:
    if not data.has_objects:
        return []
    objects = [sample for split in SPLITS for sample in data.objects(split)]
    empty = sum(not len(sample.classes) for sample in objects)
    return [f"classes are counted by objects; {empty:,} of {len(objects):,} images have none"]


def _about_masks(data: Described) -> tuple[list[str], list[str]]:
    """Return notes and warnings on masks: the share of each class in the pixels of the training split."""
    targets = data.targets("train") if data.has_targets else np.zeros(0)
    if targets.dtype != np.uint8 or targets.ndim != 3:
        return [], []
    counts = np.bincount(targets.ravel(), minlength=NO_CLASS + 1)
    total = max(int(counts[:NO_CLASS].sum()), 1)
    present = [index for index in np.argsort(-counts[:NO_CLASS], kind="stable").tolist() if counts[index]]
    shares = [f"{data.class_names[index]} {counts[index] / total:.1%}" for index in present[:MOST_CLASSES_SHOWN]]
    note = f"pixels of the training masks: {', '.join(shares)}; {counts[NO_CLASS] / targets.size:.1%} do not count"
    if len(present) > 1:
        return [note], []
    only = f"of the class {data.class_names[present[0]]!r}" if present else f"{NO_CLASS}, which does not count"
    return [note], [f"every pixel of the training masks is {only}: check `classes`, `keep` and `ignore`"]


def _about_distortion(samples: list[NDArray[Any]], steps: list[dict[str, Any]]) -> list[str]:
    """Warn of images that the first step in `steps` stretches to a very different aspect ratio."""
    shaping = next((step for step in steps if step.keys() & SHAPING_STEPS), {})
    resize = shaping.get("resize")
    shapes = [sample.shape for sample in samples if sample.dtype == np.uint8 and sample.ndim == 3]
    if resize is None or resize.get("fit", "stretch") != "stretch" or not shapes:
        return []
    height, width = resize["size"]
    ratios = np.array([(shape[1] / shape[0]) / (width / height) for shape in shapes])
    distortions = np.maximum(ratios, 1 / ratios)
    if np.median(distortions) < MAX_DISTORTION:
        return []
    example = shapes[int(np.argmax(distortions))]
    return [
        f"the images are distorted: one of {example[1]} x {example[0]} pixels, for example, is stretched to {width} x "
        f"{height}; if the model was trained without that, set `fit: crop` or `fit: pad` in resize"
    ]


def _seen(samples: list[NDArray[Any]]) -> Facts:
    not_empty = [sample for sample in samples if sample.size] or [np.zeros(1)]
    return {
        "shapes": _shape_range(samples),
        "range": [float(min(map(np.min, not_empty))), float(max(map(np.max, not_empty)))],
        "dtypes": sorted({str(sample.dtype) for sample in samples}),
        "looked_at": len(samples),
    }


def _shape_range(samples: list[NDArray[Any]]) -> list[list[int]]:
    """Return the smallest and the largest length of each axis; nothing for samples of different ranks."""
    if len({sample.ndim for sample in samples}) != 1:
        return []
    shapes = np.array([sample.shape for sample in samples])
    return [shapes.min(axis=0).tolist(), shapes.max(axis=0).tolist()]


def describe(summary: Facts) -> str:
    """Return the summary as a table and lines of text."""
    lines = [
        *_class_table(summary),
        *(
            f"target {target['name']}: {target['least']:g} to {target['most']:g}, mean {target['mean']:g}, in the "
            "training split"
            for target in summary.get("targets", ())
        ),
        *_balance(summary),
        _sample_line(summary),
        *summary["notes"],
        *(f"warning: {text}" for text in summary["warnings"]),
    ]
    corrupt = summary["corrupt"]
    if corrupt["count"]:
        lines.append(f"{corrupt['count']:,} samples cannot be read, and are not counted:")
        lines += [f"  {reason}" for reason in corrupt["first"]]
    lines += [f"a run would refuse this: {reason}" for reason in summary.get("refused", ())]
    return "\n".join(lines)


def _class_table(summary: Facts) -> list[str]:
    names = [name[:40] for name in summary["classes"]]
    counts = summary["counts"]
    width = max(map(len, ["class", *names]))
    rows: list[tuple[str, ...]] = [("class" if counts else "", *SPLITS)]
    if counts:
        columns = [[f"{count:,}" for count in counts[split]] for split in SPLITS]
        rows += zip(names, *columns, strict=True)
    rows.append(("all", *(f"{count:,}" for count in summary["samples"].values())))
    return [f"{name:<{width}} " + " ".join(f"{cell:>10}" for cell in cells) for name, *cells in rows]


def _balance(summary: Facts) -> list[str]:
    without = summary["without_samples"]
    lines = [f"no {_ADJECTIVES[split]} sample: {', '.join(without[split])}" for split in SPLITS if without.get(split)]
    if summary["imbalance"] is not None:
        lines.append(f"the most frequent class has {summary['imbalance']:g} training samples for one of the rarest")
    return lines


def _sample_line(summary: Facts) -> str:
    shapes = [" x ".join(map(str, shape)) for shape in sorted(set(map(tuple, summary["shapes"])))]
    low, high = summary["range"]
    shape = " to ".join(shapes) or "of different ranks"
    dtypes = ", ".join(summary["dtypes"])
    return f"{summary['looked_at']:,} samples looked at: {shape}, {dtypes}, {low:g} to {high:g}"
