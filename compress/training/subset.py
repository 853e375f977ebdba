"""Selection of samples for training or calibration, from labels, scores and features.

All choices keep the classes in their proportions, but for `at_random`: what is hard or far away is compared within
its class, so that no class is lost with a small share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.artifact import Facts
from compress.data.dataset import spread
from compress.data.rows import rows
from compress.data.types import Data, Objects, Split
from compress.settings import Settings

Way = Literal["random", "stratified", "hardness", "coverage"]
Indices = NDArray[np.int64]


class Subset(Settings):
    """Which part of the training split is used. Validation and test samples are never looked at."""

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
        """Return how many of `samples` training samples are kept: at least one."""
        return max(round(self.share * samples), 1)


@dataclass(frozen=True)
class Part:
    """A data set of whose training split a part is seen (`compress.stage.Data`).

    Attributes:
        whole: all of it.
        indices: samples of its training split.
    """

    whole: Data
    indices: Indices

    @property
    def task(self) -> str:
        """The name of the task."""
        return self.whole.task

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.whole.class_names

    @property
    def preprocessing(self) -> list[dict[str, Any]]:
        """The preprocessing steps."""
        return self.whole.preprocessing

    @property
    def decoding(self) -> dict[str, Any]:
        """The decoding of files on the device (`deploy.contract.decoding`)."""
        return self.whole.decoding

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one preprocessed sample."""
        return self.whole.input_shape

    def summary(self) -> Facts:
        """Return the summary of the whole data set."""
        return self.whole.summary()

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """The samples of a split, preprocessed; the part is in memory."""
        found = self.whole.inputs(split)
        return rows(found, self.indices) if split == "train" else found

    def raw(self, split: Split, indices: Indices) -> list[NDArray[Any]]:
        """Some samples of a split as they came."""
        return self.whole.raw(split, self.indices[indices] if split == "train" else indices)

    def labels(self, split: Split) -> Indices:
        """The label of every sample of a split."""
        found = self.whole.labels(split)
        return found[self.indices] if split == "train" else found

    def targets(self, split: Split) -> NDArray[np.float32]:
        """The targets of every sample of a split."""
        found = self.whole.targets(split)
        return found[self.indices] if split == "train" else found

    def objects(self, split: Split) -> list[Objects]:
        """The objects of every sample of a split."""
        found = self.whole.objects(split)
        return [found[int(index)] for index in self.indices] if split == "train" else found


def at_random(count: int, labels: Indices, seed: int) -> Indices:
    """So many samples, whatever their class."""
    return np.sort(np.random.default_rng(seed).permutation(len(labels))[:count])


def stratified(count: int, labels: Indices, seed: int) -> Indices:
    """So many samples at random, the classes in their proportions."""
    return np.sort(spread(labels, seed)[:count])


def by_error(count: int, labels: Indices, errors: NDArray[np.float64], keep: str = "hardest") -> Indices:
    """The samples with the largest errors in each class, or those around the median.

    Args:
        count: how many.
        labels: [n].
        errors: [n].
        keep: "hardest" or "middle".
    """
    found = []
    for members, some in _quotas(count, labels):
        order = members[np.argsort(-errors[members], kind="stable")]
        first = (len(order) - some) // 2 if keep == "middle" else 0
        found.append(order[first : first + some])
    return np.sort(np.concatenate(found))


def covering(count: int, labels: Indices, features: NDArray[np.float32]) -> Indices:
    """Samples of which every other one of their class is near one: greedy k-centre.

    It begins with the sample nearest to the mean of its class, and takes the one farthest from all taken so far.
    Source: Sener and Savarese, Active Learning for Convolutional Neural Networks: A Core-Set Approach, ICLR 2018,
    algorithm 1.

    Args:
        count: how many.
        labels: [n].
        features: [n, features].
    """
    found = []
    for members, some in _quotas(count, labels):
        points = features[members].astype(np.float32)
        taken = [int(np.square(points - points.mean(axis=0)).sum(axis=1).argmin())]
        distance = np.square(points - points[taken[0]]).sum(axis=1)
        for _ in range(some - 1):
            distance[taken[-1]] = -1  # so that equal samples are not taken twice
            taken.append(int(distance.argmax()))
            distance = np.minimum(distance, np.square(points - points[taken[-1]]).sum(axis=1))
            distance[taken] = -1
        found.append(members[taken[:some]])
    return np.sort(np.concatenate(found))


def _quotas(count: int, labels: Indices) -> list[tuple[Indices, int]]:
    """The samples of each class, and how many of them are taken: as `stratified` would take them."""
    taken = np.bincount(labels[spread(labels)[:count]], minlength=int(labels.max()) + 1)
    groups = [(np.flatnonzero(labels == label), int(some)) for label, some in enumerate(taken)]
    return [(members, some) for members, some in groups if some]
