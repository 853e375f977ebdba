"""Images with masks: the class of each pixel as a PNG file."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.core.errors import DataError
from compress.data import class_names, files, label_files, labels
from compress.data.class_names import ClassList
from compress.data.file_tree import Tree, inside, unpacked
from compress.data.source import Samples, Stored
from compress.data.sources import bounding_boxes
from compress.data.sources.images import ERRORS, FORMATS, MAX_IMAGE_BYTES, DecodedImages, Observed, check_size
from compress.data.splits import at_random
from compress.data.yaml_description import Description
from deploy.contract import pictures
from deploy.contract.image_geometry import NO_CLASS

VALUES = 256
MODES = ("L", "P", "1")
"""Modes of Pillow: grey levels, a palette, and one bit for each pixel."""
CLASS_FILES = ("classes.txt", "classes.yaml")
MAX_SHOWN = 10
_INVALID = -1
ClassEntry = Annotated[int, Field(ge=0, lt=VALUES)] | str
"""A value of the masks, or the name of a class."""


class Masks(DecodedImages, Stored):
    """A folder with images and masks: `images/a.jpg` and `masks/a.png`, also in folders train/, val/ and test/.

    A mask is a PNG file with 8 bits or a palette, as large as its image; the value of a pixel is the index of its
    class. Pixels with the value 255 do not count in the loss and in the metrics.
    """

    name: ClassVar[str] = "masks"
    task: ClassVar[str] = "segmentation"
    paths: ClassVar[tuple[str, ...]] = ("path", "classes", "manifest")

    path: str
    """Path of the folder, relative to the pipeline file."""
    images: str = "images"
    """The folder of the images in it."""
    masks: str = "masks"
    """The folder of the masks in it."""
    classes: Annotated[int, Field(ge=1, lt=VALUES)] | ClassList | None = None
    """The number of classes; or their names in the order of the values: a list, or the path of a labels file or of a
    YAML file with `names`, relative to the pipeline file. By default those of classes.txt or classes.yaml in the
    folder, or next to the masks."""
    keep: Annotated[dict[str, tuple[ClassEntry, ...]], Field(min_length=1)] | None = None
    """The classes of the model, if they are not those of the masks: for each name, the values or names in the masks.
    All other pixels are the first class, `rest`. `{person: [person]}` is person against everything else."""
    rest: str = "rest"
    """The name of the class of all other pixels, with `keep`."""
    ignore: tuple[ClassEntry, ...] = ()
    """Values or names in the masks that do not count, in addition to 255; they are not classes of the model."""

    def files(self) -> dict[str, Path]:
        """Return the images and their masks.

        Raises:
            DataError: the folder does not exist, or has no image with a mask.
        """
        tree = unpacked(Path(self.path))
        pairs, _ = self._pairs(tree)
        names = [*(name for pair in pairs for name in pair), *self._class_file(tree)]
        listed = self.classes if isinstance(self.classes, str) else None
        return tree.files(tuple(names)) | class_names.files_of(listed)

    def load(self) -> Samples:
        """Find images and masks; they are decoded when they are used."""
        tree = unpacked(Path(self.path))
        pairs, without_mask = self._pairs(tree)
        names, table = self._table(tree)
        splits = [labels.split_of_folders(image) for image, _ in pairs]
        labels.refuse_parts([image for image, _ in pairs], splits, tree.where)
        observed = Observed()
        paths = [(Path(tree.describe(image)), Path(tree.describe(mask))) for image, mask in pairs]
        note = f"{without_mask:,} images have no mask, and were left out"
        return Samples(
            np.zeros(len(pairs), np.int64),
            names,
            lambda index: bounding_boxes.pixels(paths[index][0], self, observed),
            labels.splits(splits),
            lambda index: str(paths[index][0]),
            at_random,
            notes=(note,) * bool(without_mask),
            read_mask=lambda index: self._mask(*paths[index], table),
            observed=observed.notes,
        )

    def _pairs(self, tree: Tree) -> tuple[list[tuple[str, str]], int]:
        """Return the names of images and masks, and the number of images without a mask."""
        images = _by_stem(tree, inside(self.images, "data.source.masks.images"), tuple(FORMATS))
        masks = _by_stem(tree, inside(self.masks, "data.source.masks.masks"), (".png",))
        for stem, name in masks.items():
            if stem not in images:
                hint = "add the image, or remove the mask"
                raise DataError(f"there is no image {self.images}/{stem}.*", where=tree.describe(name), hint=hint)
        pairs = [(images[stem], masks[stem]) for stem in images if stem in masks]
        if not pairs:
            allowed = f"{self.images}/NAME.jpg with {self.masks}/NAME.png"
            raise DataError("contains no images with masks", where=tree.where, allowed=allowed)
        return pairs, len(images) - len(pairs)

    def _class_file(self, tree: Tree) -> list[str]:
        """Return the file in the folder with the class names, if it is used."""
        if self.classes is not None:
            return []
        folders = [PurePosixPath(), *PurePosixPath(self.masks).parents]
        candidates = [str(folder / name) for name in CLASS_FILES for folder in folders]
        return [name for name in candidates if name in tree.names][:1]

    def _mask_names(self, tree: Tree) -> dict[int, str]:
        """Return the class names by the values of the masks; empty if they are not known."""
        class_file = self._class_file(tree)
        path = tree.describe(class_file[0]) if class_file else self.classes
        if isinstance(path, str) and path.endswith(".yaml"):
            names = Description(Path(path)).names_by_index() or {}
        elif isinstance(path, str):
            names = dict(label_files.read(Path(path)).names())
        elif isinstance(path, int):
            names = {value: str(value) for value in range(path)}
        else:
            names = dict(enumerate(class_names.listed(path, "data.source.masks") or ()))
        if max(names, default=0) >= NO_CLASS:
            what = f"there is a class {max(names)}"
            raise DataError(what, where="data.source.masks.classes", allowed=f"0 to {NO_CLASS - 1}")
        return names

    def _table(self, tree: Tree) -> tuple[tuple[str, ...], NDArray[np.int16]]:
        """Return the class names of the model, and the class of each value of a mask: int16 [256]."""
        names = self._mask_names(tree)
        if not names and self.keep is None:
            hint = "set `classes:` to their names or their number, or `keep:`"
            raise DataError("the classes of the masks are not known", where="data.source.masks", hint=hint)
        table = np.full(VALUES, _INVALID, np.int16)
        ignored = [_value(entry, names, "ignore") for entry in self.ignore]
        if self.keep is None:
            counted = [value for value in names if value not in ignored]
            table[counted] = np.arange(len(counted))
            classes = tuple(names[value] for value in counted)
        else:
            table[list(names) or slice(None)] = 0
            classes = (self.rest, *self.keep)
        table[[*ignored, NO_CLASS]] = NO_CLASS
        for value, index in self._kept_values(names).items():
            if value in ignored:
                what = f"the value {value} is in `keep` and in `ignore`"
                raise DataError(what, where="data.source.masks", hint="leave it in one")
            table[value] = index
        return class_names.checked(classes, "data.source.masks"), table

    def _kept_values(self, names: Mapping[int, str]) -> dict[int, int]:
        """Return the class of the model for each value that `keep` names."""
        kept: dict[int, int] = {}
        for index, (name, entries) in enumerate((self.keep or {}).items(), 1):
            where = f"keep.{name}"
            for value in (_value(entry, names, where) for entry in entries):
                if kept.setdefault(value, index) != index:
                    what = f"the value {value} is in two classes"
                    raise DataError(what, where=f"data.source.masks.{where}", hint="leave it in one")
        return kept

    def _mask(self, image: Path, mask: Path, table: NDArray[np.int16]) -> NDArray[np.uint8]:
        """Return the classes of an image's pixels: uint8 [height, width] of the decoded image."""
        values = _values(mask)
        classes = table[values]
        wrong = np.argwhere(classes == _INVALID)
        if len(wrong):
            row, column = wrong[0]
            allowed = f"values of {int((table != _INVALID).sum()) - 1} classes, or {NO_CLASS} for pixels without one"
            what = f"has the value {values[row, column]} in row {row}, column {column}"
            raise DataError(what, where=str(mask), allowed=allowed, hint="check data.source.masks.classes")
        (width, height), orientation = bounding_boxes.head_of(image, str(mask))
        applied = orientation if self.orientation == pictures.EXIF else pictures.UPRIGHT
        if values.shape == (height, width):
            turned: NDArray[np.uint8] = pictures.oriented(classes.astype(np.uint8)[..., np.newaxis], applied)[..., 0]
            return turned
        if applied in pictures.TRANSPOSED and values.shape == (width, height):
            return classes.astype(np.uint8)
        size = f"{values.shape[1]}x{values.shape[0]}"
        raise DataError(
            f"the mask has {size} pixels, and {image.name} {width}x{height}",
            where=str(mask),
            hint="store both in the same size",
        )


def _by_stem(tree: Tree, folder: str, suffixes: tuple[str, ...]) -> dict[str, str]:
    """Return the files in a folder by their paths in it, without the suffix."""
    by_stem: dict[str, str] = {}
    for name in tree.names:
        if not name.startswith(f"{folder}/") or not name.lower().endswith(suffixes):
            continue
        stem = str(PurePosixPath(name).relative_to(folder).with_suffix(""))
        if stem in by_stem:
            what = f"there is {PurePosixPath(by_stem[stem]).name} too"
            raise DataError(what, where=tree.describe(name), hint="remove one, or give it another name")
        by_stem[stem] = name
    return by_stem


def _value(entry: int | str, names: Mapping[int, str], key: str) -> int:
    """Return the value of a class in the masks."""
    if isinstance(entry, int):
        return entry
    values = {name: value for value, name in names.items()}
    if entry not in values:
        shown = ", ".join([*values][:MAX_SHOWN]) + (", ..." if len(values) > MAX_SHOWN else "")
        where = f"data.source.masks.{key}"
        raise DataError(f"unknown class {entry!r}", where=where, allowed=shown, hint=labels.alike(entry, values))
    return values[entry]


def _values(path: Path) -> NDArray[np.uint8]:
    """Return the stored values of a mask: uint8 [height, width]."""
    from PIL import Image

    content = files.read(path, MAX_IMAGE_BYTES)
    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            mode, size = image.mode, image.size
            check_size(size, str(path))
            with Image.open(io.BytesIO(content), formats=("PNG",)) as again:
                again.verify()
            if mode in MODES:
                return np.asarray(image).astype(np.uint8)
    except (*ERRORS, Image.DecompressionBombError) as error:
        raise DataError(f"is not a readable PNG: {error}", where=str(path), hint="remove or repair it") from error
    what = "has 16 bits" if mode.startswith("I") else f"has colours ({mode})"
    allowed = "8 bits or a palette: the value of a pixel is the index of its class"
    raise DataError(f"{what}, so it is not a mask", where=str(path), allowed=allowed, hint="convert it")
