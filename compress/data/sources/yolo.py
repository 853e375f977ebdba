"""Images with boxes in text files, as YOLO detectors are trained with: one .txt file for each image, and a data.yaml.

Source of the format: Ultralytics, docs.ultralytics.com, "Object Detection Datasets Overview" and "Pose Estimation
Datasets Overview".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import ClassVar, NoReturn, Self

from pydantic import model_validator

from compress.core.errors import DataError
from compress.data import class_names, files, labels
from compress.data.class_names import ClassList
from compress.data.file_tree import inside, unpacked
from compress.data.source import Samples, Stored
from compress.data.sources import bounding_boxes, object_crops
from compress.data.sources.bounding_boxes import AnnotatedImage, Point, number
from compress.data.sources.images import FORMATS, DecodedImages
from compress.data.sources.object_crops import KeypointCrops
from compress.data.types import Split
from compress.data.yaml_description import Description

IMAGES = "images"
"""The folder whose name is replaced by LABELS in the path of an image."""
LABELS = "labels"
MAX_LABEL_BYTES = 4 << 20
"""Chosen: a box takes about 40 bytes, so that 100,000 fit."""
MAX_LIST_BYTES = 256 << 20
"""Chosen: a few million paths."""
MAX_KEYPOINTS = 1000
"""Chosen: faces have up to 478 points (MediaPipe)."""
DATA_FILE = "data.yaml"
CLASS_FILES = ("classes.txt", "obj.names", "classes.yaml", "dataset.yaml")
"""Names of files with class names, in the folder of the data or in the folders of the labels."""
KEYS: tuple[tuple[str, Split], ...] = (("train", "train"), ("val", "validation"), ("test", "test"))
"""The keys of data.yaml with images, and their splits."""
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class LabelRow:
    """A row of a label file.

    Attributes:
        label: index of the class.
        box: xmin, ymin, xmax, ymax: fractions of the image.
        keypoints: x, y and visibility of each; empty without keypoints.
        where: file and line.
    """

    label: int
    box: Box
    keypoints: tuple[Point, ...]
    where: str


class Yolo(DecodedImages, Stored):
    """Images with YOLO's text files: `class x y width height` in each line, as fractions of the image.

    Either a `data.yaml`, or a folder with `images/` and `labels/`, optionally divided into train/, val/ and test/. The
    labels of `images/train/1.jpg` are in `labels/train/1.txt`. An image without such a file has no objects. Polygons
    count as their bounding boxes.
    """

    name: ClassVar[str] = "yolo"
    task: ClassVar[str] = "detection"
    paths: ClassVar[tuple[str, ...]] = ("file", "folder", "root", "classes", "manifest")

    file: str | None = None
    """Path of data.yaml, relative to the pipeline file. Its keys: path, train, val, test (a folder, a list of folders,
    or a .txt list of images), names, nc, kpt_shape."""
    folder: str | None = None
    """Path of a folder with images and labels; data.yaml in it is used if there is one."""
    root: str | None = None
    """The folder that the paths in data.yaml are relative to, instead of its key `path`, which must not lead out of the
    folder of data.yaml."""
    labels: str | None = None
    """The folder of the label files inside the data, if it is not the folder `labels` next to `images`: the labels of
    `images/train/1.jpg` are then in `train/1.txt` of this folder."""
    classes: ClassList | None = None
    """Class names in the order of their indices: a list, or the path of a labels file, relative to the pipeline file.
    By default those of data.yaml, or of classes.txt, obj.names, classes.yaml or dataset.yaml in the folder."""
    keypoints: KeypointCrops | None = None
    """The samples are objects with keypoints, not images with boxes, for the task keypoints. data.yaml must have
    `kpt_shape`."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.file is None) == (self.folder is None):
            raise ValueError("needs either the key 'file' or the key 'folder'")
        if self.root is not None and self.file is None:
            raise ValueError("'root' can be used only with 'file'")
        return self

    def task_name(self) -> str:
        """Return "keypoints" if the samples are objects with keypoints."""
        return self.task if self.keypoints is None else "keypoints"

    def with_labels_beside(self, model: Path) -> Self:
        """Return the same source: the indices in label files have the order of the data's own class names."""
        return self

    def files(self) -> dict[str, Path]:
        """Return data.yaml, the lists of images, the file with the class names, the label files and the images.

        Raises:
            DataError: the data does not exist, or a label file cannot be read.
        """
        opened = YoloFolder(self)
        images = [name for name, _ in opened.images]
        texts = [name for name in map(opened.label_file, images) if name in opened.names]
        names = {*images, *texts, *opened.lists, *([opened.class_file] if opened.class_file else [])}
        paths = {name: Path(opened.tree.where) / name for name in sorted(names)}
        described = {"data.yaml": opened.description.path} if opened.description else {}
        return described | paths | class_names.files_of(self.classes)

    def load(self) -> Samples:
        """Read the labels; images are decoded when they are used."""
        opened = YoloFolder(self)
        images = opened.annotated()
        notes = (*class_names.note(self.classes), *opened.notes)
        if self.keypoints is not None:
            opened.refuse_without_keypoints()
            names = tuple(f"point_{index}" for index in range(opened.keypoint_shape[0]))
            samples = object_crops.samples(images, names, self, self.keypoints)
        else:
            samples = bounding_boxes.samples(images, opened.class_names, self)
        return replace(samples, notes=(*notes, *samples.notes))


class YoloFolder:
    """The files of a YOLO data set.

    Attributes:
        description: data.yaml; None without one.
        tree: all files of the data.
        names: their names.
        images: name and split of each image.
        lists: the text files that list images.
        notes: notes for the user.

    Raises:
        DataError: the data does not exist, or is invalid.
    """

    def __init__(self, settings: Yolo) -> None:
        self._settings = settings
        self.notes: list[str] = []
        self.lists: list[str] = []
        folder = Path(settings.folder or ".")
        path = Path(settings.file) if settings.file else folder / DATA_FILE
        self.description = Description(path) if settings.file or files.is_file(path) else None
        self.tree = unpacked(folder if self.description is None else self._root(self.description))
        self.names = frozenset(self.tree.names)
        self.images = self._described(self.description) if self.description else self._foldered()
        self._labels_folder = "" if settings.labels is None else inside(settings.labels, "data.source.yolo.labels")
        if not any(self.label_file(name) in self.names for name, _ in self.images):
            example = self.tree.describe(self.images[0][0])
            expected = self.tree.describe(self.label_file(self.images[0][0]))
            hint = "set `labels:` to the folder of the label files"
            raise DataError("no image has a label file", where=example, allowed=f"for example {expected}", hint=hint)

    def _root(self, description: Description) -> Path:
        """Return the folder that the paths of data.yaml are relative to."""
        if self._settings.root is not None:
            return Path(self._settings.root)
        value = description.content.get("path") or "."
        if not isinstance(value, str) or PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts:
            what = f"{str(value)[:60]!r} leads out of the folder of this file"
            description.refuse(
                "path", what, "a folder inside it", "set data.source.yolo.root to the folder of the data"
            )
        folder = description.path.parent / value
        if not os.path.isdir(folder):  # Path.is_dir raises an error for a name that is too long
            description.refuse("path", f"{value[:60]!r} is not a folder", hint="set data.source.yolo.root")
        return folder

    def _described(self, description: Description) -> list[tuple[str, Split | None]]:
        """Return the images of the splits in data.yaml."""
        images: list[tuple[str, Split | None]] = []
        keys: dict[str, str] = {}
        if not description.content.get("train"):
            raise DataError("has no key 'train'", where=str(description.path), allowed="train, val, test, names")
        for key, split in KEYS:
            value = description.content.get(key) or []  # programs write nothing or '' for a missing split
            for entry in value if isinstance(value, list) else [value]:
                names = self._entry(description, key, entry)
                if not names:
                    description.refuse(key, f"{entry!r} contains no images", allowed=", ".join(FORMATS))
                for name in names:
                    if name in keys:
                        _refuse_repeated(description, key, keys[name], name)
                    keys[name] = key
                images += [(name, split) for name in names]
        return images

    def _entry(self, description: Description, key: str, entry: object) -> Sequence[str]:
        """Return the images of a folder, or of a list in a text file."""
        if not isinstance(entry, str) or not entry:
            description.refuse(key, f"{str(entry)[:60]!r} is not a path", allowed="a folder, or a .txt list of images")
        name = self._inside(entry, description, key)
        if name in self.names and name.endswith(".txt"):
            self.lists.append(name)
            return [image for image in self._listed(name) if _is_image(image)]
        if name != "." and name not in self.tree.folders:
            what = f"{entry!r} is neither a folder nor a list in {self.tree.where}"
            description.refuse(key, what, hint="correct it, or set data.source.yolo.root")
        return [
            image for image in self.tree.names if _is_image(image) and (name == "." or image.startswith(f"{name}/"))
        ]

    def _inside(self, entry: str, description: Description, key: str) -> str:
        """Return a path of data.yaml relative to the data. Roboflow writes `../train/images` for `train/images`."""
        entry = str(PurePosixPath(entry))
        stripped = entry.removeprefix("../")
        if stripped != entry and (stripped in self.tree.folders or stripped in self.names):
            entry = stripped
        if PurePosixPath(entry).is_absolute() or ".." in PurePosixPath(entry).parts or "\0" in entry:
            what = f"{entry[:60]!r} leads out of {self.tree.where}"
            description.refuse(
                key, what, "paths inside it", "set data.source.yolo.root to a folder that has all images"
            )
        return entry

    def _listed(self, name: str) -> Iterator[str]:
        """Yield the images of a text file with one path in each line: relative to the file, or to the data."""
        text = self.tree.read(name, MAX_LIST_BYTES).decode("utf-8-sig", errors="replace")
        folder = PurePosixPath(name).parent
        for line, entry in enumerate(map(str.strip, text.splitlines()), 1):
            if not entry:
                continue
            where = f"{self.tree.describe(name)}, line {line}"
            image = inside(entry, where)
            path = next((candidate for candidate in (str(folder / image), image) if candidate in self.names), None)
            if path is None:
                raise DataError(f"the image {entry!r} does not exist", where=where, hint="correct or remove the line")
            yield path

    def _foldered(self) -> list[tuple[str, Split | None]]:
        """Return the images in folders called `images`, or all images if there is no such folder."""
        everything = [name for name in self.tree.names if _is_image(name)]
        names = [name for name in everything if IMAGES in name.split("/")[:-1]] or everything
        if not names:
            allowed = "images/ and labels/, or a file data.yaml"
            raise DataError("contains no images", where=self.tree.where, allowed=allowed)
        splits = [labels.split_of_folders(name) for name in names]
        labels.refuse_parts(names, splits, self.tree.where)
        return list(zip(names, splits, strict=True))

    def label_file(self, image: str) -> str:
        """Return the name of the label file of an image; it need not exist."""
        path = PurePosixPath(image)
        parts = list(path.with_suffix(".txt").parts)
        folder_index = max((index for index, part in enumerate(parts[:-1]) if part == IMAGES), default=None)
        if self._labels_folder:
            return "/".join([self._labels_folder, *parts[0 if folder_index is None else folder_index + 1 :]])
        if folder_index is not None:
            parts[folder_index] = LABELS
        return "/".join(parts)

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The class names; without any, the indices that the labels have."""
        names = class_names.listed(self._settings.classes, "data.source.yolo")
        if names is None and self.description is not None:
            names = self.description.names()
        names = names or self._names_in_folder()
        if names:
            return names
        texts = (self.label_file(name) for name, _ in self.images)
        rows = (row for name in texts if name in self.names for row in self._rows(name, labels.MOST_CLASSES))
        return tuple(map(str, range(max((row.label for row in rows), default=0) + 1)))

    @cached_property
    def class_file(self) -> str | None:
        """The file in the folder that has the class names; None if another source or nothing has the names."""
        described = None if self.description is None else self.description.names()
        if self._settings.classes is not None or described is not None:
            return None
        folders = [PurePosixPath("."), PurePosixPath(self._labels_folder), *PurePosixPath(self._labels_folder).parents]
        candidates = (str(folder / name) for name in CLASS_FILES for folder in folders)
        return next((name for name in candidates if name in self.names), None)

    def _names_in_folder(self) -> tuple[str, ...] | None:
        """Return the class names of a file in the folder, if there is one."""
        name = self.class_file
        if name is None:
            return None
        path = self.tree.describe(name)
        self.notes.append(f"the class names are those of {path}")
        if name.endswith(".yaml"):
            return Description(Path(path)).names()
        return class_names.listed(path, "data.source.yolo")

    @cached_property
    def keypoint_shape(self) -> tuple[int, int]:
        """The number of keypoints and of values for each (2: x and y; 3: and visibility); (0, 0) without keypoints."""
        shape = self.description.content.get("kpt_shape") if self.description else None
        if shape is None or self.description is None:
            return 0, 0
        is_pair = isinstance(shape, list) and len(shape) == 2 and all(type(count) is int for count in shape)
        if not is_pair or not 1 <= shape[0] <= MAX_KEYPOINTS or shape[1] not in (2, 3):
            allowed = f"[points, 2] or [points, 3], up to {MAX_KEYPOINTS} points"
            self.description.refuse("kpt_shape", f"{str(shape)[:60]!r} is not a shape", allowed=allowed)
        return shape[0], shape[1]

    def refuse_without_keypoints(self) -> None:
        """Refuse data without `kpt_shape`."""
        if self.keypoint_shape == (0, 0):
            what = "has no key 'kpt_shape', so its labels have no keypoints"
            where = str(self.description.path) if self.description else self.tree.where
            raise DataError(what, where=where, hint="add it to data.yaml, or remove data.source.yolo.keypoints")

    def annotated(self) -> list[AnnotatedImage]:
        """Return all images with their boxes.

        Raises:
            DataError: a label file cannot be read.
        """
        names = self.class_names
        images = []
        repeated = 0
        for name, split in self.images:
            text = self.label_file(name)
            rows = self._rows(text, len(names)) if text in self.names else []
            unique = list({(row.label, row.box, row.keypoints): row for row in reversed(rows)}.values())[::-1]
            repeated += len(rows) - len(unique)
            where = self.tree.describe(text if text in self.names else name)
            image = AnnotatedImage(
                Path(self.tree.describe(name)),
                None,
                tuple((row.box, row.where) for row in unique),
                tuple(names[row.label] for row in unique),
                split,
                where,
                name,
                tuple(row.keypoints for row in unique if row.keypoints),
                is_relative=True,
            )
            images.append(image)
        if repeated:
            self.notes.append(f"{repeated:,} boxes are in a label file twice, and count once")
        return images

    def _rows(self, name: str, classes: int) -> list[LabelRow]:
        text = self.tree.read(name, MAX_LABEL_BYTES).decode("utf-8-sig", errors="replace")
        lines = enumerate(text.splitlines(), 1)
        rows = ((f"{self.tree.describe(name)}, line {line}", content.split()) for line, content in lines)
        return [_row(words, where, classes, self.keypoint_shape) for where, words in rows if words]


def _refuse_repeated(description: Description, key: str, other: str, image: str) -> NoReturn:
    """Refuse an image that data.yaml names twice."""
    if key == other:
        description.refuse(key, f"the image {image!r} is listed twice", hint="remove one of the two entries")
    what = f"the image {image!r} is in `{other}` too"
    description.refuse(key, what, "splits without common images", f"remove `{key}`, and set data.split")


def _row(words: Sequence[str], where: str, classes: int, keypoint_shape: tuple[int, int]) -> LabelRow:
    """Return a row of a label file: a box, a box with keypoints, or a polygon."""
    label, *numbers = [number(word, where) for word in words]
    if label != int(label) or not 0 <= label < classes:
        raise DataError(f"the class {words[0]} is out of range", where=where, allowed=f"0 to {classes - 1}")
    count, values = keypoint_shape
    if len(numbers) == 4 + count * values:
        x, y, width, height = numbers[:4]
        keypoints = tuple(_point(numbers[start : start + values]) for start in range(4, len(numbers), values or 1))
        return LabelRow(int(label), (x - width / 2, y - height / 2, x + width / 2, y + height / 2), keypoints, where)
    if count:
        raise DataError(
            f"has {len(words)} numbers",
            where=where,
            allowed=f"{5 + count * values}: class, box and the {count} keypoints of kpt_shape",
        )
    if len(numbers) >= 6 and len(numbers) % 2 == 0:
        xs, ys = numbers[0::2], numbers[1::2]
        return LabelRow(int(label), (min(xs), min(ys), max(xs), max(ys)), (), where)
    raise DataError(
        f"has {len(words)} numbers",
        where=where,
        allowed="5: class, x, y, width, height; or class and 3 or more points of a polygon",
        hint="predictions with confidences are not labels; keypoints need `kpt_shape` in data.yaml",
    )


def _point(values: Sequence[float]) -> Point:
    """Return a keypoint; without a visibility, a point at (0, 0) is not marked."""
    marked = any(values[:2]) if len(values) == 2 else values[2] > 0
    return (values[0], values[1], values[2] if len(values) > 2 else 2.0) if marked else (0.0, 0.0, 0.0)


def _is_image(name: str) -> bool:
    return name.lower().endswith(tuple(FORMATS))
