"""The reasons of a verdict: a constant answer, the order of the classes, ties."""

from __future__ import annotations

import numpy as np
import pytest

from compress.measurement import Measurement, Metric
from compress.tasks.findings import against_constant, class_order, ties, unlike_original

ACCURACY = Metric("accuracy", "Accuracy", "fraction", "accuracy_drop")
ERROR = Metric("mae", "Mean absolute error", "", "mae_increase")


def values(*numbers: float) -> tuple[Measurement, Measurement, Measurement]:
    constant, original, result = (Measurement(number, "fraction", "measured") for number in numbers)
    return constant, original, result


@pytest.mark.parametrize(
    ("metric", "numbers", "told"),
    [
        (ACCURACY, (0.3, 0.9, 0.3), "no better than a constant answer (accuracy 0.300, a constant answer 0.300)"),
        (ACCURACY, (0.3, 0.2, 0.1), "; nor is the original (0.200)"),
        (ACCURACY, (0.3, 0.9, 0.5), "it keeps 33% of the lead over a constant answer (accuracy 0.900 before, 0.500"),
        (ERROR, (2.0, 0.5, 2.5), "no better than a constant answer (mean absolute error 2.500"),
        (ERROR, (2.0, 0.5, 1.6), "it keeps 27% of the lead"),
    ],
)
def test_a_result_without_value_is_not_usable(metric: Metric, numbers: tuple[float, ...], told: str) -> None:
    (reason,) = against_constant(metric, values(*numbers), 100)
    assert reason.level == "not usable"
    assert told in reason.text
    (few,) = against_constant(metric, values(*numbers), 10)
    assert few.level == "warning"


def test_a_useful_result_has_no_reason() -> None:
    assert not against_constant(ACCURACY, values(0.3, 0.9, 0.7), 100)
    assert not against_constant(ERROR, values(2.0, 0.5, 0.6), 100)
    assert not against_constant(ACCURACY, values(0.3, 0.2, 0.5), 100)  # better than a useless original
    missing = Measurement(None, "fraction", "missing", note="no reason")
    assert not against_constant(ACCURACY, (missing, missing, missing), 100)


def test_another_order_of_the_classes_is_named() -> None:
    labels = np.tile(np.arange(3), 40)
    predictions = np.array([0, 2, 1])[labels]
    predictions[:12] = 0
    (reason,) = class_order(labels, predictions, ["apple", "beet", "cherry"])
    assert reason.level == "warning"
    assert "its accuracy is 0.933 instead of 0.333" in reason.text
    assert "output 1 is 'cherry' and not 'beet'" in reason.text
    assert "output 2 is 'beet' and not 'cherry'" in reason.text
    assert not class_order(labels, labels, ["apple", "beet", "cherry"])


def test_chance_is_no_other_order() -> None:
    random = np.random.default_rng(0)
    for classes, samples in ((10, 60), (3, 20), (20, 400)):
        labels = random.integers(0, classes, samples)
        names = [str(number) for number in range(classes)]
        assert not class_order(labels, random.integers(0, classes, samples), names)
    assert not class_order(labels[:30], np.roll(labels[:30], 1), names)  # too few samples for so many classes


def test_ties() -> None:
    (reason,) = ties(30, 100)
    assert reason.level == "warning"
    assert "equal for 30 of 100 samples" in reason.text
    assert "end the model with logits" in reason.text
    assert not ties(2, 100)


def test_a_model_without_labels_is_judged_by_its_outputs() -> None:
    outputs = [{"name": "boxes", "sqnr_db": 31.0}, {"name": "object", "sqnr_db": 0.2}]
    (reason,) = unlike_original(0.4, outputs)
    assert (reason.level, "40% of its decisions or values agree" in reason.text) == ("not usable", True)
    doubtful, noisy = unlike_original(0.7, outputs)
    assert doubtful.level == noisy.level == "warning"
    assert "1 of 2 outputs have errors as large as their values on these samples: object (0.2 dB)" in noisy.text
    assert not unlike_original(0.98, outputs[:1])
