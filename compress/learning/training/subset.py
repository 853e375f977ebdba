"""Selection of samples for training or calibration, from labels, scores and features.

All selections keep the class proportions, except `at_random`: errors and distances are compared within a class, so
that a small share does not lose a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.core.artifact import Facts
from compress.core.settings import Settings
from compress.data.dataset import spread
from compress.data.rows import rows
from compress.data.types import Data, Objects, Split

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


@dataclass(frozen=True)
class Part:
    """A data set with a part of its training split (`compress.pipeline.stage.Data`).

    Attributes:
        full: the full data set.
        indices: the selected samples of its training split.
    """

    full: Data
    indices: Indices

    @property
    def task(self) -> str:
        """The name of the task."""
        return self.full.task

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.full.class_names

    @property
    def preprocessing(self) -> list[dict[str, Any]]:
        """The preprocessing steps."""
        return self.full.preprocessing

    @property
    def decoding(self) -> dict[str, Any]:
        """The decoding of files on the device (`deploy.contract.decoding`)."""
        return self.full.decoding

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one preprocessed sample."""
        return self.full.input_shape

    def summary(self) -> Facts:
        """Return the summary of the full data set."""
        return self.full.summary()

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """Return the preprocessed samples of a split; the selected part is in memory."""
        samples = self.full.inputs(split)
        return rows(samples, self.indices) if split == "train" else samples

    def describe(self, split: Split, index: int) -> str:
        """Return the name of a sample for people."""
        return self.full.describe(split, int(self.indices[index]) if split == "train" else index)

    def raw(self, split: Split, indices: Indices) -> list[NDArray[Any]]:
        """Return some samples of a split without preprocessing."""
        return self.full.raw(split, self.indices[indices] if split == "train" else indices)

    def labels(self, split: Split) -> Indices:
        """Return the labels of a split."""
        labels = self.full.labels(split)
        return labels[self.indices] if split == "train" else labels

    @property
    def has_targets(self) -> bool:
        """Whether the samples have arrays as targets."""
        return self.full.has_targets

    def targets(self, split: Split) -> NDArray[Any]:
        """Return the targets of a split."""
        targets = self.full.targets(split)
        return targets[self.indices] if split == "train" else targets

    def objects(self, split: Split) -> list[Objects]:
        """Return the objects of every sample of a split."""
        objects = self.full.objects(split)
        return [objects[int(index)] for index in self.indices] if split == "train" else objects


def at_random(count: int, labels: Indices, seed: int) -> Indices:
    """Return random samples, independent of their class."""
    return np.sort(np.random.default_rng(seed).permutation(len(labels))[:count])


def stratified(count: int, labels: Indices, seed: int) -> Indices:
    """Return random samples with the class proportions kept."""
    return np.sort(spread(labels, seed)[:count])


def by_error(count: int, labels: Indices, errors: NDArray[np.float64], keep: str = "hardest") -> Indices:
    """Return the samples with the largest errors in each class, or those around the median.

    Args:
        count: number of samples to select.
        labels: [n].
        errors: [n].
        keep: "hardest" or "middle".
    """
    selected = []
    for members, quota in _quotas(count, labels):
        order = members[np.argsort(-errors[members], kind="stable")]
        first = (len(order) - quota) // 2 if keep == "middle" else 0
        selected.append(order[first : first + quota])
    return np.sort(np.concatenate(selected))


def covering(count: int, labels: Indices, features: NDArray[np.float32]) -> Indices:
    """Return samples such that every other sample of their class is close to one of them: greedy k-centre.

    The first one is the sample closest to the mean of its class, each further one the farthest from all selected ones.
    Source: Sener and Savarese, Active Learning for Convolutional Neural Networks: A Core-Set Approach, ICLR 2018,
    algorithm 1.

    Args:
        count: number of samples to select.
        labels: [n].
        features: [n, features].
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
