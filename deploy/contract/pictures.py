"""Decoding of image files: training, `runner.pyz run` and `serve` all use this module.

Transparency is ignored. Of 16-bit values the upper 8 bits are used; images with more bits are refused. Decoding needs
Pillow 8 or newer.

A camera stores the pixels as its sensor delivers them, and the EXIF orientation in which viewers show them (Exif 2.32,
4.6.4). Pillow reads it from JPEG, PNG (a chunk before the image data) and WebP. An orientation in XMP is not used.
"""

from __future__ import annotations

import io
from typing import Any, Optional, Sequence, Union

import numpy as np

from deploy.contract.errors import ImageError
from deploy.contract.resizing import LONGEST
from deploy.contract.step import Array

MAX_PIXELS = 64_000_000
"""The largest number of pixels of a file that the user names."""
DEEP = "its values have 32 bits, or are floats; allowed: 8 or 16 bits"
HINT = "use another image, or a .npy array"
CONVERT = "convert it to JPEG, for example with `heif-convert` or `mogrify -format jpg`"
_BLOCK_PIXELS = 1 << 20
"""The number of pixels that are converted to grey at once; chosen, so that the sums take 4 MB."""
_AVIF_BRANDS = (b"avif", b"avis")
_HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
EXIF = "exif"
"""The setting that applies the orientation."""
IGNORE = "ignore"
"""The setting that uses the pixels as they are stored."""
UPRIGHT = 1
"""The orientation of an image that is shown as it is stored."""
TRANSPOSED = (5, 6, 7, 8)
"""The orientations that swap height and width."""
FLIPPED_DOWN = (3, 4, 7, 8)
"""The orientations that reverse the rows, after the transposition."""
FLIPPED_ACROSS = (2, 3, 6, 7)
"""The orientations that reverse the columns, after the transposition."""
_TAG = 0x0112
"""Of the orientation in EXIF."""


def decode(
    content: Union[bytes, bytearray],
    channels: Optional[int] = None,
    max_pixels: int = MAX_PIXELS,
    orientation: str = EXIF,
    formats: Optional[Sequence[str]] = None,
) -> Array:
    """Decode an image file: uint8 [height, width, channels].

    Args:
        content: the bytes of the file.
        channels: 3: RGB; 1: grey; None: the channels of the file.
        max_pixels: the largest number of pixels, checked before memory is allocated for them.
        orientation: "exif": rotate and mirror the image by its EXIF orientation; "ignore": do not.
        formats: Pillow's names of the allowed formats; None: all that Pillow knows.

    Raises:
        ImageError: the file is not an image, or is damaged or too large; or Pillow is not installed.
    """
    module = pillow()
    try:
        with module.open(io.BytesIO(content), formats=formats) as image:
            check_size(image.size[0], image.size[1], max_pixels)
            applied = UPRIGHT if orientation == IGNORE else orientation_of(image)
            return oriented(pixels(image, channels), applied)
    except module.UnidentifiedImageError:
        raise unknown_format(content)
    except ImageError:
        raise
    except Exception as error:  # noqa: BLE001 - decoders raise exceptions of every type for damaged images
        raise ImageError("the image cannot be decoded: %s" % error, HINT)


def pillow() -> Any:
    """Return the module PIL.Image.

    Raises:
        ImageError: Pillow is not installed, or older than version 8, which decodes a part of the formats alone.
    """
    try:
        import PIL
        from PIL import Image
    except ImportError:
        raise ImageError("Pillow is not installed, and photos need it", "python3 -m pip install pillow")
    if int(PIL.__version__.partition(".")[0]) < 8:
        what = "Pillow %s is too old for photos; version 8 or newer is needed" % PIL.__version__
        raise ImageError(what, "python3 -m pip install --upgrade pillow")
    return Image


def oriented(pixels: Array, orientation: int) -> Array:
    """Return an image [height, width, channels] as viewers show it."""
    if orientation in TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in FLIPPED_DOWN:
        pixels = pixels[::-1]
    if orientation in FLIPPED_ACROSS:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def orientation_of(image: Any) -> int:
    """Return the EXIF orientation of an image that Pillow has opened, and not yet loaded: 1 to 8; 1 if there is none.

    `image.getexif()` is not used: whether the orientation in XMP counts depends on the version of Pillow.
    """
    from PIL import Image

    exif = Image.Exif()
    try:
        exif.load(image.info.get("exif", b""))
        orientation = exif.get(_TAG)
    except Exception:  # noqa: BLE001 - Pillow raises exceptions of every type for a damaged block
        return UPRIGHT
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else UPRIGHT


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Check the size of an image before memory is allocated for it.

    Raises:
        ImageError: the image has no pixels, too many, or a side that is too long.
    """
    if not 0 < width * height <= max_pixels or max(width, height) > LONGEST:
        allowed = "at most %d, and at most %d along a side" % (max_pixels, LONGEST)
        raise ImageError("the image has %d x %d pixels; %s" % (width, height, allowed), "use a smaller one")


def phone_format(content: Union[bytes, bytearray]) -> str:
    """Return "HEIC" or "AVIF" for a file of this format (ISO/IEC 23008-12, 10; the first box has the brands),
    otherwise ""."""
    if bytes(content[4:8]) != b"ftyp":
        return ""
    size = min(int.from_bytes(content[:4], "big"), 256)
    brands = [bytes(content[start : start + 4]) for start in (8, *range(16, size, 4))]
    if any(brand in _AVIF_BRANDS for brand in brands):
        return "AVIF"
    return "HEIC" if any(brand in _HEIC_BRANDS for brand in brands) else ""


def unknown_format(content: Union[bytes, bytearray]) -> ImageError:
    """Return the error for an image in a format that Pillow does not read."""
    name = phone_format(content)
    if name:
        return ImageError("the image is a %s file, which cannot be decoded" % name, CONVERT)
    return ImageError("the image cannot be decoded: its format is unknown", HINT)


def pixels(image: Any, channels: Optional[int] = None) -> Array:
    """Return the stored pixels of an image that Pillow has opened: uint8 [height, width, channels].

    Raises:
        ValueError: its values have 32 bits, or are floats.
    """
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format == "PNG"):  # older Pillows open 16 bits as "I"
        grey = (np.asarray(image) >> 8).astype(np.uint8)[..., np.newaxis]
        return grey if channels == 1 else np.repeat(grey, 3, axis=2)
    if mode in ("I", "F"):
        raise ValueError(DEEP)
    as_grey = mode == "L" if channels is None else channels == 1
    if as_grey and mode in ("1", "L", "LA"):
        return np.asarray(image.convert("L"))[..., np.newaxis]
    rgb = np.asarray(image if mode == "RGB" else image.convert("RGB"))
    return to_grey(rgb) if as_grey else rgb


def to_grey(rgb: Array) -> Array:
    """Convert RGB [height, width, 3] to grey levels (ITU-R BT.601), [height, width, 1].

    The result equals Pillow's since version 7; arrays of a camera need no Pillow for it.
    """
    grey = np.empty(rgb.shape[:2] + (1,), np.uint8)
    rows = max(_BLOCK_PIXELS // max(rgb.shape[1], 1), 1)
    for start in range(0, len(rgb), rows):
        block = rgb[start : start + rows]
        sums = np.full(block.shape[:2], 1 << 15, np.uint32)
        for index, weight in enumerate((19595, 38470, 7471)):
            sums += np.multiply(block[..., index], weight, dtype=np.uint32)
        grey[start : start + rows, :, 0] = sums >> 16
    return grey
