"""Mean average precision of detections, by COCO's rules, in numpy: what is measured where there is no pycocotools.

The host measures with pycocotools; a test holds that both give the same.
Source: cocodataset.org, "detection evaluation", and pycocotools' COCOeval: ten overlaps from 0.5 to 0.95, precision
at 101 recalls, at most 100 detections of a class in an image, objects of all sizes.
Runs on Python 3.7 with numpy alone.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from deploy.contract.detection import Detections, overlaps
from deploy.contract.preprocessing import Array

OVERLAPS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
MOST = 100
Truth = Tuple[Array, Array]
"""The objects of an image: boxes float [k, 4] (ymin, xmin, ymax, xmax) and classes int [k]."""


def average_precision(found: Sequence[Detections], wanted: Sequence[Truth], classes: int) -> Dict[str, Any]:
    """How well objects are found.

    Args:
        found: the detections of each image.
        wanted: the objects of each image, in the same order.
        classes: how many there are.

    Returns:
        `ap`: the mean over overlaps and classes; `ap50`: at an overlap of 0.5; `per_class`: `ap`, `ap50` and
        `objects` of each class. A class without objects has None, and is in no mean.
    """
    rows: List[Dict[str, Any]] = []
    for index in range(classes):
        objects = sum(int((labels == index).sum()) for _, labels in wanted)
        if not objects:
            rows.append({"ap": None, "ap50": None, "objects": 0})
            continue
        curve = _by_overlap(found, wanted, index, objects)
        rows.append({"ap": float(curve.mean()), "ap50": float(curve[0]), "objects": objects})
    means: Dict[str, Any] = {}
    for name in ("ap", "ap50"):
        values = [row[name] for row in rows if row["objects"]]
        means[name] = float(np.mean(values)) if values else None
    return dict(means, per_class=rows)


def _by_overlap(found: Sequence[Detections], wanted: Sequence[Truth], index: int, objects: int) -> Array:
    """The average precision of one class at each overlap: [10]."""
    scores, right = [], []
    for detections, (boxes, labels) in zip(found, wanted):
        own = np.flatnonzero(detections.classes == index)
        own = own[np.argsort(-detections.scores[own], kind="mergesort")][:MOST]
        table = overlaps(detections.boxes[own], np.asarray(boxes)[labels == index])
        scores.append(detections.scores[own])
        right.append(np.stack([_matched(table, least) for least in OVERLAPS]))
    order = np.argsort(-np.concatenate(scores), kind="mergesort")
    hits = np.cumsum(np.concatenate(right, axis=1)[:, order], axis=1, dtype=np.float64)
    return np.array([_mean_precision(row, objects) for row in hits])


def _matched(table: Array, least: float) -> Array:
    """Which detections, in falling order of their scores, find an object that none before has found: bool [k]."""
    result, taken = np.zeros(len(table), bool), np.zeros(table.shape[1], bool)
    for row, values in enumerate(table):
        free = np.where(taken, -1.0, values)
        if len(free) and free.max() >= min(least, 1 - 1e-10):
            best = len(free) - 1 - int(free[::-1].argmax())  # of equal ones the last, as COCOeval has it
            result[row] = taken[best] = True
    return result


def _mean_precision(hits: Array, objects: int) -> float:
    """The mean of the precision at 101 recalls; of each, the best that is reached there or behind it."""
    if not len(hits):
        return 0.0
    precision = hits / np.arange(1, len(hits) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    places = np.searchsorted(hits / objects, RECALLS, side="left")
    reached = places < len(hits)
    return float(np.where(reached, precision[np.minimum(places, len(hits) - 1)], 0.0).mean())
