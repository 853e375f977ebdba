"""The matching of anchors and objects, the loss, and augmentation that also moves boxes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context

from compress.core.errors import ModelError
from compress.data.types import Objects, Split
from compress.learning.training.augmentation import Augment
from compress.learning.training.loop import fit, own_loss
from compress.pipeline.stages.train import Train
from compress.tasks.base import Draws
from compress.tasks.detection import Detection, padded
from compress.tasks.detection_head import DetectionHead, match
from compress.tasks.moved_images import _moved_objects, augmentation
from deploy.contract.average_precision import average_precision
from deploy.contract.detection import Detector

pytestmark = pytest.mark.tensorflow

TWO = {"maps": [{"cells": [2, 2], "boxes": [[0.5, 0.5]]}, {"cells": [1, 1], "boxes": [[0.9, 0.9]]}]}
QUARTER, WHOLE = (0.5, 0.5, 1.0, 1.0), (0.05, 0.05, 0.95, 0.95)


def objects(*rows: tuple[int, tuple[float, float, float, float]]) -> Objects:
    boxes = np.array([box for _, box in rows], np.float32).reshape(-1, 4)
    return Objects(boxes, np.array([label for label, _ in rows], np.int64))


class Found(Blobs):
    """Blobs with one object in each image: the bright half."""

    def objects(self, split: Split) -> list[Objects]:
        halves = {0: (0.0, 0.0, 0.5, 1.0), 1: (0.5, 0.0, 1.0, 1.0)}
        return [objects((int(label), halves[int(label)])) for label in self.labels(split)]


def test_objects_are_filled_up_to_one_array(keras: Any) -> None:
    rows = padded([objects((1, QUARTER), (0, WHOLE)), objects()])
    assert rows.shape == (2, 2, 5)
    np.testing.assert_allclose(rows[0, 0], [1, *QUARTER])
    assert rows[1, :, 0].tolist() == [-1, -1]
    assert padded([objects()]).shape == (1, 1, 5)


def test_anchors_answer_for_what_they_share_most_with_and_each_object_has_one(keras: Any) -> None:
    detector = Detector(TWO)
    thin = (0.02, 0.02, 0.06, 0.06)  # overlaps little with every anchor: the best one is forced
    targets = match(detector, padded([objects((1, QUARTER), (0, thin)), objects((1, WHOLE)), objects()]))
    assert np.asarray(targets.positive).tolist() == [[1, 0, 0, 1, 0], [0, 0, 0, 0, 1], [0] * 5]
    assert np.asarray(targets.classes)[0].tolist() == [0, -1, -1, 1, -1]
    assert np.asarray(targets.classes)[2].tolist() == [-1] * 5
    assert np.asarray(targets.counted).min() == 1


def test_anchors_that_share_some_are_asked_nothing(keras: Any) -> None:
    detector = Detector({"maps": [{"cells": [1, 1], "boxes": [[1.0, 1.0], [0.9, 0.5], [0.3, 1.0]]}]})
    targets = match(detector, padded([objects((0, (0.0, 0.0, 1.0, 1.0)))]))
    assert np.asarray(targets.positive).tolist() == [[1, 0, 0]]  # the overlaps are 1, 0.45 and 0.3
    assert np.asarray(targets.counted).tolist() == [[1, 0, 1]]


def test_the_raw_boxes_asked_for_are_what_gives_the_objects(keras: Any) -> None:
    detector = Detector(TWO)
    box = (0.55, 0.4, 0.95, 0.9)
    targets = match(detector, padded([objects((0, box))]))
    which = np.flatnonzero(np.asarray(targets.positive)[0])
    located = detector.located(np.asarray(targets.boxes)[0][which], which)
    np.testing.assert_allclose(located, [box] * len(which), atol=1e-6)


@pytest.mark.parametrize("scores", ["logits", "probabilities"])
def test_the_loss_is_small_for_right_answers_and_each_mistake_costs(keras: Any, scores: str) -> None:
    detector = Detector({**TWO, "scores": scores})
    labels = padded([objects((1, QUARTER))])
    boxes = np.asarray(match(detector, labels).boxes)
    sure, low = (8.0, -8.0) if scores == "logits" else (0.9997, 0.0003)
    logits = np.full((1, 5, 2), low, np.float32)
    logits[0, 3, 1] = sure

    def cost(boxes: Any, logits: Any) -> float:
        outputs = [keras.ops.convert_to_tensor(array) for array in (boxes, logits)]
        return float(DetectionHead(detector, 2).loss(keras.ops.convert_to_tensor(labels), outputs)[0])

    assert cost(boxes, logits) < 1e-3
    moved = boxes.copy()
    moved[0, 3] += 1
    assert cost(moved, logits) == pytest.approx(4 * 0.5, abs=1e-3)
    elsewhere = boxes.copy()
    elsewhere[0, 0] += 5  # the box of an anchor without an object does not count
    assert cost(elsewhere, logits) < 1e-3
    for place in ((0, 3, 1), (0, 3, 0), (0, 0, 0)):
        wrong = logits.copy()
        wrong[place] = -logits[place] if scores == "logits" else 1 - logits[place]
        assert cost(boxes, wrong) > 1


def test_a_model_learns_to_find_the_bright_half(keras: Any, tmp_path: Path) -> None:

    keras.utils.set_random_seed(0)
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, 2, padding="same", activation="relu")(image)
    x = layers.Conv2D(16, 4, activation="relu")(x)
    boxes = layers.Reshape((-1, 4))(layers.Conv2D(8, 1)(x))
    scores = layers.Reshape((-1, 2))(layers.Conv2D(4, 1)(x))
    model = keras.Model(image, [boxes, scores])
    detector = {"maps": [{"cells": [1, 1], "boxes": [[0.5, 1.0], [0.9, 0.9]]}]}
    data = Found(task="detection")
    stage_context = replace(context(data, tmp_path), specification=detector)
    facts = fit(
        model, own_loss(model, stage_context), Train(epochs=30, batch_size=16, learning_rate=0.02), stage_context
    )
    first = facts["history"][0]
    assert set(first) == {"loss", "scores", "boxes", "val_loss", "val_scores", "val_boxes"}
    for prefix in ("", "val_"):  # the loss is the sum of its parts
        assert first[f"{prefix}loss"] == pytest.approx(first[f"{prefix}scores"] + first[f"{prefix}boxes"], rel=1e-3)
    assert facts["loss"] == {"name": "sum of the losses of scores and boxes, for each object", "guessing": None}
    reader = Detector(detector)
    detections = [reader(pair) for pair in zip(*model.predict(data.inputs("test"), verbose=0), strict=True)]
    assert average_precision(detections, data.objects("test"), 2)["ap50"] > 0.9


def outputs(keras: Any, anchors: int, *sizes: int, sigmoid: bool = False) -> Any:
    image = keras.Input((8, 8, 1))
    flat = keras.layers.Flatten()(image)
    tensors = [keras.layers.Reshape((anchors, size))(keras.layers.Dense(anchors * size)(flat)) for size in sizes]
    if sigmoid:
        tensors[-1] = keras.layers.Activation("sigmoid")(tensors[-1])
    return keras.Model(image, tensors)


def test_a_model_that_is_no_detector_with_these_anchors_is_refused(keras: Any) -> None:
    head_of = Detection().head
    data = Found(task="detection")
    assert head_of(outputs(keras, 5, 4, 2), data, TWO).detector.specification["most"] == 100
    fitting = outputs(keras, 5, 4, 2)
    for model, specification, message in (
        (outputs(keras, 5, 4), TWO, "1 outputs; allowed: 2 outputs"),
        (outputs(keras, 5, 2, 4), TWO, r"boxes \[5, 4\], scores \[5, 2\]"),
        (outputs(keras, 6, 4, 2), TWO, r"shapes \[6, 4\], \[6, 2\]"),
        (outputs(keras, 5, 4, 2, sigmoid=True), TWO, "probabilities; set `scores: probabilities`"),
        (fitting, None, r"the anchors of the model are not known; describe them under model.detector"),
        (fitting, {**TWO, "map": 1}, "unknown key 'map'"),
    ):
        with pytest.raises(ModelError, match=message):
            head_of(model, data, specification)


@pytest.mark.parametrize(
    "augment", [{"flip": True}, {"shift": 0.3}, {"zoom": 0.4}, {"flip": True, "shift": 0.2, "zoom": 0.3}]
)
def test_augmentation_moves_boxes_with_what_is_in_them(keras: Any, augment: dict[str, Any]) -> None:
    import tensorflow

    random = np.random.default_rng(0)
    count, side = 32, 40
    images, labels = np.zeros((count, side, side, 1), np.float32), np.zeros((count, 1, 5), np.float32)
    for index in range(count):
        top, left = random.integers(4, 20, 2)
        images[index, top : top + 12, left : left + 10] = 1
        labels[index, 0] = [1, top / side, left / side, (top + 12) / side, (left + 10) / side]
    change = augmentation(Augment(**augment))
    draws = Draws(tensorflow.constant([1, 2]), count)
    moved, beside = change(tensorflow.constant(images), {"labels": tensorflow.constant(labels)}, draws)
    again = change(tensorflow.constant(images), {"labels": tensorflow.constant(labels)}, draws)[0]
    np.testing.assert_array_equal(moved, again)
    kept = 0
    for image, row in zip(np.asarray(moved)[..., 0], np.asarray(beside["labels"])[:, 0], strict=True):
        bright = np.argwhere(image > 0.5)
        if row[0] < 0:
            continue
        kept += 1
        expected = [*bright.min(axis=0) / side, *(bright.max(axis=0) + 1) / side]
        np.testing.assert_allclose(row[1:], expected, atol=1.01 / side)
    assert kept > count / 2
    assert not np.array_equal(np.asarray(moved), images)


def test_augmented_images_keep_their_size_in_graphs(keras: Any) -> None:
    import tensorflow

    change = augmentation(Augment(zoom=0.3))
    signature = [tensorflow.TensorSpec((None, 40, 32, 1)), tensorflow.TensorSpec((None, 1, 5))]
    graph = tensorflow.function(
        lambda images, labels: change(images, {"labels": labels}, Draws(tensorflow.constant([1, 2]), 2))[0],
        input_signature=signature,
    )
    assert graph.get_concrete_function().output_shapes[1:] == (40, 32, 1)


def test_what_is_moved_out_of_the_image_is_gone(keras: Any) -> None:
    import tensorflow

    rows = tensorflow.constant([[[1, 0.0, 0.0, 0.2, 0.2], [0, 0.4, 0.4, 0.6, 0.6], [-1, -1, -1, -1, -1]]])
    shift, scale = tensorflow.constant([[0.15, 0.0]]), tensorflow.constant([[1.0, 1.0]])
    moved = np.asarray(_moved_objects(tensorflow.cast(rows, tensorflow.float32), scale, shift))[0]
    assert moved[:, 0].tolist() == [-1, 0, -1]
    np.testing.assert_allclose(moved[1, 1:], [0.25, 0.4, 0.45, 0.6], atol=1e-6)
