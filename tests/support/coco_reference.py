"""Average precision by pycocotools: the reference for `deploy.contract.average_precision`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from deploy.contract.average_precision import MAX_DETECTIONS, Truth
from deploy.contract.detection import Detections


def by_coco(predictions: Sequence[Detections], ground_truth: Sequence[Truth], classes: int) -> dict[str, Any]:
    """Return the average precision by pycocotools, in the form of `average_precision`."""
    sets: list[list[dict[str, Any]]] = [[], []]
    for image, (detections, (boxes, labels)) in enumerate(zip(predictions, ground_truth, strict=True), 1):
        sets[0] += _annotations(boxes, labels, image)
        scored = _annotations(detections.boxes, detections.classes, image)
        sets[1] += [row | {"score": float(score)} for row, score in zip(scored, detections.scores, strict=True)]
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        truth, answers = COCO(), COCO()
        for index, rows in zip((truth, answers), sets, strict=True):
            index.dataset = {
                "images": [{"id": image} for image in range(1, len(ground_truth) + 1)],
                "categories": [{"id": label} for label in range(classes)],
                "annotations": [row | {"id": number} for number, row in enumerate(rows, 1)],
            }
            index.createIndex()
        judge = COCOeval(truth, answers, "bbox")
        judge.params.areaRng, judge.params.areaRngLbl, judge.params.maxDets = [[0.0, 1e10]], ["all"], [MAX_DETECTIONS]
        judge.evaluate()
        judge.accumulate()
    precision: NDArray[np.float64] = judge.eval["precision"][..., 0, 0]  # [overlaps, recalls, classes]; -1: no objects
    rows = [_row(precision[..., label], [labels for _, labels in ground_truth], label) for label in range(classes)]
    kept = [row for row in rows if row["objects"]]
    means = {name: float(np.mean([row[name] for row in kept])) if kept else None for name in ("ap", "ap50")}
    return {**means, "per_class": rows}


def _row(precision: NDArray[np.float64], true_labels: Sequence[NDArray[Any]], label: int) -> dict[str, Any]:
    objects = sum(int((labels == label).sum()) for labels in true_labels)
    if not objects:
        return {"ap": None, "ap50": None, "objects": 0}
    return {"ap": float(precision.mean()), "ap50": float(precision[0].mean()), "objects": objects}


def _annotations(boxes: NDArray[Any], labels: NDArray[Any], image: int) -> list[dict[str, Any]]:
    """Return annotations with boxes in COCO's form: x, y, width, height. The overlaps do not depend on the unit."""
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
