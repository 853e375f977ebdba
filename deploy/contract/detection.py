"""Decoding of a detector's outputs, in numpy: training, evaluation and the device all use this module.

A detector has two outputs for its anchors: `boxes` [anchors, 4] and `scores` [anchors, classes]. The specification in
the bundle describes them::

    {"maps": [{"cells": [20, 20], "boxes": [[0.1, 0.1], [0.2, 0.1]]}, ...],
     "variances": [0.1, 0.1, 0.2, 0.2], "scores": "logits",
     "least_score": 0.01, "overlap": 0.5, "most": 100}

`maps`: grids of rows x columns over the image; the centre of each cell has one anchor for each size of `boxes` (height,
width). The order of anchors is: map, row, column, size. A raw box (y, x, height, width) moves the anchor's centre by
y and x times variance times the anchor's size, and scales the size by the exponential of value times variance (Liu et
al., SSD, 2016). `scores` are `logits` (of a sigmoid for each class) or `probabilities`. Boxes below `least_score` are
removed. Of two boxes of one class whose intersection over union is above `overlap`, the one with the lower score is
removed. At most `most` boxes remain.

All lengths are fractions of the image's height and width; a box is (ymin, xmin, ymax, xmax).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.preprocessing import Array

DEFAULTS: Dict[str, Any] = {
    "variances": [0.1, 0.1, 0.2, 0.2],
    "scores": "logits",
    "least_score": 0.01,
    "overlap": 0.5,
    "most": 100,
}
MAX_ANCHORS = 1 << 20
CANDIDATES = 1000
"""Boxes of all classes, the best, that are compared with each other."""
LARGEST = math.log(1000 / 16)
"""Exponents above it are cut off: a box is at most that much larger than its anchor."""


class DetectionError(ValueError):
    """A specification, or outputs, that cannot be used."""


class Detected(NamedTuple):
    """One object that was found.

    Attributes:
        label: its class, by name.
        score: between 0 and 1.
        box: (ymin, xmin, ymax, xmax), fractions of the image's height and width.
    """

    label: str
    score: float
    box: Tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True)
class Detections:
    """The detections of one image, the highest score first.

    Attributes:
        boxes: float32 [k, 4].
        classes: int64 [k].
        scores: float32 [k].
        labels: the class names.
    """

    boxes: Array
    classes: Array
    scores: Array
    labels: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.scores)

    def above(self, score: float) -> Detections:
        """Return the detections with at least this score."""
        kept = self.scores >= score
        return Detections(self.boxes[kept], self.classes[kept], self.scores[kept], self.labels)

    def top(self, count: Optional[int] = None) -> List[Detected]:
        """Return the best detections, the best first; None: all of them."""
        rows = zip(self.classes[:count], self.scores[:count], self.boxes[:count])
        return [Detected(self._name(int(c)), float(s), tuple(float(v) for v in box)) for c, s, box in rows]  # type: ignore[arg-type]

    def rows(self, count: Optional[int] = None) -> List[Dict[str, Any]]:
        """Return the same as plain maps of `label`, `score` and `box`."""
        return [dict(row._asdict(), box=[round(value, 6) for value in row.box]) for row in self.top(count)]

    def _name(self, index: int) -> str:
        return self.labels[index] if index < len(self.labels) else str(index)


class Detector:
    """A parsed specification.

    Args:
        specification: as in the module's docstring; all but `maps` may be left out.

    Attributes:
        specification: the same with every default written out.
        anchors: float32 [anchors, 4]: y and x of the middle, height, width.

    Raises:
        DetectionError: an unknown or missing key, or a value that cannot be used.
    """

    def __init__(self, specification: Any) -> None:
        self.specification = _checked(specification)
        self.anchors = _anchors(self.specification["maps"])
        self._variances = np.asarray(self.specification["variances"], np.float32)

    def probabilities(self, scores: Array) -> Array:
        """Raw scores as probabilities: float32."""
        scores = np.asarray(scores, np.float32)
        if self.specification["scores"] == "probabilities":
            return scores
        return (1.0 / (1.0 + np.exp(-np.clip(scores, -80, 80)))).astype(np.float32)

    def located(self, raw: Array, which: Any = slice(None)) -> Array:
        """Raw boxes of some anchors as (ymin, xmin, ymax, xmax), cut off at the image's border.

        Args:
            raw: float [k, 4].
            which: the anchors that they belong to; all by default.
        """
        anchors, raw = self.anchors[which], np.asarray(raw, np.float32) * self._variances
        middle = anchors[:, :2] + raw[:, :2] * anchors[:, 2:]
        half = anchors[:, 2:] * np.exp(np.minimum(raw[:, 2:], np.float32(LARGEST))) / 2
        return np.clip(np.concatenate([middle - half, middle + half], axis=1), 0, 1).astype(np.float32)

    def __call__(self, boxes: Array, scores: Array, labels: Sequence[str] = ()) -> Detections:
        """The detections of one image.

        Args:
            boxes: float [anchors, 4], raw.
            scores: float [anchors, classes], raw.
            labels: the class names, to be handed on.

        Raises:
            DetectionError: the outputs do not belong to these anchors.
        """
        count = len(self.anchors)
        if np.shape(boxes) != (count, 4) or np.ndim(scores) != 2 or len(scores) != count:
            facts = (list(np.shape(boxes)), list(np.shape(scores)), count, count)
            raise DetectionError("boxes %r and scores %r, not [%d, 4] and [%d, classes]" % facts)
        likely = self.probabilities(scores).ravel()
        settings = self.specification
        which = np.flatnonzero(likely >= settings["least_score"])  # not where it is NaN
        which = which[np.argsort(-likely[which], kind="mergesort")][:CANDIDATES]
        which_anchors, classes = np.divmod(which, np.shape(scores)[1])
        located = self.located(np.asarray(boxes)[which_anchors], which_anchors)
        kept = suppressed(located, classes, settings["overlap"], settings["most"])
        return Detections(located[kept], classes[kept].astype(np.int64), likely[which][kept], labels)


def ordered(details: Sequence[Any]) -> Optional[List[Any]]:
    """Return the runtime's details of two outputs with the boxes first; None if they are not those of a detector.

    Compilers may change the order. With four classes the two shapes are equal, and the order is kept.
    """
    shapes = [[int(side) for side in detail["shape"]] for detail in details]
    if [len(shape) for shape in shapes] != [3, 3]:
        return None
    (batch, anchors, width), other = shapes
    same_dtype = np.dtype(details[0]["dtype"]) == np.dtype(details[1]["dtype"])
    if batch != 1 or other[:2] != [1, anchors] or 4 not in (width, other[2]) or not same_dtype:
        return None
    return list(details) if width == 4 else [details[1], details[0]]


def overlaps(boxes: Array, others: Array) -> Array:
    """Return the intersection over union of all pairs of boxes: float64 [k, m]; 0 for two empty boxes."""
    boxes = np.asarray(boxes, np.float64).reshape(-1, 4)
    others = np.asarray(others, np.float64).reshape(-1, 4)
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = np.prod(np.maximum(high - low, 0), axis=2)
    areas = [np.prod(np.maximum(corners[:, 2:] - corners[:, :2], 0), axis=1) for corners in (boxes, others)]
    union = areas[0][:, None] + areas[1][None, :] - shared
    return np.where(union > 0, shared / np.where(union > 0, union, 1), 0.0)


def suppressed(boxes: Array, classes: Array, overlap: float, most: int) -> Array:
    """Return the indices of the boxes that remain after greedy non-maximum suppression, int64.

    The boxes are in descending order of their scores. A box is removed if its intersection over union with a remaining
    box of the same class is larger than `overlap`.
    """
    low, high = (np.ascontiguousarray(part.T, np.float64) for part in (boxes[:, :2], boxes[:, 2:]))
    areas = (high[0] - low[0]) * (high[1] - low[1])
    free, kept = np.ones(len(boxes), bool), []
    for index in range(len(boxes)):
        if not free[index]:
            continue
        kept.append(index)
        if len(kept) == most:
            break
        sides = np.minimum(high, high[:, index : index + 1]) - np.maximum(low, low[:, index : index + 1])
        shared = np.maximum(sides[0], 0) * np.maximum(sides[1], 0)
        free &= (shared <= overlap * (areas + areas[index] - shared)) | (classes != classes[index])
    return np.asarray(kept, np.int64)


def agreement(first: Sequence[Detections], second: Sequence[Detections], least: float) -> Tuple[float, int]:
    """Return the fraction of the objects of one model that the other model finds too, and the number of objects.

    Objects with a score of at least `least` count. Two objects are the same if their classes are equal and their
    intersection over union is at least 0.5. The score of the other model must be at least half of `least`.
    """
    both = 0
    total = 0
    for one, other in zip(first, second):
        both += _refound(one.above(least), other.above(least / 2))
        both += _refound(other.above(least), one.above(least / 2))
        total += len(one.above(least)) + len(other.above(least))
    return (both / total if total else 1.0), total


def _refound(sure: Detections, others: Detections) -> int:
    """Return how many of the detections are also among the others, each of which counts once."""
    table = overlaps(sure.boxes, others.boxes) * (sure.classes[:, None] == others.classes[None, :])
    count = 0
    for row in range(len(table)):
        best = int(table[row].argmax()) if table.shape[1] else 0
        if table.shape[1] and table[row, best] >= 0.5:
            table[:, best] = 0
            count += 1
    return count


def _checked(specification: Any) -> Dict[str, Any]:
    if not isinstance(specification, dict) or "maps" not in specification:
        raise DetectionError("a detector's specification must be a map with the key 'maps'")
    unknown = [key for key in specification if key not in DEFAULTS and key != "maps"]
    if unknown:
        allowed = ", ".join(["maps"] + list(DEFAULTS))
        raise DetectionError("unknown key %r in a detector's specification; allowed: %s" % (unknown[0], allowed))
    settings = dict(DEFAULTS, **specification)
    variances = _numbers(settings["variances"], 4, "variances")
    least, overlap = (_numbers([settings[name]], 1, name)[0] for name in ("least_score", "overlap"))
    if settings["scores"] not in ("logits", "probabilities"):
        raise DetectionError("scores must be 'logits' or 'probabilities', not %r" % (settings["scores"],))
    if least >= 1 or overlap > 1:
        raise DetectionError("least_score must be below 1, and overlap at most 1")
    most = settings["most"]
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= 1000:
        raise DetectionError("most must be a whole number from 1 to 1000, not %r" % (most,))
    return dict(settings, maps=_maps(settings["maps"]), variances=variances, least_score=least, overlap=overlap)


def _maps(maps: Any) -> List[Dict[str, Any]]:
    if not isinstance(maps, (list, tuple)) or not maps:
        raise DetectionError("maps must be a list of maps with 'cells' and 'boxes'")
    parsed, total = [], 0
    for entry in maps:
        if not isinstance(entry, dict) or set(entry) != {"cells", "boxes"}:
            raise DetectionError("each of maps must have the keys 'cells' and 'boxes', not %r" % (entry,))
        cells = _numbers(entry["cells"], 2, "cells")
        if any(side != int(side) or side > 4096 for side in cells) or not isinstance(entry["boxes"], (list, tuple)):
            raise DetectionError("cells must be two whole numbers up to 4096, and boxes a list")
        boxes = [_numbers(box, 2, "boxes") for box in entry["boxes"]]
        total += int(cells[0] * cells[1]) * len(boxes)
        parsed.append({"cells": [int(side) for side in cells], "boxes": boxes})
    if not 1 <= total <= MAX_ANCHORS:
        raise DetectionError("maps give %d anchors; allowed: 1 to %d" % (total, MAX_ANCHORS))
    return parsed


def _numbers(values: Any, count: int, name: str) -> List[float]:
    """Return a list of positive numbers."""
    good = isinstance(values, (list, tuple)) and len(values) == count
    if not good or not all(_is_number(value) and 0 < value < 1e6 for value in values):
        raise DetectionError("%s must be %d numbers above 0, not %r" % (name, count, values))
    return [float(value) for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _anchors(maps: Sequence[Dict[str, Any]]) -> Array:
    parts = []
    for entry in maps:
        rows, columns = entry["cells"]
        sizes = np.asarray(entry["boxes"], np.float64).reshape(-1, 2)
        grid = np.empty((rows, columns, len(sizes), 4))
        grid[..., 0] = ((np.arange(rows) + 0.5) / rows)[:, None, None]
        grid[..., 1] = ((np.arange(columns) + 0.5) / columns)[None, :, None]
        grid[..., 2:] = sizes
        parts.append(grid.reshape(-1, 4))
    return np.concatenate(parts).astype(np.float32)
