"""Images with boxes in COCO's format: one JSON file for all images, or one for each split.

Source of the format: cocodataset.org, "data format", object detection.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from compress.core.errors import DataError
from compress.data import files
from compress.data.labels import MOST_CLASSES
from compress.data.source import Samples, Stored
from compress.data.sources import bounding_boxes, object_crops
from compress.data.sources.bounding_boxes import AnnotatedImage, Point, number
from compress.data.sources.images import DecodedImages
from compress.data.sources.object_crops import KeypointCrops
from compress.data.types import SPLITS, Split

MAX_JSON_BYTES = 1 << 29
"""Chosen: the largest file of COCO, instances_train2017.json, has about 450 MB."""
Plain = dict[str, Any]


class Coco(DecodedImages, Stored):
    """COCO's JSON files, one for all images or one for each split, with the images next to them or in a folder.

    Regions that are marked as crowds are left out. The classes are the categories in the order of their ids; ids may
    have gaps.
    """

    name: ClassVar[str] = "coco"
    task: ClassVar[str] = "detection"
    paths: ClassVar[tuple[str, ...]] = ("file", "train", "validation", "test", "images", "manifest")

    file: str | None = None
    """Path of one file for all images, relative to the pipeline file; `data.split` divides them."""
    train: str | None = None
    """Path of the training file, if there is one file for each split."""
    validation: str | None = None
    """Path of the validation file; by default `data.split` takes a part of `train`."""
    test: str | None = None
    """Path of the test file; by default `data.split` takes a part of `train`."""
    images: str | None = None
    """Folder that the image names are relative to; by default the folder of the JSON file."""
    keypoints: KeypointCrops | None = None
    """The samples are objects with keypoints (`person_keypoints_*.json`), not images with boxes, for the task
    keypoints."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.file is None) == (self.train is None):
            raise ValueError("needs either the key 'file' or the key 'train'")
        if self.file is not None and (self.validation or self.test):
            raise ValueError("'validation' and 'test' need 'train'; 'file' is for all images together")
        return self

    def task_name(self) -> str:
        """Return "keypoints" if the samples are objects with keypoints."""
        return self.task if self.keypoints is None else "keypoints"

    def files(self) -> dict[str, Path]:
        """Return the annotation files by split, and their images.

        Raises:
            DataError: a file or an image does not exist, or annotations cannot be read.
        """
        _, images, _ = self._read()
        bounding_boxes.refuse_unfit(images)
        annotations = {f"annotations of {split or 'all'}": path for split, path in self._files()}
        return annotations | {f"{image.split or 'all'}: {image.name}": image.path for image in images}

    def load(self) -> Samples:
        """Read the annotations; images are decoded when they are used."""
        classes, images, points = self._read()
        if self.keypoints is not None:
            return object_crops.samples(images, points, self, self.keypoints)
        return bounding_boxes.samples(images, classes, self)

    def _files(self) -> Iterator[tuple[Split | None, Path]]:
        if self.file is not None:
            yield None, Path(self.file)
        for split in SPLITS:
            if getattr(self, split) is not None:
                yield split, Path(getattr(self, split))

    def _read(self) -> tuple[list[str], list[AnnotatedImage], list[str]]:
        """Return the class names, all images, file by file in the order of their ids, and the names of the keypoints,
        if they are asked for."""
        known: dict[int, str] | None = None
        images: list[AnnotatedImage] = []
        points: list[str] = []
        contents = [(split, path, _content(path)) for split, path in self._files()]
        if self.keypoints is not None:
            points = _keypoint_names([(path, content) for _, path, content in contents])
        for split, path, content in contents:
            categories = _categories(content, path)
            if known is not None and categories != known:
                raise DataError("has other categories than the file before", where=str(path), allowed=str(known)[:200])
            known = categories
            folder = Path(self.images) if self.images else path.parent
            images += _images(content, path, folder, categories, split, len(points))
        if not images or not known:
            raise DataError("contains no images", where="data.source.coco", hint="check the file")
        return [known[key] for key in sorted(known)], images, points


def _content(path: Path) -> Plain:
    text = files.read(path, MAX_JSON_BYTES)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON: {error}", where=str(path), hint="repair it") from error
    if not isinstance(content, dict):
        raise DataError("is not an object", where=str(path), allowed="COCO's images, annotations and categories")
    return content


def _rows(content: Plain, key: str, path: Path) -> Iterator[tuple[Plain, str]]:
    """Yield the entries of a list, each with its location."""
    rows = content.get(key)
    if not isinstance(rows, list):
        raise DataError(f"has no list {key!r}", where=str(path), allowed="COCO's images, annotations and categories")
    for index, row in enumerate(rows):
        where = f"{path}: {key}[{index}]"
        if not isinstance(row, dict):
            raise DataError("is not an object", where=where)
        yield row, where


def _id(row: Plain, key: str, where: str) -> int:
    value = row.get(key)
    if type(value) is not int:
        raise DataError(f"{key} is {str(value)[:60]!r}", where=where, allowed="an integer")
    return value


def _name(row: Plain, key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise DataError(f"{key} is {str(value)[:60]!r}", where=where, allowed="a text")
    return value


def _categories(content: Plain, path: Path) -> dict[int, str]:
    """Return the class names by id, in the order of the ids."""
    categories: dict[int, str] = {}
    names: set[str] = set()
    for row, where in _rows(content, "categories", path):
        key, name = _id(row, "id", where), _name(row, "name", where)
        if key in categories or name in names:
            raise DataError(
                f"the id {key} or the name {name!r} belongs to another category too", where=where, hint="remove one"
            )
        if len(categories) == MOST_CLASSES:
            raise DataError("there are too many categories", where=where, allowed=f"{MOST_CLASSES:,}")
        categories[key] = name
        names.add(name)
    return dict(sorted(categories.items()))


def _keypoint_names(contents: Sequence[tuple[Path, Plain]]) -> list[str]:
    """Return the names of the keypoints, which all categories with keypoints have in common."""
    names: list[str] = []
    for row, where in (entry for path, content in contents for entry in _rows(content, "categories", path)):
        listed = row.get("keypoints")
        if listed is None:
            continue
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed) or not listed:
            raise DataError("keypoints is not a list of names", where=where, allowed="COCO's keypoints")
        if names and listed != names:
            raise DataError("has other keypoints than the category before", where=where, allowed=", ".join(names))
        names = listed
    if not names:
        what = "has no category with keypoints"
        raise DataError(what, where=str(contents[0][0]), hint="use a file person_keypoints_*.json")
    return names


def _images(
    content: Plain, path: Path, folder: Path, categories: dict[int, str], split: Split | None, keypoint_count: int
) -> list[AnnotatedImage]:
    """Return all images of a file with their boxes and keypoints, in the order of the ids."""
    rows: dict[int, tuple[Plain, str]] = {}
    for row, where in _rows(content, "images", path):
        key = _id(row, "id", where)
        if key in rows:
            raise DataError(
                f"the id {key} belongs to another image too", where=where, hint="give each image a unique id"
            )
        rows[key] = row, where
    boxes: dict[int, list[Any]] = {key: [] for key in rows}
    names: dict[int, list[str]] = {key: [] for key in rows}
    keypoints: dict[int, list[tuple[Point, ...]]] = {key: [] for key in rows}
    for row, where in _rows(content, "annotations", path):
        key, category = _id(row, "image_id", where), _id(row, "category_id", where)
        if key not in rows:
            raise DataError(f"unknown image {key}", where=where, hint="add it, or remove the annotation")
        if category not in categories:
            allowed = ", ".join(map(str, categories))[:200]
            raise DataError(f"unknown category {category}", where=where, allowed=allowed)
        if row.get("iscrowd") in (1, True):
            continue
        boxes[key].append((_corners(row.get("bbox"), where), where))
        names[key].append(categories[category])
        if keypoint_count:
            keypoints[key].append(_points(row.get("keypoints"), keypoint_count, where))
    images = []
    for key, (row, where) in sorted(rows.items()):
        name = _name(row, "file_name", where)
        path_of_image = _inside(folder, name, where)
        size = None
        if "width" in row and "height" in row:
            size = (int(number(row["width"], where)), int(number(row["height"], where)))
        images.append(
            AnnotatedImage(
                path_of_image,
                size,
                tuple(boxes[key]),
                tuple(names[key]),
                split,
                where,
                name,
                tuple(keypoints[key]),
            )
        )
    return images


def _corners(value: Any, where: str) -> tuple[float, float, float, float]:
    if not isinstance(value, list) or len(value) != 4:
        raise DataError(f"bbox is {str(value)[:60]!r}", where=where, allowed="[x, y, width, height] in pixels")
    left, top, width, height = (number(coordinate, f"{where}.bbox") for coordinate in value)
    return left, top, left + width, top + height


def _points(value: Any, count: int, where: str) -> tuple[Point, ...]:
    """Return the keypoints of an object; an object without the key has none that are marked."""
    if value is None:
        return ((0.0, 0.0, 0.0),) * count
    if not isinstance(value, list) or len(value) != 3 * count:
        allowed = f"{3 * count} numbers: x, y and visibility of {count} points"
        raise DataError(f"keypoints is {str(value)[:60]!r}", where=where, allowed=allowed)
    numbers = [number(element, f"{where}.keypoints") for element in value]
    return tuple((x, y, seen) for x, y, seen in zip(numbers[0::3], numbers[1::3], numbers[2::3], strict=True))


def _inside(folder: Path, name: str, where: str) -> Path:
    """Return the path of a file inside a folder."""
    path = folder / name
    if "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"the file name {name[:60]!r} leads out of the folder", where=where, allowed="a name inside it")
    return path
