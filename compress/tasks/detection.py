"""Detection: objects with boxes in images. The task, its metric (COCO's average precision), and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.core.errors import ModelError
from compress.core.measurement import Measurement, Metric, missing
from compress.core.resources import manual
from compress.data.types import Data, Objects, Split
from compress.results.evaluation import Judgement, Spread
from compress.tasks import degeneracy
from compress.tasks.base import (
    Change,
    EvaluationMembers,
    Head,
    Judge,
    Location,
    ModelOutputs,
    RandomChanges,
    Refusal,
    Rows,
    Specification,
    Task,
    Use,
    refuse_misfit,
    snr_db,
)
from compress.tasks.detection_head import DetectionHead
from compress.tasks.findings import VerdictReason, against_constant
from compress.tasks.illustrations import ObjectsIllustrator, name_of
from compress.tasks.moved_images import augmentation
from deploy.contract import image_geometry
from deploy.contract.average_precision import Truth, average_precision
from deploy.contract.box_codes import sigmoid
from deploy.contract.detection import SURE, Detections, Detector, agreement
from deploy.contract.detector_specification import DetectionError
from deploy.contract.suppression import overlaps

LIKELY = 100
"""Number of anchors of a sample whose boxes are compared: those with the highest scores, as applications use them."""
SAME_PLACE = 0.9
"""Overlap above which two boxes count as the same position."""
FITTING = 0.5
"""Overlap above which a box counts as that of an object."""
SMALLEST_SIDE = 1e-3
"""Shifts are relative to the size of the box; smaller boxes count as this size, a fraction of the image's. Chosen: it
is less than a pixel."""
NO_AP50 = 1e-3
"""AP50 below which a detector finds objects only by chance."""


@dataclass(frozen=True)
class ByObjects(Judge):
    """The comparison of two detectors: the scores, the boxes of likely anchors, and the objects that are found."""

    detector: Detector

    def snr_db(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the mean of the ratio of the scores and that of the boxes of likely locations."""
        samples = zip(expected, actual, strict=True)
        return np.array([self._ratio(before[np.newaxis], after[np.newaxis]) for before, after in samples])

    def _ratio(self, expected: Rows, actual: Rows) -> float:
        """Return the ratio of one sample [1, values]."""
        before, after = (self.detector.parts(self.detector.split(rows)) for rows in (expected, actual))
        best = self.detector.probabilities(before).max(axis=2)
        likely = np.argsort(-best, axis=1, kind="stable")[:, :LIKELY, np.newaxis]
        near, scores = [], []
        for parts in (before, after):
            near.append(np.take_along_axis(parts.boxes, likely, axis=1).reshape(1, -1))
            score_parts = [parts.scores] if parts.objectness is None else [parts.scores, parts.objectness]
            scores.append(np.concatenate([part.reshape(1, -1) for part in score_parts], axis=1))
        return float(snr_db(*near)[0] + snr_db(*scores)[0]) / 2

    def differences(self, expected: Any, actual: Any, maths: Any = np) -> list[Any]:
        """Return the differences of the probabilities and of the boxes; if there are keypoints, also the differences of
        their positions and of the probabilities that they are visible.

        Each side of a box counts relative to the size of the box, and a position in its own unit, up to 1. All but the
        probabilities of objects are weighted by the probability that the original finds an object there.
        """
        detector = self.detector
        before, after = (detector.parts(detector.split(rows, maths), maths) for rows in (expected, actual))
        known, found = (detector.probabilities(parts, maths) for parts in (before, after))
        corners, moved = (detector.corners(parts.boxes, maths=maths) for parts in (before, after))
        sizes = maths.maximum(corners[..., 2:] - corners[..., :2], SMALLEST_SIDE)
        # A box that moved by its own size is lost; farther makes no difference.
        shifts = maths.clip((moved - corners) / maths.concatenate([sizes, sizes], axis=-1), -1.0, 1.0)
        likely = maths.max(known, axis=-1, keepdims=True)
        parts = [found - known, shifts * likely]
        if before.keypoints is not None and after.keypoints is not None:
            settings = detector.specification["keypoints"]
            shape = (-1, before.keypoints.shape[1], settings["count"], 3 if settings["visibility"] else 2)
            points, others = (maths.reshape(part, shape) for part in (before.keypoints, after.keypoints))
            moved = maths.clip((others - points)[..., :2] * settings["scale"], -1.0, 1.0)
            parts.append(maths.reshape(moved, (-1, shape[1], 2 * shape[2])) * likely)
            if settings["visibility"]:
                parts.append((sigmoid(others[..., 2], maths) - sigmoid(points[..., 2], maths)) * likely)
        return [maths.reshape(part, (-1, part.shape[1] * part.shape[2])) for part in parts]

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the share of the objects that both find; 1 if neither finds any."""
        answers = [detections_in(self.detector, rows) for rows in (expected, actual)]
        pairs = zip(*answers, strict=True)
        return np.array([agreement([one], [other])[0] for one, other in pairs])


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
    truth_note: ClassVar[str] = "COCO"
    """How the average precision is measured, in the conditions of the measurements."""
    refused: ClassVar[Mapping[Use, Refusal]] = {
        "class weights": Refusal(
            "class_weights: the loss of a detector has no weights for classes", "class_weights: none"
        ),
        "rotation": Refusal(
            "augment.rotate: the box around a rotated object is not the rotated box",
            "augment.shift, zoom and flip, which change boxes too",
        ),
        "mixup": Refusal("augment.mixup: an image has several objects", "mixup: 0", "leave it out"),
        "label smoothing": Refusal("label_smoothing: an image has several objects", "label_smoothing: 0"),
        "tfmot": Refusal("it trains with tfmot, which is set up for classifiers only", hint="leave it out"),
        "tfmot qat": Refusal("engine: tfmot trains classifiers only", "engine: coralline"),
        "embedding": Refusal("a detector has no embedding of the image", hint="leave it out"),
    }

    def head(self, model: Any, data: Data, specification: Specification = None) -> Head:
        """Return the head of a detector; its specification (`deploy.contract.detection`) is necessary."""
        detector = detector_of(specification)
        refuse_misfit(model, data, len(detector.specification["tensors"]))
        columns = len(data.class_names) + (detector.specification["background"] is not None)
        refuse_other_outputs(model, detector, columns)
        return DetectionHead(detector, columns)

    def output_order(self, outputs: list[dict[str, Any]], specification: Specification) -> list[dict[str, Any]]:
        """Return the outputs in the order of the specification: compilers may change it."""
        return self.detector(specification).ordered(outputs)

    def targets(self, data: Data, split: Split) -> NDArray[Any]:
        """Return the objects as one array, see `padded`."""
        return padded(data.objects(split))

    def truth(
        self, data: Data, split: Split, specification: Specification, samples: Sequence[int] | None = None
    ) -> list[Objects]:
        """Return the objects that are to be found in some samples of a split (None: in all): the labelled objects."""
        objects = data.objects(split)
        return objects if samples is None else [objects[sample] for sample in samples]

    def class_names(self, data: Data) -> Sequence[str]:
        """Return the names of the classes; none if they are not known."""
        return data.class_names

    def _classes(self, detector: Detector, rows: Rows, data: Data) -> int:
        """Return the number of classes of outputs [n, outputs] and of the data together."""
        return max(detector.classes_in(rows.shape[1]), len(self.class_names(data)))

    def detector(self, specification: Specification) -> Detector:
        """Return the detector that a specification describes."""
        return detector_of(specification)

    def augmentation(self, augment: RandomChanges) -> Change | None:
        """Return the augmentation that moves boxes with their images."""
        return augmentation(augment)

    def refused_settings(self, settings: Mapping[str, Any]) -> list[tuple[Location, Refusal]]:
        """Return the preprocessing steps that would move objects."""
        return moving_steps(settings)

    def evaluate(self, models: Mapping[str, ModelOutputs], data: Data, split: Split, note: str) -> Facts:
        """Return `ap`, `ap50`, `per_class` and `spread` of each model, and the agreement of first and last."""
        expected = self.truth(data, split, next(iter(models.values())).specification)
        facts: Facts = {"images": len(expected)}
        answers: list[list[Detections]] = []
        for name, model in models.items():
            detector = self.detector(model.specification)
            answers.append(detections_in(detector, model.rows))
            classes = self._classes(detector, model.rows, data)
            images = f"{self.truth_note}, {note}, {len(expected)} images"
            facts[name] = evaluate(answers[-1], expected, classes, images)
            facts[name]["spread"] = asdict(spread(answers[-1], expected, self.class_names(data), split))
        facts["agreement"] = agreement(answers[0], answers[-1])
        return facts

    def compare(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Any]:
        """Return the drop of average precision, the agreement, and figures per class."""
        measurements = {}
        for name in ("ap", "ap50"):
            old = facts[original][name]["value"]
            new = facts[result][name]["value"]
            drop = missing("fraction", "there are no objects to find")
            if old is not None and new is not None:
                drop = Measurement(old - new, "fraction", "measured", note="the same images")
            measurements[f"{name}_drop"] = drop.to_json()
        share, count = facts["agreement"]
        note = f"of {count} objects that either finds with a score of {SURE:g} or more, those that both find"
        agreed = Measurement(share, "fraction", "measured", note=note)
        if not count:
            agreed = missing("fraction", f"neither finds anything with a score of {SURE:g}")
        measurements["agreement"] = agreed.to_json()
        rows = zip(facts[original]["per_class"], facts[result]["per_class"], strict=True)
        per_class = [
            {
                "name": name_of(names, label),
                "samples": before["objects"],
                "original": _measurement(before["ap"], "COCO").to_json(),
                "result": _measurement(after["ap"], "COCO").to_json(),
                "ap50": {"original": before["ap50"], "result": after["ap50"]},
            }
            for label, (before, after) in enumerate(rows)
        ]
        return {"measurements": measurements, "per_class": per_class}

    def judge_outputs(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Judgement]:
        """Judge whether two detectors find the same, or nothing, in nearly every image, or no object at all."""
        before = Spread(**facts[original]["spread"])
        return {original: _judge(facts[original], None), result: _judge(facts[result], before)}

    def findings(self, facts: Facts, names: Sequence[str], original: str, result: str) -> list[VerdictReason]:
        """Compare the average precision of both models; a detector that finds nothing has 0."""
        measured = [Measurement(**facts[model]["ap"]) for model in (original, result)]
        nothing = Measurement(0.0, "fraction", "measured")
        return against_constant(self.metrics[0], (nothing, measured[0], measured[1]), facts["images"])

    def fidelity(self, specification: Specification, *, logits: bool = False) -> ByObjects:
        """Return the comparison by scores, boxes and objects."""
        # What is less likely than half of SURE is compared with nothing, and suppresses nothing more likely.
        known = dict(self.detector(specification).specification)
        least = max(known.get("least_score", 0.0), SURE / 2)
        before_sigmoid = logits and known.get("scores") == "probabilities"
        changes = {"least_score": least} | ({"scores": "logits"} if before_sigmoid else {})
        return ByObjects(Detector({**known, **changes}))

    def score(self, rows: Rows, data: Data, split: Split, specification: Specification) -> float:
        """Return the mean average precision; 0 without objects."""
        detector = self.detector(specification)
        answers, truth = detections_in(detector, rows), self.truth(data, split, specification)
        return average_precision(answers, truth, self._classes(detector, rows, data))["ap"] or 0.0

    def packaged(
        self, rows: Mapping[str, Rows], data: Data, indices: Sequence[int], specification: Specification, note: str
    ) -> EvaluationMembers:
        """Return the objects, the average precision of each model, its drop and the agreement."""
        detector, expected = self.detector(specification), self.truth(data, "test", specification, indices)
        answers = {role: detections_in(detector, outputs) for role, outputs in rows.items()}
        classes = self._classes(detector, rows["original"], data)
        facts: Facts = {
            role: evaluate(detections, expected, classes, f"{self.truth_note}, {note}")
            for role, detections in answers.items()
        }
        facts["agreement"] = agreement(answers["original"], answers["int8"])
        compared = self.compare(facts, self.class_names(data), "original", "int8")["measurements"]
        metrics = {f"{name}_{role}": facts[role][name] for role in rows for name in ("ap", "ap50")}
        return EvaluationMembers(_object_rows(expected), metrics | compared)

    def illustrator(
        self, models: Mapping[str, ModelOutputs], data: Data, split: Split, labels: Sequence[str] = ()
    ) -> ObjectsIllustrator:
        """Return how objects are drawn."""
        detectors = [self.detector(model.specification) for model in models.values()]
        rows = [model.rows for model in models.values()]
        labelled = None if self.learns_from_original else data.objects(split)
        return ObjectsIllustrator(detectors, rows, self.class_names(data) or labels, labelled)

    def manifest(self, specification: Specification, labels: Sequence[str] = ()) -> dict[str, Any]:
        """Return the anchors, and the encoding of boxes and scores."""
        return {"detection": specification}


def moving_steps(settings: Mapping[str, Any]) -> list[tuple[Location, Refusal]]:
    """Return the preprocessing steps in pipeline.yaml that would move objects."""
    refusals: list[tuple[Location, Refusal]] = []
    for index, step in enumerate(settings["data"].get("preprocess") or ()):
        name = step if isinstance(step, str) else next(iter(step))
        if name not in image_geometry.STEPS:
            what = f"after {name}, the positions of objects are not known"
            refusals.append((("data", "preprocess", index), Refusal(what, ", ".join(image_geometry.STEPS))))
    return refusals


def refuse_other_outputs(model: Any, detector: Detector, columns: int) -> None:
    """Raise a ModelError if the outputs of a Keras model are not those of a detector with `columns` scores at each
    location."""
    entries = detector.specification["tensors"]
    sizes = detector.output_sizes(columns)
    shapes = [tuple(int(side) for side in output.shape[1:]) for output in model.outputs]
    if [int(np.prod(shape)) for shape in shapes] != [count * width for count, width in sizes]:
        expected = [f"{entry['part']} {list(size)}" for entry, size in zip(entries, sizes, strict=True)]
        raise ModelError(
            f"the model's outputs have the shapes {', '.join(str(list(shape)) for shape in shapes)}",
            allowed=f"{', '.join(expected)}, in this order: a row for each location",
            hint="check data.source, the model's last layers and model.detector",
        )
    scores = next(index for index, entry in enumerate(entries) if entry["part"] == "scores")
    last = model.outputs[scores]._keras_history.operation
    sigmoid = "sigmoid" in (getattr(getattr(last, "activation", None), "__name__", ""), type(last).__name__.lower())
    if sigmoid and detector.specification["scores"] == "logits":
        raise ModelError("the model's scores are probabilities", hint="set `scores: probabilities` in model.detector")


def detections_in(detector: Detector, rows: Rows) -> list[Detections]:
    """Return the objects that a detector finds in each sample, from its outputs [n, outputs].

    Raises:
        ModelError: the outputs are not those of the detector.
    """
    try:
        outputs = detector.split(rows)
    except DetectionError as error:
        raise ModelError(str(error), allowed="the outputs of the detector", hint="choose another model") from error
    return [detector([output[sample] for output in outputs]) for sample in range(len(rows))]


def _object_rows(objects: Sequence[Objects]) -> NDArray[np.float32]:
    """Return the objects of samples [objects, 6]: index of the sample, class, box."""
    rows = [
        np.column_stack([np.full(len(classes), index), classes, boxes])
        for index, (boxes, classes) in enumerate(objects)
    ]
    return np.concatenate(rows).astype(np.float32)


def detector_of(specification: Any) -> Detector:
    """Return the detector of a specification.

    Raises:
        ModelError: the specification is None, or invalid.
    """
    if specification is None:
        raise ModelError(
            "the anchors of the model are not known",
            hint="describe them under model.detector, or in a function `detector` of the builder: "
            + manual("detection.md"),
        )
    try:
        return Detector(specification)
    except DetectionError as error:
        raise ModelError(str(error), where="detector", hint=f"see {manual('detection.md')}") from error


def padded(objects: Sequence[Objects]) -> NDArray[np.float32]:
    """Return the objects of images as one array [n, max, 5]: class and box; padding has the class -1."""
    most = max([len(image_objects.classes) for image_objects in objects] or [0]) or 1
    rows = np.full((len(objects), most, 5), -1, np.float32)
    for row, (boxes, classes) in zip(rows, objects, strict=True):
        row[: len(classes), 0], row[: len(classes), 1:] = classes, boxes
    return rows


def _judge(facts: Mapping[str, Any], original: Spread | None) -> Judgement:
    judgement = degeneracy.judge(Spread(**facts["spread"]), original)
    objects = sum(row["objects"] for row in facts["per_class"])
    ap50 = facts["ap50"]["value"]
    if judgement.verdict == "degenerate" or objects < degeneracy.ENOUGH or ap50 >= NO_AP50:
        return judgement
    text = f"finds none of {objects:,} objects where they are (average precision at half overlap {ap50:.4f})"
    return Judgement("degenerate", text, judgement.spread)


def spread(answers: Sequence[Detections], truth: Sequence[Truth], names: Sequence[str], split: str) -> Spread:
    """Count the most frequent output of a detector: its best detection, by class and position, or nothing."""
    best = [int(detections.classes[0]) if len(detections) else -1 for detections in answers]
    classes, counts = np.unique(best, return_counts=True)
    answer = int(classes[counts.argmax()])
    if answer < 0:
        same = np.array([not len(detections) for detections in answers])
        fitting = np.array([not len(labels) for _, labels in truth])
        what = "finds nothing in"
    else:
        same, fitting = _same_detection(answers, truth, answer)
        name = names[answer] if answer < len(names) else f"class {answer}"
        what = f"finds {name!r} first, in the same place, in"
    return Spread(
        text=f"{what} {same.sum():,} of {len(same):,} {split} images",
        samples=len(same),
        same=int(same.sum()),
        others=int((~fitting).sum()),
        told_apart=int((~fitting & ~same).sum()),
    )


def _same_detection(
    answers: Sequence[Detections], truth: Sequence[Truth], answer: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return for each image whether its best detection is the usual one of a class, and whether an object is there."""
    firsts = [detections.boxes[0] for detections in answers if _finds_first(detections, answer)]
    box = np.median(firsts, axis=0)
    same = [
        _finds_first(detections, answer) and _is_there(box, detections.boxes[:1], SAME_PLACE) for detections in answers
    ]
    fitting = [_is_there(box, boxes[labels == answer], FITTING) for boxes, labels in truth]
    return np.array(same), np.array(fitting)


def _finds_first(answer: Detections, label: int) -> bool:
    return bool(len(answer)) and int(answer.classes[0]) == label


def _is_there(box: NDArray[Any], others: NDArray[Any], overlap: float) -> bool:
    """Return True if one of the boxes [k, 4] overlaps a box [4] by at least `overlap`."""
    return bool((overlaps(box, others) >= overlap).any())


def evaluate(answers: Sequence[Detections], truth: Sequence[Truth], classes: int, note: str) -> dict[str, Any]:
    """Return `ap` and `ap50` as measurements, and `per_class` as plain numbers."""
    result = average_precision(answers, truth, classes)
    shown = {name: _measurement(result[name], note).to_json() for name in ("ap", "ap50")}
    return {**shown, "per_class": result["per_class"]}


def _measurement(value: float | None, note: str) -> Measurement:
    if value is None:
        return missing("fraction", "there are no objects to find")
    return Measurement(value, "fraction", "measured", note=note)
