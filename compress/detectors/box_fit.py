"""The box code of a detector that decodes its boxes: found by comparing its boxes with those of every code.

What a code leaves open (the sizes of anchors, variances) follows from the numbers too. The decoder of the device
decides: a code is the right one if it gives the same boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.detectors.roles import MapRoles
from deploy.contract.box_codes import WITH_ANCHORS
from deploy.contract.detection import Detector

Doubles = NDArray[np.float64]
FORMS = ("xywh", "xyxy", "yxhw", "yxyx")
"""What the four numbers of a decoded box are: centre and size, or two corners."""
CLOSE = 1e-3
"""Largest difference between boxes, as a fraction of the image or of the box, whichever is larger."""
OFFSETS = {
    "dfl": (0.5, 0.0),
    "yolox": (0.0, 0.5),
    "centernet": (0.0, 0.5),
    "ltrb": (0.5, 0.0),
    "ltrb_exp": (0.5, 0.0),
    "ltrb_relu": (0.5, 0.0),
    "yolov3": (0.5,),
    "yolov5": (0.5,),
    "ssd": (0.5,),
}
"""The positions in a cell that are tried for each code."""
SIMPLE_CODES = ("yolox", "yolov5", "ltrb", "yolov3", "centernet", "ltrb_exp", "ltrb_relu", "ssd")


@dataclass(frozen=True)
class BoxFit:
    """A code that gives the boxes of the model.

    Attributes:
        settings: keys of the detector's specification.
        maps: its `maps`.
        error: the largest difference from the model's boxes, as a fraction of the image or of the box.
    """

    settings: Mapping[str, Any]
    maps: Sequence[Mapping[str, Any]]
    error: float


@dataclass(frozen=True)
class _Samples:
    """Raw numbers and boxes of one anchor of a map, in float64.

    Attributes:
        raw: [batch, positions, numbers], in the order of the channels.
        boxes: [batch, positions, 4], as the model gives them.
    """

    raw: Doubles
    boxes: Doubles


def fit(maps: Sequence[MapRoles], input_size: tuple[int, int]) -> BoxFit | None:
    """Return the code that gives the boxes of a model; None if there is none.

    Args:
        maps: the roles on each map, with decoded boxes.
        input_size: height and width of the input.
    """
    samples = [[_samples(roles, anchor) for anchor in range(len(roles.anchors))] for roles in maps]
    cells = [roles.probe.head.cells for roles in maps]
    best: BoxFit | None = None
    for settings, form, unit in _hypotheses(samples[0][0].raw.shape[2], input_size):
        boxes = [[_corners(each.boxes, form, unit) for each in anchors] for anchors in samples]
        found = _solved(settings, samples, boxes, cells)
        if found is not None and (best is None or found.error < best.error):
            best = found
        if best is not None and best.error < CLOSE / 10:
            break
    return best if best is not None and best.error < CLOSE else None


def _samples(roles: MapRoles, anchor: int) -> _Samples:
    each = roles.anchors[anchor]
    raw = roles.probe.raw[..., list(each.boxes)].astype(np.float64)
    return _Samples(raw, roles.probe.answers[..., list(each.box_values)].astype(np.float64))


def _hypotheses(width: int, input_size: tuple[int, int]) -> Iterator[tuple[dict[str, Any], str, Doubles]]:
    """Yield settings, the form of the boxes, and the unit of their numbers (y, x)."""
    codes = SIMPLE_CODES if width == 4 else ("dfl",)
    units = [np.array(input_size, np.float64), np.ones(2)]
    for code, order, unit, form in itertools.product(codes, ("xy", "yx"), units, FORMS):
        for offset in OFFSETS[code]:
            bins = {"bins": width // 4} if code == "dfl" else {}
            yield {"code": code, "order": order, "offset": offset, **bins}, form, unit


def _corners(boxes: Doubles, form: str, unit: Doubles) -> Doubles:
    """Return boxes of a form as (ymin, xmin, ymax, xmax), fractions of the image."""
    first, second = boxes[..., :2], boxes[..., 2:]
    if form[0] == "x":
        first, second = first[..., ::-1], second[..., ::-1]
    if form[2:] in ("wh", "hw"):
        first, second = first - second / 2, first + second / 2
    return np.concatenate([first / unit, second / unit], axis=-1)


def _solved(
    settings: dict[str, Any], samples: list[list[_Samples]], boxes: list[list[Doubles]], cells: list[tuple[int, int]]
) -> BoxFit | None:
    """Return the fit of one code, with the sizes of anchors and the variances that fit best; None if it cannot be."""
    code = settings["code"]
    maps: list[dict[str, Any]] = []
    if code not in WITH_ANCHORS:
        if any(len(anchors) > 1 for anchors in samples):
            return None
        maps = [{"cells": list(sides)} for sides in cells]
        return _judged(settings, maps, samples, boxes)
    if code == "ssd":
        return _ssd(settings, samples, boxes, cells)
    for anchors, expected, sides in zip(samples, boxes, cells, strict=True):
        sizes = [
            _anchor_size(code, settings["order"], each.raw, box) for each, box in zip(anchors, expected, strict=True)
        ]
        if any(size is None for size in sizes):
            return None
        maps.append({"cells": list(sides), "boxes": sizes})
    return _judged(settings, maps, samples, boxes)


def _rows_first(raw: Doubles, order: str) -> Doubles:
    return raw[..., [1, 0, 3, 2]] if order == "xy" else raw


def _anchor_size(code: str, order: str, raw: Doubles, boxes: Doubles) -> list[float] | None:
    """Return the size of an anchor from the sizes of its boxes; None if it would not be constant."""
    numbers = _rows_first(raw, order)[..., 2:]
    factor = (2 / (1 + np.exp(-numbers))) ** 2 if code == "yolov5" else np.exp(numbers)
    sizes = ((boxes[..., 2:] - boxes[..., :2]) / factor).reshape(-1, 2)
    size = np.median(sizes, axis=0)
    if (size <= 0).any() or np.percentile(np.abs(sizes / size - 1), 90) > 0.02:
        return None
    return [float(side) for side in size]


def _ssd(
    settings: dict[str, Any], samples: list[list[_Samples]], boxes: list[list[Doubles]], cells: list[tuple[int, int]]
) -> BoxFit | None:
    """Return the fit of anchors and variances: lines through the numbers of each location."""
    fits = []
    for anchors, expected in zip(samples, boxes, strict=True):
        for each, box in zip(anchors, expected, strict=True):
            found = _lines(_rows_first(each.raw, settings["order"]), box)
            if found is None:
                return None
            fits.append(found)
    variances = np.median(np.concatenate([variance for _, variance in fits]), axis=0)
    if (variances <= 0).any():
        return None
    known = {**settings, "variances": [float(f"{value:.6g}") for value in variances]}
    single: list[dict[str, Any]] = []
    regular: list[dict[str, Any]] = []
    left = iter(fits)
    for anchors, sides in zip(samples, cells, strict=True):
        of_map = np.stack([next(left)[0] for _ in anchors], axis=1)  # [positions, anchors, 4]
        single.append({"anchors": of_map.reshape(-1, 4).tolist()})
        regular.append({"cells": list(sides), "boxes": np.median(of_map[..., 2:], axis=0).tolist()})
    centres = [found[0][:, :2] for found in fits]
    farthest = float(np.concatenate(centres).max())
    if not 0.4 < farthest < 1.6:  # another unit: the anchors of a detector lie all over the image
        return None
    rows, columns = cells[0]
    if rows > 1 and float(np.ptp(centres[0][:columns, 0])) > 0.5 / rows:  # y and x are exchanged: it grows in a row
        return None
    on_grid = _judged(known, regular, samples, boxes)
    if on_grid is not None and on_grid.error < CLOSE:
        return on_grid
    return _judged(known, single, samples, boxes)


def _lines(raw: Doubles, boxes: Doubles) -> tuple[Doubles, Doubles] | None:
    """Return anchors and variances of locations [positions, 4] each; None if the boxes are no function of that kind."""
    centre, size = (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
    if (size <= 0).any():
        return None
    slopes, starts = _regression(raw, np.concatenate([centre, np.log(size)], axis=-1))
    sizes = np.exp(starts[:, 2:])
    anchors = np.concatenate([starts[:, :2], sizes], axis=1)
    variances = np.concatenate([slopes[:, :2] / sizes, slopes[:, 2:]], axis=1)
    return anchors, variances


def _regression(inputs: Doubles, outputs: Doubles) -> tuple[Doubles, Doubles]:
    """Return slope and start of the lines over the first axis."""
    middle, mean = inputs.mean(axis=0), outputs.mean(axis=0)
    spread = ((inputs - middle) ** 2).sum(axis=0)
    slopes = ((inputs - middle) * (outputs - mean)).sum(axis=0) / np.maximum(spread, 1e-12)
    return slopes, mean - slopes * middle


def _judged(
    settings: Mapping[str, Any],
    maps: list[dict[str, Any]],
    samples: list[list[_Samples]],
    boxes: list[list[Doubles]],
) -> BoxFit | None:
    """Return the fit with its largest error; None if it is far off."""
    detector = Detector({**settings, "maps": maps})
    raw = np.concatenate([_by_location([each.raw for each in anchors]) for anchors in samples], axis=1)
    expected = np.concatenate([_by_location(anchors) for anchors in boxes], axis=1)
    actual = np.asarray(detector.corners(raw), np.float64)
    size = np.maximum(np.abs(expected[..., 2:] - expected[..., :2]).max(axis=-1, keepdims=True), 1.0)
    difference = np.abs(actual - expected) / size
    difference[(expected == 0) | (expected == 1)] = 0  # cut off at the border of the image
    error = float(difference.max())
    return BoxFit(settings, maps, error) if error < 10 * CLOSE else None


def _by_location(anchors: Sequence[Doubles]) -> Doubles:
    """Return arrays [n, positions, k] of the anchors of a cell as [n, positions * anchors, k]."""
    stacked = np.stack(anchors, axis=2)
    return stacked.reshape(len(stacked), -1, stacked.shape[-1])
