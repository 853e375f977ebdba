"""Calibration: which samples, and the float model's activations on them make a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.data.types import Data
from compress.ir.keras_graph import Network
from compress.quantization.activation_statistics import Statistics, collect
from compress.quantization.plan import QuantizationPlan
from compress.quantization.ranges import WITHOUT_HISTOGRAMS, select
from compress.training import subset, subset_selection
from compress.training.loop import head_of
from compress.training.subset import Indices


def divided(select: str, count: int, model: Any, data: Data, seed: int) -> tuple[Indices, Indices]:
    """Samples of the training split to calibrate with, and the others, among which classes take turns.

    Args:
        select: one of the ways of `settings.Calibration`.
        count: how many; never more than two thirds.
        model: the float Keras model, for `hardness` and `coverage`; None for the others.
        data: the data set.
        seed: of what is random.
    """
    labels = data.labels("train")
    order = np.random.default_rng(seed).permutation(len(labels))
    turns = np.zeros(len(order), int)
    for label in np.unique(labels):
        own = labels[order] == label
        turns[own] = np.arange(own.sum())
    order = order[np.argsort(turns, kind="stable")]
    count = min(count, max(len(order) * 2 // 3, 1))
    if select == "balanced":
        return np.sort(order[:count]), order[count:]
    chosen = _chosen(select, count, model, data, seed)
    return chosen, order[~np.isin(order, chosen)]


def _chosen(select: str, count: int, model: Any, data: Data, seed: int) -> Indices:
    labels = data.labels("train")
    if select in ("random", "stratified"):
        way = subset.at_random if select == "random" else subset.stratified
        return way(count, labels, seed)
    inputs = data.inputs("train")
    if select == "hardness":
        return subset.by_error(count, labels, subset_selection.errors(model, head_of(model, data), inputs, labels))
    return subset.covering(count, labels, subset_selection.features(model, inputs))


def calibrate(network: Network, samples: NDArray[np.float32], method: str = "minmax") -> QuantizationPlan:
    """A range for every point.

    Args:
        network: in canonical form (`training.folding.canonical`).
        samples: preprocessed calibration samples [n, ...].
        method: one of `ranges.METHODS`.

    Raises:
        StageError: an activation is NaN or infinite.
    """
    return planned(collect(network, samples, histograms=method not in WITHOUT_HISTOGRAMS), method)


def planned(found: Statistics, method: str) -> QuantizationPlan:
    """The same from what was seen already."""
    return QuantizationPlan(select(found, method), f"{method} of {found.samples} samples")
