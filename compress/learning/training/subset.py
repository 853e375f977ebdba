"""Selection of samples for training or calibration, from labels, scores and features.

All selections keep the class proportions, except `at_random`: errors and distances are compared within a class, so
that a small share does not lose a class.
"""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.core.artifact import Facts
from compress.core.errors import StageError
from compress.core.files import write_atomically
from compress.core.settings import Settings
from compress.data.rows import rows
from compress.data.splits import spread
from compress.data.types import Data, Objects, Split
from compress.learning.context import Context
from compress.model.ir.tensorflow import input_tensors, keras, run, set_weights
from compress.results.encoding import encode
from compress.results.training import SampleSelection
from compress.tasks import task_of

if TYPE_CHECKING:
    from compress.tasks.base import Head

Way = Literal["random", "stratified", "hardness", "coverage"]
Indices = NDArray[np.int64]


class Subset(Settings):
    """Selection of a part of the training split."""

    by: Way
    """random: at random. stratified: at random, with the class proportions kept. hardness: by the error of a model
    (EL2N). coverage: samples that are far from each other in the input of a model's last layer (k-centre)."""
    share: Annotated[float, Field(gt=0, lt=1)]
    """Fraction of the training split to train on."""
    keep: Literal["hardest", "middle"] = "hardest"
    """For hardness. hardest: the samples with the largest errors. middle: those around the median, which is better if
    labels are wrong or few samples are kept."""
    of: Literal["proxy", "model"] = "proxy"
    """The model that gives errors and features. proxy: a copy of the model that is trained from scratch for `epochs`.
    model: the model as it is."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 3
    """Number of passes over the training split for each proxy."""
    seeds: Annotated[int, Field(ge=1, le=20)] = 2
    """Number of proxies whose errors are averaged (hardness)."""

    def count(self, samples: int) -> int:
        """Return the number of samples to select from `samples` training samples: at least one."""
        return max(round(self.share * samples), 1)


class Part:
    """A data set with a part of its training split; everything else is that of the full data set.

    Args:
        full: the full data set.
        indices: the selected samples of its training split.
    """

    def __init__(self, full: Data, indices: Indices) -> None:
        self._full, self._indices = full, indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._full, name)

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """Return the preprocessed samples of a split; the selected part is in memory."""
        samples = self._full.inputs(split)
        return rows(samples, self._indices) if split == "train" else samples

    def describe(self, split: Split, index: int) -> str:
        """Return the name of a sample for people."""
        return self._full.describe(split, int(self._indices[index]) if split == "train" else index)

    def raw(self, split: Split, indices: Indices) -> list[NDArray[Any]]:
        """Return some samples of a split without preprocessing."""
        return self._full.raw(split, self._indices[indices] if split == "train" else indices)

    def labels(self, split: Split) -> Indices:
        """Return the labels of a split."""
        labels = self._full.labels(split)
        return labels[self._indices] if split == "train" else labels

    def targets(self, split: Split) -> NDArray[Any]:
        """Return the targets of a split."""
        targets = self._full.targets(split)
        return targets[self._indices] if split == "train" else targets

    def objects(self, split: Split) -> list[Objects]:
        """Return the objects of every sample of a split."""
        objects = self._full.objects(split)
        return [objects[int(index)] for index in self._indices] if split == "train" else objects


def at_random(count: int, labels: Indices, seed: int) -> Indices:
    """Return random samples, independent of their class."""
    return np.sort(np.random.default_rng(seed).permutation(len(labels))[:count])


def stratified(count: int, labels: Indices, seed: int) -> Indices:
    """Return random samples with the class proportions kept."""
    return np.sort(spread(labels, seed)[:count])


def by_error(count: int, labels: Indices, errors: NDArray[np.float64], keep: str = "hardest") -> Indices:
    """Return the samples with the largest errors in each class, or (`keep`: "middle") those around the median."""
    selected = []
    for members, quota in _quotas(count, labels):
        order = members[np.argsort(-errors[members], kind="stable")]
        first = (len(order) - quota) // 2 if keep == "middle" else 0
        selected.append(order[first : first + quota])
    return np.sort(np.concatenate(selected))


def covering(count: int, labels: Indices, features: NDArray[np.float32]) -> Indices:
    """Return samples such that every other sample of their class is close to one of them: greedy k-centre.

    The first one is the sample whose features [n, features] are closest to the mean of its class, each further one the
    farthest from all selected ones. Source: Sener and Savarese, Active Learning for Convolutional Neural Networks: A
    Core-Set Approach, ICLR 2018, algorithm 1.
    """
    selected = []
    for members, quota in _quotas(count, labels):
        points = features[members].astype(np.float32)
        taken = [int(np.square(points - points.mean(axis=0)).sum(axis=1).argmin())]
        distance = np.square(points - points[taken[0]]).sum(axis=1)
        for _ in range(quota - 1):
            distance[taken[-1]] = -1  # so that equal samples are not selected twice
            taken.append(int(distance.argmax()))
            distance = np.minimum(distance, np.square(points - points[taken[-1]]).sum(axis=1))
            distance[taken] = -1
        selected.append(members[taken[:quota]])
    return np.sort(np.concatenate(selected))


def _quotas(count: int, labels: Indices) -> list[tuple[Indices, int]]:
    """Return the samples of each class, and how many of them `stratified` would select."""
    quotas = np.bincount(labels[spread(labels)[:count]], minlength=int(labels.max()) + 1)
    return [(np.flatnonzero(labels == label), int(quota)) for label, quota in enumerate(quotas) if quota]


FILE = "subset.npz"
BATCH = 64
"""Samples that a model computes at once; chosen: the result does not depend on it."""
FEATURES = 256
"""Maximum number of features; more are projected, which keeps distances within some percent."""
Trained = Callable[[int], Any]
"""Return a copy of the model after a short training, by number."""


def errors(model: Any, head: Head, inputs: NDArray[np.float32], targets: NDArray[Any]) -> NDArray[np.float64]:
    """Return how far a model's outputs are from the training targets, by sample (`Head.sample_errors`): [n]."""
    parts = []
    for start in range(0, len(inputs), BATCH):
        batch = slice(start, start + BATCH)
        parts.append(np.asarray(head.sample_errors(targets[batch], run(model, inputs[batch])), np.float64))
    return np.concatenate(parts)


def features(model: Any, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the inputs of the last layer with weights: float32 [n, features]; feature maps are averaged."""
    library = keras()
    operation = model.outputs[0]._keras_history.operation
    while not getattr(operation, "weights", None):
        tensor = operation.input
        if not library.ops.is_tensor(tensor) and not isinstance(tensor, library.KerasTensor):
            break
        operation = tensor._keras_history.operation
    inner = library.Model(input_tensors(model), operation.input)
    rows = []
    for start in range(0, len(inputs), BATCH):
        values = np.asarray(run(inner, inputs[start : start + BATCH]), np.float32)
        rows.append(values.mean(axis=(1, 2)) if values.ndim == 4 else values.reshape(len(values), -1))
    return _projected(np.concatenate(rows))


def _projected(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return fewer features with nearly the same distances (Johnson and Lindenstrauss, 1984)."""
    if values.shape[1] <= FEATURES:
        return values
    random = np.random.default_rng(0).standard_normal((values.shape[1], FEATURES)).astype(np.float32)
    return values @ random / np.float32(np.sqrt(FEATURES))


def chosen(settings: Subset, head: Head, model: Any, trained: Trained, context: Context) -> tuple[Indices, Facts]:
    """Return the selected samples of the training split, and facts about the selection and its cost.

    The selection is saved in `context.unfinished`, so that an interrupted stage does not repeat it. `trained` returns
    proxies of the model.

    Raises:
        StageError: there are fewer samples than classes, or the outputs of a proxy are not finite.
    """
    labels = context.data.labels("train")
    count = settings.count(len(labels))
    if count < len(np.unique(labels)):
        what = f"leaves {count} samples of {len(labels)} for {len(np.unique(labels))} classes"
        raise StageError(f"subset.share: {settings.share} {what}", hint="make it larger")
    path = context.unfinished / FILE if context.unfinished else None
    saved = _read_selection(path, len(labels)) if path is not None else None
    if saved is not None:
        indices, seconds = saved
    else:
        began = time.monotonic()
        indices = _choose(settings, count, head, model, trained, context)
        seconds = time.monotonic() - began
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.savez(content, indices=indices, seconds=seconds)
            write_atomically(path, content.getvalue())
    method = f"{settings.by}, {settings.keep}" if settings.by == "hardness" else settings.by
    facts = encode(SampleSelection(method, len(indices), len(labels), round(seconds, 1)))
    context.progress.note(f"subset: {summary(facts)}")
    return indices, {"subset": facts}


def _read_selection(path: Path, count: int) -> tuple[Indices, float] | None:
    """Return the saved indices and seconds of an interrupted stage; None if they do not fit the number of samples."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as content:
            indices = content["indices"]
            seconds = float(content["seconds"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
        return None
    if indices.ndim != 1 or indices.dtype != np.int64 or not len(indices):
        return None
    if indices.min() < 0 or indices.max() >= count:
        return None
    return indices, seconds


def summary(facts: Facts, purpose: str = "training") -> str:
    """Return the cost and the gain of a selection, as one line of text."""
    share = 1 - facts["samples"] / facts["of"]
    return (
        f"{facts['samples']:,} of {facts['of']:,} samples for {purpose}, by {facts['by']}: "
        f"{share:.0%} saved, selection took {facts['seconds']:.1f} s"
    )


def _choose(settings: Subset, count: int, head: Head, model: Any, trained: Trained, context: Context) -> Indices:
    labels = context.data.labels("train")
    if settings.by == "random":
        return at_random(count, labels, context.seed)
    if settings.by == "stratified":
        return stratified(count, labels, context.seed)
    inputs = context.data.inputs("train")
    if settings.by == "coverage":
        return covering(count, labels, features(trained(0) if settings.of == "proxy" else model, inputs))
    models_to_score = [trained(number) for number in range(settings.seeds)] if settings.of == "proxy" else [model]
    targets = task_of(context.data).targets(context.data, "train")
    mean_errors = np.mean([errors(scored, head, inputs, targets) for scored in models_to_score], axis=0)
    if not np.isfinite(mean_errors).all():
        raise StageError("the outputs of a proxy are not finite", where="subset", hint="lower learning_rate")
    return by_error(count, labels, mean_errors, settings.keep)


def fresh(model: Any, seed: int) -> Any:
    """Return a copy of a model with random weights; Normalization layers keep their statistics."""
    library = keras(seed)
    copy = library.models.clone_model(model)
    for old, new in zip(model._flatten_layers(), copy._flatten_layers(), strict=True):
        if isinstance(old, library.layers.Normalization):
            set_weights(new, old.get_weights())
    return copy
