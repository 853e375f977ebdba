"""An image file as numbers: the one definition of what training, `runner.pyz run` and `serve` take from it.

Pixels are those that are stored: an EXIF orientation is ignored. What is transparent counts as if it were not.
Runs on Python 3.7 with numpy, and Pillow or OpenCV to decode.
"""

from __future__ import annotations

import io
from typing import Any, Optional, Union

import numpy as np

from deploy.errors import ImageError
from deploy.step import Array

TODO = "use another image, or a .npy array"


def decoded(content: Union[bytes, bytearray], most: Optional[int] = None) -> Array:
    """The image in a file that Pillow or OpenCV knows: uint8 [height, width, channels], RGB or grey.

    Args:
        content: the bytes of the file.
        most: pixels that it may have; by default what the decoder takes.

    Raises:
        ImageError: it is none, damaged or too large, or there is no decoder.
    """
    try:
        from PIL import Image
    except ImportError:
        return _with_opencv(content)
    try:
        with Image.open(io.BytesIO(content)) as image:
            if most is not None and image.size[0] * image.size[1] > most:
                raise ValueError("it is larger than it said")
            return pixels(image)
    except Exception as error:  # noqa: BLE001 - decoders raise everything for spoilt images
        unknown = "cannot identify" in str(error)  # Pillow goes on with an object's address
        raise ImageError("the image cannot be decoded: %s" % ("it is of no known kind" if unknown else error), TODO)


def pixels(image: Any) -> Array:
    """The pixels of an image that Pillow has opened: uint8 [height, width, channels], RGB or grey."""
    found = np.asarray(image.convert("RGB") if image.mode not in ("L", "RGB") else image)
    return found[..., np.newaxis] if found.ndim == 2 else found


def _with_opencv(content: Union[bytes, bytearray]) -> Array:
    try:
        import cv2
    except ImportError:
        raise ImageError("there is neither Pillow nor OpenCV here to decode images", "python3 -m pip install pillow")
    try:
        flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_IGNORE_ORIENTATION
        image: Any = cv2.imdecode(np.frombuffer(content, np.uint8), flags)
    except cv2.error as error:
        raise ImageError("the image cannot be decoded: %s" % error, TODO)
    if image is None:
        raise ImageError("the image cannot be decoded", TODO)
    return image[..., np.newaxis] if image.ndim == 2 else image[..., ::-1]  # OpenCV's colours are in the order BGR
