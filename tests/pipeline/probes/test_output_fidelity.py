"""Outputs of two models compared as a whole, and by the scales of their channels."""

from __future__ import annotations

import numpy as np
import pytest

from compress.pipeline.probes.output_fidelity import compare_outputs
from compress.results.evaluation import OutputComparisonRecord
from deploy.contract.tensors import TensorLayout

STEP = 2.5
"""The step of 8 bits that hold 0 to 640."""


def compared(values: np.ndarray, step: float = STEP, constant: bool = False) -> OutputComparisonRecord:
    """Compare values [n, *shape] with what a quantization step leaves of them."""
    rows = values.reshape(len(values), -1)
    rounded = np.zeros_like(rows) if constant else np.round(rows / step) * step
    (record,) = compare_outputs(TensorLayout(["y"], [values.shape[1:]]), rows, rounded, None, [step])
    return record


def boxes_and_scores(axis: int, largest_score: float = 0.9) -> np.ndarray:
    """Return an output of 4 boxes and 6 scores on an axis of the samples' shape, for 20 positions."""
    random = np.random.default_rng(0)
    boxes, scores = random.random((8, 20, 4)) * 640, random.random((8, 20, 6)) * largest_score
    return np.moveaxis(np.concatenate([boxes, scores], axis=2), 2, axis + 1)


@pytest.mark.parametrize("axis", [0, 1])
def test_channels_that_become_constant_are_found_on_any_axis(axis: int) -> None:
    record = compared(boxes_and_scores(axis))
    assert record.sqnr_db > 40
    assert record.channel_axis == axis
    boxes, scores = record.scales
    assert boxes.channels == (0, 1, 2, 3)
    assert boxes.constant == ()
    assert boxes.sqnr_db > 40
    assert scores.channels == scores.constant == tuple(range(4, 10))
    assert scores.sqnr_db < 6
    assert record.step == STEP


def test_a_small_step_keeps_the_smaller_scale() -> None:
    _, scores = compared(boxes_and_scores(1), step=0.01).scales
    assert scores.constant == ()
    assert scores.sqnr_db > 30


def test_classes_that_the_samples_do_not_show_are_no_scale() -> None:
    """Scores of classes that are never seen are small, and rightly 0 in 8 bits."""
    random = np.random.default_rng(0)
    scores = random.random((8, 30, 10)) * np.array([0.9, 0.8, 0.7, *[1e-3] * 7])
    record = compared(scores, step=1 / 256)
    assert (record.scales, record.flat_channels) == ((), 0)
    in_one_tensor = boxes_and_scores(1)
    in_one_tensor[..., 5] *= 1e-3
    _, scores_of_tensor = compared(in_one_tensor).scales
    assert 5 in scores_of_tensor.channels
    assert 5 not in scores_of_tensor.constant


def test_a_constant_channel_of_the_original_is_no_loss() -> None:
    values = boxes_and_scores(1)
    values[..., 4:] = 0.25
    record = compared(values)
    assert (record.scales, record.flat_channels) == ((), 0)


def test_features_of_every_size_are_one_scale() -> None:
    features = np.random.default_rng(0).random((50, 64)) * np.geomspace(0.2, 30, 64)
    assert compared(features, step=30 / 255).scales == ()


def test_channels_without_values_are_counted() -> None:
    values = np.random.default_rng(0).normal(size=(40, 6))
    assert compared(values, step=0.01).flat_channels == 0
    assert compared(values, constant=True).flat_channels == 6
