"""The box codes of detectors: functions from a detector's raw numbers to boxes, for numpy and for Keras.

Every location of a detector is a cell of a grid over the image, or an anchor in such a cell. All lengths are fractions
of the image's height and width. `step` is the size of a cell, `cell` its row and column.

| code | centre | height and width | source |
|---|---|---|---|
| `ssd` | anchor + raw * variance * anchor's size | anchor's size * exp(raw * variance) | Liu et al., SSD, 2016 |
| `yolov3` | (cell + sigmoid(raw)) * step | anchor's size * exp(raw) | Redmon and Farhadi, YOLOv3, 2018 |
| `yolov5` | (cell - 0.5 + 2 sigmoid(raw)) * step | anchor's size * (2 sigmoid(raw))^2 | YOLOv5, v7, Scaled-YOLOv4 |
| `yolox` | (cell + offset + raw) * step | exp(raw) * step | YOLOX, YuNet; with `offset` CenterFace |
| `centernet` | (cell + offset + raw) * step | raw * step | Zhou et al., Objects as Points, 2019 |

In `yolov3` a `centre_scale` above 1 multiplies the distance from the middle of the cell: YOLOv4, PP-YOLO.

Codes of distances from the point (cell + offset) * step to the left, top, right and bottom of the box:

| code | distances | source |
|---|---|---|
| `ltrb` | raw * step | FCOS (Tian et al., 2019) after its last activation; YOLOv6 |
| `ltrb_exp` | exp(raw) * step | FCOS as first published |
| `ltrb_relu` | max(raw, 0) * step | FCOS with normalized targets |
| `dfl` | mean of softmax(raw) over bins 0, 1, 2, ... * step | Li et al., GFL, 2020; YOLOv8 to v12, NanoDet |

`corners` are boxes that the model has decoded itself, as fractions of the image: (y, x) of the top left and of the
bottom right; `centre_size` likewise: centre, then height and width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Dict, Tuple

import numpy as np

from deploy.contract.preprocessing import Array

LARGEST = math.log(1000 / 16)
"""Exponents above it are cut off: a box is at most that much larger than its anchor."""
LARGEST_IN_CELLS = math.log(4096)
"""The same for boxes that are measured in cells."""


@dataclasses.dataclass(frozen=True)
class Locations:
    """The locations of the boxes of a detector.

    Attributes:
        anchors: float32 [locations, 4]: y and x of the centre, height, width; one cell, where there are no anchors.
        steps: float32 [locations, 2]: the height and width of a cell.
        cells: float32 [locations, 2]: the row and the column.
        centre_scales: float32 [locations, 1]: of `yolov3`, the factor of a centre's distance from that of its cell.
    """

    anchors: Array
    steps: Array
    cells: Array
    centre_scales: Array

    def taken(self, which: Any) -> Locations:
        """Return some of the locations."""
        return Locations(self.anchors[which], self.steps[which], self.cells[which], self.centre_scales[which])


@dataclasses.dataclass(frozen=True)
class BoxSettings:
    """The numbers that some codes need.

    Attributes:
        variances: of `ssd`: y, x, height, width.
        offset: of codes with cells: the position of a location in its cell; 0 is the top left corner, 0.5 the centre.
        bins: of `dfl`: the number of bins for each side.
    """

    variances: Array
    offset: float
    bins: int


Code = Callable[[Array, Locations, BoxSettings, Any], Tuple[Array, Array]]
"""From raw numbers (y before x, or top before left) to the corners (top left, bottom right), both [..., 2]."""


def sigmoid(raw: Array, maths: Any) -> Array:
    """Return 1 / (1 + exp(-raw)), without overflow."""
    return 1.0 / (1.0 + maths.exp(-maths.clip(raw, -80.0, 80.0)))


def softmax(raw: Array, maths: Any) -> Array:
    """Return the softmax over the last axis."""
    powers = maths.exp(raw - maths.max(raw, axis=-1, keepdims=True))
    return powers / maths.sum(powers, axis=-1, keepdims=True)


def _around(centre: Array, size: Array) -> Tuple[Array, Array]:
    return centre - size / 2, centre + size / 2


def _ssd(raw: Array, at: Locations, settings: BoxSettings, maths: Any) -> Tuple[Array, Array]:
    scaled = raw * settings.variances
    centre = at.anchors[:, :2] + scaled[..., :2] * at.anchors[:, 2:]
    return _around(centre, at.anchors[:, 2:] * maths.exp(maths.minimum(scaled[..., 2:], LARGEST)))


def _yolov3(raw: Array, at: Locations, settings: BoxSettings, maths: Any) -> Tuple[Array, Array]:
    centre = (at.cells + 0.5 + at.centre_scales * (sigmoid(raw[..., :2], maths) - 0.5)) * at.steps
    return _around(centre, at.anchors[:, 2:] * maths.exp(maths.minimum(raw[..., 2:], LARGEST)))


def _yolov5(raw: Array, at: Locations, settings: BoxSettings, maths: Any) -> Tuple[Array, Array]:
    doubled = 2 * sigmoid(raw, maths)
    centre = (at.cells - 0.5 + doubled[..., :2]) * at.steps
    return _around(centre, at.anchors[:, 2:] * doubled[..., 2:] ** 2)


def _yolox(raw: Array, at: Locations, settings: BoxSettings, maths: Any) -> Tuple[Array, Array]:
    centre = (at.cells + settings.offset + raw[..., :2]) * at.steps
    return _around(centre, maths.exp(maths.minimum(raw[..., 2:], LARGEST_IN_CELLS)) * at.steps)


def _centernet(raw: Array, at: Locations, settings: BoxSettings, maths: Any) -> Tuple[Array, Array]:
    centre = (at.cells + settings.offset + raw[..., :2]) * at.steps
    return _around(centre, raw[..., 2:] * at.steps)


def _sides(distances: Array, at: Locations, settings: BoxSettings) -> Tuple[Array, Array]:
    """Return the corners at distances, in cells, from the locations."""
    points = at.cells + settings.offset
    return (points - distances[..., :2]) * at.steps, (points + distances[..., 2:]) * at.steps


def _ltrb(raw: Array, at: Locations, settings: BoxSettings, maths: Any) -> Tuple[Array, Array]:
    return _sides(raw, at, settings)


def _ltrb_exp(raw: Array, at: Locations, settings: BoxSettings, maths: Any) -> Tuple[Array, Array]:
    return _sides(maths.exp(maths.minimum(raw, LARGEST_IN_CELLS)), at, settings)


def _ltrb_relu(raw: Array, at: Locations, settings: BoxSettings, maths: Any) -> Tuple[Array, Array]:
    return _sides(maths.maximum(raw, 0.0), at, settings)


def _dfl(raw: Array, at: Locations, settings: BoxSettings, maths: Any) -> Tuple[Array, Array]:
    bins = np.arange(settings.bins, dtype=np.float32)
    return _sides(maths.sum(softmax(raw, maths) * bins, axis=-1), at, settings)


def _corners(raw: Array, at: Locations, settings: BoxSettings, maths: Any) -> Tuple[Array, Array]:
    return raw[..., :2], raw[..., 2:]


def _centre_size(raw: Array, at: Locations, settings: BoxSettings, maths: Any) -> Tuple[Array, Array]:
    return _around(raw[..., :2], raw[..., 2:])


CODES: Dict[str, Code] = {
    "ssd": _ssd,
    "yolov3": _yolov3,
    "yolov5": _yolov5,
    "yolox": _yolox,
    "centernet": _centernet,
    "ltrb": _ltrb,
    "ltrb_exp": _ltrb_exp,
    "ltrb_relu": _ltrb_relu,
    "dfl": _dfl,
    "corners": _corners,
    "centre_size": _centre_size,
}
WITH_ANCHORS = ("ssd", "yolov3", "yolov5")
"""The codes for which each cell has anchors of certain sizes; the others have one location in each cell."""
