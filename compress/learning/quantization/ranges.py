"""Methods that choose the range of each activation from statistics.

A wide range holds every value, with large steps; a narrow one has small steps, and saturates.
A single corrupt sample can widen a range a hundred times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
from numpy.typing import NDArray

from compress.learning.quantization.activation_statistics import Statistics
from compress.learning.quantization.plan import LEVELS, nudged

Range = tuple[float, float]
Method = Callable[[Statistics, str], Range]
SAMPLE_PERCENT = 98.0
"""Percentile of the samples' extremes: fewer than one corrupt sample in fifty change nothing."""
VALUE_PERCENT = 99.99
"""Percentile of the values: one value in ten thousand saturates at each end; usual in calibration tools."""
SHRINKS = np.linspace(0.3, 1.0, 57)
"""Parts of the full range that are tried as an end."""


def minmax(statistics: Statistics, point: str) -> Range:
    """Return the smallest range that holds every value."""
    return float(statistics.low[point].min()), float(statistics.high[point].max())


def sample_percentile(statistics: Statistics, point: str) -> Range:
    """Return the range that holds all values of 98% of the samples."""
    low, high = statistics.low[point], statistics.high[point]
    return float(np.percentile(low, 100 - SAMPLE_PERCENT)), float(np.percentile(high, SAMPLE_PERCENT))


def percentile(statistics: Statistics, point: str) -> Range:
    """Return the range between the lowest and the highest 0.01% of the values."""
    centres, counts = _histogram(statistics, point)
    share = np.cumsum(counts) / counts.sum()
    ends = np.searchsorted(share, [1 - VALUE_PERCENT / 100, VALUE_PERCENT / 100])
    low, high = centres[np.minimum(ends, len(centres) - 1)].tolist()
    return low, high


def mse(statistics: Statistics, point: str) -> Range:
    """Return the range with the smallest mean squared error of rounding and saturation."""

    def cost(values: NDArray[np.float64], counts: NDArray[np.float64], low: float, high: float) -> float:
        low, high = nudged(low, high)
        scale = (high - low) / LEVELS
        rounded = np.clip(np.rint((values - low) / scale), 0, LEVELS) * scale + low
        return float((counts * (rounded - values) ** 2).sum())

    return _searched(statistics, point, cost)


def entropy(statistics: Statistics, point: str) -> Range:
    """Return the range with the smallest Kullback-Leibler divergence of the rounded values' distribution.

    Source: Migacz, 8-bit Inference with TensorRT, GTC 2017. As NVIDIA's pytorch-quantization
    does (`bins[0] = bins[1]`), zero counts no more than its neighbours: a ReLU makes half of all values
    exactly 0. Every range has a step there, and that peak would make ranges too narrow.
    """

    def cost(values: NDArray[np.float64], counts: NDArray[np.float64], low: float, high: float) -> float:
        steps = np.clip(np.rint((values - low) / max(high - low, 1e-12) * LEVELS), 0, LEVELS).astype(int)
        totals = np.bincount(steps, counts, LEVELS + 1)
        filled = np.bincount(steps, counts > 0, LEVELS + 1)
        inside = (values >= low) & (values <= high)
        coarse = np.where((counts > 0) & inside, (totals / np.maximum(filled, 1))[steps], 0.0)
        p = counts / counts.sum()
        q = coarse / max(coarse.sum(), 1e-12)
        seen = p > 0
        return float((p[seen] * np.log(p[seen] / np.maximum(q[seen], 1e-9))).sum())

    return _searched(statistics, point, cost, without_zeros=True)


MINMAX = "minmax"
"""The method whose range holds every value."""
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
    """Return the range of every point, with zero on a step, as `method` chooses it or TFLite prescribes it."""
    limits_by_point = {
        point: statistics.prescribed[point] if point in statistics.prescribed else METHODS[method](statistics, point)
        for point in statistics.low
    }
    return {point: nudged(*limits) for point, limits in limits_by_point.items()}


def _histogram(statistics: Statistics, point: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the centres of the bins between the extremes of a point, and the count of values in each."""
    return statistics.histograms[point].within(*minmax(statistics, point))


def _searched(
    statistics: Statistics,
    point: str,
    cost: Callable[[NDArray[np.float64], NDArray[np.float64], float, float], float],
    *,
    without_zeros: bool = False,
) -> Range:
    """Return the range with the lowest cost: search the upper end, the lower one, and both once more."""
    values, counts = _histogram(statistics, point)
    if without_zeros:
        zero = int(np.abs(values).argmin())
        neighbours = max([*counts[max(zero - 1, 0) : zero], *counts[zero + 1 : zero + 2]])
        if neighbours:  # otherwise nearly all values are 0
            counts = counts.copy()
            counts[zero] = min(counts[zero], neighbours)
    low = lowest = min(float(values[0]), 0.0)
    high = highest = max(float(values[-1]), 0.0)
    values, counts = values[counts > 0], counts[counts > 0]

    @cache  # an end may be 0, or the same as in the first search
    def cost_of(low: float, high: float) -> float:
        return cost(values, counts, low, high)

    for _ in range(2):
        high = min((highest * shrink for shrink in SHRINKS[::-1]), key=lambda end: cost_of(low, end))
        low = min((lowest * shrink for shrink in SHRINKS[::-1]), key=lambda end: cost_of(end, high))
    return float(low), float(high)
