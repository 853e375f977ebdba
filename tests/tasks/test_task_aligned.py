"""The assignment of locations to objects, and the loss, of detectors without anchors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.tasks.detection_head import DetectionHead
from compress.tasks.task_aligned import assign, generalized_overlap, loss_parts, overlap
from deploy.contract.detection import Detector, DetectorParts
from deploy.contract.suppression import overlaps

pytestmark = pytest.mark.tensorflow

MAPS = [{"cells": [8, 8]}, {"cells": [4, 4]}]
LOCATIONS = 80
CLASSES = 3
BINS = 8
SURE = 9.0


def detector(code: str = "dfl", **settings: Any) -> Detector:
    return Detector({"maps": MAPS, "code": code, "bins": BINS, **settings})


def rows(*objects: tuple[int, tuple[float, float, float, float]], most: int = 3) -> Any:
    """Return the objects of one image: [1, most, 5]."""
    padded = np.full((1, most, 5), -1, np.float32)
    for index, (label, box) in enumerate(objects):
        padded[0, index] = [label, *box]
    return padded


def raw_boxes(reader: Detector, box: tuple[float, float, float, float]) -> Any:
    """Return the raw numbers with which every location predicts the box, as far as its code can: [1, n, numbers]."""
    points = (reader.at.cells + reader.specification["offset"]) * reader.at.steps
    low = (points - np.asarray(box[:2])) / reader.at.steps
    high = (np.asarray(box[2:]) - points) / reader.at.steps
    top, left, bottom, right = low[:, 0], low[:, 1], high[:, 0], high[:, 1]
    order = (left, top, right, bottom) if reader.specification["order"] == "xy" else (top, left, bottom, right)
    distances = np.stack(order, axis=1).astype(np.float32)
    if reader.specification["code"] == "ltrb":
        return distances[None]
    clipped = np.clip(distances, 0, BINS - 1.01)[..., None]
    share = np.maximum(1 - abs(np.arange(BINS) - clipped), 1e-6)
    return np.log(share).astype(np.float32).reshape(1, len(distances), -1)


def test_overlaps_are_those_of_the_evaluation(keras: Any) -> None:
    random = np.random.default_rng(0)
    corners = random.random((2, 20, 2, 2)).astype(np.float32)
    first, second = np.sort(corners, axis=2).reshape(2, 20, 4)
    table = overlap(first[:, None], second[None])
    np.testing.assert_allclose(table, overlaps(first, second), atol=1e-6)
    pairs = np.array([[[0, 0, 1, 1], [0, 0, 1, 1]], [[0, 0, 1, 1], [0, 2, 1, 3]]], np.float32)
    # Rezatofighi et al., 2019: 1 for equal boxes; for separate boxes, minus the empty share of the box around both.
    np.testing.assert_allclose(generalized_overlap(pairs[:, 0], pairs[:, 1]), [1, -1 / 3], atol=1e-6)


def test_the_best_ten_locations_inside_an_object_are_assigned_to_it(keras: Any) -> None:
    reader = detector()
    box = (0.1, 0.1, 0.9, 0.9)
    likely = np.full((1, LOCATIONS, CLASSES), 0.1, np.float32)
    better = [9, 18, 27]
    likely[0, better, 2] = 0.9
    predicted = np.broadcast_to(np.array([0.2, 0.2, 0.9, 0.9], np.float32), (1, LOCATIONS, 4))
    result = assign(reader, rows((2, box)), predicted, likely)
    positive = np.flatnonzero(np.asarray(result.positive)[0])
    points = reader.anchors[positive, :2]
    assert (points > 0.1).all()
    assert (points < 0.9).all()
    assert set(better) <= set(positive)
    np.testing.assert_allclose(np.asarray(result.boxes)[0, positive], [box] * len(positive))
    scores = np.asarray(result.scores)[0]
    assert not scores[:, :2].any()
    # The best location gets the overlap; the others get less, as the root of their score is smaller (TOOD).
    reached = 0.49 / 0.64
    np.testing.assert_allclose(scores[better, 2], reached, rtol=1e-5)
    others = [index for index in positive if index not in better]
    np.testing.assert_allclose(scores[others, 2], reached * (0.1 / 0.9) ** 0.5, rtol=1e-4)


def test_no_more_than_ten_locations_are_assigned_if_they_differ(keras: Any) -> None:
    likely = np.random.default_rng(0).random((1, LOCATIONS, CLASSES)).astype(np.float32)
    box = (0.0, 0.0, 1.0, 1.0)
    predicted = np.broadcast_to(np.array(box, np.float32), (1, LOCATIONS, 4))
    result = assign(detector(), rows((1, box)), predicted, likely)
    expected = np.argsort(-likely[0, :, 1])[:10]
    assert set(np.flatnonzero(np.asarray(result.positive)[0])) == set(expected)


def test_a_location_in_two_objects_belongs_to_the_one_that_it_overlaps_most(keras: Any) -> None:
    left, right = (0.0, 0.0, 1.0, 0.6), (0.0, 0.4, 1.0, 1.0)
    likely = np.full((1, LOCATIONS, CLASSES), 0.5, np.float32)
    for box, label in ((left, 0), (right, 1)):
        predicted = np.broadcast_to(np.array(box, np.float32), (1, LOCATIONS, 4))
        result = assign(detector(), rows((0, left), (1, right)), predicted, likely)
        columns = detector().anchors[:, 1]
        shared = (columns > 0.4) & (columns < 0.6) & (np.asarray(result.positive)[0] > 0)
        assert shared.any()
        assert (np.asarray(result.scores)[0, shared].argmax(axis=1) == label).all()


def test_an_object_without_a_location_inside_gets_the_nearest_and_padding_gets_none(keras: Any) -> None:
    tiny = (0.49, 0.49, 0.51, 0.51)  # between the centres of the cells
    likely = np.full((1, LOCATIONS, CLASSES), 0.5, np.float32)
    predicted = np.concatenate([detector().anchors[:, :2] - 0.05, detector().anchors[:, :2] + 0.05], axis=1)[None]
    result = assign(detector(), rows((0, tiny)), predicted, likely)
    (place,) = np.flatnonzero(np.asarray(result.positive)[0])
    np.testing.assert_allclose(abs(detector().anchors[place, :2] - 0.5), 1 / 16)
    nothing = assign(detector(), rows(), predicted, likely)
    assert not np.asarray(nothing.positive).any()
    assert not np.asarray(nothing.scores).any()


@pytest.mark.parametrize("order", ["xy", "yx"])
@pytest.mark.parametrize("code", ["dfl", "ltrb"])
def test_the_loss_is_small_for_right_answers_and_each_mistake_costs(keras: Any, code: str, order: str) -> None:
    reader = detector(code, order=order)
    box = (0.25, 0.125, 0.625, 0.5)
    objects = rows((1, box))
    boxes = raw_boxes(reader, box)
    decoded = np.asarray(reader.corners(boxes))
    likely = np.full((1, LOCATIONS, CLASSES), 0.5, np.float32)
    positive = np.asarray(assign(reader, objects, decoded, likely).positive)[0] > 0
    np.testing.assert_allclose(decoded[0, positive], [box] * positive.sum(), atol=1e-3)
    scores = np.full((1, LOCATIONS, CLASSES), -SURE, np.float32)
    scores[0, positive, 1] = SURE

    def cost(boxes: Any, scores: Any) -> float:
        return float(sum(loss_parts(reader, objects, DetectorParts(boxes, scores)))[0])

    # The cross-entropy with two bins is at least the entropy of their shares.
    least = cost(boxes, scores)
    assert least < (0.05 if code == "ltrb" else 1.1)
    place = np.flatnonzero(positive)[0]
    moved = boxes.copy()
    moved[0, place] = np.roll(moved[0, place], 1)
    assert cost(moved, scores) > least + 0.1
    elsewhere = boxes.copy()
    elsewhere[0, np.flatnonzero(~positive)[0]] += np.arange(boxes.shape[2])
    assert cost(elsewhere, scores) == pytest.approx(least, abs=1e-5)
    # A single location may miss the object, if others find it; not all of them.
    for index, label in ((positive, 1), (place, 0), (np.flatnonzero(~positive)[0], 0)):
        wrong = scores.copy()
        wrong[0, index, label] *= -1
        assert cost(boxes, wrong) > least + 0.1


@pytest.mark.parametrize("code", ["dfl", "ltrb"])
def test_gradients_are_finite_without_objects_too_and_in_graphs_of_any_batch(keras: Any, code: str) -> None:
    import tensorflow

    entries = [{"part": part, "map": index} for index in range(2) for part in ("boxes", "scores")]
    head = DetectionHead(detector(code, tensors=entries), CLASSES)
    width = 4 * BINS if code == "dfl" else 4
    shapes = [(8, 8, width), (8, 8, CLASSES), (4, 4, width), (4, 4, CLASSES)]

    @tensorflow.function(  # type: ignore[untyped-decorator]
        input_signature=[
            [tensorflow.TensorSpec((None, *shape)) for shape in shapes],
            tensorflow.TensorSpec((None, 3, 5)),
        ]
    )
    def gradients(outputs: Any, objects: Any) -> Any:
        with tensorflow.GradientTape() as tape:
            tape.watch(outputs)
            loss = head.loss(objects, outputs)
        return loss, tape.gradient(loss, outputs)

    outputs = [np.full((2, *shape), 2.0, np.float32) for shape in shapes]  # boxes of 4 cells with `ltrb`
    objects = np.concatenate([rows((0, (0.2, 0.2, 0.7, 0.6)), (2, (0.0, 0.0, 0.0, 0.0))), rows()])
    losses, output_gradients = gradients(outputs, objects)
    assert losses.shape == (2,)
    assert all(np.isfinite(array).all() for array in [losses, *output_gradients])
    assert all(np.asarray(gradient)[0].any() for gradient in output_gradients[:2])
    assert not np.asarray(output_gradients[0])[1].any()  # no object, no box
    assert np.asarray(output_gradients[1])[1].all()


def test_distances_between_two_bins_are_shared_by_both(keras: Any) -> None:
    reader = Detector({"maps": [{"cells": [4, 4]}], "code": "dfl", "bins": BINS})
    box = (0.0625, 0.1875, 0.5625, 0.6875)  # from the centre of cell 1, 1: 1.25, 0.75, 0.75, 1.25 cells
    probabilities = np.full((4, BINS), 1e-6)
    for side, distance in enumerate((0.75, 1.25, 1.25, 0.75)):
        below = int(distance)
        probabilities[side, below : below + 2] = [1 - (distance - below), distance - below]
    scores = np.full((1, 16, 1), -SURE, np.float32)
    scores[0, 5] = SURE

    def cost(probabilities: Any) -> float:
        boxes = np.zeros((1, 16, 4, BINS), np.float32)
        boxes[..., -1] = 9  # the other locations predict boxes that overlap little
        boxes[0, 5] = np.log(probabilities)
        return float(sum(loss_parts(reader, rows((0, box)), DetectorParts(boxes.reshape(1, 16, -1), scores)))[0])

    same_mean = np.full((4, BINS), 1e-6)
    for side, distance in enumerate((0.75, 1.25, 1.25, 0.75)):
        same_mean[side, [0, 2]] = [1 - distance / 2, distance / 2]
    assert cost(probabilities) < cost(same_mean)


@pytest.mark.parametrize("code", ["dfl", "ltrb"])
def test_distillation_learns_scores_everywhere_and_boxes_where_the_teacher_sees_an_object(
    keras: Any, code: str
) -> None:
    head = DetectionHead(detector(code), CLASSES)
    random = np.random.default_rng(0)
    width = 4 * BINS if code == "dfl" else 4
    boxes = random.normal(size=(1, LOCATIONS, width)).astype(np.float32)
    scores = np.full((1, LOCATIONS, CLASSES), -SURE, np.float32)
    scores[0, 7, 1] = SURE
    teacher = head.logits([boxes, scores])

    def cost(boxes: Any, scores: Any) -> float:
        student = head.logits([boxes, scores])
        return float(head.distillation_loss(student, teacher, 1.0)[0])

    assert cost(boxes, scores) == pytest.approx(0, abs=1e-4)
    for place, least, most in ((7, 0.3, 30.0), (8, 0.0, 0.02)):
        moved = boxes.copy()
        moved[0, place] = np.roll(moved[0, place], 1)
        assert least <= cost(moved, scores) < most
        other = scores.copy()
        other[0, place, 1] *= -1
        assert cost(boxes, other) > 5
