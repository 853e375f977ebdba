"""Decoding of a detector's outputs, in numpy: training, evaluation and the device all use this module.

A detector looks for objects at fixed locations of the image: the cells of one or several grids (`maps`), with or
without anchors of several sizes in each. Its outputs hold, for each location, a box as raw numbers, a score for each
class, and perhaps an objectness and keypoints. The specification in the bundle describes them::

    {"maps": [{"cells": [20, 20], "boxes": [[0.1, 0.1], [0.2, 0.1]]}, ...],
     "code": "ssd", "variances": [0.1, 0.1, 0.2, 0.2], "scores": "logits",
     "least_score": 0.01, "overlap": 0.5, "most": 100}

The order of locations is: map, row, column, size. `deploy.contract.box_codes` has the codes of boxes, and
`deploy.contract.detector_specification` all keys with their defaults. Boxes below `least_score` are removed. Of two
boxes of one class whose intersection over union is above `overlap`, the one with the lower score is removed. At most
`most` boxes remain.

All lengths are fractions of the image's height and width; a box is (ymin, xmin, ymax, xmax).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.box_codes import CODES, BoxSettings, Locations, sigmoid, softmax
from deploy.contract.detector_specification import DetectionError, checked
from deploy.contract.preprocessing import Array
from deploy.contract.suppression import overlaps, suppressed

BOX_ORDER = ("ymin", "xmin", "ymax", "xmax")
BOX_FORMAT = "%s, as fractions of the image's height and width" % ", ".join(BOX_ORDER)
"""The meaning of the four numbers of a box, as outputs for people and programs state it."""
CANDIDATES = 1000
"""Boxes of all classes, the best, that are compared with each other."""
SURE = 0.5
"""The smallest score of the objects by which two models are compared."""


class Detected(NamedTuple):
    """One object that was found.

    Attributes:
        label: its class, by name.
        score: between 0 and 1.
        box: (ymin, xmin, ymax, xmax), fractions of the image's height and width.
        keypoints: (y, x) of each keypoint, or (y, x, probability that it is visible); empty for detectors without.
    """

    label: str
    score: float
    box: Tuple[float, float, float, float]
    keypoints: Tuple[Tuple[float, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Detections:
    """The detections of one image, the highest score first.

    Attributes:
        boxes: float32 [k, 4].
        classes: int64 [k].
        scores: float32 [k].
        labels: the class names.
        keypoints: float32 [k, count, 2 or 3]: y, x, and the probability that it is visible; None without keypoints.
    """

    boxes: Array
    classes: Array
    scores: Array
    labels: Sequence[str] = ()
    keypoints: Optional[Array] = None

    def __len__(self) -> int:
        return len(self.scores)

    def above(self, score: float) -> Detections:
        """Return the detections with at least this score."""
        return self.taken(self.scores >= score)

    def taken(self, kept: Array) -> Detections:
        """Return the detections for which `kept`, bool [k], is true."""
        points = None if self.keypoints is None else self.keypoints[kept]
        return Detections(self.boxes[kept], self.classes[kept], self.scores[kept], self.labels, points)

    def top(self, count: Optional[int] = None) -> List[Detected]:
        """Return the best detections, the best first; None: all of them."""
        best = []
        for index in range(len(self) if count is None else min(count, len(self))):
            ymin, xmin, ymax, xmax = map(float, self.boxes[index])
            points = () if self.keypoints is None else tuple(map(tuple, self.keypoints[index].tolist()))
            label = self.label(int(self.classes[index]))
            best.append(Detected(label, float(self.scores[index]), (ymin, xmin, ymax, xmax), points))
        return best

    def rows(self, count: Optional[int] = None) -> List[Dict[str, Any]]:
        """Return the same as plain maps of `label`, `score`, `box`, and `keypoints` if the detector has any.

        Numbers that are NaN or infinite are None.
        """
        rows = []
        for detected in self.top(count):
            row: Dict[str, Any] = {"label": detected.label, "score": detected.score, "box": _plain(detected.box)}
            if self.keypoints is not None:
                row["keypoints"] = [_plain(point) for point in detected.keypoints]
            rows.append(row)
        return rows

    def label(self, index: int) -> str:
        """Return the name of a class; its index if it has no name."""
        return self.labels[index] if index < len(self.labels) else str(index)


@dataclasses.dataclass(frozen=True)
class DetectorParts:
    """The outputs of a detector for a batch, one row for each location: [batch, locations, values].

    Attributes:
        boxes: raw numbers.
        scores: raw scores, background included.
        objectness: raw; None without it.
        keypoints: raw; None without them.
    """

    boxes: Array
    scores: Array
    objectness: Optional[Array] = None
    keypoints: Optional[Array] = None


class Detector:
    """A parsed specification. Methods with `maths` take arrays, or tensors with `keras.ops` instead of numpy.

    Args:
        specification: as in the module's docstring; all but `maps` may be left out.

    Attributes:
        specification: the same with every default written out.
        at: the locations.
        anchors: float32 [locations, 4]: y and x of the middle, height, width.

    Raises:
        DetectionError: an unknown or missing key, or a value that cannot be used.
    """

    def __init__(self, specification: Any) -> None:
        self.specification = checked(specification)
        settings = self.specification
        self.at, self._sizes = _locations(settings)
        self.anchors = self.at.anchors
        self._code = CODES[settings["code"]]
        variances = np.asarray(settings["variances"], np.float32)
        self._box_settings = BoxSettings(variances, settings["offset"], settings["bins"])
        self._box_width = 4 * settings["bins"] if settings["code"] == "dfl" else 4

    @property
    def has_objectness(self) -> bool:
        """Whether scores are those of a class, given that there is an object."""
        return any(entry["part"] == "objectness" for entry in self.specification["tensors"])

    def output_sizes(self, classes: int) -> List[Tuple[int, int]]:
        """Return the number of locations of each output, and the number of values for each of them."""
        sizes = []
        for entry in self.specification["tensors"]:
            count = self._sizes[entry["map"]] if "map" in entry else len(self.anchors)
            sizes.append((count, self._width(entry["part"], classes)))
        return sizes

    def classes_of(self, values: int) -> int:
        """Return the number of classes, with the background, of a model from the number of values of all its outputs.

        Raises:
            DetectionError: no number of classes gives so many values.
        """
        fixed = sum(count * width for count, width in self.output_sizes(0))
        per_class = sum(count * width for count, width in self.output_sizes(1)) - fixed
        classes, rest = divmod(values - fixed, per_class)
        if rest or classes < 1:
            raise DetectionError("%d values are not the outputs of %d locations" % (values, len(self.anchors)))
        return classes

    def classes_in(self, values: int) -> int:
        """Return the number of classes without the background, see `classes_of`."""
        return self.classes_of(values) - (self.specification["background"] is not None)

    def misfit(self, shapes: Sequence[Any]) -> Optional[str]:
        """Return why outputs of these shapes, with the batch, are not those of the detector; None if they are."""
        entries = self.specification["tensors"]
        if len(shapes) != len(entries):
            return "%d outputs instead of %d" % (len(shapes), len(entries))
        values = [int(np.prod([int(side) for side in shape[1:]])) for shape in shapes]
        try:
            sizes = self.output_sizes(self.classes_of(sum(values)))
        except DetectionError as error:
            return str(error)
        for entry, shape, value, (count, width) in zip(entries, shapes, values, sizes):
            if value != count * width:
                return "%s %r, not %d locations x %d" % (entry["part"], list(shape[1:]), count, width)
        return None

    def split(self, rows: Array, maths: Any = np) -> List[Array]:
        """Return the outputs in rows [n, values], in which they are flattened and joined."""
        sizes = [count * width for count, width in self.output_sizes(self.classes_of(int(rows.shape[1])))]
        return list(maths.split(rows, np.cumsum(sizes)[:-1].tolist(), axis=1))

    def parts(self, outputs: Sequence[Any], maths: Any = np) -> DetectorParts:
        """Return the parts of the outputs of a batch.

        Args:
            outputs: arrays or tensors [n, ...], in the order of `tensors` of the specification.
            maths: numpy, or `keras.ops` for tensors.

        Raises:
            DetectionError: the outputs are not those of the detector.
        """
        problem = self.misfit([output.shape for output in outputs])
        if problem is not None:
            raise DetectionError(problem)
        classes = self.classes_of(sum(int(np.prod(output.shape[1:])) for output in outputs))
        rows_by_part: Dict[str, List[Tuple[int, Any]]] = {}
        sizes = self.output_sizes(classes)
        for entry, output, (count, width) in zip(self.specification["tensors"], outputs, sizes):
            rows = maths.reshape(output, (-1, count, width))
            rows_by_part.setdefault(entry["part"], []).append((entry.get("map", 0), rows))
        parts = {}
        for part, rows in rows_by_part.items():
            ordered = [tensor for _, tensor in sorted(rows, key=lambda row: row[0])]
            parts[part] = ordered[0] if len(ordered) == 1 else maths.concatenate(ordered, axis=1)
        return DetectorParts(**parts)

    def corners(self, raw: Array, at: Optional[Locations] = None, maths: Any = np) -> Array:
        """Return raw boxes as (ymin, xmin, ymax, xmax), not cut off at the image's border: [..., locations, 4].

        Args:
            raw: [..., locations, values].
            at: their locations; all by default.
            maths: numpy, or `keras.ops` for tensors.
        """
        settings = self.specification
        if settings["code"] == "dfl":
            raw = maths.reshape(raw, (-1, *raw.shape[1:-1], 4, settings["bins"]))  # the first dimension may be unknown
        axis = -2 if settings["code"] == "dfl" else -1
        if settings["order"] == "xy":
            groups = maths.split(raw, 4, axis=axis)
            raw = maths.concatenate([groups[1], groups[0], groups[3], groups[2]], axis=axis)
        low, high = self._code(raw, self.at if at is None else at, self._box_settings, maths)
        boxes = maths.concatenate([low, high], axis=-1)
        size = settings["input_size"]
        return boxes if size is None else boxes / np.asarray(size * 2, np.float32)

    def probabilities(self, parts: DetectorParts, maths: Any = np) -> Array:
        """Return the scores of the classes as probabilities, with the objectness in them: [..., locations, classes]."""
        scores = self._class_probabilities(parts.scores, maths)
        if parts.objectness is None:
            return scores
        both = scores * self._objectness(parts.objectness, maths)
        return both if self.specification["objectness"] == "product" else maths.sqrt(both)

    def located(self, raw: Array, which: Any = slice(None)) -> Array:
        """Return raw boxes [k, values] as (ymin, xmin, ymax, xmax), cut off at the image's border: float32.

        `which` are their locations; all by default.
        """
        boxes = self.corners(np.asarray(raw, np.float32), self.at.taken(which))
        return np.clip(boxes, 0, 1).astype(np.float32)

    def __call__(self, outputs: Sequence[Array], labels: Sequence[str] = ()) -> Detections:
        """Return the detections of one image.

        Args:
            outputs: the arrays of one sample, without the batch, in the order of `tensors` of the specification.
            labels: the class names, for the result.

        Raises:
            DetectionError: the outputs are not those of the detector.
        """
        batch = self.parts([np.asarray(output, np.float32)[np.newaxis] for output in outputs])
        objectness = None if batch.objectness is None else batch.objectness[0]
        which, classes, likely = self._candidates(batch.scores[0], objectness)
        with np.errstate(over="ignore", invalid="ignore"):  # float models may give infinite numbers
            boxes = self.corners(batch.boxes[0][which], self.at.taken(which))
        sound = np.isfinite(boxes).all(axis=1)
        which, classes, likely, boxes = which[sound], classes[sound], likely[sound], boxes[sound]
        at = self.at.taken(which)
        groups = np.zeros_like(classes) if self.specification["class_agnostic"] else classes
        kept = suppressed(np.clip(boxes, 0, 1), groups, self.specification["overlap"], self.specification["most"])
        points = None
        if batch.keypoints is not None:
            points = self._keypoints(batch.keypoints[0][which[kept]], at.taken(kept), boxes[kept])
        located = np.clip(boxes[kept], 0, 1).astype(np.float32)
        return Detections(located, classes[kept].astype(np.int64), likely[kept], labels, points)

    def ordered(self, details: Sequence[Any]) -> List[Any]:
        """Return a runtime's details of the outputs in the order of `tensors`: compilers may change it.

        Outputs of equal shape and dtype keep their order. Details that do not fit are returned as they are.
        """
        shapes = [[int(side) for side in detail["shape"]] for detail in details]
        sizes = [int(np.prod(shape)) for shape in shapes]
        try:
            expected = self.output_sizes(self.classes_of(sum(sizes)))
        except DetectionError:
            return list(details)
        if sorted(sizes) != sorted(count * width for count, width in expected):
            return list(details)
        left = list(range(len(sizes)))
        order = []
        for count, width in expected:
            equal = [index for index in left if sizes[index] == count * width]
            # 20 x 20 x 4 scores and 5 x 5 x 64 boxes have equal sizes: the last dimension decides.
            first = next((index for index in equal if shapes[index][-1] == width), equal[0])
            left.remove(first)
            order.append(details[first])
        return order

    def _candidates(self, scores: Array, objectness: Optional[Array]) -> Tuple[Array, Array, Array]:
        """Return locations, classes and probabilities of the likeliest boxes, the likeliest first.

        Args:
            scores: float32 [locations, classes], raw.
            objectness: float32 [locations, 1], raw; None without it.
        """
        settings = self.specification
        rows = None
        least = settings["least_score"]
        if objectness is not None:  # the product is at most the objectness, and its root at most the root of that
            lowest = least if settings["objectness"] == "product" else least**2
            rows = np.flatnonzero(self._objectness(objectness[:, 0], np) >= lowest)
            likely = self.probabilities(DetectorParts(scores, scores[rows], objectness[rows]))
        elif settings["scores"] == "logits":  # few pass: only these need an exponential
            raw = self._without_background(scores)
            passed = np.flatnonzero(raw >= math.log(least / (1 - least)) - 1e-3)
            likely = np.zeros(raw.shape, np.float32)
            likely.ravel()[passed] = sigmoid(raw.ravel()[passed], np)
        else:
            likely = self._class_probabilities(scores, np)
        best = np.flatnonzero(likely >= least)  # not where it is NaN
        values = likely.ravel()[best]
        if len(best) > CANDIDATES:  # a full sort of all would be slow; ties at the end keep the first, as a sort does
            limit = -np.partition(-values, CANDIDATES - 1)[CANDIDATES - 1]
            enough = np.flatnonzero(values >= limit)
            best, values = best[enough], values[enough]
        order = np.argsort(-values, kind="mergesort")[:CANDIDATES]
        locations, classes = np.divmod(best[order], likely.shape[1])
        return (locations if rows is None else rows[locations]), classes, values[order].astype(np.float32)

    def _class_probabilities(self, scores: Array, maths: Any) -> Array:
        kind = self.specification["scores"]
        if kind == "softmax":
            return self._without_background(softmax(scores, maths))
        kept = self._without_background(scores)
        return kept if kind == "probabilities" else sigmoid(kept, maths)

    def _without_background(self, scores: Array) -> Array:
        background = self.specification["background"]
        if background is None:
            return scores
        return scores[..., 1:] if background == "first" else scores[..., :-1]

    def _objectness(self, raw: Array, maths: Any) -> Array:
        return raw if self.specification["scores"] == "probabilities" else sigmoid(raw, maths)

    def _keypoints(self, raw: Array, at: Locations, boxes: Array) -> Array:
        """Return keypoints: float32 [k, count, 2 or 3]: y, x, and the probability that it is visible."""
        settings = self.specification["keypoints"]
        rows = raw.reshape(len(raw), settings["count"], 3 if settings["visibility"] else 2)  # also of no object
        offsets = rows[..., 1::-1] if self.specification["order"] == "xy" else rows[..., :2]
        units = {"cell": at.steps, "anchor": at.anchors[:, 2:], "box": boxes[:, 2:] - boxes[:, :2]}
        start = boxes[:, :2] if settings["unit"] == "box" else (at.cells + settings["offset"]) * at.steps
        points = start[:, np.newaxis] + offsets * settings["scale"] * units[settings["unit"]][:, np.newaxis]
        if not settings["visibility"]:
            return points.astype(np.float32)
        return np.concatenate([points, sigmoid(rows[..., 2:3], np)], axis=-1).astype(np.float32)

    def _width(self, part: str, classes: int) -> int:
        if part == "scores":
            return classes
        if part == "keypoints":
            settings = self.specification["keypoints"]
            return int(settings["count"]) * (3 if settings["visibility"] else 2)
        return self._box_width if part == "boxes" else 1


def agreement(first: Sequence[Detections], second: Sequence[Detections]) -> Tuple[float, int]:
    """Return the fraction of the objects of one model that the other model finds too, and the number of objects.

    Objects with a score of at least `SURE` count. Two objects are the same if their classes are equal and their
    intersection over union is at least 0.5. The score of the other model must be at least half of `SURE`.
    """
    both = 0
    total = 0
    for one, other in zip(first, second):
        both += _refound(one.above(SURE), other.above(SURE / 2))
        both += _refound(other.above(SURE), one.above(SURE / 2))
        total += len(one.above(SURE)) + len(other.above(SURE))
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


def _plain(values: Sequence[float]) -> List[Optional[float]]:
    return [round(value, 6) if math.isfinite(value) else None for value in values]


def _locations(settings: Dict[str, Any]) -> Tuple[Locations, List[int]]:
    """Return the locations, and the number of those of each map."""
    parts = [_of_map(entry) for entry in settings["maps"]]
    anchors, steps, cells = (np.concatenate([part[index] for part in parts]).astype(np.float32) for index in range(3))
    sizes = [len(part[0]) for part in parts]
    scales = np.repeat([entry.get("centre_scale", 1.0) for entry in settings["maps"]], sizes).astype(np.float32)
    return Locations(anchors, steps, cells, scales[:, np.newaxis]), sizes


def _of_map(entry: Dict[str, Any]) -> Tuple[Array, Array, Array]:
    """Return anchors [n, 4], steps [n, 2] and cells [n, 2] of a map, float64; a single anchor is a cell."""
    if "anchors" in entry:
        single = np.asarray(entry["anchors"], np.float64)
        return single, single[:, 2:], single[:, :2] / single[:, 2:] - 0.5
    rows, columns = entry["cells"]
    step = np.array([1 / rows, 1 / columns])
    sizes = np.asarray(entry.get("boxes", [step]), np.float64).reshape(-1, 2)
    cells = np.empty((rows, columns, len(sizes), 2))
    cells[..., 0] = np.arange(rows)[:, None, None]
    cells[..., 1] = np.arange(columns)[None, :, None]
    anchors = np.concatenate([(cells + 0.5) * step, np.broadcast_to(sizes, cells.shape)], axis=3)
    steps = np.broadcast_to(step, cells.shape)
    return anchors.reshape(-1, 4), steps.reshape(-1, 2), cells.reshape(-1, 2)
