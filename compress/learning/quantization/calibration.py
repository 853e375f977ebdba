"""Calibration: the choice of samples, and plans from the float model's activations on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compress.data.rows import rows
from compress.data.splits import Indices
from compress.data.types import Data
from compress.learning.quantization.activation_statistics import Statistics, collect
from compress.learning.quantization.plan import QuantizationPlan
from compress.learning.quantization.ranges import WITHOUT_HISTOGRAMS, select
from compress.model.ir.keras_graph import Network


@dataclass(frozen=True)
class CalibrationSplit:
    """Samples of the training split that quantization uses.

    Attributes:
        calibration: preprocessed samples for ranges [n, ...].
        held_out: further ones, on which candidates are compared [m, ...]; the same where there are no others.
        are_rows: whether they are rows of a lookup that was cut off the model (`ir.passes.cut_lookup`).
    """

    calibration: NDArray[np.float32]
    held_out: NDArray[np.float32]
    are_rows: bool = False


def split(data: Data, count: int, held_out: int, seed: int) -> CalibrationSplit:
    """Choose calibration samples and at most `held_out` held-out samples from the training split, as `divided` does."""
    chosen, others = divided(data.labels("train"), count, seed)
    inputs = data.inputs("train")
    # Not sorted: a search runs candidates on the first held-out samples first, and their classes take turns.
    rest = others[:held_out]
    return CalibrationSplit(rows(inputs, chosen), rows(inputs, rest if len(rest) else chosen))


def divided(labels: Indices, count: int, seed: int) -> tuple[Indices, Indices]:
    """Return indices of samples to calibrate with, the same number of each class where possible, and of the others.

    At most two thirds are calibrated with. The classes of the others take turns.
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    turns = np.zeros(len(order), int)
    for label in np.unique(labels):
        is_class = labels[order] == label
        turns[is_class] = np.arange(is_class.sum())
    order = order[np.argsort(turns, kind="stable")]
    count = min(count, max(len(order) * 2 // 3, 1))
    return np.sort(order[:count]), order[count:]


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
