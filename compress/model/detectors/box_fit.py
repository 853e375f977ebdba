"""The box code of a detector that decodes its boxes: found by comparing its boxes with those of every code.

What a code leaves open (the sizes of anchors, variances) follows from the values too, and so does a scale that the
model applies before its code: the last convolutions take it over. The decoder of the device decides: a code is the
right one if it gives the same boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.detectors.roles import MapRoles
from deploy.contract.box_codes import WITH_ANCHORS
from deploy.contract.detection import Detector

Doubles = NDArray[np.float64]
FORMS = ("xywh", "xyxy", "yxhw", "yxyx")
"""The meaning of the four values of a decoded box: centre and size, or two corners."""
CLOSE = 1e-3
"""Largest difference between boxes, as a fraction of the image or of the box, whichever is larger."""
CLOSE_IN_8_BITS = 0.02
"""The same for a file that was quantized: its grids, strides and bins are rounded to 8 bits. Networks of the form of
YOLOv8 had 0.004 to 0.006 with the right code, and 0.04 with the next one (tests/support/exported_yolo.py)."""
FAR = 0.05
"""The difference above which a code is not considered any further."""
REPEATED = 2
"""Boxes whose smallest or largest value is this often exactly the same are cut off at the border of the image."""
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
FEWEST_SAMPLES = 4
"""Boxes that a line needs."""
NUMBERS: Mapping[str, Callable[[Doubles, Doubles, Doubles], Doubles]] = {
    "yolox": lambda low, high, points: _pairs((low + high) / 2 - points, np.log(high - low)),
    "centernet": lambda low, high, points: _pairs((low + high) / 2 - points, high - low),
    "ltrb": lambda low, high, points: _pairs(points - low, high - points),
    "ltrb_exp": lambda low, high, points: np.log(_pairs(points - low, high - points)),
    "ltrb_relu": lambda low, high, points: _positive(_pairs(points - low, high - points)),
}
"""The values from which a code makes boxes: the inverse of `deploy.contract.box_codes`, from the corners of boxes and
the points of locations, all in cells."""
SIMPLE_CODES = ("yolox", "yolov5", "ltrb", "yolov3", "centernet", "ltrb_exp", "ltrb_relu", "ssd")


@dataclass(frozen=True)
class ChannelLines:
    """The values of a code as linear functions of the channels of a box: slope and start of each channel."""

    slopes: Doubles
    starts: Doubles


@dataclass(frozen=True)
class BoxFit:
    """A code that gives the boxes of the model.

    Attributes:
        settings: keys of the detector's specification.
        maps: its `maps`.
        error: the largest difference from the model's boxes, as a fraction of the image or of the box.
        lines: for each map and anchor, what its channels become before the code; empty if nothing.
    """

    settings: Mapping[str, Any]
    maps: Sequence[Mapping[str, Any]]
    error: float
    lines: Sequence[Sequence[ChannelLines]] = ()


_Hypothesis = tuple[dict[str, Any], str, Doubles]
"""Settings, the form of the boxes, and the unit of their values (y, x)."""


@dataclass(frozen=True)
class _Samples:
    """Raw values and boxes of the anchors of a map, in float64.

    Attributes:
        cells: rows and columns of the map.
        raw: for each anchor [batch, positions, values], in the order of the channels.
        boxes: for each anchor [batch, positions, 4]: the boxes of the model, or from `_attempt` on their corners (ymin,
            xmin, ymax, xmax) as fractions of the image; NaN where they are cut off at the border of the image.
    """

    cells: tuple[int, int]
    raw: Sequence[Doubles]
    boxes: Sequence[Doubles]


_Solve = Callable[[dict[str, Any], Sequence[_Samples]], BoxFit | None]


def _pairs(first: Doubles, second: Doubles) -> Doubles:
    return np.concatenate([first, second], axis=-1)


def _positive(distances: Doubles) -> Doubles:
    """Return distances with NaN for 0: the value before the ReLU is unknown."""
    return np.where(distances > CLOSE, distances, np.nan)


def fit(maps: Sequence[MapRoles], input_size: tuple[int, int], close: float = CLOSE) -> BoxFit | None:
    """Return the code that gives the boxes of a model; None if no code gives boxes that differ by less than `close`.

    The maps have decoded boxes; `input_size` is height and width of the input.
    """
    samples = [_samples(roles) for roles in maps]
    hypotheses = list(_hypotheses(samples[0].raw[0].shape[2], input_size))
    for solve in (_solved, _solved_with_lines):
        best = _best(solve, hypotheses, samples)
        if best is not None and best.error < close:
            return best
    return None


def _best(solve: _Solve, hypotheses: Sequence[_Hypothesis], samples: Sequence[_Samples]) -> BoxFit | None:
    """Return the fit with the smallest error; None if there is none."""
    best: BoxFit | None = None
    for hypothesis in hypotheses:
        if len(samples) > 1 and _attempt(solve, hypothesis, samples[-1:]) is None:
            continue  # the coarsest map has few boxes
        candidate = _attempt(solve, hypothesis, samples)
        if candidate is not None and (best is None or candidate.error < best.error):
            best = candidate
        if best is not None and best.error < CLOSE / 10:
            break
    return best


def _attempt(solve: _Solve, hypothesis: _Hypothesis, samples: Sequence[_Samples]) -> BoxFit | None:
    settings, form, unit = hypothesis
    with_corners = [replace(of_map, boxes=[_corners(box, form, unit) for box in of_map.boxes]) for of_map in samples]
    return solve(settings, with_corners)


def _samples(roles: MapRoles) -> _Samples:
    probe = roles.probe
    raw = [probe.raw[..., list(anchor.boxes)].astype(np.float64) for anchor in roles.anchors]
    boxes = [probe.answers[..., list(anchor.box_values)].astype(np.float64) for anchor in roles.anchors]
    for column in (column for box in boxes for column in np.moveaxis(box, -1, 0)):  # views
        for border in (column.min(), column.max()):
            at_border = column == border
            if at_border.sum() >= REPEATED:
                column[at_border] = np.nan
    return _Samples(probe.head.cells, raw, boxes)


def _hypotheses(width: int, input_size: tuple[int, int]) -> Iterator[_Hypothesis]:
    """Yield the combinations of code, form and unit to try, the most frequent first."""
    codes = SIMPLE_CODES if width == 4 else ("dfl",)
    units = [np.array(input_size, np.float64), np.ones(2)]
    for code, order, unit, form in itertools.product(codes, ("xy", "yx"), units, FORMS):
        for offset in OFFSETS[code]:
            bins = {"bins": width // 4} if code == "dfl" else {}
            yield {"code": code, "order": order, "offset": offset, **bins}, form, unit


def _corners(boxes: Doubles, form: str, unit: Doubles) -> Doubles:
    """Return boxes of a form as (ymin, xmin, ymax, xmax), fractions of the image; NaN at its border."""
    first, second = boxes[..., :2], boxes[..., 2:]
    if form[0] == "x":
        first, second = first[..., ::-1], second[..., ::-1]
    if form[2:] in ("wh", "hw"):
        first, second = first - second / 2, first + second / 2
    corners = np.concatenate([first / unit, second / unit], axis=-1)
    return np.where((corners == 0) | (corners == 1), np.nan, corners)


def _solved(settings: dict[str, Any], samples: Sequence[_Samples]) -> BoxFit | None:
    """Return the fit of one code, with the sizes of anchors and the variances that fit best; None without a fit."""
    code = settings["code"]
    if code not in WITH_ANCHORS:
        return _judged(settings, _plain_maps(samples), samples)
    if code == "ssd":
        return _ssd(settings, samples)
    maps: list[dict[str, Any]] = []
    for of_map in samples:
        anchors = zip(of_map.raw, of_map.boxes, strict=True)
        sizes = [_anchor_size(code, settings["order"], raw, boxes) for raw, boxes in anchors]
        if any(size is None for size in sizes):
            return None
        maps.append({"cells": list(of_map.cells), "boxes": sizes})
        if code == "yolov3":
            maps[-1] |= _centre_scale(settings["order"], of_map.raw[0], of_map.boxes[0], of_map.cells)
    return _judged(settings, maps, samples)


def _centre_scale(order: str, raw: Doubles, boxes: Doubles, cells: tuple[int, int]) -> dict[str, float]:
    """Return the key `centre_scale` of a map; nothing if centres are in their cells."""
    inputs = 1 / (1 + np.exp(-_rows_first(raw, order)[..., :2])) - 0.5
    rows, columns = np.divmod(np.arange(cells[0] * cells[1]), cells[1])
    middle = np.stack([rows, columns], axis=1) + 0.5
    scales = ((boxes[..., :2] + boxes[..., 2:]) / 2 * cells - middle) / inputs
    if np.isnan(scales).all():
        return {}
    scale = round(float(np.nanmedian(scales)), 5)
    return {"centre_scale": scale} if scale > 0 and abs(scale - 1) > CLOSE else {}


def _plain_maps(samples: Sequence[_Samples]) -> list[dict[str, Any]]:
    """Return the maps of a code without anchors; several boxes in a cell are listed one by one."""
    maps: list[dict[str, Any]] = []
    for of_map in samples:
        if len(of_map.raw) == 1:
            maps.append({"cells": list(of_map.cells)})
            continue
        height, width = (1 / side for side in of_map.cells)
        centres = [((row + 0.5) * height, (column + 0.5) * width) for row, column in np.ndindex(of_map.cells)]
        maps.append({"anchors": [[*centre, height, width] for centre in centres for _ in of_map.raw]})
    return maps


def _solved_with_lines(settings: dict[str, Any], samples: Sequence[_Samples]) -> BoxFit | None:
    """Return the fit of one code whose values are linear functions of the channels; None without a fit."""
    if settings["code"] not in NUMBERS:
        return None
    lines: list[list[ChannelLines]] = []
    scaled = []
    for of_map in samples:
        lines.append([])
        for raw, boxes in zip(of_map.raw, of_map.boxes, strict=True):
            line = _line(raw, _code_values(settings, boxes, of_map.cells))
            if line is None:
                return None
            lines[-1].append(line)
        pairs = zip(of_map.raw, lines[-1], strict=True)
        scaled.append(replace(of_map, raw=[raw * line.slopes + line.starts for raw, line in pairs]))
    judged = _judged(settings, _plain_maps(samples), scaled)
    return None if judged is None else replace(judged, lines=lines)


def _code_values(settings: Mapping[str, Any], boxes: Doubles, cells: tuple[int, int]) -> Doubles:
    """Return the values from which a code makes boxes [batch, positions, 4]; NaN for unknown values."""
    rows, columns = np.divmod(np.arange(cells[0] * cells[1]), cells[1])
    points = np.stack([rows, columns], axis=1) + settings["offset"]
    low, high = boxes[..., :2] * cells, boxes[..., 2:] * cells
    with np.errstate(invalid="ignore", divide="ignore"):
        values = NUMBERS[settings["code"]](low, high, points)
    values[~np.isfinite(values)] = np.nan
    return _rows_first(values, settings["order"])  # exchanging two pairs is its own inverse


def _line(raw: Doubles, values: Doubles) -> ChannelLines | None:
    inputs = np.where(np.isnan(values), np.nan, raw).reshape(-1, 4)
    outputs = values.reshape(-1, 4)
    if (np.isfinite(outputs).sum(axis=0) < FEWEST_SAMPLES).any():
        return None
    slopes, starts = _regression(inputs, outputs)
    difference = np.nanmax(np.abs(inputs * slopes + starts - outputs) / (1 + np.abs(outputs)), axis=0)
    if (difference > 10 * CLOSE).any() or (np.abs(slopes) < CLOSE).any():
        return None
    return ChannelLines(slopes, starts)


def _rows_first(raw: Doubles, order: str) -> Doubles:
    return raw[..., [1, 0, 3, 2]] if order == "xy" else raw


def _anchor_size(code: str, order: str, raw: Doubles, boxes: Doubles) -> list[float] | None:
    """Return the size of an anchor from the sizes of its boxes; None if the size would not be constant."""
    values = _rows_first(raw, order)[..., 2:]
    factor = (2 / (1 + np.exp(-values))) ** 2 if code == "yolov5" else np.exp(values)
    sizes = ((boxes[..., 2:] - boxes[..., :2]) / factor).reshape(-1, 2)
    if np.isnan(sizes).all(axis=0).any():
        return None
    size = np.nanmedian(sizes, axis=0)
    if (size <= 0).any() or np.nanpercentile(np.abs(sizes / size - 1), 90) > 0.02:
        return None
    return [float(side) for side in size]


def _ssd(settings: dict[str, Any], samples: Sequence[_Samples]) -> BoxFit | None:
    """Return the fit of anchors and variances: lines through the values of each location."""
    fits = []
    for of_map in samples:
        for raw, boxes in zip(of_map.raw, of_map.boxes, strict=True):
            fitted = _lines(_rows_first(raw, settings["order"]), boxes)
            if fitted is None:
                return None
            fits.append(fitted)
    measured = np.concatenate([variance for _, variance in fits])
    if np.isnan(measured).all(axis=0).any():
        return None
    variances = np.nanmedian(measured, axis=0)
    if (variances <= 0).any():
        return None
    known = {**settings, "variances": [float(f"{value:.6g}") for value in variances]}
    if any(np.isnan(anchors).all(axis=0).any() for anchors, _ in fits):  # boxes that are always cut off
        return None
    centres = [anchors[:, :2] for anchors, _ in fits]
    farthest = float(np.nanmax(np.concatenate(centres)))
    if not 0.4 < farthest < 1.6:  # another unit: the anchors of a detector lie all over the image
        return None
    rows, columns = samples[0].cells
    first_row = centres[0][:columns, 0]
    is_known = np.isfinite(first_row).any()
    if rows > 1 and is_known and np.nanmax(first_row) - np.nanmin(first_row) > 0.5 / rows:
        return None  # y and x are exchanged: it grows in a row
    *forms, single = _forms(fits, samples)
    for maps in forms:
        judged = _judged(known, maps, samples)
        if judged is not None and judged.error < CLOSE:
            return judged
    return _judged(known, single, samples)


def _forms(fits: Sequence[tuple[Doubles, Doubles]], samples: Sequence[_Samples]) -> tuple[list[dict[str, Any]], ...]:
    """Return the `maps` of measured anchors, the most regular first: on grids, on lattices, and single ones."""
    regular: list[dict[str, Any]] = []
    lattice: list[dict[str, Any]] = []
    single: list[dict[str, Any]] = []
    left = iter(fits)
    for of_map in samples:
        anchors = np.stack([next(left)[0] for _ in of_map.raw], axis=1)  # [positions, anchors, 4]
        on_lattice = _lattice(anchors, of_map.cells)
        regular.append({"cells": list(of_map.cells), "boxes": np.nanmedian(anchors[..., 2:], axis=0).tolist()})
        lattice.append({"anchors": on_lattice.reshape(-1, 4).tolist()})
        single.append({"anchors": np.where(np.isnan(anchors), on_lattice, anchors).reshape(-1, 4).tolist()})
    return regular, lattice, single


def _lattice(anchors: Doubles, cells: tuple[int, int]) -> Doubles:
    """Return anchors [positions, anchors, 4] as they are on a lattice: at equal distances, and of equal sizes.

    Single anchors are measured less precisely, and not at all if their boxes are always cut off.
    """
    lattice = np.empty_like(anchors)
    lattice[..., 2:] = np.nanmedian(anchors[..., 2:], axis=0)
    for index, positions in enumerate(np.divmod(np.arange(len(anchors)), cells[1])):
        for number in range(anchors.shape[1]):
            centres = anchors[:, number, index]
            known = [position for position in np.unique(positions) if np.isfinite(centres[positions == position]).any()]
            medians = [np.nanmedian(centres[positions == position]) for position in known]
            lattice[:, number, index] = np.polyval(np.polyfit(known, medians, min(1, len(known) - 1)), positions)
    return lattice


def _lines(raw: Doubles, boxes: Doubles) -> tuple[Doubles, Doubles] | None:
    """Return anchors and variances of locations [positions, 4] each; None if the boxes are another function."""
    centre, size = (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
    if (size <= 0).any():
        return None
    slopes, starts = _regression(raw, np.concatenate([centre, np.log(size)], axis=-1))
    sizes = np.exp(starts[:, 2:])
    anchors = np.concatenate([starts[:, :2], sizes], axis=1)
    variances = np.concatenate([slopes[:, :2] / sizes, slopes[:, 2:]], axis=1)
    return anchors, variances


def _regression(inputs: Doubles, outputs: Doubles) -> tuple[Doubles, Doubles]:
    """Return slope and start of the lines over the first axis; NaN with fewer than two points."""
    known = np.isfinite(outputs)
    count = np.where(known.sum(axis=0) > 1, known.sum(axis=0), np.nan)
    middle = np.where(known, inputs, 0).sum(axis=0) / count
    mean = np.where(known, outputs, 0).sum(axis=0) / count
    around = np.where(known, inputs - middle, 0)
    slopes = (around * np.where(known, outputs - mean, 0)).sum(axis=0) / np.maximum((around**2).sum(axis=0), 1e-12)
    return slopes, mean - slopes * middle


def _judged(settings: Mapping[str, Any], maps: list[dict[str, Any]], samples: Sequence[_Samples]) -> BoxFit | None:
    """Return the fit with its largest error; None for an error of FAR and more."""
    detector = Detector({**settings, "maps": maps})
    raw = np.concatenate([_by_location(of_map.raw) for of_map in samples], axis=1)
    expected = np.concatenate([_by_location(of_map.boxes) for of_map in samples], axis=1)
    actual = np.asarray(detector.corners(raw), np.float64)
    size = np.fmax(np.abs(expected[..., 2:] - expected[..., :2]).max(axis=-1, keepdims=True), 1.0)
    difference = np.abs(actual - expected) / size
    error = float(np.nanmax(difference)) if np.isfinite(difference).any() else np.inf
    return BoxFit(settings, maps, error) if error < FAR else None


def _by_location(anchors: Sequence[Doubles]) -> Doubles:
    """Return arrays [n, positions, k] of the anchors of a cell as [n, positions * anchors, k]."""
    stacked = np.stack(anchors, axis=2)
    return stacked.reshape(len(stacked), -1, stacked.shape[-1])
