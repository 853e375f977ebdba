"""Detectors and photos without labels: the result finds what the original model finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.core.errors import ModelError, StageError
from compress.data.types import Data, Objects, Split
from compress.tasks.base import Change, Location, RandomChanges, Refusal, Specification, Use
from compress.tasks.detection import Detection, detections_in, detector_of, moving_steps
from compress.tasks.detection_head import DetectionHead
from compress.tasks.findings import ENOUGH, VerdictReason, little_left, unlike_original
from compress.tasks.outputs import OutputsHead, OutputsTask
from deploy.contract.detection import SURE, Detector

DETECTOR = "detector"
"""The key of the detector in the specification; the other keys are those of the task `outputs`."""
FOUND = 0.3
"""Score from which an object of the original has to be found. Chosen: less likely ones are mostly wrong, and with SURE
a few dozen photos have too few objects."""


@dataclass(frozen=True)
class UnlabelledDetectionHead(OutputsHead):
    """The outputs of a detector, compared by scores and by the boxes of likely locations."""

    objects: DetectionHead

    @property
    def specification(self) -> Specification:
        """The outputs of the original, and how boxes and scores are read."""
        return {**(super().specification or {}), DETECTOR: self.objects.specification}

    def logits(self, outputs: Any) -> Any:
        """Return the outputs, with scores as logits: [n, values]."""
        return self.objects.logits(outputs)

    def divergence(self, expected: Any, actual: Any, temperature: float = 1.0) -> Any:
        """Return the divergence of scores and likely boxes: [n]."""
        return self.objects.divergence(expected, actual, temperature)


class UnlabelledDetection(Detection):
    """Detection without labels: the objects of the original model take the place of labels."""

    name: ClassVar[str] = "unlabelled_detection"
    instead_of: ClassVar[frozenset[str]] = frozenset({"outputs", "classification", "regression", "detection"})
    learns_from_original: ClassVar[bool] = True
    models: ClassVar[str] = "detectors without labels"
    truth_note: ClassVar[str] = f"COCO with the original's objects of a score of {FOUND:g} or more as labels"
    refused: ClassVar[Mapping[Use, Refusal]] = {**Detection.refused, **OutputsTask.refused}

    def head(self, model: Any, data: Data, specification: Specification = None) -> UnlabelledDetectionHead:
        """Return the head of a detector.

        The specification is that of the detector (`deploy.contract.detection`), for the original model, or that of an
        earlier artifact, which also has the outputs of the original.
        """
        known = dict(specification or {})
        detector = detector_of(known.pop(DETECTOR, None) or known or None)
        outputs = {"outputs": specification["outputs"]} if specification and DETECTOR in specification else None
        raw_outputs = model.outputs[: len(detector.specification["tensors"])]  # features for distillation may follow
        problem = detector.misfit([(1, *output.shape[1:]) for output in raw_outputs])
        if problem is not None:
            raise ModelError(
                f"the model's outputs are not those of its detector: {problem}",
                hint="check model.detector: `detector: auto` recognizes the head",
            )
        forms = OutputsTask().head(model, data, outputs).outputs
        columns = detector.classes_of(sum(prod(form.shape) for form in forms))
        return UnlabelledDetectionHead(forms, DetectionHead(detector, columns))

    def detector(self, specification: Specification) -> Detector:
        """Return the detector that a specification describes."""
        return detector_of((specification or {}).get(DETECTOR))

    def file_specification(self, file: Path, data: Data, detector: Specification = None) -> Specification:
        """Return the outputs of the file, and how boxes and scores are read."""
        return {**(OutputsTask().file_specification(file, data) or {}), DETECTOR: detector}

    def targets(self, data: Data, split: Split) -> NDArray[Any]:
        """Return the outputs of the original: [n, values]."""
        return data.targets(split)

    def truth(self, data: Data, split: Split, specification: Specification) -> Sequence[Objects]:
        """Return the objects that the original finds with a score of at least FOUND."""
        answers = detections_in(self.detector(specification), data.targets(split))
        return [Objects(found.boxes, found.classes) for found in (answer.above(FOUND) for answer in answers)]

    def augmentation(self, augment: RandomChanges) -> Change | None:
        """Return None: the original runs on the changed samples, so no target moves."""
        return None

    def refused_settings(self, settings: Mapping[str, Any]) -> list[tuple[Location, Refusal]]:
        """Return the preprocessing steps that would move objects, and a model without a detector."""
        refusals = moving_steps(settings)
        if not settings["model"].get("detector"):
            refusal = Refusal("a detector is needed", "model.detector: auto, the name of a family, or a specification")
            refusals.append((("model",), refusal))
        return refusals

    def compare(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Any]:
        """Return the comparison without classes of which the original finds nothing."""
        compared = super().compare(facts, names, original, result)
        return {**compared, "per_class": [row for row in compared["per_class"] if row["samples"]]}

    def findings(self, facts: Facts, names: Sequence[str], original: str, result: str) -> list[VerdictReason]:
        """Compare the objects of both models, and the values of the outputs if there are few objects."""
        agreed, count = facts["agreement"]
        reasons = [*super().findings(facts, names, original, result), *unlike_original(agreed, ())]
        if sum(row["objects"] for row in facts[original]["per_class"]) < ENOUGH:
            reasons += little_left(facts.get("outputs", ()))
        if count:
            return reasons
        text = (
            f"neither model finds an object with a score of {SURE:g} or more in {facts['images']:,} samples, so "
            "nothing is known of the boxes of the result: give photos of what the detector finds, and check "
            "data.preprocess"
        )
        return [VerdictReason("warning", text, "named"), *reasons]

    def manifest(self, specification: Specification, labels: Sequence[str] = ()) -> dict[str, Any]:
        """Return the task on the device: detection."""
        detector = self.detector(specification)
        classes = detector.classes_in(sum(prod(output["shape"]) for output in (specification or {})["outputs"]))
        if labels and len(labels) != classes:
            raise StageError(f"package.labels has {len(labels)} names, and the detector {classes} classes")
        return {"task": Detection.name, "detection": detector.specification}
