"""How well objects are found: COCO's mean average precision of detectors, and what differs between two of them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from compress.artifact import MODEL_TFLITE, Artifact, Facts
from compress.measurement import Measurement, missing
from compress.stage import Context, Need, Probe
from compress.tflite.interpreter import Model, version
from deploy.contract.average_precision import MOST, Truth
from deploy.contract.detection import Detections, Detector, agreement

SURE = 0.5
"""Detections with at least this score are what two models are compared by."""


class Precision(Probe):
    """Mean average precision on a split, by COCO's rules, of models that find objects."""

    name: ClassVar[str] = "precision"
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert", "pycocotools")

    split: Literal["validation", "test"]
    """The split that is measured on; `test` only for the final comparison."""

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """For each subject `ap`, `ap50` and `per_class`; and how far the last one agrees with the first."""
        samples, wanted = context.data.inputs(self.split), context.data.objects(self.split)
        facts: Facts = {}
        answers: list[list[Detections]] = []
        for done, (name, artifact) in enumerate(subjects.items()):
            context.progress.update(done, len(subjects))
            detector, model = (
                Detector(artifact.facts["detector"]),
                Model(artifact.file(MODEL_TFLITE), reproducible=True),
            )
            answers.append([detector(*model.pair(sample)) for sample in samples])
            note = f"COCO, {self.split} split, {len(samples)} images, {version()}, reference kernels"
            facts[name] = found(answers[-1], wanted, len(context.data.class_names), note)
        facts["agreement"] = agreement(answers[0], answers[-1], SURE)
        return facts


def found(answers: Sequence[Detections], wanted: Sequence[Truth], classes: int, note: str) -> dict[str, Any]:
    """`ap` and `ap50` as measurements, and `per_class` as plain numbers."""
    result = by_coco(answers, wanted, classes)
    shown = {name: _measurement(result[name], note).to_json() for name in ("ap", "ap50")}
    return {**shown, "per_class": result["per_class"]}


def _measurement(value: float | None, note: str) -> Measurement:
    if value is None:
        return missing("fraction", "there are no objects to find")
    return Measurement(value, "fraction", "measured", note=note)


def compare(facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Any]:
    """What changed from one subject to another: loss of average precision, agreement, per class.

    Args:
        facts: what `Precision.run` found.
        names: the class names.
        original: the subject compared with.
        result: the subject compared.
    """
    measurements = {
        f"{name}_drop": _drop(facts[original][name], facts[result][name]).to_json() for name in ("ap", "ap50")
    }
    share, count = facts["agreement"]
    if count:
        note = f"of {count} objects that either finds with a score of {SURE:g} or more, those that both find"
        measurements["agreement"] = Measurement(share, "fraction", "measured", note=note).to_json()
    else:
        measurements["agreement"] = missing("fraction", f"neither finds anything with a score of {SURE:g}").to_json()
    rows = zip(names, facts[original]["per_class"], facts[result]["per_class"], strict=True)
    per_class = [
        {
            "name": name,
            "samples": before["objects"],
            "original": _measurement(before["ap"], "COCO").to_json(),
            "result": _measurement(after["ap"], "COCO").to_json(),
            "ap50": {"original": before["ap50"], "result": after["ap50"]},
        }
        for name, before, after in rows
    ]
    return {"measurements": measurements, "per_class": per_class}


def _drop(before: Mapping[str, Any], after: Mapping[str, Any]) -> Measurement:
    if before["value"] is None or after["value"] is None:
        return missing("fraction", "there are no objects to find")
    return Measurement(before["value"] - after["value"], "fraction", "measured", note="the same images")


def by_coco(found: Sequence[Detections], wanted: Sequence[Truth], classes: int) -> dict[str, Any]:
    """Average precision by pycocotools, in the form of `deploy.contract.average_precision.average_precision`."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    sets: list[list[dict[str, Any]]] = [[], []]
    for image, (detections, (boxes, labels)) in enumerate(zip(found, wanted, strict=True), 1):
        sets[0] += _annotations(boxes, labels, image)
        scored = _annotations(detections.boxes, detections.classes, image)
        sets[1] += [row | {"score": float(score)} for row, score in zip(scored, detections.scores, strict=True)]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
        truth, answers = COCO(), COCO()
        for index, rows in zip((truth, answers), sets, strict=True):
            index.dataset = {
                "images": [{"id": image} for image in range(1, len(wanted) + 1)],
                "categories": [{"id": label} for label in range(classes)],
                "annotations": [row | {"id": number} for number, row in enumerate(rows, 1)],
            }
            index.createIndex()
        judge = COCOeval(truth, answers, "bbox")
        judge.params.areaRng, judge.params.areaRngLbl, judge.params.maxDets = [[0.0, 1e10]], ["all"], [MOST]
        judge.evaluate()
        judge.accumulate()
    precision: NDArray[np.float64] = judge.eval["precision"][..., 0, 0]  # [overlaps, recalls, classes]; -1: no objects
    rows = [_row(precision[..., label], [labels for _, labels in wanted], label) for label in range(classes)]
    kept = [row for row in rows if row["objects"]]
    means = {name: float(np.mean([row[name] for row in kept])) if kept else None for name in ("ap", "ap50")}
    return {**means, "per_class": rows}


def _row(precision: NDArray[np.float64], wanted: Sequence[NDArray[Any]], label: int) -> dict[str, Any]:
    objects = sum(int((labels == label).sum()) for labels in wanted)
    if not objects:
        return {"ap": None, "ap50": None, "objects": 0}
    return {"ap": float(precision.mean()), "ap50": float(precision[0].mean()), "objects": objects}


def _annotations(boxes: NDArray[Any], labels: NDArray[Any], image: int) -> list[dict[str, Any]]:
    """Boxes in COCO's form: x, y, width, height. Fractions of the sides do: no overlap depends on the unit."""
    corners = np.asarray(boxes, np.float64).reshape(-1, 4)
    return [
        {
            "image_id": image,
            "category_id": int(label),
            "bbox": [left, top, right - left, bottom - top],
            "area": (right - left) * (bottom - top),
            "iscrowd": 0,
        }
        for (top, left, bottom, right), label in zip(corners.tolist(), labels, strict=True)
    ]
