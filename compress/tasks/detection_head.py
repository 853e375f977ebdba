"""The outputs of detectors in training: losses with objects and with other detectors.

Sources: Liu et al., SSD, 2016 (anchors); Lin et al., Focal Loss for Dense Object Detection, 2017 (scores of anchors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.model.ir.tensorflow import keras
from compress.tasks import task_aligned
from compress.tasks.anchor_matching import match
from compress.tasks.base import Head, Specification
from deploy.contract.detection import Detector, DetectorParts

FOCUS, BALANCE = 2.0, 0.25
"""Gamma and alpha of the focal loss."""


@dataclass(frozen=True)
class DetectionHead(Head):
    """The meaning of a detector's outputs.

    Attributes:
        detector: its locations, and how its boxes and scores are read.
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

    def distillation_loss(self, logits: Any, soft_targets: Any, temperature: float) -> Any:
        """Return the divergence from the teachers' scores, and from their boxes where they see an object: [n].

        Both are divided by the number of objects that the teachers see.
        """
        return self._divergence(keras().ops.stop_gradient(soft_targets), logits, temperature)

    def divergence(self, expected: Any, actual: Any) -> Any:
        """Return the divergence of scores and likely boxes: [n]."""
        return self._divergence(expected, actual, 1.0)

    def _divergence(self, expected: Any, actual: Any, temperature: float) -> Any:
        ops = keras().ops
        detector = self._logits_detector
        teacher, student = self._parts(expected), self._parts(actual)
        likely = ops.max(detector.probabilities(teacher, ops), axis=-1)
        total = 0.0
        weights = 1.0
        if teacher.objectness is not None and student.objectness is not None:
            # Where no object is, its class does not matter.
            total += ops.sum(_cross_entropy(teacher.objectness, student.objectness, temperature), axis=(1, 2))
            weights = ops.sigmoid(teacher.objectness)
        if detector.specification["scores"] == "softmax":
            missed = _softmax_divergence(teacher.scores, student.scores, temperature)[..., None]
        else:
            missed = _cross_entropy(teacher.scores, student.scores, temperature)
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
        return ops.sum(_softmax_divergence(ops.reshape(expected, shape), ops.reshape(actual, shape), 1.0), axis=-1)

    def _parts(self, rows: Any) -> DetectorParts:
        """Return rows in the form of `logits` as parts [n, locations, values]."""
        ops = keras().ops
        detector = self._logits_detector
        return detector.parts(detector.split(rows, ops), ops)

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the loss of scores and boxes with the objects of images: [n].

        Detectors with anchors: focal loss of all scores plus smooth L1 of the boxes of matched anchors. Others: see
        `compress.tasks.task_aligned`.

        Args:
            targets: [n, most, 5], class and box of each object; padding has the class -1.
            outputs: of the model.
        """
        scores, boxes = self._loss_parts(targets, outputs)
        return scores + boxes

    def training_values(self, targets: Any, outputs: Any) -> Mapping[str, Any]:
        """Return the parts of the loss: those of scores and boxes."""
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


def _cross_entropy(expected: Any, actual: Any, temperature: float) -> Any:
    """Return the divergence of sigmoids, from their logits: 0 where both are equal."""
    ops = keras().ops
    share = ops.sigmoid(expected / temperature)
    entropy, cross = (
        ops.softplus(logits / temperature) - share * logits / temperature for logits in (expected, actual)
    )
    return (cross - entropy) * temperature**2


def _softmax_divergence(expected: Any, actual: Any, temperature: float) -> Any:
    """Return the divergence of softmaxes over the last axis, from their logits."""
    ops = keras().ops
    before, after = (ops.log_softmax(logits / temperature) for logits in (expected, actual))
    return ops.sum(ops.exp(before) * (before - after), axis=-1) * temperature**2
