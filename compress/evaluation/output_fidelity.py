"""How close each output of a model is to the original's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from compress.report.record import OutputComparisonRecord
from compress.tasks.base import Rows, Specification
from compress.tasks.output_forms import OutputForm, forms_by_values, from_json
from deploy.contract.tensors import TensorLayout

BLOCK = 256
LARGEST = float(np.finfo(np.float32).max)
"""The value that infinite outputs count as."""
BEST_DB = 120.0
"""Ratios above this count as equal outputs."""


def compare_outputs(
    layout: TensorLayout, expected: Rows, actual: Rows, specification: Specification = None
) -> list[OutputComparisonRecord]:
    """Compare the outputs of two models for the same samples.

    Args:
        layout: the outputs in a row.
        expected: of the original [n, values].
        actual: of the other model.
        specification: with the names and forms of the outputs, if they are known.
    """
    known = (specification or {}).get("outputs")
    forms = from_json(known) if known else forms_by_values(layout, np.asarray(expected[:BLOCK]))
    return [_compared(form, *pair) for form, *pair in zip(forms, *_parts(layout, expected, actual), strict=True)]


def _parts(layout: TensorLayout, expected: Rows, actual: Rows) -> Iterator[list[Rows]]:
    return (layout.parts(rows) for rows in (expected, actual))


def _compared(form: OutputForm, expected: Rows, actual: Rows) -> OutputComparisonRecord:
    """Return the comparison of one output, of which large ones are read in blocks."""
    signal = noise = largest = 0.0
    same = []
    for start in range(0, len(expected), BLOCK):
        before = np.asarray(expected[start : start + BLOCK], np.float64)
        after = np.asarray(actual[start : start + BLOCK], np.float64)
        before, after = (np.nan_to_num(rows, posinf=LARGEST, neginf=-LARGEST) for rows in (before, after))
        difference = after - before
        signal += float((before**2).sum())
        noise += float((difference**2).sum())
        largest = max(largest, float(np.abs(difference).max(initial=0.0)))
        if form.form != "values":
            shape = (len(before), *form.shape)
            same.append(form.agreement(before.reshape(shape), after.reshape(shape)))
    agreement = float(np.concatenate(same).mean()) if same else None
    return OutputComparisonRecord(form.name, form.shape, _decibels(signal, noise), largest, agreement)


def _decibels(signal: float, noise: float) -> float:
    """Return the ratio in dB, from -BEST_DB to BEST_DB; NaN gives -BEST_DB."""
    if not np.isfinite(signal) or not np.isfinite(noise):
        return -BEST_DB
    if noise == 0:
        return BEST_DB
    return float(np.clip(10 * np.log10(max(signal, 1e-300) / noise), -BEST_DB, BEST_DB))
