"""How close each output of a model is to the original's, as a whole and by the scales of its channels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compress.results.evaluation import OutputComparisonRecord, ScaleRecord
from compress.tasks.base import Rows, Specification
from compress.tasks.output_forms import OutputForm, forms_by_values, from_json, meaningful, scale_groups
from deploy.contract.tensors import TensorLayout

BLOCK = 256
LARGEST = float(np.finfo(np.float32).max)
"""The value that infinite outputs count as."""
BEST_DB = 120.0
"""Ratios above this count as equal outputs."""


def compare_outputs(
    layout: TensorLayout,
    expected: Rows,
    actual: Rows,
    specification: Specification = None,
    steps: Sequence[float | None] = (),
) -> list[OutputComparisonRecord]:
    """Compare the outputs of two models for the same samples.

    Args:
        layout: the outputs in a row.
        expected: of the original [n, values].
        actual: of the other model.
        specification: with the names and forms of the outputs, if they are known.
        steps: the quantization step of each output of the other model; None for an output in floating point.
    """
    known = (specification or {}).get("outputs")
    forms = from_json(known) if known else forms_by_values(layout, np.asarray(expected[:BLOCK]))
    known_steps = steps or [None] * len(forms)
    parts = zip(forms, layout.parts(expected), layout.parts(actual), known_steps, strict=True)
    return [_compared(form, before, after, step) for form, before, after, step in parts]


def _compared(form: OutputForm, expected: Rows, actual: Rows, step: float | None) -> OutputComparisonRecord:
    """Return the comparison of one output, of which large ones are read in blocks."""
    largest = 0.0
    sums = _Sums(expected.shape[1])
    same = []
    for start in range(0, len(expected), BLOCK):
        before = np.asarray(expected[start : start + BLOCK], np.float64)
        after = np.asarray(actual[start : start + BLOCK], np.float64)
        before, after = (np.nan_to_num(rows, posinf=LARGEST, neginf=-LARGEST) for rows in (before, after))
        sums.add(before, after)
        largest = max(largest, float(np.abs(after - before).max(initial=0.0)))
        if form.form != "values":
            shape = (len(before), *form.shape)
            same.append(form.agreement(before.reshape(shape), after.reshape(shape)))
    agreement = float(np.concatenate(same).mean()) if same else None
    ratio = _decibels(float(sums.signal.sum()), float(sums.noise.sum()))
    axis, scales = sums.scales(form.shape)
    flat = sums.flat_channels(form.shape)
    return OutputComparisonRecord(form.name, form.shape, ratio, largest, agreement, axis, scales, step, flat)


class _Sums:
    """What is known of each value of an output after a number of samples.

    Attributes:
        signal: the sums of the squares of the original's values [values].
        noise: the sums of the squared errors.
    """

    def __init__(self, values: int) -> None:
        self.signal, self.noise, self._sum = (np.zeros(values) for _ in range(3))
        self._low, self._lowest_result = (np.full(values, np.inf) for _ in range(2))
        self._high, self._highest_result = (np.full(values, -np.inf) for _ in range(2))
        self._samples = 0

    def add(self, before: NDArray[np.float64], after: NDArray[np.float64]) -> None:
        """Add the values of the original and of the result for some samples [n, values]."""
        self._samples += len(before)
        self.signal += (before**2).sum(axis=0)
        self.noise += ((after - before) ** 2).sum(axis=0)
        self._sum += before.sum(axis=0)
        self._low, self._high = np.minimum(self._low, before.min(axis=0)), np.maximum(self._high, before.max(axis=0))
        self._lowest_result = np.minimum(self._lowest_result, after.min(axis=0))
        self._highest_result = np.maximum(self._highest_result, after.max(axis=0))

    def scales(self, shape: tuple[int, ...]) -> tuple[int | None, tuple[ScaleRecord, ...]]:
        """Return the axis of the channels and the comparison of each scale; nothing for an output of one scale."""
        axis, groups = scale_groups(self._low.reshape(shape), self._high.reshape(shape))
        return (axis, tuple(self._scale(shape, axis, group) for group in groups)) if groups else (None, ())

    def _scale(self, shape: tuple[int, ...], axis: int, channels: tuple[int, ...]) -> ScaleRecord:
        """Return the comparison of the channels of one scale; the ratio is that of their variation to the error."""
        low, high, constant = self._by_channel(shape, axis)
        index = list(channels)
        signal, total, noise = (
            np.moveaxis(values.reshape(shape), axis, 0)[index].reshape(len(index), -1)
            for values in (self.signal, self._sum, self.noise)
        )
        count = self._samples * signal.shape[1]
        variation = float((signal.sum(axis=1) - total.sum(axis=1) ** 2 / count).sum())
        lost = [channel for channel in channels if constant[channel]]
        ends = (float(low[index].min()), float(high[index].max()))
        return ScaleRecord(channels, *ends, _decibels(max(variation, 0.0), float(noise.sum())), tuple(lost))

    def flat_channels(self, shape: tuple[int, ...]) -> int:
        """Return how many channels on the last axis vary in the original, and are constant in the result."""
        return int(self._by_channel(shape, len(shape) - 1)[2].sum()) if shape else 0

    def _by_channel(
        self, shape: tuple[int, ...], axis: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """Return the range of each channel in the original, and whether only the result has one value in it."""
        others = tuple(other for other in range(len(shape)) if other != axis)
        low, result_low = (values.reshape(shape).min(axis=others) for values in (self._low, self._lowest_result))
        high, result_high = (values.reshape(shape).max(axis=others) for values in (self._high, self._highest_result))
        return low, high, meaningful(low, high) & (result_low == result_high)


def _decibels(signal: float, noise: float) -> float:
    """Return the ratio in dB, from -BEST_DB to BEST_DB; NaN gives -BEST_DB."""
    if not np.isfinite(signal) or not np.isfinite(noise):
        return -BEST_DB
    if noise == 0:
        return BEST_DB
    return float(np.clip(10 * np.log10(max(signal, 1e-300) / noise), -BEST_DB, BEST_DB))
