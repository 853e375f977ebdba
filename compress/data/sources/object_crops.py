"""Objects with keypoints as samples: each object is cropped out of its image by its box."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.core.errors import DataError
from compress.core.settings import Settings
from compress.data.labels import splits
from compress.data.source import Samples
from compress.data.sources import bounding_boxes
from compress.data.sources.bounding_boxes import AnnotatedImage, Frame, about_turned, frame_of, oriented, relative
from compress.data.sources.images import DecodedImages, Observed
from compress.data.splits import by_group

ROUNDING = 1e-6
"""Pixels by which a border that is computed in floating point may miss a whole number."""


class KeypointCrops(Settings):
    """Samples of one object with its keypoints each."""

    margin: Annotated[float, Field(ge=0, le=2)] = 0.25
    """Added to each end of the box, as a fraction of its height and width. The crop ends at the border of the image."""
    fewest: Annotated[int, Field(ge=1)] = 1
    """Objects with fewer marked keypoints are left out."""


class _Crop(NamedTuple):
    """An object in an image.

    Attributes:
        image: index of its image.
        area: top, left, bottom, right of the crop in pixels of the decoded image.
        points: x and y as fractions of the crop, and visibility: float32 [points, 3].
    """

    image: int
    area: tuple[int, int, int, int]
    points: NDArray[np.float32]


def samples(
    images: Sequence[AnnotatedImage], names: Sequence[str], settings: DecodedImages, crops: KeypointCrops
) -> Samples:
    """Return the objects of images as samples with keypoints. Objects of one image are in the same split.

    Raises:
        DataError: an image is missing or annotated twice, a box is outside of its image, or there are no keypoints.
    """
    bounding_boxes.refuse_unfit(images)
    kept_crops: list[_Crop] = []
    objects = 0
    doubtful: list[Path] = []
    for index, image in enumerate(images):
        frame = frame_of(image, settings.orientation)
        doubtful += [image.path] * frame.doubtful
        objects += len(image.boxes)
        scaled = image.scaled(frame)
        for (box, where), points in zip(scaled.boxes, scaled.keypoints, strict=True):
            crop = _crop(index, relative(box, frame.size, where), points, frame, crops.margin)
            if (crop.points[:, 2] > 0).sum() >= crops.fewest:
                kept_crops.append(crop)
    if not kept_crops:
        raise DataError("no object has keypoints", where="data.source", hint="check the annotations")
    observed = Observed()

    def read(index: int) -> NDArray[np.uint8]:
        top, left, bottom, right = kept_crops[index].area
        pixels = bounding_boxes.pixels(images[kept_crops[index].image].path, settings, observed)
        return np.ascontiguousarray(pixels[top:bottom, left:right])

    image_indices = np.array([crop.image for crop in kept_crops], np.int64)
    left_out = objects - len(kept_crops)
    note = f"{left_out:,} of {objects:,} objects have fewer than {crops.fewest} marked keypoints, and were left out"
    return Samples(
        np.zeros(len(kept_crops), np.int64),
        tuple(names),
        read,
        splits(images[crop.image].split for crop in kept_crops),
        lambda index: f"{images[kept_crops[index].image].path}, object at {list(kept_crops[index].area)}",
        by_group(image_indices),
        notes=(*about_turned(doubtful), *[note] * bool(left_out)),
        sizes=np.array([(c.area[2] - c.area[0], c.area[3] - c.area[1]) for c in kept_crops], np.int64),
        points=np.stack([crop.points for crop in kept_crops]),
        observed=observed.notes,
    )


def _crop(
    image: int,
    box: tuple[float, float, float, float],
    keypoints: Sequence[bounding_boxes.Point],
    frame: Frame,
    margin: float,
) -> _Crop:
    """Return the crop of an object.

    Args:
        image: index of the image.
        box: ymin, xmin, ymax, xmax as fractions of the annotated image.
        keypoints: in pixels of the annotated image.
        frame: the coordinates of the annotation.
        margin: see `KeypointCrops`.
    """
    size = np.array(frame.shown_size)
    corners = oriented(np.array([box]), frame.orientation).reshape(2, 2)
    extent = margin * (corners[1] - corners[0])
    low = np.minimum(np.floor(np.clip(corners[0] - extent, 0, 1) * size + ROUNDING), size - 1).astype(int)
    high = np.maximum(np.ceil(np.clip(corners[1] + extent, 0, 1) * size - ROUNDING), low + 1).astype(int)
    width, height = frame.size
    positions = np.array([[y / height, x / width] for x, y, _ in keypoints])
    shown = oriented(np.tile(positions, 2), frame.orientation)
    fractions = (shown[:, :2] * size - low) / (high - low)
    marked = np.array([seen > 0 for *_, seen in keypoints]) & ((fractions >= 0) & (fractions <= 1)).all(axis=1)
    visibility = np.array([seen for *_, seen in keypoints])
    points = np.where(marked[:, np.newaxis], np.column_stack([fractions[:, ::-1], visibility]), 0)
    return _Crop(image, (int(low[0]), int(low[1]), int(high[0]), int(high[1])), points.astype(np.float32))
