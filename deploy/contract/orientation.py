"""EXIF orientation of image files: training and the device read and apply it with this module, for every decoder.

A camera stores the pixels as its sensor delivers them, and the orientation in which viewers show them (Exif 2.32,
4.6.4). JPEG has it in an APP1 segment (Exif 2.32, 4.7.2), PNG in a chunk eXIf (PNG specification, third edition,
11.3.2.5), WebP in a chunk EXIF (RFC 9649, 2.7.1.4). An orientation in XMP is not used.
"""

from __future__ import annotations

import io
import os
import struct
from typing import BinaryIO, Union

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
_MAX_BLOCK = 1 << 20
_PREFIX = b"Exif\0\0"


def oriented(pixels: Array, orientation: int) -> Array:
    """Return an image [height, width, channels] as viewers show it."""
    if orientation in TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in FLIPPED_DOWN:
        pixels = pixels[::-1]
    if orientation in FLIPPED_ACROSS:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def upright(pixels: Array, content: Union[bytes, bytearray], setting: str = EXIF) -> Array:
    """Return a decoded image with its file's orientation applied, unless the setting is IGNORE."""
    orientation = UPRIGHT if setting == IGNORE else read(io.BytesIO(content))
    return pixels if orientation == UPRIGHT else oriented(pixels, orientation)


def read(stream: BinaryIO) -> int:
    """Return the EXIF orientation of an image file: 1 to 8; 1 if it has none, or an invalid one.

    Args:
        stream: the file, seekable and at its start. Only headers are read.
    """
    try:
        return _orientation(_exif(stream))
    except struct.error:  # cut short
        return UPRIGHT


def _exif(stream: BinaryIO) -> bytes:
    """Return the EXIF block of a file, which begins like a TIFF file; empty if there is none."""
    head = stream.read(12)
    if head.startswith(b"\xff\xd8"):
        return _jpeg_exif(stream)
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        stream.seek(8)
        block = _png_chunk(stream, b"eXIf")
    elif head.startswith(b"RIFF") and head.endswith(b"WEBP"):
        block = _riff_chunk(stream, b"EXIF")
    else:
        return b""
    return block[len(_PREFIX) :] if block.startswith(_PREFIX) else block  # some programs write the prefix of JPEG


def _jpeg_exif(stream: BinaryIO) -> bytes:
    """Return the EXIF block in the segments before the image data (ITU T.81, B.1.1)."""
    stream.seek(2)
    while True:
        (marker,) = struct.unpack(">H", stream.read(2))
        if marker == 0xFFFF:  # a fill byte
            stream.seek(-1, os.SEEK_CUR)
            continue
        if marker < 0xFFC0 or marker in (0xFFD9, 0xFFDA):  # the end, or the image data
            return b""
        size = struct.unpack(">H", stream.read(2))[0] - 2
        if size < 0:
            return b""
        if marker != 0xFFE1:
            stream.seek(size, os.SEEK_CUR)
            continue
        segment = stream.read(size)
        if segment.startswith(_PREFIX):
            return segment[len(_PREFIX) :]


def _png_chunk(stream: BinaryIO, name: bytes) -> bytes:
    """Return the content of the first chunk with this name (PNG specification, 5.3)."""
    while True:
        size, chunk_name = struct.unpack(">I4s", stream.read(8))
        if chunk_name == name:
            return stream.read(min(size, _MAX_BLOCK))
        stream.seek(size + 4, os.SEEK_CUR)  # 4: the checksum


def _riff_chunk(stream: BinaryIO, name: bytes) -> bytes:
    """Return the content of the first chunk with this name (RFC 9649, 2.3)."""
    while True:
        chunk_name, size = struct.unpack("<4sI", stream.read(8))
        if chunk_name == name:
            return stream.read(min(size, _MAX_BLOCK))
        stream.seek(size + size % 2, os.SEEK_CUR)  # chunks are padded to an even length


def _orientation(block: bytes) -> int:
    """Return the orientation in the first directory of an EXIF block (TIFF 6.0, section 2)."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(block[:4])
    if order is None:
        return UPRIGHT
    (start,) = struct.unpack_from(order + "I", block, 4)
    (count,) = struct.unpack_from(order + "H", block, start)
    for index in range(count):
        entry = start + 2 + 12 * index
        tag, kind, values = struct.unpack_from(order + "HHI", block, entry)
        if tag == _TAG and kind in (3, 4) and values == 1:  # SHORT or LONG
            (orientation,) = struct.unpack_from(order + ("H" if kind == 3 else "I"), block, entry + 8)
            return orientation if 1 <= orientation <= 8 else UPRIGHT
    return UPRIGHT
