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
from compress.results.evaluation import Judgement
from compress.tasks.base import (
    Change,
    EvaluationMembers,
    Location,
    ModelOutputs,
    RandomChanges,
    Refusal,
    Rows,
    Specification,
    Use,
)
from compress.tasks.detection import Detection, detections_in, detector_of, moving_steps
from compress.tasks.detection_head import DetectionHead
from compress.tasks.findings import DOUBTFUL, ENOUGH, KEPT, UNLIKE, Level, VerdictReason, little_left
from compress.tasks.measured import deviation_over_samples, judged_by_deviation
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

    def truth(
        self, data: Data, split: Split, specification: Specification, samples: Sequence[int] | None = None
    ) -> list[Objects]:
        """Return the objects that the original finds with a score of at least FOUND.

        A box outside of the image is cut to its border, and left out: it has no area.
        """
        settings = self.detector(specification).specification
        detector = Detector({**settings, "least_score": max(settings["least_score"], FOUND)})
        rows = data.targets(split)
        answers = detections_in(detector, rows if samples is None else rows[list(samples)])
        with_area = [found.taken((found.boxes[:, 2:] > found.boxes[:, :2]).all(axis=1)) for found in answers]
        return [Objects(found.boxes, found.classes) for found in with_area]

    def class_names(self, data: Data) -> Sequence[str]:
        """Return no names: the classes of the data, such as folders of photos, are not the classes of the detector."""
        return ()

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

    def evaluate(self, models: Mapping[str, ModelOutputs], data: Data, split: Split, note: str) -> Facts:
        """Return also how much the outputs of each model differ between samples."""
        facts = super().evaluate(models, data, split, note) | {"split": split}
        for name, model in models.items():
            facts[name]["deviation"] = deviation_over_samples(model.rows)
        return facts

    def compare(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Any]:
        """Return the comparison without classes of which the original finds nothing."""
        compared = super().compare(facts, facts.get("class_names", ()), original, result)
        return {**compared, "per_class": [row for row in compared["per_class"] if row["samples"]]}

    def judge_outputs(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Judgement]:
        """Judge whether the outputs depend on the input: a camera that always sees the same has the same objects."""
        return judged_by_deviation(facts, f"{facts['images']:,} {facts['split']} samples", original, result)

    def findings(self, facts: Facts, names: Sequence[str], original: str, result: str) -> list[VerdictReason]:
        """Compare the objects of both models, and the values of the outputs if there are few objects.

        A comparison of few objects leads to a warning at most.
        """
        agreed, count = facts["agreement"]
        objects = sum(row["objects"] for row in facts[original]["per_class"])
        precision = facts[result]["ap"]["value"]
        reasons = []
        if not count:
            text = (
                f"neither model finds an object with a score of {SURE:g} or more in {facts['images']:,} samples, so "
                "nothing is known of the boxes of the result: give photos of what the detector finds, and check "
                "data.preprocess"
            )
            reasons.append(VerdictReason("warning", text, "named"))
        elif agreed < DOUBTFUL:
            found = f"{agreed:.0%} of the {count:,} objects"
            text = f"both models find {found} that either finds with a score of {SURE:g} or more"
            level: Level = "not usable" if agreed < UNLIKE and count >= ENOUGH else "warning"
            reasons.append(VerdictReason(level, text))
        if precision is not None and precision < KEPT:
            known = f"{objects:,} objects of the original as labels"
            text = f"the average precision of the result is {precision:.3f}, with {known}"
            reasons.append(VerdictReason("not usable" if objects >= ENOUGH else "warning", text))
        if objects < ENOUGH:
            reasons += little_left(facts.get("outputs", ()), "warning")
        return reasons

    def packaged(
        self, rows: Mapping[str, Rows], data: Data, indices: Sequence[int], specification: Specification, note: str
    ) -> EvaluationMembers:
        """Return the objects of the original, the average precision of each model, its drop and the agreement.

        Without any object, the device compares the outputs instead.
        """
        members = super().packaged(rows, data, indices, specification, note)
        has_objects = members.targets is not None and len(members.targets)
        return members if has_objects else EvaluationMembers(None, members.metrics)

    def manifest(self, specification: Specification, labels: Sequence[str] = ()) -> dict[str, Any]:
        """Return the task on the device: detection."""
        detector = self.detector(specification)
        classes = detector.classes_in(sum(prod(output["shape"]) for output in (specification or {})["outputs"]))
        if labels and len(labels) != classes:
            raise StageError(f"package.labels has {len(labels)} names, and the detector {classes} classes")
        return {"task": Detection.name, "detection": detector.specification}
