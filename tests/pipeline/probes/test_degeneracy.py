"""The verdict on models with one answer for nearly every sample: the criterion on counts, and the tasks that use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny

from compress.pipeline.probes import Evaluation
from compress.results.evaluation import Judgement, Spread
from compress.tasks import detection
from compress.tasks.classification import Classification
from compress.tasks.degeneracy import judge
from compress.tasks.detection import Detection
from deploy.contract.detection import Detections

NAMES = ("apple", "bread", "cheese")


def counts(samples: int, same: int, others: int, told_apart: int, *, constant: bool = False) -> Spread:
    return Spread("answers", samples, same, others, told_apart, constant)


@pytest.mark.parametrize(
    ("samples", "same", "others", "told_apart", "verdict"),
    [
        (100, 100, 50, 0, "degenerate"),  # balanced
        (100, 95, 50, 5, "degenerate"),  # nearly all samples
        (100, 94, 50, 5, "varied"),
        (5, 5, 4, 0, "degenerate"),  # a small split, and still 4 misses
        (5, 5, 3, 0, "undecided"),
        (20, 19, 4, 1, "varied"),  # 17 of 20 right: too few samples to call it one answer
        (500, 480, 60, 20, "varied"),  # 88% of the labels are the answer
        (2485, 2440, 2450, 45, "degenerate"),  # 81 classes
        (100, 100, 0, 0, "undecided"),  # one class only
        (1000, 1000, 30, 0, "degenerate"),  # 97% of the labels are the answer
        (1000, 985, 30, 12, "varied"),  # rare classes are found, not all of them
        (1000, 970, 30, 1, "degenerate"),  # no better than chance
        (1000, 997, 40, 3, "varied"),  # few are found, but without a false alarm
        (400, 400, 3, 0, "undecided"),  # too few of the rare classes
    ],
)
def test_criterion(samples: int, same: int, others: int, told_apart: int, verdict: str) -> None:
    assert judge(counts(samples, same, others, told_apart)).verdict == verdict


def test_an_original_that_tells_samples_apart_needs_fewer_of_them() -> None:
    result = counts(400, 400, 3, 0)
    assert judge(result, counts(400, 397, 3, 3)).verdict == "degenerate"
    assert judge(result, counts(400, 400, 3, 0)).verdict == "undecided"
    assert judge(counts(400, 400, 1, 0), counts(400, 399, 1, 1)).verdict == "undecided"


def classes(labels: list[int], before: list[int], after: list[int]) -> dict[str, Judgement]:
    facts: dict[str, Any] = {"labels": labels, "split": "test"}
    facts |= {
        name: {"predictions": predictions, "constant": False} for name, predictions in (("a", before), ("b", after))
    }
    return Classification().judge_outputs(facts, NAMES, "a", "b")


def test_classifiers() -> None:
    labels = [0, 1, 2, 0, 1, 2]
    judgements = classes(labels, labels, [1] * 6)
    assert (judgements["a"].verdict, judgements["b"].verdict) == ("varied", "degenerate")
    assert judgements["b"].text == "answers 'bread' to 6 of 6 test samples"
    assert judgements["b"].spread == Spread(judgements["b"].text, samples=6, same=6, others=4, told_apart=0)


def test_constant_outputs_of_float_models(artifact: Callable[..., Any], context: Callable[..., Any]) -> None:
    flat = artifact(tiny.classifier(int8=False, gain=0.0))
    one_class = context(labels=np.zeros(12, np.int64))
    facts = Evaluation(split="test").run({"model": flat, "other": artifact(int8=False)}, one_class)
    assert (facts["model"]["constant"], facts["other"]["constant"]) == (True, False)
    judgements = Classification().judge_outputs(facts, NAMES, "other", "model")
    assert judgements["model"].verdict == "degenerate"
    assert judgements["model"].text == "gives the same output for all 12 test samples"
    alike = context(samples=np.ones((12, 4, 4, 1), np.float32))
    assert not Evaluation(split="test").run({"model": flat}, alike)["model"]["constant"]  # all samples are equal


BOX, FAR = [0.1, 0.1, 0.4, 0.4], [0.6, 0.6, 0.9, 0.9]


def detections(*labelled_boxes: tuple[list[float], int]) -> Detections:
    boxes = np.array([box for box, _ in labelled_boxes], np.float32).reshape(-1, 4)
    labels = np.array([label for _, label in labelled_boxes], np.int64)
    return Detections(boxes, labels, np.linspace(0.9, 0.8, len(labelled_boxes), dtype=np.float32))


def truth(box: list[float], label: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([box], np.float32), np.array([label])


EMPTY = (np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
WANTED = [truth(BOX, 0), truth(FAR, 1)] * 5


def objects(answers: list[Detections], ground_truth: list[Any]) -> Judgement:
    facts = detection.evaluate(answers, ground_truth, 2, "")
    facts["spread"] = vars(detection.spread(answers, ground_truth, ("ace", "king"), "test"))
    return Detection().judge_outputs({"model": facts}, ("ace", "king"), "model", "model")["model"]


@pytest.mark.parametrize(
    ("answers", "ground_truth", "verdict", "text"),
    [
        (
            [detections((BOX, 0)), detections((FAR, 1))] * 5,
            WANTED,
            "varied",
            "finds 'ace' first, in the same place, in 5 of 10 test images",
        ),
        ([detections()] * 10, WANTED, "degenerate", "finds nothing in 10 of 10 test images"),
        (
            [detections()] * 10,
            [EMPTY] * 9 + [truth(BOX, 0)],
            "undecided",
            "finds nothing in 10 of 10 test images",
        ),
        (
            [detections((BOX, 0), (FAR, 1))] * 10,
            WANTED,
            "degenerate",
            "finds 'ace' first, in the same place, in 10 of 10 test images",
        ),
        (
            [detections((BOX, 0))] * 10,
            [truth(BOX, 0)] * 10,
            "undecided",
            "finds 'ace' first, in the same place, in 10 of 10 test images",
        ),
    ],
    ids=["objects", "nothing", "nothing where nothing is", "the same everywhere", "the same where it always is"],
)
def test_detectors(answers: list[Detections], ground_truth: list[Any], verdict: str, text: str) -> None:
    judgement = objects(answers, ground_truth)
    assert (judgement.verdict, judgement.text) == (verdict, text)


def test_a_detector_that_finds_no_object_where_it_is() -> None:
    wrong = [detections((FAR, 0)), detections((BOX, 1))] * 5
    judgement = objects(wrong, WANTED)
    assert judgement.verdict == "degenerate"
    assert judgement.text == "finds none of 10 objects where they are (average precision at half overlap 0.0000)"
    assert objects(wrong[:3], WANTED[:3]).verdict == "varied"  # three objects are too few


def test_a_class_without_a_name() -> None:
    spread = detection.spread([detections((BOX, 7))] * 2, WANTED[:2], ("ace", "king"), "test")
    assert spread.text == "finds 'class 7' first, in the same place, in 2 of 2 test images"


def test_a_majority_class_that_is_told_from_the_others() -> None:
    labels = [0] * 194 + [1] * 6
    judgements = classes(labels, labels, [0] * 200)
    text = "answers 'apple' to 194 of 200 test samples"
    assert judgements["a"].spread == Spread(text, samples=200, same=194, others=6, told_apart=6)
    assert (judgements["a"].verdict, judgements["b"].verdict) == ("varied", "degenerate")
