"""Decoding of a detector's outputs, and its average precision against pycocotools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coco_reference import by_coco

from deploy.contract.average_precision import average_precision
from deploy.contract.detection import Detections, Detector, DetectorParts
from deploy.contract.detector_specification import DetectionError
from deploy.contract.suppression import overlaps, suppressed

SMALL = {"maps": [{"cells": [2, 3], "boxes": [[0.4, 0.2], [0.2, 0.4]]}, {"cells": [1, 1], "boxes": [[0.8, 0.8]]}]}


def test_centres_may_be_outside_their_cells_by_a_scale() -> None:
    maps = [{"cells": [1, 2], "boxes": [[0.5, 0.5]], "centre_scale": 1.2}]
    boxes = Detector({"maps": maps, "code": "yolov3"}).corners(np.full((2, 4), [80.0, -80.0, 0.0, 0.0], np.float32))
    np.testing.assert_allclose(boxes[:, [1, 3]].mean(axis=1), [0.55, 1.05], atol=1e-6)
    np.testing.assert_allclose(boxes[:, [0, 2]].mean(axis=1), [-0.1, -0.1], atol=1e-6)
    with pytest.raises(DetectionError, match="centre_scale must be"):
        Detector({"maps": [{**maps[0], "centre_scale": 0}], "code": "yolov3"})
    with pytest.raises(DetectionError, match="must have the keys"):
        Detector({"maps": maps, "code": "yolov5"})


def test_anchors_come_map_by_map_row_by_row_column_by_column_size_by_size() -> None:
    anchors = Detector(SMALL).anchors
    assert anchors.shape == (13, 4)
    assert anchors.dtype == np.float32
    np.testing.assert_allclose(anchors[0], [0.25, 1 / 6, 0.4, 0.2], rtol=1e-6)
    np.testing.assert_allclose(anchors[1], [0.25, 1 / 6, 0.2, 0.4], rtol=1e-6)
    np.testing.assert_allclose(anchors[2], [0.25, 3 / 6, 0.4, 0.2], rtol=1e-6)
    np.testing.assert_allclose(anchors[6], [0.75, 1 / 6, 0.4, 0.2], rtol=1e-6)
    np.testing.assert_allclose(anchors[12], [0.5, 0.5, 0.8, 0.8], rtol=1e-6)


def test_raw_boxes_move_and_scale_their_anchors() -> None:
    detector = Detector({**SMALL, "variances": [0.1, 0.1, 0.2, 0.2]})
    raw = np.zeros((13, 4), np.float32)
    raw[12] = [1, -1, np.log(0.5) / 0.2, 0]
    located = detector.located(raw)
    np.testing.assert_allclose(located[0], [0.05, 1 / 6 - 0.1, 0.45, 1 / 6 + 0.1], atol=1e-6)
    np.testing.assert_allclose(located[12], [0.58 - 0.2, 0.42 - 0.4, 0.58 + 0.2, 0.42 + 0.4], atol=1e-6)


def test_boxes_are_cut_off_at_the_border_and_huge_numbers_do_no_harm() -> None:
    raw = np.full((13, 4), 1e30, np.float32)
    with np.errstate(over="raise"):
        located = Detector(SMALL).located(raw)
    assert np.isfinite(located).all()
    assert located.min() >= 0
    assert located.max() <= 1


def test_detections_are_sorted_and_suppressed_within_their_class() -> None:
    detector = Detector({"maps": [{"cells": [1, 1], "boxes": [[0.5, 0.5]] * 4}], "scores": "probabilities"})
    scores = np.array([[0.6, 0.0], [0.9, 0.0], [0.0, 0.7], [0.0, 0.005]], np.float32)
    detections = detector([np.zeros((4, 4), np.float32), scores], ["a", "b"])
    assert [(detection.label, round(detection.score, 3)) for detection in detections.top()] == [("a", 0.9), ("b", 0.7)]
    assert detections.top(1)[0].box == (0.25, 0.25, 0.75, 0.75)
    assert [row["label"] for row in detections.above(0.8).rows()] == ["a"]


def test_logits_are_the_sigmoids_of_probabilities() -> None:
    logits = np.array([[-200.0, 0.0, 200.0]], np.float32)
    with np.errstate(all="raise", under="ignore"):
        probabilities = Detector(SMALL).probabilities(DetectorParts(np.zeros((1, 4)), logits))
        np.testing.assert_allclose(probabilities, [[0, 0.5, 1]], atol=1e-6)


def test_nothing_is_found_where_scores_are_low_or_no_numbers() -> None:
    scores = np.full((13, 2), -30.0, np.float32)
    scores[3] = np.nan
    assert len(Detector(SMALL)([np.zeros((13, 4)), scores])) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("code", ["ssd", "centernet", "corners", "dfl"])
def test_boxes_that_are_no_numbers_are_left_out(code: str, value: float) -> None:
    maps = SMALL["maps"] if code == "ssd" else [{"cells": [1, 13]}]
    detector = Detector({"maps": maps, "code": code, "bins": 4, "overlap": 1.0})
    boxes = np.zeros((13, 16 if code == "dfl" else 4), np.float32)
    boxes[3] = value
    detections = detector([boxes, np.full((13, 1), 2.0)])
    assert np.isfinite(detections.boxes).all()
    assert 12 <= len(detections) <= 13


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"maps": []}, "maps must be a list"),
        ({"maps": [{"cells": [2, 2]}]}, "must have the keys"),
        ({"maps": [{"cells": [2.5, 2], "boxes": [[0.1, 0.1]]}]}, "whole numbers"),
        ({"maps": [{"cells": [2, 2], "boxes": [[0.1, -0.1]]}]}, "2 numbers above 0"),
        ({"maps": [{"cells": [4096, 4096], "boxes": [[0.1, 0.1]]}]}, "allowed: 1 to"),
        ({"maps": [{"cells": [4, 4], "boxes": []}]}, "boxes must be a list"),
        ({"variances": [1, 1, 1]}, "variances must be 4 numbers"),
        ({"scores": "tanh"}, "scores must be one of 'logits'"),
        ({"least_score": 1.0}, "least_score must be below 1"),
        ({"most": True}, "most must be a whole number"),
        ({"anchor": 1}, "unknown key 'anchor'"),
    ],
)
def test_specifications_that_cannot_be_used_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DetectionError, match=message):
        Detector({**SMALL, **change})


def test_outputs_of_other_anchors_are_refused() -> None:
    with pytest.raises(DetectionError, match="76 values are not the outputs of 13 locations"):
        Detector(SMALL)([np.zeros((12, 4)), np.zeros((14, 2))])


def test_the_boxes_of_a_runtime_come_first() -> None:
    boxes, scores = ({"shape": np.array([1, 13, side])} for side in (4, 3))
    detector = Detector(SMALL)
    assert detector.ordered([scores, boxes]) == [boxes, scores]
    assert detector.ordered([boxes, scores]) == [boxes, scores]
    assert detector.ordered([boxes]) == [boxes]
    assert detector.ordered([scores, scores]) == [scores, scores]


def test_the_last_dimension_distinguishes_outputs_of_equal_size() -> None:
    tensors = [{"part": part, "map": index} for index in (0, 1) for part in ("boxes", "scores")]
    maps = [{"cells": [8, 8]}, {"cells": [2, 2]}]
    detector = Detector({"maps": maps, "code": "dfl", "bins": 16, "tensors": tensors})
    shapes = [[1, 8, 8, 64], [1, 8, 8, 4], [1, 2, 2, 64], [1, 2, 2, 4]]
    details = [{"shape": np.array(shape)} for shape in shapes]
    assert detector.ordered([details[index] for index in (2, 3, 1, 0)]) == details


def test_suppression_keeps_the_first_of_those_that_share_much() -> None:
    boxes = np.array([[0, 0, 1, 1], [0, 0, 1, 0.9], [0, 0.5, 1, 1], [0, 0, 0, 0]], np.float32)
    same, other = np.zeros(4, int), np.array([0, 1, 0, 0])
    assert suppressed(boxes, same, 0.5, 10).tolist() == [0, 2, 3]
    assert suppressed(boxes, same, 0.4, 10).tolist() == [0, 3]
    assert suppressed(boxes, same, 0.95, 2).tolist() == [0, 1]
    assert suppressed(boxes, other, 0.5, 10).tolist() == [0, 1, 2, 3]  # only a box of the same class suppresses one
    assert overlaps(boxes[:1], boxes)[0].tolist() == pytest.approx([1, 0.9, 0.5, 0])


def scene(random: np.random.Generator, classes: int) -> tuple[Any, Detections]:
    """Return random objects, and detections near some of them and elsewhere."""
    count = int(random.integers(0, 6))
    low = random.uniform(0, 0.7, (count, 2))
    boxes = np.concatenate([low, low + random.uniform(0.05, 0.3, (count, 2))], axis=1).astype(np.float32)
    labels = random.integers(0, classes - 1, count)  # the last class has no objects
    near = np.sort((boxes + random.normal(0, 0.02, boxes.shape)).reshape(-1, 2, 2), axis=1).reshape(-1, 4)
    stray = np.sort(random.uniform(0, 1, (3, 2, 2)), axis=1).reshape(3, 4)
    predicted_boxes = np.concatenate([near, near, stray]).astype(np.float32)
    kinds = np.concatenate([labels, random.integers(0, classes, count + 3)])
    scores = np.round(random.uniform(0.01, 1, len(predicted_boxes)), 1).astype(np.float32)  # many are equal
    order = np.argsort(-scores, kind="mergesort")
    return (boxes, labels), Detections(predicted_boxes[order], kinds[order], scores[order])


@pytest.mark.parametrize("seed", range(5))
def test_average_precision_is_that_of_pycocotools(seed: int) -> None:
    random = np.random.default_rng(seed)
    ground_truth, predictions = zip(*(scene(random, 4) for _ in range(30)), strict=True)
    ours, theirs = average_precision(predictions, ground_truth, 4), by_coco(predictions, ground_truth, 4)
    assert ours["ap50"] > 0.2  # some objects are found, and some are not
    assert ours["ap"] < 0.9
    assert ours["ap"] == pytest.approx(theirs["ap"], abs=1e-9)
    assert ours["ap50"] == pytest.approx(theirs["ap50"], abs=1e-9)
    for one, other in zip(ours["per_class"], theirs["per_class"], strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    assert ours["per_class"][3] == {"ap": None, "ap50": None, "objects": 0}


def test_without_objects_there_is_no_average_precision() -> None:
    nothing = (np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    none = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32))
    assert average_precision([none], [nothing], 2)["ap"] is None
    one = (np.array([[0.1, 0.1, 0.5, 0.5]], np.float32), np.zeros(1, np.int64))
    assert average_precision([none], [one], 2)["ap"] == 0.0
