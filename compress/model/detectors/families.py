"""Facts that the file of a detector does not contain: the families of detectors, and the names of COCO's classes.

A file that decodes its boxes says everything. One that ends at its convolutions leaves open how its values become
boxes; `auto` then assumes what the numbers of channels suggest, and a preset names the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.core.errors import ModelError
from deploy.contract.detector_specification import checked

FAMILY = "family"
OWN_KEYS = ("least_score", "overlap", "most", "class_agnostic")
"""Keys of a specification that can be set together with the name of a family."""
Sizes = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Preset:
    """A family of detectors. None: measured, or concluded from the channels.

    Attributes:
        code: the box code, see `deploy.contract.box_codes`.
        offset: the position of a location in its cell.
        sizes: for each stride, the height and width of its anchors in pixels of the input.
        box_columns: in a file whose outputs are unchanged values: the first column of the box of an anchor, and the
            number of columns; a negative one counts from the end.
        objectness: whether the column after the box is the objectness.
        background: the position of the background among the scores: "first", "last" or None.
        overlap: of non-maximum suppression, as the family's own programs use it.
        root: whether a score is the root of the product of class and objectness.
        size_first: whether the outputs are heatmap, size, offset, and perhaps keypoints, in this order.
        order: whether the values of a box begin with y ("yx") or x ("xy").
        keypoint_unit: the unit of keypoints that are not decoded, see the specification.
    """

    code: str | None = None
    offset: float | None = None
    sizes: Mapping[int, Sizes] | None = None
    box_columns: tuple[int, int] | None = None
    objectness: bool | None = None
    background: str | None = None
    overlap: float | None = None
    root: bool | None = None
    size_first: bool = False
    order: str = "xy"
    keypoint_unit: str = "cell"

    @property
    def anchors_per_cell(self) -> int:
        """The number of anchors of a cell, 1 if unknown."""
        return len(next(iter(self.sizes.values()))) if self.sizes else 1


def _squares(*pairs: tuple[int, int]) -> Sizes:
    """Return (width, height), as configurations list them, as (height, width)."""
    return tuple((float(height), float(width)) for width, height in pairs)


def _sides(*sides: int) -> Sizes:
    return tuple((float(side), float(side)) for side in sides)


_YOLOV5_SIZES = {
    8: _squares((10, 13), (16, 30), (33, 23)),
    16: _squares((30, 61), (62, 45), (59, 119)),
    32: _squares((116, 90), (156, 198), (373, 326)),
}
_YOLOV7_SIZES = {
    8: _squares((12, 16), (19, 36), (40, 28)),
    16: _squares((36, 75), (76, 55), (72, 146)),
    32: _squares((142, 110), (192, 243), (459, 401)),
}
_ULTRAFACE_SIZES = {8: _sides(10, 16, 24), 16: _sides(32, 48), 32: _sides(64, 96), 64: _sides(128, 192, 256)}
_RETINAFACE_SIZES = {8: _sides(16, 32), 16: _sides(64, 128), 32: _sides(256, 512)}
AUTO = Preset()
PRESETS: Mapping[str, Preset] = {
    "auto": AUTO,
    "yolov3": Preset("yolov3", sizes=_YOLOV5_SIZES, box_columns=(0, 4), objectness=True, overlap=0.45),
    "yolov5": Preset("yolov5", sizes=_YOLOV5_SIZES, box_columns=(0, 4), objectness=True, overlap=0.45),
    "yolov7": Preset("yolov5", sizes=_YOLOV7_SIZES, box_columns=(0, 4), objectness=True, overlap=0.45),
    "yolov6": Preset("ltrb", 0.5, objectness=False, overlap=0.45),
    "yolov8": Preset("dfl", 0.5, objectness=False, overlap=0.7),
    "yolov9": Preset("dfl", 0.5, objectness=False, overlap=0.7),
    "yolo11": Preset("dfl", 0.5, objectness=False, overlap=0.7),
    "yolo26": Preset("ltrb", 0.5, objectness=False, overlap=0.7),
    "yolox": Preset("yolox", 0.0, overlap=0.65),
    "yunet": Preset("yolox", 0.0, overlap=0.3, root=True),
    "nanodet": Preset("dfl", 0.5, box_columns=(-32, 32), objectness=False, overlap=0.6),
    "nanodet_plus": Preset("dfl", 0.0, box_columns=(-32, 32), objectness=False, overlap=0.6),
    "fcos": Preset("ltrb_exp", 0.5, objectness=True, overlap=0.6),
    "centernet": Preset("centernet", 0.0, overlap=0.5, size_first=True),
    "centerface": Preset("yolox", 0.5, overlap=0.3, size_first=True, order="yx", keypoint_unit="box"),
    "ultraface": Preset("ssd", sizes=_ULTRAFACE_SIZES, background="first", objectness=False, overlap=0.3),
    "retinaface": Preset("ssd", sizes=_RETINAFACE_SIZES, background="first", objectness=False, overlap=0.4),
    "ssd": Preset("ssd", objectness=False, overlap=0.6),
}
"""Presets by the name of the family. Sizes: the configurations of these projects."""
USUAL_BINS = (8, 16, 17, 32, 33)
"""Bins of distributions that `auto` assumes. 36 channels are more likely the boxes of nine anchors (RetinaNet)."""
BY_ANCHORS = {((3, 2, 2, 3), False): "ultraface", ((2, 2, 2), True): "retinaface"}
"""The families of detectors of faces with anchors that do not decode: by the anchors of each map, and whether there are
keypoints."""


def refuse_unknown(family: str) -> None:
    """Raise a ModelError for a name that is not the name of a family."""
    if family not in PRESETS:
        raise ModelError(f"{family!r} is not a family of detectors", allowed=", ".join(PRESETS))


def family_of(settings: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of the family in `model.detector`, and the keys that it changes.

    Raises:
        ValueError: the family or a key is unknown, or a key has an invalid value.
    """
    changes = {} if isinstance(settings, str) else dict(settings)
    family = settings if isinstance(settings, str) else str(changes.pop(FAMILY, "auto"))
    if family not in PRESETS:
        raise ValueError(f"unknown family {family!r}; allowed: {', '.join(PRESETS)}")
    unknown = [key for key in changes if key not in OWN_KEYS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} cannot be set together with a family; allowed: {', '.join(OWN_KEYS)}")
    checked({"maps": [{"cells": [1, 1]}], "code": "yolox", **changes})
    return family, changes


_COCO = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign,
parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella,
handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard,
surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange,
broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv,
laptop, mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase,
scissors, teddy bear, hair drier, toothbrush
"""
COCO_CLASSES: tuple[str, ...] = tuple(" ".join(name.split()) for name in _COCO.split(","))
"""The 80 classes of COCO, in the order of the models. Source: cocodataset.org, "explore"."""
