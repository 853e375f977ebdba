"""Calibration: the choice of samples, and plans from the float model's activations on them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.data.rows import rows
from compress.data.types import Data
from compress.learning.quantization.activation_statistics import Statistics, collect
from compress.learning.quantization.plan import QuantizationPlan
from compress.learning.quantization.ranges import WITHOUT_HISTOGRAMS, select
from compress.learning.training import subset
from compress.learning.training.loop import head_of
from compress.learning.training.subset import Indices
from compress.model.ir.keras_graph import Network
from compress.results.encoding import encode
from compress.results.training import SampleSelection
from compress.tasks import task_of
from compress.tasks.base import Specification


@dataclass(frozen=True)
class CalibrationSplit:
    """Samples of the training split that quantization uses.

    Attributes:
        calibration: preprocessed samples for ranges [n, ...].
        held_out: further ones, on which candidates are compared [m, ...]; the same where there are no others.
        select: how the calibration samples were chosen, one of `settings.Calibration`.
        available: samples of the training split.
        seconds: time that the choice took.
        are_rows: whether they are rows of a lookup that was cut off the model (`ir.passes.cut_lookup`).
    """

    calibration: NDArray[np.float32]
    held_out: NDArray[np.float32]
    select: str
    available: int
    seconds: float
    are_rows: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the facts of a stage."""
        count = len(self.calibration)
        facts: dict[str, Any] = {"calibration_samples": count}
        if self.select != "balanced":
            seconds = round(self.seconds, 1)
            facts["calibration"] = encode(SampleSelection(self.select, count, self.available, seconds))
        return facts


def split(
    data: Data,
    select: str,
    count: int,
    held_out: int,
    model: Any = None,
    seed: int = 0,
    specification: Specification = None,
) -> CalibrationSplit:
    """Choose calibration samples and at most `held_out` held-out samples from the training split, as `divided` does."""
    began = time.monotonic()
    chosen, others = divided(select, count, model, data, seed, specification)
    seconds = time.monotonic() - began
    inputs = data.inputs("train")
    # Not sorted: a search runs candidates on the first held-out samples first, and their classes take turns.
    rest = others[:held_out]
    return CalibrationSplit(
        rows(inputs, chosen), rows(inputs, rest if len(rest) else chosen), select, len(inputs), seconds
    )


def divided(
    select: str, count: int, model: Any, data: Data, seed: int, specification: Specification = None
) -> tuple[Indices, Indices]:
    """Return indices of training samples to calibrate with, and of the others, whose classes take turns.

    Args:
        select: one of the ways of `settings.Calibration`.
        count: number of calibration samples; never more than two thirds of the split.
        model: the float Keras model, for `hardness` and `coverage`; None for the others.
        data: the data set.
        seed: of random choices.
        specification: how the model's outputs are read.
    """
    labels = data.labels("train")
    order = np.random.default_rng(seed).permutation(len(labels))
    turns = np.zeros(len(order), int)
    for label in np.unique(labels):
        is_class = labels[order] == label
        turns[is_class] = np.arange(is_class.sum())
    order = order[np.argsort(turns, kind="stable")]
    count = min(count, max(len(order) * 2 // 3, 1))
    if select == "balanced":
        return np.sort(order[:count]), order[count:]
    chosen = _chosen(select, count, model, data, seed, specification)
    return chosen, order[~np.isin(order, chosen)]


def _chosen(select: str, count: int, model: Any, data: Data, seed: int, specification: Specification) -> Indices:
    labels = data.labels("train")
    if select in ("random", "stratified"):
        choose = subset.at_random if select == "random" else subset.stratified
        return choose(count, labels, seed)
    inputs = data.inputs("train")
    if select == "hardness":
        targets = task_of(data).targets(data, "train")
        head = head_of(model, data, specification)
        return subset.by_error(count, labels, subset.errors(model, head, inputs, targets))
    return subset.covering(count, labels, subset.features(model, inputs))


def calibrate(network: Network, samples: NDArray[np.float32], method: str = "minmax") -> QuantizationPlan:
    """Run a network on calibration samples, and choose a range for every point.

    Args:
        network: in canonical form (`ir.passes.fold.canonical`).
        samples: preprocessed calibration samples [n, ...].
        method: one of `ranges.METHODS`.

    Raises:
        StageError: an activation is NaN or infinite.
    """
    return planned(collect(network, samples, histograms=method not in WITHOUT_HISTOGRAMS), method)


def planned(statistics: Statistics, method: str) -> QuantizationPlan:
    """Choose a range for every point from statistics."""
    return QuantizationPlan(select(statistics, method), f"{method} of {statistics.samples} samples")
