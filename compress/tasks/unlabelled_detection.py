"""Detectors and photos without labels: the result finds what the original model finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from compress.core.artifact import Facts
from compress.core.errors import ModelError, StageError
from compress.core.measurement import missing
from compress.data.types import Data, Split
from compress.tasks.base import EvaluationMembers, Judge, Location, ModelOutputs, Refusal, Rows, Specification, Use
from compress.tasks.detection import Detection, detector_of, moving_steps
from compress.tasks.detection_head import DetectionHead
from compress.tasks.findings import ENOUGH, VerdictReason, little_left, unlike_original
from compress.tasks.illustrations import ObjectsIllustrator, name_of
from compress.tasks.outputs import OutputsHead, OutputsTask
from deploy.contract.detection import SURE, Detector

NOTHING_FOUND = missing("fraction", f"neither model finds an object with a score of {SURE:g} or more")
DETECTOR = "detector"
"""The key of the detector in the specification; the other keys are those of the task `outputs`."""


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


class UnlabelledDetection(OutputsTask):
    """Detection without labels; the metric is the error of the outputs, and the agreement is that of the objects."""

    name: ClassVar[str] = "unlabelled_detection"
    instead_of: ClassVar[frozenset[str]] = frozenset({"outputs", "classification", "regression", "detection"})
    models: ClassVar[str] = "detectors without labels"
    reads_specification: ClassVar[bool] = True
    refused: ClassVar[Mapping[Use, Refusal]] = {**Detection.refused, **OutputsTask.refused}
    agreement_note: ClassVar[str] = "of the objects that either finds with a score of 0.5 or more, those that both find"

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
        forms = super().head(model, data, outputs).outputs
        columns = detector.classes_of(sum(prod(form.shape) for form in forms))
        return UnlabelledDetectionHead(forms, DetectionHead(detector, columns))

    def output_order(self, outputs: list[dict[str, Any]], specification: Specification) -> list[dict[str, Any]]:
        """Return the outputs in the order of the specification: compilers may change it."""
        return _detector(specification).ordered(outputs)

    def file_specification(self, file: Path, data: Data, detector: Specification = None) -> Specification:
        """Return the outputs of the file, and how boxes and scores are read."""
        return {**(super().file_specification(file, data) or {}), DETECTOR: detector}

    def fidelity(self, specification: Specification, *, logits: bool = False) -> Judge:
        """Return the comparison by scores, boxes and objects."""
        return Detection().fidelity((specification or {}).get(DETECTOR), logits=logits)

    def refused_settings(self, settings: Mapping[str, Any]) -> list[tuple[Location, Refusal]]:
        """Return the preprocessing steps that would move objects, and a model without a detector."""
        refusals = moving_steps(settings)
        if not settings["model"].get("detector"):
            refusal = Refusal("a detector is needed", "model.detector: auto, the name of a family, or a specification")
            refusals.append((("model",), refusal))
        return refusals

    def evaluate(self, models: Mapping[str, ModelOutputs], data: Data, split: Split, note: str) -> Facts:
        """Return for two models also `found_again`: by class, the number of the original's objects, and how many of
        them the result finds; and `sure_objects`: how many objects of both models count in the agreement."""
        facts = super().evaluate(models, data, split, note)
        if len(models) > 1:
            illustrator = self.illustrator(models, data, split)
            facts["found_again"] = illustrator.found_again()
            facts["sure_objects"] = illustrator.count(SURE)
        return facts

    def compare(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Any]:
        """Return also `found_again`, without classes of which the original finds nothing.

        Without any object, the agreement is missing.
        """
        labels = facts.get("class_names") or ()
        rows = [
            {"name": name_of(labels, label), "objects": objects, "found": matched}
            for label, (objects, matched) in enumerate(facts["found_again"])
            if objects
        ]
        compared = super().compare(facts, names, original, result)
        if not facts["sure_objects"]:
            compared["measurements"]["agreement"] = NOTHING_FOUND.to_json()
        return {**compared, "found_again": rows}

    def findings(self, facts: Facts, names: Sequence[str], original: str, result: str) -> list[VerdictReason]:
        """Compare the objects of both models, or warn that there are none.

        Where the samples show some objects, the values between them matter less.
        """
        objects = sum(count for count, _ in facts["found_again"])
        reasons = unlike_original(facts["agreement"], ())
        reasons += little_left(facts.get("outputs", ()), "warning" if objects >= ENOUGH else "not usable")
        if facts.get("sure_objects", 1):
            return reasons
        text = (
            f"neither model finds an object with a score of {SURE:g} or more in {facts['samples']:,} samples, so "
            "nothing is known of the boxes of the result: give photos of what the detector finds, and check "
            "data.preprocess"
        )
        return [VerdictReason("warning", text, "named"), *reasons]

    def packaged(
        self, rows: Mapping[str, Rows], data: Data, indices: Sequence[int], specification: Specification, note: str
    ) -> EvaluationMembers:
        """Return the metrics of each model with their changes; no agreement if no model finds an object."""
        members = super().packaged(rows, data, indices, specification, note)
        detectors = [_detector(specification)] * len(rows)
        if ObjectsIllustrator(detectors, list(rows.values()), (), None).count(SURE):
            return members
        return EvaluationMembers(None, {**members.metrics, "agreement": NOTHING_FOUND.to_json()})

    def illustrator(
        self, models: Mapping[str, ModelOutputs], data: Data, split: Split, labels: Sequence[str] = ()
    ) -> ObjectsIllustrator:
        """Return how objects are drawn; classes without names have numbers."""
        detectors = [_detector(model.specification) for model in models.values()]
        return ObjectsIllustrator(detectors, [model.rows for model in models.values()], labels, None)

    def manifest(self, specification: Specification, labels: Sequence[str] = ()) -> dict[str, Any]:
        """Return the task on the device: detection."""
        detector = _detector(specification)
        sizes = sum(prod(output["shape"]) for output in (specification or {})["outputs"])
        classes = detector.classes_of(sizes) - (detector.specification["background"] is not None)
        if labels and len(labels) != classes:
            raise StageError(f"package.labels has {len(labels)} names, and the detector {classes} classes")
        return {"task": Detection.name, "detection": detector.specification}


def _detector(specification: Specification) -> Detector:
    return detector_of((specification or {}).get(DETECTOR))
