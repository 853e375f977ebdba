"""Shapes in images: they change their own pixels, and no others."""

from __future__ import annotations

import numpy as np

from deploy.contract import shapes
from deploy.contract.detection import Detections


def test_labels_name_classes_and_the_best_box_is_on_top() -> None:
    canvas = np.zeros((50, 100, 3), np.uint8)
    boxes = np.array([[0.2, 0.1, 0.8, 0.5], [0.2, 0.1, 0.8, 0.9]], np.float32)
    detections = Detections(boxes, np.array([0, 5]), np.array([0.9, 0.4], np.float32), ["cup"])
    texts = shapes.draw_objects(canvas, detections)
    assert [text.text for text in texts] == ["5 0.40", "cup 0.90"]  # a class without a name is shown as a number
    assert [text.colour for text in texts] == [shapes.colour_of(5), shapes.colour_of(0)]
    assert tuple(canvas[20, 10]) == shapes.colour_of(0)  # the left side of both
    assert tuple(canvas[20, 89]) == shapes.colour_of(5)
    assert not canvas[20, 60].any()
    named = canvas.copy()
    shapes.write_captions(named, [])
    assert np.array_equal(named, canvas)
    shapes.write_captions(named, texts)
    assert not np.array_equal(named, canvas)


def test_classes_of_scores() -> None:
    scores = np.zeros((1, 2, 3), np.float32)
    scores[0, 1, 2] = 1
    assert shapes.class_at(scores).tolist() == [[0, 2]]
    assert shapes.class_at(np.array([[0.4, 0.6]], np.float32)).tolist() == [[0, 1]]


def test_classes_of_a_coarse_grid_cover_the_image_and_the_first_changes_nothing() -> None:
    canvas = np.full((4, 6, 3), 100, np.uint8)
    shapes.blend_classes(canvas, np.array([[0, 1], [2, 0]]))
    first, second = ((100 + np.array(shapes.colour_of(number))) // 2 for number in (0, 1))
    assert (canvas[:2, 3:] == first).all()
    assert (canvas[2:, :3] == second).all()
    assert (canvas[:2, :3] == 100).all()
