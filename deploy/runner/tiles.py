"""Small objects in large photos: a detector runs on overlapping tiles of the photo, and its answers become one.

A photo is resized to the input of the model, so that small objects lose the pixels they need. A tile is resized less::

    from deploy import Model, Tiles

    detections = Model("birds.coralline").tiled(photo, Tiles(rows=2, columns=3))

The photo as a whole is one of the tiles by default: it shows the objects that are larger than a tile.

The edges of tiles cut objects. Neighbours overlap, so that an object that is smaller than the overlap is complete in
one of them, but the other one still detects the part that it sees. Non-maximum suppression alone keeps this fragment:
its intersection with the complete box, divided by their union, is small, because the union is as large as the complete
box. Divided by the fragment's own area it is close to 1. So this ratio decides about boxes that end at the inner edge
of a tile; all others are compared by their intersection over union, as within one image.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.detection import Detections
from deploy.contract.errors import ArgumentError, ImageError
from deploy.contract.image_geometry import IDENTITY, AffineMap
from deploy.contract.preprocessing import Array
from deploy.contract.suppression import intersections, suppressed

MAX_TILES = 256
"""The largest number of tiles; chosen: a detector of 30 ms then takes 8 s for a photo."""
MAX_OVERLAP = 0.9
"""The largest overlap; chosen: with more, neighbours are nearly the same part of the photo."""
LEAST_SIDE = 32
"""The smallest height and width of a tile, in pixels. A photo that is too small for the tiles gets fewer of them."""
CANDIDATES = 4096
"""Boxes of all tiles, the best, that are compared with each other."""
EDGE = 0.02
"""A box ends at the edge of a tile if it is closer to it than this fraction of the tile: boxes are not exact."""
COVERED = 0.6
"""A fragment is removed if another box covers more than this fraction of it."""
SURE = 0.5
"""The score of that box must be at least this fraction of the score of the fragment: boxes with low scores, of which
detectors give many, remove no object."""
_ROWS_AND_COLUMNS = re.compile(r"([1-9][0-9]{0,2})x([1-9][0-9]{0,2})\Z")
_BLOCK = 256
"""Fragments that are compared with all boxes at once."""


class Area(NamedTuple):
    """A part of a photo, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A grid of overlapping tiles.

    Args:
        rows: the number of tiles from top to bottom.
        columns: the number of tiles from left to right.
        overlap: the part of a tile that it shares with its neighbour, as a fraction of its height and width. An object
            up to this size is complete in one of them.
        whole: whether the photo as a whole is one more tile.
        most: the largest number of objects in the answer; None: `most` of the bundle for each tile.

    Raises:
        ArgumentError: a value is out of range.
    """

    rows: int
    columns: int
    overlap: float = 0.2
    whole: bool = True
    most: Optional[int] = None

    def __post_init__(self) -> None:
        for name, count in (("rows", self.rows), ("columns", self.columns)):
            if not _is_integer(count) or count < 1:
                raise ArgumentError("%s of tiles is %r, and must be an integer from 1" % (name, count), "use 2 or 3")
        total = self.rows * self.columns
        if total > MAX_TILES:
            what = "%d x %d tiles are %d; allowed: 1 to %d" % (self.rows, self.columns, total, MAX_TILES)
            raise ArgumentError(what, "use fewer tiles")
        if not 0 <= self.overlap <= MAX_OVERLAP:  # also False for NaN
            raise ArgumentError("the overlap of tiles is %r; allowed: 0 to %r" % (self.overlap, MAX_OVERLAP), "use 0.2")
        if self.most is not None and (not _is_integer(self.most) or self.most < 1):
            raise ArgumentError("most of tiles is %r, and must be an integer from 1" % (self.most,), "leave it out")

    def areas(self, height: int, width: int) -> List[Area]:
        """Return the tiles of a photo of this height and width in pixels, the whole photo first.

        All tiles of the grid have the same size. Their number of pixels is rounded up, and their positions are rounded:
        neighbours overlap by at least `overlap`, except for one pixel.
        """
        tops, tile_height = _along(height, self.rows, self.overlap)
        lefts, tile_width = _along(width, self.columns, self.overlap)
        areas = [Area(top, left, tile_height, tile_width) for top in tops for left in lefts]
        photo = Area(0, 0, height, width)
        return [photo] + areas if self.whole and photo not in areas else areas


def parsed(text: str, overlap: Optional[float] = None) -> Tiles:
    """Return tiles from ROWSxCOLUMNS.

    Raises:
        ArgumentError: the text is something else, or a number is out of range.
    """
    match = _ROWS_AND_COLUMNS.match(text)
    if match is None:
        raise ArgumentError("--tiles %s is not a number of tiles" % text[:40], "write it as 2x3: rows, then columns")
    rows = int(match.group(1))
    columns = int(match.group(2))
    return Tiles(rows, columns) if overlap is None else Tiles(rows, columns, overlap)


def refuse_others(opened: Any) -> None:
    """Raise an ArgumentError for a bundle of another task than detection."""
    if opened.detector is None:
        what = "tiles are for detectors, and the task of this bundle is %s; allowed: detection" % opened.task
        raise ArgumentError(what, "run the model on the whole image")


def detect(
    model: Callable[[Array], Detections],
    image: Array,
    tiles: Tiles,
    specification: Any,
    position: Callable[[int, int], AffineMap] = lambda height, width: IDENTITY,
) -> Detections:
    """Return the detections of all tiles of a photo as one answer, in fractions of the photo.

    The model returns the detections of an image in fractions of the image; its specification has `overlap`, `most` and
    `class_agnostic`. `position` returns the position of an image of a height and width in the input of the model, of
    which the detector sees no more; by default, the detector sees the whole image.

    Raises:
        ImageError: the image has another shape, or a tile cannot be used.
    """
    if image.ndim not in (2, 3) or 0 in image.shape:
        what = "a photo for tiles must be [height, width, channels], not %r" % (list(image.shape),)
        raise ImageError(what, "pass a decoded image")
    height, width = image.shape[:2]
    answers = []
    cut = []
    for area in tiles.areas(height, width):
        detections = _of_tile(model, image, area)
        answers.append(_in_photo(detections, area, (height, width)))
        seen = position(area.height, area.width).boxes_to_image(np.array([[0.0, 0.0, 1.0, 1.0]]))
        cut.append(_is_cut(answers[-1].boxes, _boxes_in_photo(seen, area, (height, width))[0]))
    most = specification["most"] * len(answers) if tiles.most is None else tiles.most
    return merged(_together(answers), np.concatenate(cut), specification["overlap"], most,
                  specification["class_agnostic"])  # fmt: skip


def merged(detections: Detections, cut: Array, overlap: float, most: int, class_agnostic: bool = False) -> Detections:
    """Return detections of one photo without detections that show the same object again.

    `cut` says which boxes end at the inner edge of their tile: bool [k]. Two boxes with an intersection over union
    above `overlap` are the same object, if they are of one class or `class_agnostic` is set.
    """
    order = np.argsort(-detections.scores, kind="mergesort")[:CANDIDATES]
    detections = detections.taken(order)
    groups = np.zeros_like(detections.classes) if class_agnostic else detections.classes
    kept = np.flatnonzero(~_fragments(detections.boxes, groups, detections.scores, cut[order]))
    return detections.taken(kept[suppressed(detections.boxes[kept], groups[kept], overlap, most)])


def _fragments(boxes: Array, groups: Array, scores: Array, cut: Array) -> Array:
    """Return which boxes are parts of an object of which another box shows more: bool [k].

    The other box is complete, or larger: of two fragments of one object, the larger one remains. Boxes of different
    groups are different objects.
    """
    result = np.zeros(len(boxes), bool)
    areas = np.prod(np.asarray(boxes[:, 2:], np.float64) - boxes[:, :2], axis=1)
    cut_indices = np.flatnonzero(cut)
    for start in range(0, len(cut_indices), _BLOCK):
        block = cut_indices[start : start + _BLOCK]
        covered = intersections(boxes[block], boxes) > COVERED * areas[block][:, np.newaxis]
        shows_more = ~cut | (areas > areas[block][:, np.newaxis])
        is_sure = scores >= SURE * scores[block][:, np.newaxis]
        is_same = groups == groups[block][:, np.newaxis]
        result[block] = (covered & shows_more & is_sure & is_same).any(axis=1)
    return result


def _is_cut(boxes: Array, seen: Array) -> Array:
    """Return which boxes [k, 4] end at an edge of the part `seen` [4] that is not an edge of the photo: bool [k]."""
    sizes = np.tile(seen[2:] - seen[:2], 2)
    signs = np.array([1, 1, -1, -1])
    is_inner = np.where(signs > 0, seen > 1e-6, seen < 1 - 1e-6)
    return ((signs * (boxes - seen) <= EDGE * sizes) & is_inner).any(axis=1)


def _of_tile(model: Callable[[Array], Detections], image: Array, area: Area) -> Detections:
    try:
        return model(image[area.top : area.top + area.height, area.left : area.left + area.width])
    except ImageError as error:
        raise ImageError("the tile of %d x %d pixels: %s" % (area.height, area.width, error.what), error.hint)


def _in_photo(detections: Detections, area: Area, size: Tuple[int, int]) -> Detections:
    """Return the detections of a tile in fractions of the photo."""
    points = detections.keypoints
    if points is not None:
        start = np.array([area.top, area.left])
        moved = (points[..., :2] * [area.height, area.width] + start) / size
        points = np.concatenate([moved, points[..., 2:]], axis=-1).astype(np.float32)
    boxes = _boxes_in_photo(detections.boxes, area, size).astype(np.float32)
    return dataclasses.replace(detections, boxes=boxes, keypoints=points)


def _boxes_in_photo(boxes: Array, area: Area, size: Tuple[int, int]) -> Array:
    """Return boxes [k, 4] in fractions of a tile as fractions of the photo: float64."""
    corners = np.reshape(boxes, (-1, 2, 2)) * [area.height, area.width] + np.array([area.top, area.left])
    return np.clip(corners / size, 0, 1).reshape(-1, 4)


def _together(answers: Sequence[Detections]) -> Detections:
    points = None
    if answers[0].keypoints is not None:
        points = np.concatenate([answer.keypoints for answer in answers])
    boxes, classes, scores = (
        np.concatenate([getattr(answer, name) for answer in answers]) for name in ("boxes", "classes", "scores")
    )
    return Detections(boxes, classes, scores, answers[0].labels, points)


def _along(length: int, count: int, overlap: float) -> Tuple[List[int], int]:
    """Return the first pixels of the tiles along one dimension, and their length."""
    size = int(np.ceil(length / (count - (count - 1) * overlap)))
    size = min(max(size, LEAST_SIDE), length)
    # A photo that is too small: as many tiles as it takes to cover it with this overlap.
    needed = 1 + int(np.ceil((length - size) / max(size * (1 - overlap), 1) - 1e-9))
    count = min(count, needed)
    return [int(start) for start in np.rint(np.linspace(0, length - size, count))], size


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
