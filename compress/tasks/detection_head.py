"""The outputs of detectors in training: matching of anchors with objects, losses with objects and other detectors.

Sources: Liu et al., SSD, 2016 (anchors); Lin et al., Focal Loss for Dense Object Detection, 2017 (scores of anchors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from compress.model.ir.tensorflow import keras
from compress.tasks import task_aligned
from compress.tasks.base import Head, Specification
from compress.tasks.output_forms import sigmoid_divergence, softmax_divergence
from deploy.contract.detection import Detector, DetectorParts

FOCUS, BALANCE = 2.0, 0.25
"""Gamma and alpha of the focal loss."""
MATCHED, UNMATCHED = 0.5, 0.4
"""Overlap above which an anchor is positive, and below which it is negative; between them it is ignored."""


@dataclass(frozen=True)
class DetectionHead(Head):
    """The meaning of a detector's outputs.

    Attributes:
        detector: the locations, and how boxes and scores are read.
        columns: the number of scores of a location: the classes, and the background if it has a score.
    """

    loss_name: ClassVar[str] = "sum of the losses of scores and boxes, for each object"
    shown_values: ClassVar[tuple[str, ...]] = ("scores", "boxes")

    detector: Detector
    columns: int

    @property
    def specification(self) -> Specification:
        """The locations, and the encoding of boxes and scores."""
        return self.detector.specification

    @property
    def _logits_detector(self) -> Detector:
        """The detector of outputs in the form of `logits`."""
        if self.detector.specification["scores"] != "probabilities":
            return self.detector
        return Detector({**self.detector.specification, "scores": "logits"})

    def logits(self, outputs: Any) -> Any:
        """Return the outputs, with scores as logits, flattened and concatenated: [n, values]."""
        ops = keras().ops
        flat = []
        entries = self.detector.specification["tensors"]
        sizes = self.detector.output_sizes(self.columns)
        tensors = keras().tree.flatten(outputs)
        for entry, size, output in zip(entries, sizes, tensors, strict=False):  # features may follow
            values = ops.cast(output, "float32")
            if entry["part"] in ("scores", "objectness") and self.detector.specification["scores"] == "probabilities":
                likely = ops.clip(values, 1e-6, 1 - 1e-6)
                values = ops.log(likely) - ops.log(1 - likely)
            flat.append(ops.reshape(values, (ops.shape(values)[0], size[0] * size[1])))
        return ops.concatenate(flat, axis=1) if len(flat) > 1 else flat[0]

    def divergence(self, expected: Any, actual: Any, temperature: float = 1.0) -> Any:
        """Return the divergence of scores and likely boxes, divided by the number of objects in `expected`: [n]."""
        ops = keras().ops
        detector = self._logits_detector
        teacher, student = self._parts(expected), self._parts(actual)
        likely = ops.max(detector.probabilities(teacher, ops), axis=-1)
        total = 0.0
        weights = 1.0
        if teacher.objectness is not None and student.objectness is not None:
            # Where no object is, its class does not matter.
            total += ops.sum(sigmoid_divergence(teacher.objectness, student.objectness, temperature), axis=(1, 2))
            weights = ops.sigmoid(teacher.objectness)
        if detector.specification["scores"] == "softmax":
            missed = softmax_divergence(teacher.scores, student.scores, temperature)[..., None]
        else:
            missed = sigmoid_divergence(teacher.scores, student.scores, temperature)
        total += ops.sum(missed * weights, axis=(1, 2))
        total += ops.sum(self._box_distance(teacher.boxes, student.boxes) * likely, axis=1)
        if teacher.keypoints is not None and student.keypoints is not None:
            moved = ops.mean(_smooth(student.keypoints - teacher.keypoints), axis=-1)
            total += ops.sum(moved * likely, axis=1)
        return total / ops.maximum(ops.sum(likely, axis=1), 1)

    def _box_distance(self, expected: Any, actual: Any) -> Any:
        """Return the distance of raw boxes: [n, locations]."""
        ops = keras().ops
        bins = self.detector.specification["bins"]
        if self.detector.specification["code"] != "dfl":
            return ops.sum(_smooth(actual - expected), axis=-1)
        shape = (-1, expected.shape[1], 4, bins)
        return ops.sum(softmax_divergence(ops.reshape(expected, shape), ops.reshape(actual, shape)), axis=-1)

    def _parts(self, rows: Any) -> DetectorParts:
        """Return rows in the form of `logits` as parts [n, locations, values]."""
        ops = keras().ops
        detector = self._logits_detector
        return detector.parts(detector.split(rows, ops), ops)

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the loss of scores and boxes with the objects of images: [n].

        Detectors with anchors have a focal loss of all scores plus smooth L1 of the boxes of matched anchors; for other
        detectors see `compress.tasks.task_aligned`. The targets [n, most, 5] are those of `detection.padded`.
        """
        scores, boxes = self._loss_parts(targets, outputs)
        return scores + boxes

    def training_values(self, targets: Any, outputs: Any) -> Mapping[str, Any]:
        """Return the losses of scores and of boxes."""
        return dict(zip(self.shown_values, self._loss_parts(targets, outputs), strict=True))

    def _loss_parts(self, targets: Any, outputs: Any) -> tuple[Any, Any]:
        """Return the losses of scores and boxes: [n] each."""
        parts = self._parts(self.logits(outputs))
        if self.detector.specification["code"] == "ssd":
            return self._anchor_loss(targets, parts)
        return task_aligned.loss_parts(self._logits_detector, targets, parts)

    def _anchor_loss(self, targets: Any, parts: DetectorParts) -> tuple[Any, Any]:
        ops = keras().ops
        detector = self._logits_detector
        answers = match(detector, targets)
        count = ops.maximum(ops.sum(answers.positive, axis=1), 1)
        raw = parts.boxes
        if detector.specification["order"] == "xy":
            groups = ops.split(raw, 4, axis=-1)
            raw = ops.concatenate([groups[1], groups[0], groups[3], groups[2]], axis=-1)
        distance = ops.sum(_smooth(raw - answers.boxes), axis=-1) * answers.positive
        missed = self._missed(answers, parts.scores)
        return missed / count, ops.sum(distance, axis=1) / count

    def _missed(self, answers: Any, scores: Any) -> Any:
        """Return the focal loss of the scores of all anchors: [n]."""
        ops = keras().ops
        background = self.detector.specification["background"]
        classes = ops.cast(answers.classes, "int32") + (1 if background == "first" else 0)
        width = scores.shape[-1]
        if self.detector.specification["scores"] == "softmax":
            nothing = 0 if background == "first" else width - 1
            chosen = ops.where(answers.positive > 0, classes, nothing)
            target = ops.one_hot(chosen, width, dtype="float32")
            entropy = -ops.sum(target * ops.log_softmax(scores), axis=-1)
            weight = (1 - ops.exp(-entropy)) ** FOCUS * answers.counted
            return ops.sum(weight * entropy, axis=1)
        target = ops.one_hot(ops.where(answers.positive > 0, classes, -1), width, dtype="float32")
        miss = ops.where(target > 0, ops.softplus(-scores), ops.softplus(scores))
        wrong = ops.where(target > 0, 1 - ops.sigmoid(scores), ops.sigmoid(scores))
        weight = ops.where(target > 0, BALANCE, 1 - BALANCE) * wrong**FOCUS * answers.counted[..., None]
        return ops.sum(weight * miss, axis=(1, 2))


def _smooth(difference: Any) -> Any:
    """Return the smooth L1 of each difference."""
    ops = keras().ops
    distance = ops.abs(difference)
    return ops.where(distance < 1, 0.5 * distance**2, distance - 0.5)


@dataclass(frozen=True)
class AnchorTargets:
    """The training targets of the anchors for a batch of images: tensors [n, anchors].

    Attributes:
        positive: 1 where an anchor is assigned to an object, otherwise 0.
        counted: 0 where the scores do not contribute to the loss, because the overlap is between UNMATCHED and MATCHED;
            otherwise 1.
        classes: the class of the assigned object, -1 for none.
        boxes: [n, anchors, 4], the raw values that decode to the box of the assigned object.
    """

    positive: Any
    counted: Any
    classes: Any
    boxes: Any


def match(detector: Detector, objects: Any) -> AnchorTargets:
    """Match each anchor with the object of largest overlap, if that is MATCHED, and each object [n, most, 5] (class and
    box; see `detection.padded`) with its best anchor."""
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
    matched_objects = ops.take_along_axis(objects, ops.repeat(ops.expand_dims(owner, -1), 5, axis=-1), axis=1)
    matched_classes = ops.where(positive > 0, matched_objects[..., 0], -1.0)
    return AnchorTargets(positive, counted, matched_classes, _raw(matched_objects[..., 1:], detector))


def _overlaps(boxes: Any, detector: Detector) -> Any:
    """Return the intersection over union of each object with each anchor: [n, objects, anchors]."""
    ops, anchors = keras().ops, detector.anchors
    low, high = anchors[:, :2] - anchors[:, 2:] / 2, anchors[:, :2] + anchors[:, 2:] / 2
    boxes = ops.expand_dims(boxes, 2)
    sides = ops.maximum(ops.minimum(boxes[..., 2:], high) - ops.maximum(boxes[..., :2], low), 0)
    shared = sides[..., 0] * sides[..., 1]
    areas = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    return shared / ops.maximum(areas + anchors[:, 2] * anchors[:, 3] - shared, 1e-9)


def _raw(boxes: Any, detector: Detector) -> Any:
    """Encode boxes relative to their anchors; `Detector.located` decodes them."""
    ops, anchors = keras().ops, detector.anchors
    variances = np.asarray(detector.specification["variances"], np.float32)
    middle, size = (boxes[..., :2] + boxes[..., 2:]) / 2, ops.maximum(boxes[..., 2:] - boxes[..., :2], 1e-6)
    moved = (middle - anchors[:, :2]) / anchors[:, 2:]
    return ops.concatenate([moved, ops.log(size / anchors[:, 2:])], axis=-1) / variances
