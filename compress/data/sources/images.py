"""Folders of images."""

from __future__ import annotations

import io
import os
import struct
import zlib
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError
from compress.core.settings import Settings
from compress.data.file_listing import LabelledFiles
from compress.data.file_tree import Tree
from compress.data.source import Samples
from deploy.contract import pictures
from deploy.contract.errors import ImageError
from deploy.contract.pictures import (
    CONVERT,
    IGNORE,
    MAX_PIXELS,
    UPRIGHT,
    orientation_of,
    oriented,
    phone_format,
    pixels,
)

MAX_IMAGE_BYTES = 256 << 20
"""Chosen: a BMP file of MAX_PIXELS has 192 MB."""
JPEG = dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG")
FORMATS = {".png": "PNG", **JPEG, ".bmp": "BMP", ".webp": "WEBP"}

ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    MemoryError,
    OverflowError,
    LookupError,
    TypeError,
    struct.error,
    zlib.error,
)
"""Exceptions of Pillow for damaged files."""


CONVERTIBLE = (".heic", ".heif", ".hif", ".avif", ".tif", ".tiff", ".gif", ".jp2", ".jxl")
"""Suffixes of images in formats that are not decoded."""
OTHER_FORMATS = {
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\xff\x0a": "JPEG XL",
    b"%PDF-": "PDF",
}
"""The formats of image files by the bytes that they begin with."""
MAX_SIDE_RATIO = 20
"""A larger ratio between the sides of an image is unusual."""
NOTES = {
    "rotated": "are rotated or mirrored by their EXIF orientation",
    "deep": "have 16 bits; the upper 8 are used",
    "cmyk": "are CMYK; they are converted to RGB without a colour profile",
    "animated": "are animated; the first frame is used",
    "transparent": "have transparency, which is removed; the colours under it are used",
    "suffix": "have a suffix of another format; they are decoded by their content",
    "single": "have a single pixel",
    "narrow": f"have one side more than {MAX_SIDE_RATIO} times the other",
}
"""The notes on unusual images, by kind."""


class Observed:
    """Record of the unusual images among those that were decoded. Several threads add to it."""

    def __init__(self) -> None:
        self._files: dict[str, set[str]] = {kind: set() for kind in NOTES}

    def add(self, image: Any, where: str, orientation: int) -> None:
        """Add an image that Pillow has opened, and its EXIF orientation."""
        width, height = image.size
        suffix = os.path.splitext(where)[1].lower()
        image_format = "JPEG" if image.format == "MPO" else image.format  # the format of stereo photos
        kinds = {
            "rotated": orientation != UPRIGHT,
            "deep": image.mode.startswith("I"),
            "cmyk": image.mode == "CMYK",
            "animated": image.format != "MPO" and getattr(image, "is_animated", False),
            "transparent": image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info,
            "suffix": FORMATS.get(suffix, image_format) != image_format,
            "single": width == height == 1,
            "narrow": max(width, height) > MAX_SIDE_RATIO * min(width, height),
        }
        for kind, applies in kinds.items():
            if applies:
                self._files[kind].add(where)

    def notes(self) -> tuple[str, ...]:
        """Return a note for each kind with the number of images and the first."""
        return tuple(
            f"{len(self._files[kind]):,} images {note} (the first is {min(self._files[kind])})"
            for kind, note in NOTES.items()
            if self._files[kind]
        )


def refuse_other_format(content: bytes, where: str) -> None:
    """Refuse an image in a known format that is not decoded."""
    of_phone = phone_format(content)
    name = of_phone or next((name for start, name in OTHER_FORMATS.items() if content.startswith(start)), "")
    if name:
        allowed = ", ".join(sorted(set(FORMATS.values())))
        hint = CONVERT if of_phone else "convert it, for example with `mogrify -format png`"
        raise DataError(f"is a {name} file, which cannot be decoded", where=where, allowed=allowed, hint=hint)


class DecodedImages(Settings):
    """The settings of sources with image files."""

    channels: Literal[1, 3] = 3
    """3: decode as RGB. 1: decode as grey levels."""
    orientation: Literal["exif", "ignore"] = "exif"
    """exif: rotate and mirror photos by their EXIF orientation, as viewers do. ignore: use the pixels as they are
    stored. The device does the same."""

    @property
    def decoding(self) -> dict[str, Any]:
        """How the device decodes images."""
        return {"image_channels": self.channels, "orientation": self.orientation}

    def decoded(self, content: bytes, where: str, observed: Observed | None = None) -> NDArray[np.uint8]:
        """Decode an image file to uint8 [height, width, channels], as the device does (`deploy.contract.pictures`)."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(content), formats=tuple(set(FORMATS.values()))) as image:
                check_size(image.size, where)
                orientation = UPRIGHT if self.orientation == IGNORE else orientation_of(image)
                if image.format == "PNG":  # of what is cut short, Pillow would give the beginning
                    with Image.open(io.BytesIO(content), formats=("PNG",)) as again:
                        again.verify()
                array: NDArray[np.uint8] = oriented(pixels(image, self.channels), orientation)
                if observed is not None:
                    observed.add(image, where, orientation)
        except (*ERRORS, Image.DecompressionBombError) as error:
            refuse_other_format(content, where)
            unknown = isinstance(error, UnidentifiedImageError)
            reason = f"it is not {', '.join(sorted(set(FORMATS.values())))}, or damaged" if unknown else str(error)
            raise DataError(f"is not a readable image: {reason}", where=where, hint="remove or repair it") from error
        return array


class ImageFolder(DecodedImages, LabelledFiles):
    """A folder of images: one subfolder for each class, optionally inside train/, val/ and test/; or with a table of
    labels."""

    name: ClassVar[str] = "folder"
    suffixes: ClassVar[tuple[str, ...]] = tuple(FORMATS)
    convertible: ClassVar[tuple[str, ...]] = CONVERTIBLE
    how_to_convert: ClassVar[str] = "convert them, for example with `mogrify -format png`, or `heif-convert` for HEIC"

    def load(self) -> Samples:
        """Read labels from folders or a table; images are decoded when they are used."""
        observed = Observed()

        def read(tree: Tree, name: str) -> NDArray[Any]:
            return self.decoded(tree.read(name, MAX_IMAGE_BYTES), tree.describe(name), observed)

        return replace(self.samples(read), observed=observed.notes)


def check_size(size: tuple[int, int], where: str) -> None:
    """Check width and height of an image before memory is allocated for it."""
    try:
        pictures.check_size(*size, MAX_PIXELS)
    except ImageError as error:
        raise DataError(error.what, where=where, hint="resize or remove it") from error
