"""The reasons of a verdict: a constant answer, the order of the classes, ties."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from compress.core.measurement import Measurement, Metric
from compress.results.evaluation import OutputComparisonRecord, ScaleRecord
from compress.tasks.findings import (
    about_original,
    against_constant,
    channels,
    class_order,
    input_range,
    never_answered,
    other_inputs,
    ties,
    unlike_original,
    wrong_statistics,
)

ACCURACY = Metric("accuracy", "Accuracy", "fraction", "accuracy_drop")
ERROR = Metric("mae", "Mean absolute error", "", "mae_increase")


def values(*numbers: float) -> tuple[Measurement, Measurement, Measurement]:
    constant, original, result = (Measurement(number, "fraction", "measured") for number in numbers)
    return constant, original, result


@pytest.mark.parametrize(
    ("metric", "numbers", "message"),
    [
        (ACCURACY, (0.3, 0.9, 0.3), "no better than a constant answer (accuracy 0.300, a constant answer 0.300)"),
        (ACCURACY, (0.3, 0.2, 0.1), "; nor is the original (0.200)"),
        (ACCURACY, (0.3, 0.9, 0.5), "it keeps 33% of the lead over a constant answer (accuracy 0.900 before, 0.500"),
        (ERROR, (2.0, 0.5, 2.5), "no better than a constant answer (mean absolute error 2.500"),
        (ERROR, (2.0, 0.5, 1.6), "it keeps 27% of the lead"),
    ],
)
def test_a_result_without_value_is_not_usable(metric: Metric, numbers: tuple[float, ...], message: str) -> None:
    (reason,) = against_constant(metric, values(*numbers), 100)
    assert reason.level == "not usable"
    assert message in reason.text
    (few,) = against_constant(metric, values(*numbers), 10)
    assert few.level == "warning"


def test_a_useful_result_has_no_reason() -> None:
    for metric, numbers in ((ACCURACY, (0.3, 0.9, 0.7)), (ERROR, (2.0, 0.5, 0.6)), (ACCURACY, (0.3, 0.2, 0.5))):
        assert not against_constant(metric, values(*numbers), 100)  # the last one is better than a useless original
    missing = Measurement(None, "fraction", "missing", note="no reason")
    assert not against_constant(ACCURACY, (missing, missing, missing), 100)


def test_another_order_of_the_classes_is_named() -> None:
    labels = np.tile(np.arange(3), 40)
    predictions = np.array([0, 2, 1])[labels]
    predictions[:12] = 0
    (reason,) = class_order(labels, predictions, ["apple", "beet", "cherry"])
    assert reason.level == "not usable"
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
    (reason,) = ties(30, 100, probabilities=True)
    assert reason.level == "warning"
    assert "equal for 30 of 100 samples" in reason.text
    assert "end the model with logits" in reason.text
    assert not ties(2, 100, probabilities=True)
    assert not ties(1, 20, probabilities=True)
    (reason,) = ties(30, 100, probabilities=False)
    assert "softmax" not in reason.text


def test_a_model_without_labels_is_judged_by_its_outputs() -> None:
    boxes, scores = compared("boxes", 31.0), compared("object", 6.5)
    (reason,) = unlike_original(0.4, [boxes])
    assert (reason.level, "40% of its decisions or values agree" in reason.text) == ("not usable", True)
    doubtful, noisy = unlike_original(0.7, [boxes, scores])
    assert (doubtful.level, noisy.level, noisy.on_noise) == ("warning", "not usable", "warning")
    assert "little is left of 1 outputs" in noisy.text
    assert "object (6.5 dB); calibrate with samples of the kind" in noisy.text
    assert not unlike_original(0.98, [boxes])
    assert not unlike_original(0.98, [scores | {"agreement": 0.99}])  # nearly all decisions are the same


def compared(name: str, sqnr_db: float, **values: object) -> dict[str, object]:
    """The comparison of one output, of shape [20, 5]."""
    return asdict(OutputComparisonRecord(name, (20, 5), sqnr_db, 1.0)) | values


def scales(scores_db: float, constant: tuple[int, ...]) -> tuple[dict[str, object], ...]:
    """The boxes and the scores of an output."""
    boxes = ScaleRecord((0, 1, 2, 3), 0.0, 640.0, 46.0)
    return tuple(map(asdict, (boxes, ScaleRecord((4,), 0.0, 1.0, scores_db, constant))))


@pytest.mark.parametrize(
    ("scores_db", "constant", "level", "text"),
    [
        (0.0, (4,), "not usable", "1 of 5 channels of the output y (4 on axis 2) are constant in the result"),
        (8.0, (), "not usable", "(4 on axis 2) keep a ratio of 8.0 dB to their error"),
        (15.0, (), "warning", "0 to 1, and share one tensor with values from 0 to 640, whose quantization step is 2.5"),
    ],
)
def test_channels_of_another_scale_are_named(
    scores_db: float, constant: tuple[int, ...], level: str, text: str
) -> None:
    output = compared("y", 46.0, channel_axis=1, scales=scales(scores_db, constant), step=2.5)
    (reason,) = channels([output])
    assert (reason.level, reason.cause, reason.on_noise) == (level, "named", "holds")
    assert text in reason.text
    assert "end the model in front of the operator that joins them" in reason.text


def test_channels_of_one_scale_have_no_reason() -> None:
    assert not channels([compared("y", 46.0)])
    assert not channels([compared("y", 46.0, channel_axis=1, scales=scales(30.0, ()), step=2.5)])


@pytest.mark.parametrize(("flat", "level"), [(1, "warning"), (3, "not usable")])
def test_channels_that_the_result_does_not_change_are_counted(flat: int, level: str) -> None:
    (reason,) = channels([compared("y", 46.0, flat_channels=flat)])
    assert reason.level == level
    assert f"{flat} of 5 channels of the output y have one value for all samples" in reason.text


def accuracy(value: float, width: float = 0.05) -> Measurement:
    return Measurement(value, "fraction", "measured", low=value - width, high=value + width)


def tried(before: float, *after: float, width: float = 0.05) -> dict[str, object]:
    values = [accuracy(score, width).to_json() for score in after]
    rows = [{"description": f"change {row}", "advice": "`x`", "value": value} for row, value in enumerate(values)]
    return {"samples": 90, "original": accuracy(before, width).to_json(), "alternatives": rows}


def test_another_preprocessing_with_which_the_model_is_much_better_is_named() -> None:
    (reason,) = other_inputs(ACCURACY, tried(0.4, 0.5, 0.9))
    assert (reason.level, reason.cause, reason.gain) == ("not usable", "named", pytest.approx(0.5))
    assert "with change 1, the original's accuracy is 0.900 instead of 0.400 (90 samples); add `x`" in reason.text
    (reason,) = other_inputs(ERROR, tried(2.0, 3.0, 0.5))
    assert "with change 1" in reason.text


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"samples": 90, "alternatives": []},
        tried(0.9, 0.3, 0.95),  # hardly better
        tried(0.4, 0.7, width=0.2),  # chance
        tried(-3.0, 0.1),  # bad in another way
    ],
)
def test_a_preprocessing_is_not_doubted_without_cause(facts: dict[str, object]) -> None:
    assert not other_inputs(ACCURACY, facts)


def test_samples_that_a_quantized_input_cannot_hold() -> None:
    other = {"description": "0 to 1", "advice": "`scale`"}
    limits: dict[str, object] = {"low": 0.0, "high": 1.0, "sample_low": 0.0, "sample_high": 255.0, "alternative": None}
    (reason,) = input_range({**limits, "outside": 0.9, "used": 255.0})
    assert "they are 0 to 255, and its quantized input is 0 to 1; use the preprocessing with which" in reason.text
    (reason,) = input_range({**limits, "sample_high": 0.004, "outside": 0.0, "used": 0.004})
    assert "they are 0 to 0.004" in reason.text
    assert not input_range({**limits, "sample_high": 1.1, "outside": 0.01, "used": 1.1})
    assert not input_range(None)
    known = {**limits, "outside": 0.9, "used": 255.0, "alternative": other}
    assert [input_range(known, labelled=labelled)[0].level for labelled in (False, True)] == ["not usable", "warning"]


STALE = {
    "metric": "accuracy", "validation_before": 0.3, "validation_after": 0.9, "samples": 60, "first": 2.0, "others": 0.6,
}  # fmt: skip
LOSS = {"metric": "loss", "validation_before": 1.1, "validation_after": 0.1}


@pytest.mark.parametrize(
    ("change", "result", "cause"),
    [
        ({}, "accuracy is 0.900 instead of 0.300", "the weights of the model"),
        (LOSS, "loss is 0.100 instead of 1.100", "the weights of the model"),
        ({"first": 0.5, "others": 0.2}, "accuracy", "the weights of the model"),
        ({"others": 0.1}, "accuracy", "these samples"),
        ({"others": None}, "accuracy", "these samples"),
    ],
)
def test_batch_norms_with_wrong_statistics_are_named(change: dict[str, object], result: str, cause: str) -> None:
    (reason,) = wrong_statistics({**STALE, **change})
    assert (reason.level, reason.cause) == ("not usable", "named")
    assert f"do not fit {cause}" in reason.text
    assert f"its validation {result}" in reason.text
    assert "set `momentum` of these layers to 0.9" in reason.text


@pytest.mark.parametrize(
    "change",
    [{"validation_after": 0.35}, {"validation_after": None}, {"samples": 6}, {**LOSS, "validation_after": 0.9}],
)
def test_batch_norms_are_not_doubted_without_cause(change: dict[str, object]) -> None:
    assert not wrong_statistics({**STALE, **change})
    assert not wrong_statistics({})


def test_one_cause_of_a_bad_original_is_named() -> None:
    scale, same = tried(0.4, 0.9), (accuracy(0.4), accuracy(0.41))
    assert "batch norms" in about_original(ACCURACY, scale, STALE, *same)[0].text
    assert "preprocessing" in about_original(ACCURACY, scale, {**STALE, "others": 0.1}, *same)[0].text
    assert "batch norms" in about_original(ACCURACY, tried(0.4, 0.3), {**STALE, "others": 0.1}, *same)[0].text
    assert "preprocessing" in about_original(ACCURACY, scale, {}, *same)[0].text
    assert not about_original(ACCURACY, {}, {}, *same)


def test_a_result_that_was_trained_with_the_preprocessing_can_be_used() -> None:
    for result, level in ((0.42, "not usable"), (0.88, "warning")):
        (reason,) = about_original(ACCURACY, tried(0.4, 0.9), {}, accuracy(0.4), accuracy(result))
        assert reason.level == level


@pytest.mark.parametrize(
    ("value", "samples", "level"), [(0.38, 100, "not usable"), (0.38, 20, "warning"), (0.52, 100, None)]
)
def test_a_result_within_chance_of_a_constant_answer_is_not_usable(
    value: float, samples: int, level: str | None
) -> None:
    constant = Measurement(0.3, "fraction", "measured")
    reasons = against_constant(ACCURACY, (constant, accuracy(0.55, 0.1), accuracy(value, 0.1)), samples)
    assert [reason.level for reason in reasons] == ([] if level is None else [level])
    if reasons:
        assert "cannot be told from a constant answer, 0.300" in reasons[0].text
        assert "0.280 to 0.480" in reasons[0].text


NAMES = ["apple", "beet", "cherry"]


def test_a_class_that_only_the_original_answers_is_named() -> None:
    labels = np.repeat(np.arange(3), [20, 20, 6])
    without = np.where(labels == 2, 0, labels)
    (reason,) = never_answered(labels, labels, without, NAMES)
    assert (reason.level, reason.cause) == ("not usable", "compression")
    assert "never answers 1 of 3 classes: 'cherry' (6 samples); the original recognizes 6 of these" in reason.text


def test_a_class_that_no_model_answers_needs_enough_samples() -> None:
    for count, found in ((29, 0), (30, 1)):
        labels = np.repeat(np.arange(3), [40, 40, count])
        without = np.where(labels == 2, 0, labels)
        reasons = never_answered(labels, without, without, NAMES)
        assert [reason.cause for reason in reasons] == ["model"] * found
    assert "and neither does the original" in reasons[0].text
    assert not never_answered(labels, labels, labels, NAMES)
