"""Answers drawn into images, and the difference between two answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.data.types import Objects
from compress.tasks.illustrations import MasksIllustrator, ObjectsIllustrator, PointsIllustrator
from deploy.contract import shapes
from deploy.contract.detection import Detector

NAMES = ("cup", "dog")
QUARTERS = Detector({"maps": [{"cells": [2, 2], "boxes": [[0.5, 0.5]]}], "scores": "probabilities"})
"""Four locations; raw boxes of 0 are the quarters of the image."""


def row(*objects: tuple[int, int, float], moved: float = 0.0) -> np.ndarray:
    """Outputs with objects: location, class and score."""
    boxes, scores = np.full((4, 4), moved, np.float32), np.zeros((4, 2), np.float32)
    for location, label, score in objects:
        scores[location, label] = score
    return np.concatenate([boxes.ravel(), scores.ravel()])


def illustrator(original: Any, result: Any, labels: Any = None, names: Any = NAMES) -> ObjectsIllustrator:
    return ObjectsIllustrator([QUARTERS] * 2, [np.stack(original), np.stack(result)], names, labels)


def blank() -> np.ndarray:
    return np.zeros((100, 100, 3), np.uint8)


def test_lost_objects_count_more_than_moved_ones() -> None:
    both = row((0, 0, 0.9), (3, 1, 0.8))
    results = [
        both,
        row((0, 0, 0.7), (3, 1, 0.8), moved=0.1),
        row((0, 0, 0.9)),
        row((0, 1, 0.9), (3, 1, 0.8)),  # another class
        row((0, 0, 0.9), (3, 1, 0.8), (1, 0, 0.6)),
    ]
    same, moved, lost, other, more = illustrator([both] * 5, results).differences()
    assert same.size == 0
    assert 0 < moved.size < 1 <= lost.size
    assert lost.size < other.size
    assert more.text == "1 of 3 objects found by one model alone"
    assert other.text == "2 of 3 objects found by one model alone"
    assert moved.text.startswith("the same objects, 2: scores differ by 0.10 on average, boxes overlap by 0.")
    assert same.text.endswith("scores differ by 0.00 on average, boxes overlap by 1.00")
    (nothing,) = illustrator([row()], [row()]).differences()
    assert nothing == (0.0, "neither model finds an object")


def test_an_object_of_which_one_model_is_less_sure_is_no_lost_one_and_is_drawn() -> None:
    drawing = illustrator([row((0, 0, 0.51))], [row((0, 0, 0.49), (3, 0, 0.49))])
    assert drawing.differences()[0].size < 1
    original, result = drawing.answers(blank(), 0)
    assert original.text == "cup 0.51"
    assert result.text == "cup 0.49"  # not the other object, of which neither model is sure
    assert tuple(result.image[49, 20]) == shapes.colour_of(0)
    assert not result.image[60:, 60:].any()


def test_boxes_names_and_labels() -> None:
    labels = [
        Objects(np.array([[0, 0, 0.5, 0.5], [0.5, 0.5, 1, 1]], np.float32), np.array([1, 1])),
        Objects(np.zeros((0, 4), np.float32), np.zeros(0, np.int64)),
    ]
    rows = [row((0, 1, 0.9), (3, 0, 0.8)), row()]
    drawing = illustrator(rows, rows, labels)
    image = blank()
    label = drawing.label(image.copy(), 0)
    assert label is not None
    assert label.text == "2 dog"
    assert tuple(label.image[99, 60]) == shapes.colour_of(1)
    original, result = drawing.answers(image, 0)
    assert original.text == result.text == "dog 0.90, cup 0.80"
    assert tuple(original.image[99, 60]) == shapes.colour_of(0)
    assert not image.any()
    assert not drawing.is_empty(0)
    assert drawing.is_empty(1)
    assert illustrator(rows, rows).label(image, 0) is None
    assert illustrator(rows, rows, names=()).answers(image, 0)[0].text == "class 1 0.90, class 0 0.80"


def test_weak_detectors_are_drawn_with_lower_scores() -> None:
    assert "the score is 0.5 or more" in illustrator([row((0, 0, 0.6))], [row()]).note
    weak = illustrator([row((0, 0, 0.2))], [row()])
    assert "the score is 0.1 or more" in weak.note
    assert weak.answers(blank(), 0)[0].text == "cup 0.20"


def test_boxes_that_are_no_numbers_are_left_out() -> None:
    broken = row((0, 0, 0.9), (3, 0, 0.9))
    broken[:4] = np.nan
    drawing = illustrator([row((0, 0, 0.9))], [broken])
    assert drawing.answers(blank(), 0)[1].text == "cup 0.90"


def scores_of(mask: np.ndarray, classes: int = 3) -> np.ndarray:
    return np.eye(classes, dtype=np.float32)[mask].reshape(1, -1)


def test_masks() -> None:
    truth = np.array([[[0, 0, 1, 1], [0, 0, 255, 2]]], np.uint8)
    before = np.array([[0, 0, 1, 1], [0, 0, 0, 2]])
    after = np.array([[0, 1, 1, 1], [0, 0, 0, 0]])
    drawing = MasksIllustrator([scores_of(before), scores_of(after)], ["road", "car", "tree"], truth)
    (difference,) = drawing.differences()
    assert difference.size == 2 / 8
    assert difference.text == "0.250 of the pixels have different classes"
    image = np.full((200, 400, 3), 100, np.uint8)
    label = drawing.label(image.copy(), 0)
    assert label.text == "car 0.25, tree 0.12"
    assert (label.image[150:, 200:300] == 100).all()  # the pixels that do not count
    assert (label.image[:, :200] == 100).all()
    assert tuple(label.image[10, 210]) == tuple((100 + np.array(shapes.colour_of(0))) // 2)
    assert tuple(label.image[190, 310]) == tuple((100 + np.array(shapes.colour_of(1))) // 2)
    original, result = drawing.answers(image, 0)
    assert (original.text, result.text) == ("car 0.25, tree 0.12", "car 0.38")
    assert (image == 100).all()
    assert not drawing.is_empty(0)
    nothing = np.zeros_like(truth)
    assert MasksIllustrator([scores_of(nothing[0])] * 2, ["road"], nothing).is_empty(0)


POINTS = np.array([[[0.5, 0.25, 2], [0.9, 0.9, 0]]], np.float32)
"""x, y and visibility."""


@pytest.mark.parametrize("scale", [(1, 1), (80, 40)], ids=["fractions", "pixels"])
def test_points(scale: tuple[int, int]) -> None:
    labels = POINTS * [*scale, 1]
    rows = [(np.array([[0.5, 0.25, 0.1, 0.75]]).reshape(1, 2, 2) * scale).reshape(1, 4) for _ in range(2)]
    rows[1] = rows[1] + np.array([[0.3 * scale[0], 0.4 * scale[1], 0, 0]])
    drawing = PointsIllustrator.of(rows, labels, (40, 80))
    assert drawing is not None
    assert drawing.differences()[0].size == pytest.approx(0.25)
    label = drawing.label(blank(), 0)
    assert label.text == "1 of 2 points are marked"
    assert tuple(label.image[25, 50]) == shapes.colour_of(0)
    assert not label.image[80:, 80:].any()
    original, result = drawing.answers(blank(), 0)
    assert tuple(original.image[75, 10]) == shapes.colour_of(1)
    assert tuple(result.image[65, 80]) == shapes.colour_of(0)
    assert result.text == "0.500 of the image from the labels on average"


def test_positions_in_other_units_are_not_drawn() -> None:
    rows = [np.zeros((1, 4))] * 2
    assert PointsIllustrator.of(rows, POINTS * [500, 500, 1], (40, 80)) is None
    assert PointsIllustrator.of(rows, POINTS - [100, 0, 0], (40, 80)) is None
    unknown = PointsIllustrator.of([np.full((1, 4), np.nan)] * 2, POINTS * [1, 1, 0], (40, 80))
    assert unknown is not None
    assert not unknown.answers(blank(), 0)[0].image.any()
