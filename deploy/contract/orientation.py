"""EXIF orientation of image files: training and the device read and apply it with this module.

A camera stores the pixels as its sensor delivers them, and the orientation in which viewers show them (Exif 2.32,
4.6.4). Pillow reads it from JPEG, PNG (a chunk before the image data) and WebP. An orientation in XMP is not used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deploy.contract.step import Array

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


def oriented(pixels: Array, orientation: int) -> Array:
    """Return an image [height, width, channels] as viewers show it."""
    if orientation in TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in FLIPPED_DOWN:
        pixels = pixels[::-1]
    if orientation in FLIPPED_ACROSS:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def read(image: Any) -> int:
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
