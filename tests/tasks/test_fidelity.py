"""The comparison of outputs: by class, and by the objects that are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.model.ir.tensorflow import flattened
from compress.tasks import TASKS, detection
from compress.tasks.classification import ByClass
from compress.tasks.detection import ByObjects
from deploy.contract.detection import Detector

ANCHORS = {"maps": [{"cells": [1, 2], "boxes": [[0.6, 0.4]]}]}
NOTHING = -9.0


def row(*scores: float, boxes: float = 0.0) -> np.ndarray:
    """Outputs of one sample: two anchors side by side, two classes."""
    return np.concatenate([np.full(8, boxes), scores]).astype(np.float32)[np.newaxis]


def test_classifiers_are_compared_by_their_largest_output() -> None:
    expected = np.array([[1.0, 2, 0], [3, 1, 0]])
    assert ByClass().same(expected, expected[::-1]).tolist() == [0, 0]
    assert ByClass().same(expected, expected * 2).tolist() == [1, 1]
    assert isinstance(TASKS["classification"].fidelity(None), ByClass)


@pytest.mark.parametrize(
    ("actual", "share"),
    [
        (row(4, NOTHING, NOTHING, 4), 1.0),
        (row(1, NOTHING, NOTHING, 1), 1.0),  # lower scores, but both are found
        (row(4, NOTHING, NOTHING, NOTHING), 2 / 3),  # one of two objects is lost: 1 of 2, and 1 of 1
        (row(NOTHING, 4, NOTHING, 4), 0.5),  # another class
        (row(4, NOTHING, NOTHING, 4, boxes=30.0), 0.0),  # other positions
        (row(NOTHING, NOTHING, NOTHING, NOTHING), 0.0),
    ],
)
def test_detectors_are_compared_by_the_objects_that_both_find(actual: np.ndarray, share: float) -> None:
    expected = row(4, NOTHING, NOTHING, 4)
    assert ByObjects(Detector(ANCHORS)).same(expected, actual) == pytest.approx([share])
    nothing = row(NOTHING, NOTHING, NOTHING, NOTHING)
    assert ByObjects(Detector(ANCHORS)).same(nothing, nothing).tolist() == [1]


def test_boxes_of_unlikely_anchors_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "LIKELY", 1)
    expected = row(4, NOTHING, NOTHING, NOTHING, boxes=1.0)
    near, far = expected.copy(), expected.copy()
    near[0, 0] += 0.5  # the box of the likely anchor
    far[0, 4] += 0.5  # the box of the other one
    by_objects = ByObjects(Detector(ANCHORS))
    assert by_objects.snr_db(expected, far).tolist() == [60.0]
    assert by_objects.snr_db(expected, near)[0] < 45
    scored = expected + np.float32(0.5) * (np.arange(12) >= 8)
    assert by_objects.snr_db(expected, scored)[0] < 45


def test_users_see_probabilities_and_the_boxes_of_likely_anchors(keras: Any) -> None:
    by_objects = ByObjects(Detector(ANCHORS))
    expected = row(4, NOTHING, NOTHING, NOTHING)
    actual = expected.copy()
    actual[0, 8] = 0.0  # the score of the first class at the first anchor
    scores, boxes = by_objects.differences(expected, actual)
    assert scores[0, 0] == pytest.approx(0.5 - 1 / (1 + np.exp(-4)), abs=1e-4)
    assert not scores[0, 1:].any()
    assert not boxes.any()
    for anchor, moved in ((0, True), (1, False)):
        actual = expected.copy()
        actual[0, 4 * anchor : 4 * anchor + 4] += 100.0
        _, boxes = by_objects.differences(expected, actual)
        assert (np.abs(boxes).max() > 0.9) == moved
        assert np.abs(boxes).max() <= 1
    tensors = by_objects.differences(*(keras.ops.convert_to_tensor(rows) for rows in (expected, actual)), keras.ops)
    for tensor, array in zip(tensors, by_objects.differences(expected, actual), strict=True):
        np.testing.assert_allclose(np.asarray(tensor), array, atol=1e-5)


def test_keypoints_differ_by_position_and_by_visibility(keras: Any) -> None:
    keypoints = {"count": 2, "visibility": True, "scale": 0.5}
    tensors = [{"part": "boxes"}, {"part": "scores"}, {"part": "keypoints"}]
    by_objects = ByObjects(Detector({**ANCHORS, "keypoints": keypoints, "tensors": tensors}))
    expected = np.concatenate([row(4, NOTHING, NOTHING, NOTHING), np.zeros((1, 12), np.float32)], axis=1)
    actual = expected.copy()
    actual[0, 12] = 1.0  # the first coordinate of the first point at the likely anchor
    actual[0, 17] = 4.0  # whether the second point is visible
    _, _, positions, visible = by_objects.differences(expected, actual)
    likely = 1 / (1 + np.exp(-4.0))
    np.testing.assert_allclose(positions, [[0.5 * likely, *[0.0] * 7]], atol=1e-5)
    np.testing.assert_allclose(visible, [[0.0, (likely - 0.5) * likely, 0.0, 0.0]], atol=1e-5)
    tensors = by_objects.differences(*map(keras.ops.convert_to_tensor, (expected, actual)), keras.ops)
    np.testing.assert_allclose(np.asarray(tensors[3]), visible, atol=1e-5)


def test_scores_before_a_sigmoid_are_read_as_logits() -> None:
    specification = {**ANCHORS, "scores": "probabilities"}
    for logits, expected in ((True, "logits"), (False, "probabilities")):
        fidelity = TASKS["detection"].fidelity(specification, logits=logits)
        assert isinstance(fidelity, ByObjects)
        assert fidelity.detector.specification["scores"] == expected
    softmax = TASKS["detection"].fidelity({**ANCHORS, "scores": "softmax", "background": "first"}, logits=True)
    assert isinstance(softmax, ByObjects)
    assert softmax.detector.specification["scores"] == "softmax"


def test_several_outputs_stand_flattened() -> None:
    parts = [np.arange(8.0).reshape(2, 2, 2), np.arange(2.0).reshape(2, 1)]
    assert flattened(parts).tolist() == [[0, 1, 2, 3, 0], [4, 5, 6, 7, 1]]
    assert flattened(parts[1]).tolist() == [[0], [1]]
