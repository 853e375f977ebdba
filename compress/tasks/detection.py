"""Detection: objects with boxes in images. Head, matching of anchors, loss, augmentation, metrics and comparisons.

Sources: Liu et al., SSD: Single Shot MultiBox Detector, 2016 (anchors, matching, boxes); Lin et al., Focal Loss for
Dense Object Detection, 2017 (scores).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.artifact import Facts
from compress.data.types import Data, Objects, Split
from compress.errors import ModelError
from compress.ir.tensorflow import keras
from compress.measurement import Measurement, Metric
from compress.stage import Refusal, Use
from compress.tasks import average_precision
from compress.tasks.base import (
    Change,
    DistillationTerms,
    EvaluationMembers,
    Head,
    Judge,
    Location,
    ModelOutputs,
    RandomChanges,
    Rows,
    Specification,
    Task,
    refuse_misfit,
    snr_db,
)
from compress.tasks.degeneracy import Judgement
from compress.tasks.findings import VerdictReason, against_constant
from deploy.contract import image_geometry
from deploy.contract.average_precision import average_precision as mean_average_precision
from deploy.contract.detection import DetectionError, Detections, Detector, agreement, ordered

MATCHED, UNMATCHED = 0.5, 0.4
"""Overlap above which an anchor is positive, and below which it is negative; between them it is ignored."""
FOCUS, BALANCE = 2.0, 0.25
"""Gamma and alpha of the focal loss."""
VISIBLE = 0.4
"""Share of an object that must be visible in an augmented image."""
LIKELY = 100
"""Number of anchors of a sample whose boxes are compared: those with the highest scores, as applications use them."""


@dataclass(frozen=True)
class DetectionHead(Head):
    """The meaning of a detector's outputs.

    Attributes:
        detector: its anchors, and how its boxes and scores are read.
    """

    detector: Detector

    def logits(self, outputs: Any) -> Any:
        """Return the raw boxes and the scores as logits, flattened and concatenated: [n, anchors * (4 + classes)]."""
        ops = keras().ops
        boxes, scores = keras().tree.flatten(outputs)[:2]
        parts = [ops.cast(boxes, "float32"), self._score_logits(ops.cast(scores, "float32"))]
        flat = [ops.reshape(part, (ops.shape(part)[0], int(np.prod(part.shape[1:])))) for part in parts]
        return ops.concatenate(flat, axis=1)

    def _score_logits(self, scores: Any) -> Any:
        ops = keras().ops
        if self.detector.specification["scores"] == "logits":
            return scores
        likely = ops.clip(scores, 1e-6, 1 - 1e-6)
        return ops.log(likely) - ops.log(1 - likely)

    def distillation_loss(self, logits: Any, soft_targets: Any, labels: Any, terms: DistillationTerms) -> Any:
        """Return the divergence from the teachers' scores, and from their boxes where they see an object: [n].

        Both are divided by the number of objects that the teachers see.
        """
        del labels
        return self._divergence(keras().ops.stop_gradient(soft_targets), logits, terms.temperature)

    def divergence(self, expected: Any, actual: Any) -> Any:
        """Return the divergence of scores and likely boxes: [n]."""
        return self._divergence(expected, actual, 1.0)

    def _divergence(self, expected: Any, actual: Any, temperature: float) -> Any:
        ops = keras().ops
        boxes, scores = self._split(expected)
        other_boxes, other_scores = self._split(actual)
        likely = ops.max(ops.sigmoid(scores), axis=-1)
        share = ops.sigmoid(scores / temperature)
        softened = (scores / temperature, other_scores / temperature)
        own, cross = (ops.softplus(each) - share * each for each in softened)
        missed = ops.sum(cross - own, axis=(1, 2)) * temperature**2
        distance = ops.abs(other_boxes - boxes)
        smooth = ops.where(distance < 1, 0.5 * distance**2, distance - 0.5)
        moved = ops.sum(smooth * likely[..., None], axis=(1, 2))
        return (missed + moved) / ops.maximum(ops.sum(likely, axis=1), 1)

    def _split(self, rows: Any) -> tuple[Any, Any]:
        """Return rows as boxes [n, anchors, 4] and logits of scores [n, anchors, classes]."""
        ops, anchors = keras().ops, len(self.detector.anchors)
        boxes, scores = ops.split(rows, [4 * anchors], axis=1)
        classes = (rows.shape[1] - 4 * anchors) // anchors
        return ops.reshape(boxes, (-1, anchors, 4)), ops.reshape(scores, (-1, anchors, classes))

    @property
    def specification(self) -> Specification:
        """The anchors, and the encoding of boxes and scores."""
        return self.detector.specification

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the focal loss of all scores plus the smooth L1 loss of the boxes of anchors that have an object."""
        ops = keras().ops
        raw, scores = keras().tree.flatten(outputs)[:2]
        answers = match(self.detector, targets)
        target = ops.one_hot(ops.cast(answers.classes, "int32"), scores.shape[-1], dtype="float32")
        logits = self._score_logits(scores)
        miss = ops.where(target > 0, ops.softplus(-logits), ops.softplus(logits))
        wrong = ops.where(target > 0, 1 - ops.sigmoid(logits), ops.sigmoid(logits))
        weight = ops.where(target > 0, BALANCE, 1 - BALANCE) * wrong**FOCUS * answers.counted[..., None]
        distance = ops.abs(raw - answers.boxes)
        smooth = ops.where(distance < 1, 0.5 * distance**2, distance - 0.5) * answers.positive[..., None]
        count = ops.maximum(ops.sum(answers.positive, axis=1), 1)
        return (ops.sum(weight * miss, axis=(1, 2)) + ops.sum(smooth, axis=(1, 2))) / count


@dataclass(frozen=True)
class ByObjects(Judge):
    """The comparison of two detectors: the scores, the boxes of likely anchors, and the objects that are found.

    Attributes:
        detector: reads the outputs.
    """

    detector: Detector

    def snr_db(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the mean of the ratio of the scores and that of the boxes of likely anchors."""
        (boxes, scores), (other_boxes, other_scores) = self._parts(expected), self._parts(actual)
        likely = np.argsort(-scores.max(axis=2), axis=1, kind="stable")[:, :LIKELY, np.newaxis]
        near = [np.take_along_axis(each, likely, axis=1).reshape(len(boxes), -1) for each in (boxes, other_boxes)]
        by_scores = snr_db(*(each.reshape(len(scores), -1) for each in (scores, other_scores)))
        return np.asarray((snr_db(*near) + by_scores) / 2)

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the share of the objects that both find; 1 if neither finds any."""
        answers = [_detections(self.detector, rows) for rows in (expected, actual)]
        pairs = zip(*answers, strict=True)
        return np.array([agreement([one], [other], average_precision.SURE)[0] for one, other in pairs])

    def _parts(self, rows: Rows) -> tuple[Rows, Rows]:
        return _boxes_and_scores(self.detector, rows)


class Detection(Task):
    """Objects with boxes; the metric is COCO's mean average precision."""

    name: ClassVar[str] = "detection"
    models: ClassVar[str] = "detectors"
    score_name: ClassVar[str] = "validation_ap"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("ap", "Average precision", "fraction", "ap_drop", limited=True),
        Metric("ap50", "Average precision at IoU 0.5", "fraction", "ap50_drop"),
    )
    reads_specification: ClassVar[bool] = True
    refused: ClassVar[Mapping[Use, Refusal]] = {
        "class weights": Refusal(
            "class_weights: the loss of a detector has no weights for classes", "class_weights: none"
        ),
        "rotation": Refusal(
            "augment.rotate: the box around a rotated object is not the rotated box",
            "augment.shift, zoom and flip, which change boxes too",
        ),
        "decoupled": Refusal("decoupled: an image has several objects", "distillation without `decoupled`"),
        "tfmot": Refusal("it trains with tfmot, which is set up for classifiers only", hint="leave it out"),
        "tfmot qat": Refusal("engine: tfmot trains classifiers only", "engine: coralline"),
    }

    def head(self, model: Any, data: Data, specification: Specification = None) -> DetectionHead:
        """Return the head of a detector with these anchors, after a check that it fits the data.

        Args:
            model: a Keras model of the data's input shape.
            data: with objects.
            specification: of the anchors, see `deploy.contract.detection`; None where they are unknown.

        Raises:
            ModelError: it is not.
        """
        refuse_misfit(model, data, 2)
        detector = detector_of(specification)
        expected = [(len(detector.anchors), 4), (len(detector.anchors), len(data.class_names))]
        actual = [tuple(each.shape[1:]) for each in model.outputs]
        if actual != expected:
            raise ModelError(
                f"the model's outputs have the shapes {', '.join(str(list(shape)) for shape in actual)}",
                allowed=f"boxes {list(expected[0])} and scores {list(expected[1])}, in this order, one row per anchor",
                hint="check data.source, the model's last layers and its anchors",
            )
        last = model.outputs[1]._keras_history.operation
        sigmoid = "sigmoid" in (getattr(getattr(last, "activation", None), "__name__", ""), type(last).__name__.lower())
        if sigmoid and detector.specification["scores"] == "logits":
            raise ModelError("the model's scores are probabilities", hint="say scores: probabilities in its detector")
        return DetectionHead(detector)

    def output_order(self, outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the boxes first: compilers may change the order."""
        return ordered(outputs) or outputs

    def targets(self, data: Data, split: Split) -> NDArray[Any]:
        """Return the objects as one array, see `padded`."""
        return padded(data.objects(split))

    def augmentation(self, augment: RandomChanges) -> Change:
        """Return the augmentation that moves boxes with their images."""
        return augmentation(augment)

    def refused_settings(self, settings: Mapping[str, Any]) -> list[tuple[Location, Refusal]]:
        """Return the problems: unknown anchors, and preprocessing steps that would move objects."""
        found: list[tuple[Location, Refusal]] = []
        model = settings["model"]
        if "file" in model and not model.get("detector"):
            hint = "describe them under model.detector: see docs/detection.md"
            found.append((("model",), Refusal("the anchors of the model are not known", hint=hint)))
        for index, entry in enumerate(settings["data"].get("preprocess") or ()):
            refusal = _moving(entry)
            if refusal is not None:
                found.append((("data", "preprocess", index), refusal))
        return found

    def evaluate(self, models: Mapping[str, ModelOutputs], data: Data, split: Split, note: str) -> Facts:
        """Return `ap`, `ap50`, `per_class` and `spread` of each model, and the agreement of first and last."""
        expected, names = data.objects(split), data.class_names
        facts: Facts = {"images": len(expected)}
        answers: list[list[Detections]] = []
        for name, model in models.items():
            detector = detector_of(model.specification)
            answers.append(_detections(detector, model.rows))
            images = f"COCO, {note}, {len(expected)} images"
            facts[name] = average_precision.evaluate(answers[-1], expected, len(names), images)
            facts[name]["spread"] = asdict(average_precision.spread(answers[-1], expected, names, split))
        facts["agreement"] = agreement(answers[0], answers[-1], average_precision.SURE)
        return facts

    def compare(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Any]:
        """Return the drop of average precision, the agreement, and figures per class."""
        return average_precision.compare(facts, names, original, result)

    def judge_outputs(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Judgement]:
        """Judge whether two detectors find the same, or nothing, in nearly every image, or no object at all."""
        return average_precision.judge_outputs(facts, names, original, result)

    def findings(self, facts: Facts, names: Sequence[str], original: str, result: str) -> list[VerdictReason]:
        """Compare the average precision of both models; a detector that finds nothing has 0."""
        del names
        measured = [Measurement(**facts[model]["ap"]) for model in (original, result)]
        nothing = Measurement(0.0, "fraction", "measured")
        return against_constant(self.metrics[0], (nothing, measured[0], measured[1]), facts["images"])

    def fidelity(self, specification: Specification, *, logits: bool = False) -> ByObjects:
        """Return the comparison by scores, boxes and objects."""
        # What is less likely than half of SURE is compared with nothing, and suppresses nothing more likely.
        known = dict(specification or {})
        least = max(known.get("least_score", 0.0), average_precision.SURE / 2)
        changes = {"least_score": least} | ({"scores": "logits"} if logits else {})
        return ByObjects(Detector({**known, **changes}))

    def score(self, rows: Rows, data: Data, split: Split, specification: Specification) -> float:
        """Return the mean average precision; 0 without objects."""
        detections = _detections(detector_of(specification), rows)
        return mean_average_precision(detections, data.objects(split), len(data.class_names))["ap"] or 0.0

    def packaged(
        self, rows: Mapping[str, Rows], data: Data, indices: Sequence[int], specification: Specification, note: str
    ) -> EvaluationMembers:
        """Return the objects, the average precision of each model, its drop and the agreement."""
        detector, names = detector_of(specification), data.class_names
        expected = [data.objects("test")[index] for index in indices]
        answers = {role: _detections(detector, each) for role, each in rows.items()}
        facts: Facts = {
            role: average_precision.evaluate(each, expected, len(names), f"COCO, {note}")
            for role, each in answers.items()
        }
        facts["agreement"] = agreement(answers["original"], answers["int8"], average_precision.SURE)
        compared = average_precision.compare(facts, names, "original", "int8")["measurements"]
        metrics = {f"{name}_{role}": facts[role][name] for role in rows for name in ("ap", "ap50")}
        return EvaluationMembers(_object_rows(expected), metrics | compared)

    def manifest(self, specification: Specification, labels: Sequence[str] = ()) -> dict[str, Any]:
        """Return the anchors, and the encoding of boxes and scores."""
        del labels
        return {"detection": specification}


def _moving(step: Any) -> Refusal | None:
    """Return why a preprocessing step cannot be used with boxes, or None."""
    name = step if isinstance(step, str) else next(iter(step))
    if name in image_geometry.STEPS:
        return None
    return Refusal(f"after {name}, the positions of objects are not known", ", ".join(image_geometry.STEPS))


def _boxes_and_scores(detector: Detector, rows: Rows) -> tuple[Rows, Rows]:
    """Return boxes [n, anchors, 4] and scores [n, anchors, classes].

    Raises:
        ModelError: the outputs are not those of the detector.
    """
    anchors = len(detector.anchors)
    if rows.shape[1] <= 4 * anchors or rows.shape[1] % anchors:
        raise ModelError(
            f"gives {rows.shape[1]} numbers for {anchors} anchors",
            allowed="the boxes and scores of a detector",
            hint="choose another model",
        )
    boxes, scores = np.split(rows, [4 * anchors], axis=1)
    return boxes.reshape(len(rows), anchors, 4), scores.reshape(len(rows), anchors, -1)


def _detections(detector: Detector, rows: Rows) -> list[Detections]:
    """Return the detections of each sample."""
    boxes, scores = _boxes_and_scores(detector, rows)
    return [detector(*pair) for pair in zip(boxes, scores, strict=True)]


def _object_rows(objects: Sequence[Objects]) -> NDArray[np.float32]:
    """Return the objects of samples [objects, 6]: index of the sample, class, box."""
    rows = [
        np.column_stack([np.full(len(classes), place), classes, boxes])
        for place, (boxes, classes) in enumerate(objects)
    ]
    return np.concatenate(rows).astype(np.float32)


def detector_of(specification: Any) -> Detector:
    """Return the detector of a specification.

    Raises:
        ModelError: there is none, or it cannot be used.
    """
    if specification is None:
        raise ModelError(
            "the anchors of the model are not known",
            hint="describe them under model.detector, or in a function `detector` of the builder: docs/detection.md",
        )
    try:
        return Detector(specification)
    except DetectionError as error:
        raise ModelError(str(error), where="detector", hint="see docs/detection.md") from error


def padded(objects: Sequence[Objects]) -> NDArray[np.float32]:
    """Return the objects of images as one array [n, max, 5]: class and box; padding has the class -1."""
    most = max([len(each.classes) for each in objects] or [0]) or 1
    rows = np.full((len(objects), most, 5), -1, np.float32)
    for row, (boxes, classes) in zip(rows, objects, strict=True):
        row[: len(classes), 0], row[: len(classes), 1:] = classes, boxes
    return rows


@dataclass(frozen=True)
class AnchorTargets:
    """The training targets of the anchors for a batch of images: tensors [n, anchors].

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


def match(detector: Detector, objects: Any) -> AnchorTargets:
    """Match each anchor with the object of largest overlap, if that is enough, and each object with its best anchor.

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
    return AnchorTargets(positive, counted, found, _raw(own[..., 1:], detector))


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


def augmentation(augment: RandomChanges) -> Change:
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
    """Return images sampled at (u - 1/2) * scale + 1/2 + shift for positions u in [0, 1]; edges are repeated."""
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
    """Return the objects at their positions after `_moved_images`, without those that are hardly visible."""
    import tensorflow

    scale, shift = scale[:, None], shift[:, None]
    ends = [(objects[..., place : place + 2] - 0.5 - shift) / scale + 0.5 for place in (1, 3)]
    low, high = tensorflow.minimum(*ends), tensorflow.maximum(*ends)
    seen_low, seen_high = tensorflow.clip_by_value(low, 0.0, 1.0), tensorflow.clip_by_value(high, 0.0, 1.0)
    whole, seen = (tensorflow.reduce_prod(b - a, axis=-1) for a, b in ((low, high), (seen_low, seen_high)))
    kept = tensorflow.logical_and(objects[..., 0] >= 0, seen >= VISIBLE * whole)
    classes = tensorflow.where(kept, objects[..., 0], -1.0)
    return tensorflow.concat([classes[..., None], seen_low, seen_high], axis=-1)
