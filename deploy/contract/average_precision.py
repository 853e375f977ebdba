"""Mean average precision of detections, by COCO's rules: host and device both use this module.

Source: cocodataset.org, "detection evaluation", and pycocotools' COCOeval, whose results are equal: ten thresholds of
intersection over union (IoU) from 0.5 to 0.95, precision at 101 recalls, at most 100 detections per class and image,
objects of all sizes.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from deploy.contract.detection import Detections
from deploy.contract.preprocessing import Array
from deploy.contract.suppression import overlaps

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
MAX_DETECTIONS = 100
Truth = Tuple[Array, Array]
"""The objects of an image: boxes float [k, 4] (ymin, xmin, ymax, xmax) and classes int [k]."""


def average_precision(answers: Sequence[Detections], truth: Sequence[Truth], classes: int) -> Dict[str, Any]:
    """Return the average precision of a detector.

    `truth` has the objects of each image, in the order of `answers`.

    Returns:
        `ap`: the mean over IoU thresholds and classes; `ap50`: at a threshold of 0.5; `per_class`: `ap`, `ap50` and
        `objects` of each class. The values of a class without objects are None, and do not count in the means.
    """
    rows: List[Dict[str, Any]] = []
    for index in range(classes):
        objects = sum(int((labels == index).sum()) for _, labels in truth)
        if not objects:
            rows.append({"ap": None, "ap50": None, "objects": 0})
            continue
        precisions = _class_precision(answers, truth, index, objects)
        rows.append({"ap": float(precisions.mean()), "ap50": float(precisions[0]), "objects": objects})
    means: Dict[str, Any] = {}
    for name in ("ap", "ap50"):
        values = [row[name] for row in rows if row["objects"]]
        means[name] = float(np.mean(values)) if values else None
    return dict(means, per_class=rows)


def _class_precision(answers: Sequence[Detections], truth: Sequence[Truth], index: int, objects: int) -> Array:
    """Return the average precision of one class at each IoU threshold: [10]."""
    scores = []
    matches = []
    for detections, (boxes, labels) in zip(answers, truth):
        of_class = np.flatnonzero(detections.classes == index)
        if not len(of_class):
            continue
        of_class = of_class[np.argsort(-detections.scores[of_class], kind="mergesort")][:MAX_DETECTIONS]
        scores.append(detections.scores[of_class])
        matches.append(_match(overlaps(detections.boxes[of_class], np.asarray(boxes)[labels == index])))
    if not scores:
        return np.zeros(len(IOU_THRESHOLDS))
    order = np.argsort(-np.concatenate(scores), kind="mergesort")
    true_positives = np.cumsum(np.concatenate(matches, axis=1)[:, order], axis=1, dtype=np.float64)
    return np.array([_mean_precision(row, objects) for row in true_positives])


def _match(ious: Array) -> Array:
    """Return which detections match an object that none before matches, at each IoU threshold: bool [10, k].

    Args:
        ious: the IoU of k detections, in falling order of their scores, with each object: [k, objects].
    """
    thresholds = np.minimum(IOU_THRESHOLDS, 1 - 1e-10)
    rows = np.arange(len(thresholds))
    detections, objects = ious.shape
    matched = np.zeros((len(thresholds), detections), bool)
    taken = np.zeros((len(thresholds), objects), bool)
    for index in range(detections if objects else 0):
        free = np.where(taken, -1.0, ious[index])
        best = objects - 1 - free[:, ::-1].argmax(axis=1)  # the last of equal ones, as in COCOeval
        matched[:, index] = free[rows, best] >= thresholds
        taken[rows, best] |= matched[:, index]
    return matched


def _mean_precision(true_positives: Array, objects: int) -> float:
    """Return the mean of the precision at 101 recalls, each the best precision at that recall or a higher one."""
    count = len(true_positives)
    precision = true_positives / np.arange(1, count + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    ranks = np.searchsorted(true_positives / objects, RECALLS, side="left")
    return float(np.where(ranks < count, precision[np.minimum(ranks, count - 1)], 0.0).mean())
