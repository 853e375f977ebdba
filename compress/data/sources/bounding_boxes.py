"""Images with objects: the common parts of the sources for detection."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError, reason_of
from compress.data import files
from compress.data.labels import splits
from compress.data.source import Samples
from compress.data.sources.images import (
    FORMATS,
    MAX_IMAGE_BYTES,
    DecodedImages,
    Observed,
    check_size,
    refuse_other_format,
)
from compress.data.types import Objects, Split
from deploy.contract import pictures

BEYOND = 1.0
"""Number of pixels that a box may extend beyond its image, because programs round or count from 1. It is cut off
there."""


Point = tuple[float, float, float]
"""x, y and visibility: 0 not marked, 1 hidden, 2 visible."""


@dataclass(frozen=True)
class AnnotatedImage:
    """An image with the objects in its annotation.

    Attributes:
        path: the image file.
        size: width and height in the annotations; None if the annotations have no size.
        boxes: (xmin, ymin, xmax, ymax) in pixels, each with its location in the annotations.
        names: the class of each box.
        split: the split of the image, if the data defines it.
        where: the location of the image in the annotations, for messages.
        name: the name of the image in the annotations.
        keypoints: x, y and visibility of each point of each box, in the unit of the boxes; empty without keypoints.
        is_relative: whether the boxes are fractions of the decoded image, as in YOLO's files, and not pixels.
    """

    path: Path
    size: tuple[int, int] | None
    boxes: tuple[tuple[tuple[float, float, float, float], str], ...]
    names: tuple[str, ...]
    split: Split | None
    where: str
    name: str
    keypoints: tuple[tuple[Point, ...], ...] = ()
    is_relative: bool = False

    def scaled(self, frame: Frame) -> AnnotatedImage:
        """Return the same with boxes and keypoints in pixels."""
        if not self.is_relative:
            return self
        width, height = frame.size
        boxes = (((a * width, b * height, c * width, d * height), where) for (a, b, c, d), where in self.boxes)
        keypoints = (tuple((x * width, y * height, seen) for x, y, seen in points) for points in self.keypoints)
        return replace(self, boxes=tuple(boxes), keypoints=tuple(keypoints), is_relative=False)


def number(value: Any, where: str) -> float:
    """Return a text as a finite number."""
    try:
        result = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise DataError(f"{str(value)[:60]!r} is not a number", where=where, hint="repair the annotation")
    return result


def head_of(path: Path, where: str) -> tuple[tuple[int, int], int]:
    """Return width and height of an image as stored, and its EXIF orientation.

    Raises:
        DataError: the image does not exist, or cannot be read.
    """
    from PIL import Image

    if not files.is_file(path):
        raise DataError(f"the image {path} does not exist", where=where, hint="add it, or remove its annotation")
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=tuple(set(FORMATS.values()))) as image:
            width, height = image.size
            orientation = pictures.orientation_of(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        with path.open("rb") as stream:
            refuse_other_format(stream.read(256), str(path))
        raise DataError(
            f"is not a readable image: {reason_of(error)}", where=str(path), hint="remove or repair it"
        ) from error
    check_size((width, height), str(path))
    return (width, height), orientation


def pixels(path: Path, settings: DecodedImages, observed: Observed | None = None) -> NDArray[np.uint8]:
    """Return the pixels of an image: [height, width, channels], RGB or grey."""
    return settings.decoded(files.read(path, MAX_IMAGE_BYTES), str(path), observed)


def oriented(boxes: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Return boxes [k, 4] (ymin, xmin, ymax, xmax) after the rotation and mirroring of their image by an EXIF
    orientation."""
    if orientation in pictures.TRANSPOSED:
        boxes = boxes[:, [1, 0, 3, 2]]
    top, left, bottom, right = boxes.T
    if orientation in pictures.FLIPPED_DOWN:
        top, bottom = 1 - bottom, 1 - top
    if orientation in pictures.FLIPPED_ACROSS:
        left, right = 1 - right, 1 - left
    return np.stack([top, left, bottom, right], axis=1)


def relative(
    box: tuple[float, float, float, float], size: tuple[int, int], where: str
) -> tuple[float, float, float, float]:
    """Convert a box in pixels (xmin, ymin, xmax, ymax) to fractions of the image: (ymin, xmin, ymax, xmax)."""
    left, top, right, bottom = box
    if right <= left or bottom <= top:
        raise DataError(
            f"the box from ({left:g}, {top:g}) to ({right:g}, {bottom:g}) is empty or inverted",
            where=where,
            allowed="xmin < xmax and ymin < ymax",
            hint="repair or remove it",
        )
    width, height = size
    outside = min(left, top) < -BEYOND or right > width + BEYOND or bottom > height + BEYOND
    ends = np.clip([top / height, left / width, bottom / height, right / width], 0, 1)
    if outside or ends[2] <= ends[0] or ends[3] <= ends[1]:
        raise DataError(
            f"the box from ({left:g}, {top:g}) to ({right:g}, {bottom:g}) is outside of the image",
            where=where,
            allowed=f"0 to {width} across and 0 to {height} down",
            hint="repair or remove it; was the image scaled or turned after it was annotated?",
        )
    return float(ends[0]), float(ends[1]), float(ends[2]), float(ends[3])


def refuse_unfit(images: Sequence[AnnotatedImage]) -> None:
    """Refuse images that are missing, or annotated twice and so possibly in two splits.

    Raises:
        DataError: an image is missing, or annotated twice.
    """
    known: dict[str, str] = {}
    for image in images:
        if not files.is_file(image.path):
            hint = "add it, or remove its annotation"
            raise DataError(f"the image {image.path} does not exist", where=image.where, hint=hint)
        path = os.path.realpath(image.path)
        if path in known:
            hint = "join the two, or remove one"
            raise DataError(f"the image {image.path} is annotated in {known[path]} too", where=image.where, hint=hint)
        known[path] = image.where


def samples(images: Sequence[AnnotatedImage], classes: Sequence[str], settings: DecodedImages) -> Samples:
    """Return images with their objects as samples.

    Raises:
        DataError: an image is missing, annotated twice, or of another size than annotated, or a box is invalid.
    """
    refuse_unfit(images)
    class_index = {name: index for index, name in enumerate(classes)}
    objects = []
    sizes = []
    doubtful = []
    observed = Observed()
    for image in images:
        frame = frame_of(image, settings.orientation)
        doubtful += [image.path] * frame.doubtful
        fractions = [relative(box, frame.size, where) for box, where in image.scaled(frame).boxes]
        boxes = oriented(np.array(fractions, np.float32).reshape(-1, 4), frame.orientation)
        objects.append(Objects(boxes, np.array([class_index[name] for name in image.names], np.int64)))
        sizes.append(frame.shown_size)
    return Samples(
        strata(objects, len(classes)),
        tuple(classes),
        lambda index: pixels(images[index].path, settings, observed),
        splits(image.split for image in images),
        lambda index: str(images[index].path),
        notes=about_turned(doubtful),
        objects=tuple(objects),
        sizes=np.array(sizes, np.int64),
        observed=observed.notes,
    )


class Frame(NamedTuple):
    """The coordinates of an image's boxes.

    Attributes:
        size: width and height of the image that the boxes are in.
        orientation: the EXIF orientation to apply to the boxes; 1 for none.
        doubtful: whether the boxes may as well be in the coordinates of the rotated image.
    """

    size: tuple[int, int]
    orientation: int
    doubtful: bool

    @property
    def shown_size(self) -> tuple[int, int]:
        """Height and width of the decoded image."""
        return self.size if self.orientation in pictures.TRANSPOSED else self.size[::-1]


def frame_of(image: AnnotatedImage, setting: str) -> Frame:
    """Return the coordinates of an image's boxes: those of the stored pixels, or those of the rotated image if its
    annotated width and height say so.

    Raises:
        DataError: the image is missing, or of another size than annotated.
    """
    size, orientation = head_of(image.path, image.where)
    quarter_turn = orientation in pictures.TRANSPOSED and size[0] != size[1]
    applied = orientation if setting == pictures.EXIF else pictures.UPRIGHT
    if image.is_relative:
        return Frame(size[::-1] if applied in pictures.TRANSPOSED else size, pictures.UPRIGHT, False)
    if image.size in (None, size):
        certain = orientation == pictures.UPRIGHT or (quarter_turn and image.size is not None)
        return Frame(size, applied, not certain)
    if quarter_turn and applied == orientation and image.size == size[::-1]:
        return Frame(size[::-1], pictures.UPRIGHT, False)
    rotated = f" (rotated by viewers, EXIF orientation {orientation})" if orientation != pictures.UPRIGHT else ""
    ignored = (
        "; set `orientation: exif` to apply the EXIF orientation" if quarter_turn and applied != orientation else ""
    )
    raise DataError(
        f"the image is annotated as {image.size[0]}x{image.size[1]}, and {image.path.name} is "
        f"{size[0]}x{size[1]}{rotated}",
        where=image.where,
        hint=f"annotate the image as it is: was it scaled or rotated since?{ignored}",
    )


def about_turned(images: Sequence[Path]) -> tuple[str, ...]:
    """Return a note on images whose boxes may be in other coordinates than those that are assumed."""
    if not images:
        return ()
    what = f"{len(images):,} images have an EXIF orientation, by which viewers rotate them (the first is {images[0]})"
    return (f"{what}: boxes are assumed to be in the coordinates of the stored pixels",)


def strata(objects: Sequence[Objects], classes: int) -> NDArray[np.int64]:
    """Return the class by which each image is stratified: the one of its classes that the fewest images have; `classes`
    for images without objects."""
    counts = np.zeros(classes + 1, np.int64)
    for image_objects in objects:
        counts[np.unique(image_objects.classes)] += 1
    return np.array(
        [
            min(image_objects.classes, key=lambda label: (counts[label], label), default=classes)
            for image_objects in objects
        ],
        np.int64,
    )
