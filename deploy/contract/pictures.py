"""An image file as numbers: the one definition of what training, `runner.pyz run` and `serve` take from it.

Pixels are those that are stored: an EXIF orientation is ignored. What is transparent counts as if it were not. Of
numbers of 16 bits the upper 8 are taken; what has more is refused.
Runs on Python 3.7 with numpy, and Pillow or OpenCV to decode.
"""

from __future__ import annotations

import io
from typing import Any, Optional, Union

import numpy as np

from deploy.contract.errors import ImageError
from deploy.contract.step import Array

DEEP = "it has numbers of 32 bits, or floats, and images have 8 or 16"
TODO = "use another image, or a .npy array"


def decoded(content: Union[bytes, bytearray], channels: Optional[int] = None, most: Optional[int] = None) -> Array:
    """The image in a file that Pillow or OpenCV knows: uint8 [height, width, channels].

    Args:
        content: the bytes of the file.
        channels: 3: RGB; 1: grey; None: what the file has.
        most: pixels that it may have; by default what the decoder takes.

    Raises:
        ImageError: it is none, damaged or too large, or there is no decoder.
    """
    try:
        from PIL import Image
    except ImportError:
        return _with_opencv(content, channels)
    try:
        with Image.open(io.BytesIO(content)) as image:
            if most is not None and image.size[0] * image.size[1] > most:
                raise ValueError("it is larger than it said")
            return pixels(image, channels)
    except Exception as error:  # noqa: BLE001 - decoders raise everything for spoilt images
        unknown = "cannot identify" in str(error)  # Pillow goes on with an object's address
        raise ImageError("the image cannot be decoded: %s" % ("it is of no known kind" if unknown else error), TODO)


def pixels(image: Any, channels: Optional[int] = None) -> Array:
    """The pixels of an image that Pillow has opened: uint8 [height, width, channels]; `channels` as above.

    Raises:
        ValueError: its numbers are of 32 bits, or floats.
    """
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format == "PNG"):  # of 16 bits, as older Pillows open it
        grey = (np.asarray(image) >> 8).astype(np.uint8)[..., np.newaxis]
        return grey if channels == 1 else np.repeat(grey, 3, axis=2)
    if mode in ("I", "F"):
        raise ValueError(DEEP)
    as_grey = mode == "L" if channels is None else channels == 1
    if as_grey and mode in ("1", "L", "LA"):
        return np.asarray(image.convert("L"))[..., np.newaxis]
    found = np.asarray(image if mode == "RGB" else image.convert("RGB"))
    return _grey(found) if as_grey else found


def _grey(colours: Array) -> Array:
    """RGB [height, width, 3] as grey levels (ITU-R BT.601), [height, width, 1].

    To the bit what Pillow gives since its version 7; older ones cut fractions off, OpenCV rounds otherwise.
    """
    found = np.full(colours.shape[:2], 1 << 15, np.uint32)
    for index, weight in enumerate((19595, 38470, 7471)):
        found += np.multiply(colours[..., index], weight, dtype=np.uint32)
    return (found >> 16).astype(np.uint8)[..., np.newaxis]


def _with_opencv(content: Union[bytes, bytearray], channels: Optional[int]) -> Array:
    try:
        import cv2
    except ImportError:
        raise ImageError("there is neither Pillow nor OpenCV here to decode images", "python3 -m pip install pillow")
    flags = cv2.IMREAD_ANYCOLOR if channels is None else cv2.IMREAD_COLOR
    flags |= cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        image: Any = cv2.imdecode(np.frombuffer(content, np.uint8), flags)
    except cv2.error as error:
        raise ImageError("the image cannot be decoded: %s" % error, TODO)
    if image is None:
        raise ImageError("the image cannot be decoded", TODO)
    if image.dtype == np.uint16:
        image = (image >> 8).astype(np.uint8)
    if image.dtype != np.uint8:
        raise ImageError("the image cannot be decoded: %s" % DEEP, TODO)
    found = image[..., np.newaxis] if image.ndim == 2 else image[..., ::-1]  # OpenCV's colours are in the order BGR
    return _grey(found) if channels == 1 else found
