"""Detectors without labels, and those that find nothing: every function after the outputs takes an empty answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blobs import Blobs
from hypothesis import given
from hypothesis import strategies as st

from compress.core.measurement import missing
from compress.data.types import Objects, Split
from compress.tasks import detection
from compress.tasks.base import ModelOutputs
from compress.tasks.detection import Detection, padded
from compress.tasks.illustrations import ObjectsIllustrator
from compress.tasks.unlabelled_detection import UnlabelledDetection
from deploy.contract.average_precision import average_precision as measured
from deploy.contract.box_codes import CODES, WITH_ANCHORS
from deploy.contract.detection import Detector, agreement
from deploy.contract.image_geometry import AffineMap
from deploy.runner import tiles
from deploy.runner.answers import in_image, to_json

NAMES = ("cat", "dog")
NOTHING = Objects(np.zeros((0, 4), np.float32), np.zeros(0, np.int64))


@st.composite
def detectors(draw: Any) -> Detector:
    """Return detectors of every code, with and without objectness and keypoints."""
    code = draw(st.sampled_from(sorted(CODES)))
    entry: dict[str, Any] = {"cells": [2, 3]}
    if code in WITH_ANCHORS:
        entry["boxes"] = [[0.2, 0.3]]
    parts = ["boxes", "scores", *(["objectness"] if draw(st.booleans()) else [])]
    settings: dict[str, Any] = {"maps": [entry], "code": code, "class_agnostic": draw(st.booleans())}
    settings["objectness"] = draw(st.sampled_from(["product", "geometric_mean"]))
    if draw(st.booleans()):
        unit = draw(st.sampled_from(["cell", "anchor", "box"]))
        settings["keypoints"] = {"count": draw(st.integers(1, 5)), "visibility": draw(st.booleans()), "unit": unit}
        parts.append("keypoints")
    return Detector({**settings, "tensors": [{"part": part} for part in parts]})


def empty_rows(detector: Detector, samples: int) -> np.ndarray:
    """Return outputs with scores of 0.0000001."""
    columns = []
    for entry, size in zip(detector.specification["tensors"], detector.output_sizes(len(NAMES)), strict=True):
        value = -16.0 if entry["part"] in ("scores", "objectness") else 0.1
        columns.append(np.full((samples, size[0] * size[1]), value, np.float32))
    return np.concatenate(columns, axis=1)


@given(detectors())
def test_an_answer_without_objects(detector: Detector) -> None:
    answer = detector([part[0] for part in detector.split(empty_rows(detector, 1))], NAMES)
    assert len(answer) == 0
    assert answer.boxes.shape == (0, 4)
    keypoints = detector.specification["keypoints"]
    if keypoints is not None:
        assert answer.keypoints is not None
        assert answer.keypoints.shape == (0, keypoints["count"], 3 if keypoints["visibility"] else 2)
    assert to_json(answer, 3)["top"] == []
    assert len(in_image(answer, AffineMap((0.5, 1.0), (0.25, 0.0)))) == 0
    assert len(tiles.merged(answer, np.zeros(0, bool), 0.5, 10)) == 0
    assert agreement([answer], [answer]) == (1.0, 0)
    assert measured([answer], [NOTHING], len(NAMES))["ap"] is None
    one = (np.array([[0.1, 0.1, 0.5, 0.5]], np.float32), np.array([1]))
    assert measured([answer], [one], len(NAMES))["ap"] == 0


@given(detectors(), st.integers(1, 3))
def test_the_facts_and_pictures_of_models_that_find_nothing(detector: Detector, samples: int) -> None:
    rows = empty_rows(detector, samples)
    truth = [NOTHING] * samples
    answers = [detector([part[0] for part in detector.split(row[np.newaxis])]) for row in rows]
    model = detection.evaluate(answers, truth, len(NAMES), "test")
    model["spread"] = vars(detection.spread(answers, truth, NAMES, "test"))
    facts = {"original": model, "result": model, "agreement": agreement(answers, answers)}
    compared = Detection().compare(facts, NAMES, "original", "result")
    assert compared["measurements"]["agreement"]["value"] is None
    assert set(Detection().judge_outputs(facts, NAMES, "original", "result")) == {"original", "result"}
    judge = Detection().fidelity(detector.specification)
    assert judge.same(rows, rows).tolist() == [1.0] * samples
    assert (judge.snr_db(rows, rows) >= 60).all()
    pictures = ObjectsIllustrator([detector] * 2, [rows, rows], NAMES, truth)
    assert len(pictures.differences()) == samples
    assert pictures.is_empty(0)
    canvas = np.zeros((16, 16, 3), np.uint8)
    assert [drawn.text for drawn in pictures.answers(canvas, 0)] == ["no object"] * 2
    assert padded(truth).shape[0] == samples


def test_the_comparison_says_that_nothing_was_found() -> None:
    """An agreement of 1 over no objects would look like a good result."""
    nothing = missing("fraction", "there are no objects to find").to_json()
    model = {"ap": nothing, "ap50": nothing, "per_class": [{"ap": None, "ap50": None, "objects": 0}]}
    facts: dict[str, Any] = {"images": 4, "agreement": (1.0, 0), "original": model, "result": model}
    task = UnlabelledDetection()
    compared = task.compare(facts, NAMES, "original", "result")
    assert compared["measurements"]["agreement"]["value"] is None
    assert compared["per_class"] == []
    (reason,) = task.findings(facts, NAMES, "original", "result")
    assert "neither model finds an object" in reason.text
    assert reason.level == "warning"


class TaughtBlobs(Blobs):
    """Blobs without labels, whose targets are outputs of a detector with two locations and two classes."""

    class_names = ()

    def targets(self, split: Split) -> np.ndarray:
        rows = np.full((len(self.labels(split)), 12), -9.0, np.float32)
        rows[:, :8] = 0.0
        rows[0, 8] = rows[1, 11] = 3.0
        rows[2, 8] = -1.5  # a probability of 0.18 is not an object that has to be found
        return rows


def test_objects_of_the_original_take_the_place_of_labels() -> None:
    task, data = UnlabelledDetection(), TaughtBlobs()
    specification = {"detector": {"maps": [{"cells": [1, 2], "boxes": [[0.6, 0.4]]}]}}
    expected = data.targets("test")
    lost = expected.copy()
    lost[1, 11] = -9.0

    def evaluated(rows: np.ndarray) -> dict[str, Any]:
        models = {"original": expected, "result": rows}
        outputs = {name: ModelOutputs(values, True, specification) for name, values in models.items()}
        return task.evaluate(outputs, data, "test", "default kernels")

    facts = evaluated(lost)
    assert (facts["original"]["ap"]["value"], facts["result"]["ap"]["value"]) == (1.0, 0.5)
    assert [row["objects"] for row in facts["original"]["per_class"]] == [1, 1]
    compared = task.compare(facts | {"class_names": ["cup"]}, (), "original", "result")
    assert [(row["name"], row["samples"]) for row in compared["per_class"]] == [("cup", 1), ("class 1", 1)]
    assert task.score(lost, data, "test", specification) == 0.5
    assert evaluated(expected)["result"]["ap"]["value"] == 1.0


def facts_of(*, found: int, agreement: float, precision: float | None, sqnr_db: float = 40.0) -> dict[str, Any]:
    """Facts of two models of which the original finds `found` objects."""
    model = {"ap": {"value": precision, "unit": "fraction", "how": "measured"}, "per_class": [{"objects": found}]}
    outputs = [{"name": "scores", "sqnr_db": sqnr_db, "agreement": None}]
    return {"images": 40, "agreement": (agreement, found), "original": model, "result": model, "outputs": outputs}


@pytest.mark.parametrize(
    ("facts", "levels"),
    [
        (facts_of(found=30, agreement=1.0, precision=0.9), []),
        (facts_of(found=1, agreement=0.0, precision=1.0), ["warning"]),
        (facts_of(found=29, agreement=0.4, precision=0.3), ["warning", "warning"]),
        (facts_of(found=30, agreement=0.4, precision=0.3), ["not usable", "not usable"]),
        (facts_of(found=30, agreement=0.7, precision=0.9), ["warning"]),
        (facts_of(found=30, agreement=1.0, precision=0.9, sqnr_db=5.0), []),
        (facts_of(found=29, agreement=1.0, precision=0.9, sqnr_db=5.0), ["warning"]),
    ],
)
def test_few_objects_are_a_warning_at_most(facts: dict[str, Any], levels: list[str]) -> None:
    reasons = UnlabelledDetection().findings(facts, (), "original", "result")
    assert [reason.level for reason in reasons] == levels


def test_a_camera_that_always_sees_the_same_is_no_constant_answer() -> None:
    task = UnlabelledDetection()
    facts: dict[str, Any] = {
        "images": 40,
        "split": "test",
        "original": {"deviation": 0.3},
        "result": {"deviation": 0.2},
    }
    assert {row.verdict for row in task.judge_outputs(facts, (), "original", "result").values()} == {"varied"}
    facts["result"]["deviation"] = 0.0
    assert task.judge_outputs(facts, (), "original", "result")["result"].verdict == "degenerate"


def test_the_background_is_no_class_and_a_box_without_an_area_no_object() -> None:
    class Taught(TaughtBlobs):
        def targets(self, split: Split) -> np.ndarray:
            rows = np.zeros((32, 14), np.float32)
            rows[:, 8::3] = 9.0  # the background is first
            rows[0, 8:11] = (0, 0, 9)
            rows[1, 11:14] = (0, 9, 0)
            rows[2, 8:11] = (0, 9, 0)
            rows[2, 0] = 80.0  # the centre is far outside of the image
            return rows

    settings = {"maps": [{"cells": [1, 2], "boxes": [[0.6, 0.4]]}], "scores": "softmax", "background": "first"}
    task, data = UnlabelledDetection(), Taught()
    objects = task.truth(data, "test", {"detector": settings})
    assert [row.classes.tolist() for row in objects[:4]] == [[1], [0], [], []]
    assert [row.classes.tolist() for row in task.truth(data, "test", {"detector": settings}, [1, 0])] == [[0], [1]]
    rows = data.targets("test")
    facts = task.evaluate({"original": ModelOutputs(rows, True, {"detector": settings})}, data, "test", "")
    assert [row["objects"] for row in facts["original"]["per_class"]] == [1, 1]
