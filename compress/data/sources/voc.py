"""Images with boxes in Pascal VOC's format: an XML file next to each image, or in a separate folder.

Source of the format: M. Everingham, J. Winn, The PASCAL VOC 2012 Development Kit, section 4.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from xml.parsers import expat

from compress.core.errors import DataError
from compress.data import class_names, files, labels
from compress.data.class_names import ClassList
from compress.data.labels import SPLIT_WORDS
from compress.data.source import Samples, Stored
from compress.data.sources import bounding_boxes
from compress.data.sources.bounding_boxes import AnnotatedImage, number
from compress.data.sources.images import FORMATS, DecodedImages
from compress.data.types import Split

MAX_XML_BYTES = 4 << 20
"""Chosen: an object takes about 300 bytes, so that 10,000 fit."""
MAX_DEPTH = 32
"""Chosen: annotations have four elements inside each other."""
IMAGE_FOLDERS = ("JPEGImages", "images", ".")
Listed = dict[Path, dict[str, Split]]
"""For each folder with lists of splits: the split of each image name."""


@dataclass
class Element:
    """An element of an XML file.

    Attributes:
        name: the tag.
        line: the line of the start tag.
        text: the text between the tags.
        children: the elements between the tags.
    """

    name: str
    line: int
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, name: str) -> Iterator[Element]:
        """Return the children with a name."""
        return (child for child in self.children if child.name == name)

    def first(self, name: str) -> Element | None:
        """Return the first child with a name."""
        return next(self.all(name), None)


def parse(path: Path) -> Element:
    """Return the root of an XML file.

    Document types are refused, and entities with them, which could expand without end or name files and addresses.

    Raises:
        DataError: the file is not XML, too large, nested too deeply, or declares a document type.
    """
    content = files.read(path, MAX_XML_BYTES)
    top = Element("", 0)
    stack, parser = [top], expat.ParserCreate()

    def begin(name: str, attributes: Any) -> None:
        if len(stack) > MAX_DEPTH:
            raise DataError(f"has more than {MAX_DEPTH} elements inside of each other", where=_at(path, parser))
        stack[-1].children.append(Element(name, parser.CurrentLineNumber))
        stack.append(stack[-1].children[-1])

    def text(part: str) -> None:
        stack[-1].text += part

    def refuse(*_: object) -> None:
        hint = "remove the line with <!DOCTYPE"
        raise DataError("declares a document type, and annotations need none", where=_at(path, parser), hint=hint)

    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = begin, lambda name: stack.pop()
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = text, refuse
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise DataError(f"is not XML: {error}", where=str(path), hint="repair or remove it") from error
    return top.children[0]


def _at(path: Path, parser: Any) -> str:
    return f"{path}, line {parser.CurrentLineNumber}"


class Voc(DecodedImages, Stored):
    """A folder of images with Pascal VOC's XML files: Annotations/ and JPEGImages/, or images and XML files side by
    side.

    The splits are given by ImageSets/Main/train.txt, val.txt and test.txt, in this folder or in subfolders
    (trainval.txt is divided if these two are missing), or by the folders train/, val/ and test/. Otherwise `data.split`
    divides the images. Objects that are marked as difficult are ignored.
    """

    name: ClassVar[str] = "voc"
    task: ClassVar[str] = "detection"
    paths: ClassVar[tuple[str, ...]] = ("path", "classes", "manifest")

    path: str
    """Path of the folder, relative to the pipeline file."""
    classes: ClassList | None = None
    """Class names in the order of the model's scores: a list, or the path of a labels file, relative to the pipeline
    file. By default the classes that occur, in alphabetical order."""

    def files(self) -> dict[str, Path]:
        """Return the annotations, their images, and the lists of the splits.

        Raises:
            DataError: the folder or an image does not exist, or an annotation cannot be read.
        """
        root, (images, _) = Path(self.path), self._images()
        bounding_boxes.refuse_unfit(images)
        paths = [*(Path(image.where) for image in images), *(image.path for image in images), *_lists(root)]
        return {os.path.relpath(path, root): path for path in sorted(set(paths))} | class_names.files_of(self.classes)

    def load(self) -> Samples:
        """Read the annotations; images are decoded when they are used."""
        images, unlisted = self._images()
        note = f"{unlisted:,} images with an .xml file are in no list of ImageSets/Main, and were left out"
        samples = bounding_boxes.samples(images, self._names(images), self)
        return replace(samples, notes=(*class_names.note(self.classes), *samples.notes, *[note] * bool(unlisted)))

    def _names(self, images: list[AnnotatedImage]) -> tuple[str, ...]:
        classes = class_names.listed(self.classes, "data.source.voc")
        annotated = [name for image in images for name in image.names]
        locations = [where for image in images for _, where in image.boxes]
        return labels.named(annotated, classes, locations.__getitem__, class_names.origin(self.classes))[1]

    def _images(self) -> tuple[list[AnnotatedImage], int]:
        """Return the annotated images in a fixed order, and the number of images that are in no list of a split."""
        root = Path(self.path)
        paths = self._annotation_files(root)
        listed = _listed(root)
        _refuse_missing(listed, paths)
        images = [self._image(path, listed) for path in paths]
        if listed:
            kept = [image for image in images if image.split]
            return kept, len(images) - len(kept)
        names = [os.path.relpath(path, root) for path in paths]
        labels.refuse_parts(names, [image.split for image in images], self.path)
        return images, 0

    def _annotation_files(self, root: Path) -> list[Path]:
        if not root.is_dir():
            raise DataError("is not a folder", where=self.path, hint="check data.source")
        candidates = sorted(path for path in root.rglob("*.xml") if not _hidden(path.relative_to(root)))
        paths = [path for path in candidates if files.is_file(path)]
        if not paths:
            raise DataError(
                "contains no .xml files", where=self.path, allowed="Pascal VOC's annotations, one for each image"
            )
        return paths

    def _image(self, path: Path, listed: Listed) -> AnnotatedImage:
        annotation = parse(path)
        if annotation.name != "annotation":
            raise DataError(f"begins with <{annotation.name}>", where=str(path), allowed="<annotation>")
        boxes, names = [], []
        for element in annotation.all("object"):
            if _text(element.first("difficult")) == "1":
                continue
            where = f"{path}, line {element.line}"
            name, box = _text(element.first("name")), element.first("bndbox")
            if not name or box is None:
                raise DataError("an <object> has no <name> or no <bndbox>", where=where, hint="repair or remove it")
            left, top, right, bottom = (
                number(_text(box.first(side)), f"{path}, line {box.line}: <{side}>")
                for side in ("xmin", "ymin", "xmax", "ymax")
            )
            boxes.append(((left, top, right, bottom), where))
            names.append(name)
        image, split = self._beside(path, _text(annotation.first("filename"))), self._split(path, listed)
        return AnnotatedImage(image, _size(annotation, path), tuple(boxes), tuple(names), split, str(path), image.name)

    def _split(self, path: Path, listed: Listed) -> Split | None:
        """Return the split of an XML file's image: from the lists, or without lists from its folders."""
        if listed:
            listed_splits = (stems.get(path.stem) for folder, stems in listed.items() if path.is_relative_to(folder))
            return next(listed_splits, None)
        folders = [part.lower() for part in path.relative_to(self.path).parts[:-1]]
        return next((SPLIT_WORDS[part] for part in folders if part in SPLIT_WORDS), None)

    def _beside(self, path: Path, name: str) -> Path:
        """Return the image of an XML file: the one with its name, in its folder or in the folder of images; otherwise
        the one named in the file, a name that often belongs to another file.

        Only the part after the last slash is used: programs write complete paths of other machines into it.
        """
        name = name.replace("\\", "/").rpartition("/")[2] or f"{path.stem}.jpg"
        holders = [path.parent, *(path.parent.parent / folder for folder in IMAGE_FOLDERS)]
        named = [holder / name for holder in holders]
        same_stem = [holder / f"{path.stem}{suffix}" for holder in holders for suffix in FORMATS]
        options = [*named, *same_stem] if Path(name).stem == path.stem else [*same_stem, *named]
        return next((option for option in options if files.is_file(option)), named[0])


def _lists(root: Path) -> list[Path]:
    """Return the existing lists of the images of each split; trainval.txt, which contains train.txt and val.txt, is
    last."""
    words = (*SPLIT_WORDS, "trainval")
    paths = [path for path in root.rglob("ImageSets/Main/*.txt") if path.stem in words and files.is_file(path)]
    shown = (path for path in paths if not _hidden(path.relative_to(root)))
    return sorted(shown, key=lambda path: (words.index(path.stem), path))


def _listed(root: Path) -> Listed:
    """Return the split of each image name, for every folder whose ImageSets/Main has lists."""
    listed: Listed = {}
    for path in _lists(root):
        stems = listed.setdefault(path.parents[2], {})
        both = path.stem == "trainval"
        split = SPLIT_WORDS.get(path.stem) or ("validation" if path.with_name("train.txt").is_file() else "train")
        for where, stem in _listed_names([path]):
            before = stems.setdefault(stem, split)
            if before != split and not (both and before != "test"):
                raise DataError(f"{stem!r} is in the split {before} too", where=where, hint="leave it in one")
    return listed


def _listed_names(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield the image names in lists, each with its location."""
    for path in paths:
        for line, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if text.split():
                yield f"{path}, line {line}", text.split()[0]


def _refuse_missing(listed: Listed, paths: list[Path]) -> None:
    for folder, stems in listed.items():
        missing = sorted(stems.keys() - {path.stem for path in paths if path.is_relative_to(folder)})
        if missing:
            where = next(location for location, stem in _listed_names(_lists(folder)) if stem == missing[0])
            raise DataError(f"names {missing[0]!r}, which has no .xml file ({len(missing)} in all)", where=where)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _text(element: Element | None) -> str:
    return element.text.strip() if element is not None else ""


def _size(annotation: Element, path: Path) -> tuple[int, int] | None:
    """Return width and height if the file has them; some programs write 0 for an unknown size."""
    size = annotation.first("size")
    if size is None:
        return None
    where = f"{path}, line {size.line}"
    width, height = (int(number(_text(size.first(side)) or "0", where)) for side in ("width", "height"))
    return (width, height) if width > 0 and height > 0 else None
