"""Temperature scaling, calibration error and thresholds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deploy.contract import confidence
from deploy.contract.confidence import Confidence


def drawn(factor: float, samples: int = 4000) -> tuple[Any, Any]:
    """Return logits that are `factor` times the true ones, and labels from the true probabilities."""
    random = np.random.default_rng(0)
    logits = random.normal(0, 2, (samples, 5))
    likely = np.exp(confidence.log_softmax(logits))
    return logits * factor, np.array([random.choice(5, p=row) for row in likely])


@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_the_temperature_undoes_a_factor(factor: float) -> None:
    logits, labels = drawn(factor)
    temperature = confidence.fitted_temperature(logits, labels)
    assert temperature == pytest.approx(factor, rel=0.06)
    likely = np.exp(confidence.log_softmax(logits, temperature)).max(axis=1)
    right = logits.argmax(axis=1) == labels
    assert confidence.calibration_error(likely, right) < 0.03
    if factor != 1:
        raw = np.exp(confidence.log_softmax(logits)).max(axis=1)
        assert confidence.calibration_error(raw, right) > 0.1


@pytest.mark.parametrize(("samples", "expected"), [(2, 0.75), (8, 0.9), (98, 0.99)])
def test_a_few_samples_without_an_error_are_not_certain(samples: int, expected: float) -> None:
    labels = np.arange(samples) % 2
    logits = 9.0 * np.eye(2)[labels]
    likely = np.exp(confidence.log_softmax(logits, confidence.fitted_temperature(logits, labels)))
    np.testing.assert_allclose(likely.max(axis=1), expected, atol=0.005)


def test_the_temperature_has_limits() -> None:
    logits = np.array([[9.0, 0.0], [0.0, 9.0]])
    assert confidence.fitted_temperature(logits, np.array([1, 0])) == pytest.approx(confidence.TEMPERATURES[1])
    small = np.array([[1e-6, 0.0], [0.0, 1e-6]])
    assert confidence.fitted_temperature(small, np.array([0, 1])) == pytest.approx(confidence.TEMPERATURES[0])
    assert confidence.fitted_temperature(np.ones((3, 1)), np.zeros(3, np.int64)) > 0


def test_calibration_error_by_hand() -> None:
    """Two bins: 0.95 with 3 of 4 right, 0.55 with 1 of 2 right."""
    likely = np.array([0.95, 0.95, 0.95, 0.95, 0.55, 0.55])
    right = np.array([True, True, True, False, True, False])
    assert confidence.calibration_error(likely, right) == pytest.approx(4 / 6 * 0.2 + 2 / 6 * 0.05)
    assert confidence.calibration_error(np.ones(3), np.ones(3, bool)) == 0


@pytest.mark.parametrize(("rate", "rejected"), [(0.0, 0), (0.05, 5), (0.3, 30), (0.999, 99)])
def test_the_threshold_rejects_no_more_than_the_rate(rate: float, rejected: int) -> None:
    likely = np.random.default_rng(0).permutation(np.linspace(0.2, 1, 100))
    assert int((likely < confidence.rejection_threshold(likely, rate)).sum()) == rejected


def test_equal_confidences_are_not_all_rejected() -> None:
    assert not (np.full(10, 0.5) < confidence.rejection_threshold(np.full(10, 0.5), 0.5)).any()


def test_a_quantized_probability_of_0_counts_as_half_a_step() -> None:
    logits = confidence.logits_of(np.array([[0.0, 1 / 256, 1.0]]), "probabilities", 1 / 256)
    np.testing.assert_allclose(logits, np.log([[1 / 512, 1 / 256, 1.0]]))
    assert np.isfinite(confidence.logits_of(np.zeros((1, 2), np.float32), "probabilities", 0.0)).all()


def test_there_and_back() -> None:
    for calibration in (Confidence("probabilities", 0.7, 0.4, 1 / 256), Confidence("head", 2.0, None)):
        assert confidence.parsed(calibration.to_json()) == calibration
    assert confidence.parsed({**Confidence("head", 2.0, 0.1).to_json(), "later": 1}).temperature == 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, "not a map"),
        ({"logits": "other", "temperature": 1.0}, "logits is not one of"),
        ({"logits": "head"}, "temperature cannot be 0.0"),
        ({"logits": "head", "temperature": 1e9}, "temperature cannot be"),
        ({"logits": "head", "temperature": True}, "temperature cannot be"),
        ({"logits": "head", "temperature": 1.0, "threshold": 1.5}, "threshold cannot be"),
        ({"logits": "head", "temperature": 1.0, "step": "a"}, "step cannot be"),
    ],
)
def test_invalid_entries(entry: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        confidence.parsed(entry)
