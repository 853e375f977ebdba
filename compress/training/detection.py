"""Training of detectors: which anchor answers for which object, the loss, and random changes that move boxes along.

Sources: Liu et al., SSD: Single Shot MultiBox Detector, 2016 (anchors, matching, boxes); Lin et al., Focal Loss for
Dense Object Detection, 2017 (scores).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.data.types import Data, Objects
from compress.errors import ModelError
from compress.ir.tensorflow import keras
from compress.training.batches import Augment
from compress.training.loop import Batch, Loss, refuse_misfit
from deploy.contract.detection import DetectionError, Detector

MATCHED, UNMATCHED = 0.5, 0.4
"""An anchor answers for an object that it shares so much with, and for none below the other; between, for nothing."""
FOCUS, BALANCE = 2.0, 0.25
"""Gamma and alpha of the focal loss."""
VISIBLE = 0.4
"""Share of an object that must still be in an augmented image."""


@dataclass(frozen=True)
class DetectionHead:
    """What a detector's outputs mean.

    Attributes:
        detector: its anchors, and how its boxes and scores are read.
    """

    detector: Detector

    def logits(self, scores: Any) -> Any:
        """Scores as logits."""
        ops = keras().ops
        if self.detector.specification["scores"] == "logits":
            return scores
        likely = ops.clip(scores, 1e-6, 1 - 1e-6)
        return ops.log(likely) - ops.log(1 - likely)


def head_of(model: Any, data: Data, specification: Any) -> DetectionHead:
    """Finds out that a model is a detector with these anchors, for this data.

    Args:
        model: a Keras model of the data's input shape.
        data: with objects.
        specification: of the anchors, see `deploy.contract.detection`; None where nobody has said.

    Raises:
        ModelError: it is not.
    """
    refuse_misfit(model, data, 2)
    detector = detector_of(specification)
    wanted = [(len(detector.anchors), 4), (len(detector.anchors), len(data.class_names))]
    found = [tuple(each.shape[1:]) for each in model.outputs]
    if found != wanted:
        raise ModelError(
            f"the model's outputs have the shapes {', '.join(str(list(shape)) for shape in found)}",
            allowed=f"boxes {list(wanted[0])} and scores {list(wanted[1])}, in this order: one row for each anchor",
            todo="check data.source, the model's last layers and its anchors",
        )
    last = model.outputs[1]._keras_history.operation
    sigmoid = "sigmoid" in (getattr(getattr(last, "activation", None), "__name__", ""), type(last).__name__.lower())
    if sigmoid and detector.specification["scores"] == "logits":
        raise ModelError("the model's scores are probabilities", todo="say scores: probabilities in its detector")
    return DetectionHead(detector)


def detector_of(specification: Any) -> Detector:
    """The detector of a specification.

    Raises:
        ModelError: there is none, or it cannot be used.
    """
    if specification is None:
        raise ModelError(
            "where the model's anchors stand is not known",
            todo="say it under model.detector, or with a function `detector` in the builder: see docs/detection.md",
        )
    try:
        return Detector(specification)
    except DetectionError as error:
        raise ModelError(str(error), where="detector", todo="see docs/detection.md") from error


def padded(objects: Sequence[Objects]) -> NDArray[np.float32]:
    """Objects of images as one array: [n, most, 5], a class and a box in each row; the class -1 fills up."""
    most = max([len(each.classes) for each in objects] or [0]) or 1
    rows = np.full((len(objects), most, 5), -1, np.float32)
    for row, (boxes, classes) in zip(rows, objects, strict=True):
        row[: len(classes), 0], row[: len(classes), 1:] = classes, boxes
    return rows


def loss(head: DetectionHead) -> Loss:
    """Focal loss of the scores of all anchors and smooth L1 of the boxes of those that answer for an object."""
    ops, classes = keras().ops, keras().ops.one_hot

    def of(batch: Batch, outputs: Any) -> Any:
        raw, scores = outputs
        answers = match(head.detector, batch.labels)
        target = classes(ops.cast(answers.classes, "int32"), scores.shape[-1], dtype="float32")
        logits = head.logits(scores)
        miss = ops.where(target > 0, ops.softplus(-logits), ops.softplus(logits))
        wrong = ops.where(target > 0, 1 - ops.sigmoid(logits), ops.sigmoid(logits))
        weight = ops.where(target > 0, BALANCE, 1 - BALANCE) * wrong**FOCUS * answers.counted[..., None]
        apart = ops.abs(raw - answers.boxes)
        smooth = ops.where(apart < 1, 0.5 * apart**2, apart - 0.5) * answers.positive[..., None]
        count = ops.maximum(ops.sum(answers.positive, axis=1), 1)
        return (ops.sum(weight * miss, axis=(1, 2)) + ops.sum(smooth, axis=(1, 2))) / count

    return Loss(of)


@dataclass(frozen=True)
class Answers:
    """What the anchors of a batch of images should say: tensors [n, anchors].

    Attributes:
        positive: 1 where an anchor answers for an object, otherwise 0.
        counted: 1 where its scores count, 0 where it is too near to an object to deny it.
        classes: its object's class, -1 for none.
        boxes: [n, anchors, 4], the raw numbers that give its object's box.
    """

    positive: Any
    counted: Any
    classes: Any
    boxes: Any


def match(detector: Detector, objects: Any) -> Answers:
    """Gives each anchor the object that it shares most with, if that is enough; and each object its best anchor.

    Args:
        detector: with the anchors.
        objects: [n, most, 5] as `padded` makes them.
    """
    ops = keras().ops
    classes, boxes = objects[..., 0], objects[..., 1:]
    there = ops.cast(classes >= 0, "float32")
    shared = _overlaps(boxes, detector) * there[..., None]  # [n, most, anchors]
    best = ops.argmax(shared, axis=1)
    most = ops.max(shared, axis=1)
    favourite = ops.one_hot(ops.argmax(shared, axis=2), shared.shape[-1], dtype="float32") * there[..., None]
    favourite = favourite * ops.cast(shared > 0, "float32")
    forced = ops.max(favourite, axis=1) > 0
    owner = ops.where(forced, ops.argmax(favourite, axis=1), best)
    positive = ops.cast(ops.logical_or(forced, most >= MATCHED), "float32")
    counted = ops.maximum(positive, ops.cast(most < UNMATCHED, "float32"))
    own = ops.take_along_axis(objects, ops.repeat(ops.expand_dims(owner, -1), 5, axis=-1), axis=1)
    found = ops.where(positive > 0, own[..., 0], -1.0)
    return Answers(positive, counted, found, _raw(own[..., 1:], detector))


def _overlaps(boxes: Any, detector: Detector) -> Any:
    """Intersection over union of each object with each anchor: [n, most, anchors]."""
    ops, anchors = keras().ops, detector.anchors
    low, high = anchors[:, :2] - anchors[:, 2:] / 2, anchors[:, :2] + anchors[:, 2:] / 2
    boxes = ops.expand_dims(boxes, 2)
    sides = ops.maximum(ops.minimum(boxes[..., 2:], high) - ops.maximum(boxes[..., :2], low), 0)
    shared = sides[..., 0] * sides[..., 1]
    areas = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    return shared / ops.maximum(areas + anchors[:, 2] * anchors[:, 3] - shared, 1e-9)


def _raw(boxes: Any, detector: Detector) -> Any:
    """The raw numbers that make boxes of anchors: what `Detector.located` undoes."""
    ops, anchors = keras().ops, detector.anchors
    variances = np.asarray(detector.specification["variances"], np.float32)
    middle, size = (boxes[..., :2] + boxes[..., 2:]) / 2, ops.maximum(boxes[..., 2:] - boxes[..., :2], 1e-6)
    moved = (middle - anchors[:, :2]) / anchors[:, 2:]
    return ops.concatenate([moved, ops.log(size / anchors[:, 2:])], axis=-1) / variances


def augmentation(augment: Augment) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """(images, targets, two seeds) -> both with random shifts, changes of size and mirrorings of images and objects.

    Of what is moved out of the image the rest counts, if there is enough of it. Rotation is refused beforehand.
    """
    import tensorflow

    def change(images: Any, targets: Any, seeds: Any) -> tuple[Any, Any]:
        if not (augment.flip or augment.shift or augment.zoom):
            return images, targets
        count = tensorflow.shape(images)[0]
        draws = tensorflow.random.stateless_uniform((count, 4), seeds, -1.0, 1.0)
        size = 1 + augment.zoom * draws[:, :1]
        mirrored = draws[:, 1:2] > (0.0 if augment.flip else 1.0)
        scale = tensorflow.concat([size, tensorflow.where(mirrored, -size, size)], axis=1)  # of y and x
        shift = augment.shift * draws[:, 2:]
        return _moved_images(images, scale, shift), {"labels": _moved_objects(targets["labels"], scale, shift)}

    return change


def _moved_images(images: Any, scale: Any, shift: Any) -> Any:
    """Images in which what is at u comes from (u - 1/2) * scale + 1/2 + shift, fractions of the sides; edges repeat."""
    import tensorflow

    sides = tensorflow.cast(tensorflow.shape(images)[1:3], tensorflow.float32)
    offset = (sides - 1) / 2 * (1 - scale) + shift * sides
    zero = tensorflow.zeros_like(scale[:, 0])
    rows = [scale[:, 1], zero, offset[:, 1], zero, scale[:, 0], offset[:, 0], zero, zero]
    return tensorflow.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tensorflow.stack(rows, axis=1),
        output_shape=tensorflow.shape(images)[1:3],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="NEAREST",
    )


def _moved_objects(objects: Any, scale: Any, shift: Any) -> Any:
    """Objects where `_moved_images` has moved them; gone where too little of them is left."""
    import tensorflow

    scale, shift = scale[:, None], shift[:, None]
    ends = [(objects[..., place : place + 2] - 0.5 - shift) / scale + 0.5 for place in (1, 3)]
    low, high = tensorflow.minimum(*ends), tensorflow.maximum(*ends)
    seen_low, seen_high = tensorflow.clip_by_value(low, 0.0, 1.0), tensorflow.clip_by_value(high, 0.0, 1.0)
    whole, seen = (tensorflow.reduce_prod(b - a, axis=-1) for a, b in ((low, high), (seen_low, seen_high)))
    kept = tensorflow.logical_and(objects[..., 0] >= 0, seen >= VISIBLE * whole)
    classes = tensorflow.where(kept, objects[..., 0], -1.0)
    return tensorflow.concat([classes[..., None], seen_low, seen_high], axis=-1)
