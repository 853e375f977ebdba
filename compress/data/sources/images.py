"""Folders of images."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from compress.data.file_listing import LabelledFiles
from compress.data.source import Samples
from compress.errors import DataError
from compress.settings import Settings
from deploy.contract.orientation import upright
from deploy.contract.pictures import pixels

MAX_PIXELS = 64_000_000
MAX_IMAGE_BYTES = 256 << 20
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

    def decoded(self, content: bytes, where: str) -> NDArray[np.uint8]:
        """Decode an image file to uint8 [height, width, channels], as the device does (`deploy.contract.pictures`).

        Raises:
            DataError: it is none, damaged, or too large.
        """
        image: NDArray[np.uint8] = upright(decoded(content, self.channels, where), content, self.orientation)
        return image


class ImageFolder(DecodedImages, LabelledFiles):
    """A folder of images: one subfolder for each class, optionally inside train/, val/ and test/; or with a table of
    labels."""

    name: ClassVar[str] = "folder"
    suffixes: ClassVar[tuple[str, ...]] = tuple(FORMATS)

    def load(self) -> Samples:
        """Read labels from folders or a table; images are decoded when they are used."""
        opened = self.open_files()

        def read(index: int) -> NDArray[Any]:
            name = opened.listed[index].file
            return self.decoded(opened.tree.read(name, MAX_IMAGE_BYTES), opened.tree.describe(name))

        return opened.samples(read, skip=self.corrupt == "skip")


def decoded(content: bytes, channels: int, where: str) -> NDArray[np.uint8]:
    """Decode an image file to its stored pixels: uint8 [height, width, channels].

    Raises:
        DataError: it is none, damaged, or too large.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=tuple(set(FORMATS.values()))) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"has {image.width}x{image.height} pixels", where=where, allowed=str(MAX_PIXELS))
            if image.format == "PNG":  # of what is cut short, Pillow would give the beginning
                with Image.open(io.BytesIO(content), formats=("PNG",)) as again:
                    again.verify()
            array: NDArray[np.uint8] = pixels(image, channels)
    except (*ERRORS, Image.DecompressionBombError) as error:
        unknown = isinstance(error, UnidentifiedImageError)
        reason = f"it is not {', '.join(sorted(set(FORMATS.values())))}, or damaged" if unknown else str(error)
        raise DataError(f"is not a readable image: {reason}", where=where, hint="remove or repair it") from error
    return array
