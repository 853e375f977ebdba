"""The body of a request as a decoded sample: .npy, raw numbers, JPEG, PNG, BMP, WebP, WAV. All of it is hostile.

numpy's own reader of .npy evaluates the header and is not used; what an image would unpack to is read
from its first bytes before anything unpacks it.
Runs on Python 3.7 with numpy; images where Pillow or OpenCV is there.
"""

from __future__ import annotations

import re
import struct
from typing import List, Optional, Tuple, Union

import numpy as np

from deploy import recording
from deploy.contract import bundle, pictures
from deploy.contract.decoding import AS_THEY_ARE, Decoding
from deploy.contract.errors import ImageError
from deploy.contract.preprocessing import Array
from deploy.protocol import parse_integer

MAX_PIXELS = 1 << 25
"""Of an image: 33 million, 100 MB of colours."""
DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "float32", "float64")
Bytes = Union[bytes, bytearray]
MAX_AXES = 4
MAX_DIMENSION = 10**9 - 1
_NPY = b"\x93NUMPY"
FORMS = "send a .npy array, raw numbers with X-Shape and X-Dtype, JPEG, PNG, BMP, WebP or WAV"


def decoded(body: Bytes, shape: str = "", dtype: str = "", decoding: Decoding = AS_THEY_ARE) -> Array:
    """The sample in a body.

    Args:
        body: .npy, JPEG, PNG, BMP, WebP, WAV; with a shape: raw numbers, little-endian.
        shape: `height,width,channels` or `samples` of raw numbers; empty: the body says itself what it is.
        dtype: of raw numbers, one of DTYPES; empty: uint8.
        decoding: what becomes of images and WAV files.

    Raises:
        ImageError: it is none of these, or not what it says.
    """
    if shape:
        array = _raw(body, shape, dtype or "uint8")
    elif body.startswith(_NPY):
        try:
            array = bundle.read_array(body)
        except bundle.BundleError as error:
            raise ImageError("the body is not a .npy array of numbers: %s" % error, "write it with numpy.save")
    elif recording.recognized(body):
        array = recording.sound(body, decoding.sound_rate, decoding.sound_channels)
    else:
        array = _picture(body, decoding.image_channels)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ImageError("the sample has numbers that are infinite or none", "send finite numbers")
    return array


def of_file(content: Bytes, decoding: Decoding = AS_THEY_ARE) -> Array:
    """The sample in a file of one's own: WAV, or an image of any kind that the decoder here knows.

    Raises:
        ImageError: it is neither, or damaged.
    """
    if recording.recognized(content):
        return recording.sound(content, decoding.sound_rate, decoding.sound_channels)
    return pictures.decoded(content, decoding.image_channels)


def _raw(body: Bytes, shape: str, dtype: str) -> Array:
    if dtype not in DTYPES:
        raise ImageError("X-Dtype: %s is not supported" % dtype[:40], "use one of: %s" % ", ".join(DTYPES))
    dimensions = _dimensions(shape)
    stored = np.dtype(dtype).newbyteorder("<")
    expected_bytes = stored.itemsize
    for dimension in dimensions:
        expected_bytes *= dimension
    if expected_bytes != len(body):
        what = "the body has %d bytes, and X-Shape and X-Dtype need %d" % (len(body), expected_bytes)
        raise ImageError(what, "send the whole array")
    return np.frombuffer(body, stored).reshape(dimensions).astype(dtype, copy=False)


def _dimensions(shape: str) -> Tuple[int, ...]:
    """Parse X-Shape: up to `MAX_AXES` integers with commas between them.

    Raises:
        ImageError: the text is not a shape.
    """
    dimensions: List[int] = []
    for part in shape.split(","):
        dimension = parse_integer(part, 0, MAX_DIMENSION)
        if dimension is None or len(dimensions) == MAX_AXES:
            raise ImageError("X-Shape: %s is not a shape" % shape[:40], "send for example X-Shape: 224,224,3")
        dimensions.append(dimension)
    return tuple(dimensions)


def _picture(body: Bytes, channels: Optional[int]) -> Array:
    """An image, of which it is known before anything unpacks it how large it is."""
    read = next((read for starts, read in _SIZES if starts.match(body)), None)
    if read is None:
        raise ImageError("the body is nothing that is known here", FORMS)
    width, height = read(body)
    if not 0 < width * height <= MAX_PIXELS:
        raise ImageError("the image has %d x %d pixels; at most %d" % (width, height, MAX_PIXELS), "send a smaller one")
    return pictures.decoded(body, channels, MAX_PIXELS)


def _png_size(body: Bytes) -> Tuple[int, int]:
    """Width and height in the first chunk, IHDR (PNG specification, 11.2.2); 0, 0 where there is none."""
    if body[12:16] != b"IHDR" or len(body) < 24:
        return 0, 0
    width, height = struct.unpack(">II", body[16:24])
    return int(width), int(height)


def _jpeg_size(body: Bytes) -> Tuple[int, int]:
    """Width and height in the frame header, SOF (ITU T.81, B.2.2); 0, 0 where there is none."""
    place = 2
    while place + 9 <= len(body) and body[place] == 0xFF:
        marker = body[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", body[place + 5 : place + 9])
            return int(width), int(height)
        place += 2 + int(struct.unpack(">H", body[place + 2 : place + 4])[0])
    return 0, 0


def _bmp_size(body: Bytes) -> Tuple[int, int]:
    """Width and height in the header behind the file's own (BITMAPCOREHEADER, BITMAPINFOHEADER); 0, 0 where none is."""
    if len(body) < 26:
        return 0, 0
    core = struct.unpack_from("<I", body, 14)[0] == 12
    width, height = struct.unpack_from("<HH" if core else "<ii", body, 18)
    return int(width), abs(int(height))  # from above to below where it is negative


def _webp_size(body: Bytes) -> Tuple[int, int]:
    """Width and height in the first chunk (RFC 9649: 2.5 to 2.7, 3.4; RFC 6386, 9.1); 0, 0 where there is none."""
    kind = body[12:16]
    if kind == b"VP8X" and len(body) >= 30:
        return 1 + int.from_bytes(body[24:27], "little"), 1 + int.from_bytes(body[27:30], "little")
    if kind == b"VP8L" and len(body) >= 25:
        bits = int.from_bytes(body[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and len(body) >= 30:
        width, height = struct.unpack_from("<HH", body, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0


_SIZES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), _png_size),
    (re.compile(rb"\xff\xd8\xff"), _jpeg_size),
    (re.compile(rb"BM"), _bmp_size),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), _webp_size),
)
"""How files of each kind begin, and what reads width and height from their first bytes."""
