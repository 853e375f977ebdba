"""From what was seen to the range of each activation: how much of the tails is cut off.

A wide range holds every value and is coarse; a narrow one is fine and saturates. A single
corrupt sample can widen a range a hundred times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from compress.quantization.activation_statistics import Statistics
from compress.quantization.plan import LEVELS, nudged

Range = tuple[float, float]
Method = Callable[[Statistics, str], Range]
SAMPLE_PERCENT = 98.0
"""Of the samples' own extremes: fewer than one corrupt sample in fifty change nothing."""
VALUE_PERCENT = 99.99
SHRINKS = np.linspace(0.3, 1.0, 57)
"""Parts of the whole range that are tried as an end."""


def minmax(statistics: Statistics, point: str) -> Range:
    """The smallest range that holds every value."""
    return float(statistics.low[point].min()), float(statistics.high[point].max())


def sample_percentile(statistics: Statistics, point: str) -> Range:
    """The range that holds all values of 98% of the samples."""
    low, high = statistics.low[point], statistics.high[point]
    return float(np.percentile(low, 100 - SAMPLE_PERCENT)), float(np.percentile(high, SAMPLE_PERCENT))


def percentile(statistics: Statistics, point: str) -> Range:
    """The range between the lowest and the highest 0.01% of the values."""
    centres, counts = _histogram(statistics, point)
    share = np.cumsum(counts) / counts.sum()
    ends = np.searchsorted(share, [1 - VALUE_PERCENT / 100, VALUE_PERCENT / 100])
    low, high = centres[np.minimum(ends, len(centres) - 1)].tolist()
    return low, high


def mse(statistics: Statistics, point: str) -> Range:
    """The range with the least mean squared error of rounding and saturation."""

    def cost(values: NDArray[np.float64], counts: NDArray[np.float64], low: float, high: float) -> float:
        return float((counts * (_rounded(values, low, high) - values) ** 2).sum())

    return _searched(statistics, point, cost)


def entropy(statistics: Statistics, point: str) -> Range:
    """The range whose 255 steps tell most of the values' distribution (least Kullback-Leibler divergence).

    Source: Migacz, 8-bit Inference with TensorRT, GTC 2017. As NVIDIA's pytorch-quantization
    does (`bins[0] = bins[1]`), zero counts no more than its neighbours: a ReLU makes half of all values
    exactly 0, for which every range has a step, and that peak would make ranges too narrow.
    """

    def cost(values: NDArray[np.float64], counts: NDArray[np.float64], low: float, high: float) -> float:
        steps = np.clip(np.rint((values - low) / max(high - low, 1e-12) * LEVELS), 0, LEVELS).astype(int)
        whole, filled = np.bincount(steps, counts, LEVELS + 1), np.bincount(steps, counts > 0, LEVELS + 1)
        inside = (values >= low) & (values <= high)
        coarse = np.where((counts > 0) & inside, (whole / np.maximum(filled, 1))[steps], 0.0)
        p, q = counts / counts.sum(), coarse / max(coarse.sum(), 1e-12)
        seen = p > 0
        return float((p[seen] * np.log(p[seen] / np.maximum(q[seen], 1e-9))).sum())

    return _searched(statistics, point, cost, without_zeros=True)


WITHOUT_HISTOGRAMS = {"minmax", "sample_percentile"}
"""Methods that need the extremes of samples alone."""
METHODS: Mapping[str, Method] = {
    "minmax": minmax,
    "sample_percentile": sample_percentile,
    "percentile": percentile,
    "mse": mse,
    "entropy": entropy,
}


def select(statistics: Statistics, method: str) -> dict[str, Range]:
    """The range of every point, with zero on a step, as `method` finds it or TFLite prescribes it."""
    found = {
        point: statistics.prescribed[point] if point in statistics.prescribed else METHODS[method](statistics, point)
        for point in statistics.low
    }
    return {point: nudged(*limits) for point, limits in found.items()}


def _histogram(statistics: Statistics, point: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The centres of the bins between the extremes of a point, and how many values lie in each."""
    return statistics.histograms[point].within(*minmax(statistics, point))


def _searched(
    statistics: Statistics,
    point: str,
    cost: Callable[[NDArray[np.float64], NDArray[np.float64], float, float], float],
    *,
    without_zeros: bool = False,
) -> Range:
    """The cheapest range: the upper end first, then the lower one, then the upper one again."""
    values, counts = _histogram(statistics, point)
    if without_zeros:
        zero = int(np.abs(values).argmin())
        beside = max([*counts[max(zero - 1, 0) : zero], *counts[zero + 1 : zero + 2]])
        if beside:  # otherwise nearly all values are 0
            counts = counts.copy()
            counts[zero] = min(counts[zero], beside)
    low, high = (min(values[0], 0.0), max(values[-1], 0.0))
    lowest, highest = low, high
    for _ in range(2):
        high = min((highest * shrink for shrink in SHRINKS[::-1]), key=lambda end: cost(values, counts, low, end))
        low = min((lowest * shrink for shrink in SHRINKS[::-1]), key=lambda end: cost(values, counts, end, high))
    return float(low), float(high)


def _rounded(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    low, high = nudged(low, high)
    scale = (high - low) / LEVELS
    return np.asarray(np.clip(np.rint((values - low) / scale), 0, LEVELS) * scale + low)
