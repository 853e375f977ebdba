"""Decoding of request bodies: .npy, .npz, raw values, JPEG, PNG, BMP, WebP, WAV, text. The content is not trusted.

numpy's own reader is not used for .npy and .npz, because it evaluates the header of an array.
"""

from __future__ import annotations

import io
import re
import zipfile
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from deploy.contract import bundle, pictures, recording, text
from deploy.contract.decoding import AS_THEY_ARE, Decoding
from deploy.contract.errors import ImageError
from deploy.contract.preprocessing import Array
from deploy.contract.recording import Bytes

MAX_PIXELS = 1 << 25
"""The largest image of a request, and frame of a video: 33 million pixels, 100 MB as RGB."""
DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "float32", "float64")
MAX_AXES = 4
"""Of raw values; chosen: the steps of the preprocessing take up to three axes."""
MAX_DIMENSION = 10**9 - 1
"""Chosen: nine digits. The product of all dimensions must be the size of the body."""
_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
_IMAGE = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|BM|RIFF....WEBP", re.DOTALL)
_CHARSET = re.compile(r"charset=\"?([^\s;\"]+)")
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
FORMATS = "send .npy, .npz for several inputs, raw values with X-Shape and X-Dtype, JPEG, PNG, BMP, WebP or WAV"


MAX_DIGITS = 18
"""Integers of up to 18 digits fit 64 bits; `int` of a text of a million digits takes seconds."""
_DIGITS = re.compile("[0-9]{1,%d}\\Z" % MAX_DIGITS)


def parse_integer(text: str, low: int, high: int) -> Optional[int]:
    """Return the integer that `text` writes in ASCII digits, or None if it is not one from `low` to `high`.

    `int` also takes signs, spaces, underscores and the digits of every script, and `str.isdigit` is true for
    characters that `int` refuses (superscript two). All integers of requests are therefore parsed here.
    """
    if not _DIGITS.match(text):
        return None
    value = int(text)
    return value if low <= value <= high else None


def decode_body(body: Bytes, shape: str = "", dtype: str = "", decoding: Decoding = AS_THEY_ARE) -> Any:
    """Decode the sample in a request body: an array; of an .npz file a map of arrays by name.

    Args:
        body: .npy, .npz, JPEG, PNG, BMP, WebP, WAV; with a shape: raw values, little-endian. If the model takes texts:
            .npy or a text.
        shape: the shape of raw values: `height,width,channels` or `samples`; empty: the body is a file.
        dtype: the dtype of raw values, one of DTYPES; empty: uint8.
        decoding: how images, WAV files and texts are decoded.

    Raises:
        ImageError: the body has none of these formats, or is invalid.
    """
    if decoding.text_bytes is not None and not shape and not body.startswith(_NPY):
        return text.sample_of(body, decoding.text_bytes)
    if not shape and body.startswith(_ZIP):
        return _named_arrays(body)
    if shape:
        array = _raw(body, shape, dtype or "uint8")
    elif body.startswith(_NPY):
        array = _array(body, "the body")
    elif recording.is_wav(body):
        array = recording.decode_wav(body, decoding.sound_rate, decoding.sound_channels)
    elif _IMAGE.match(body):
        array = pictures.decode(body, decoding.image_channels, MAX_PIXELS, decoding.orientation, IMAGE_FORMATS)
    elif pictures.phone_format(body):
        raise pictures.unknown_format(body)
    else:
        raise ImageError("the format of the body is unknown", FORMATS)
    return _finite(array)


def refuse_type_of_text(content_type: str) -> None:
    """Refuse the Content-Type of a body that is not a plain text in UTF-8: its bytes would be taken as another text.

    Raises:
        ImageError: the body is JSON, or in another character encoding.
    """
    media_type, _, parameters = content_type.lower().partition(";")
    if media_type.strip() == "application/json":
        raise ImageError("the body is JSON, and the model takes a text", "send the text alone, as text/plain")
    charset = _CHARSET.search(parameters)
    if charset is not None and charset.group(1) not in ("utf-8", "utf8", "us-ascii"):
        raise ImageError("the encoding of the text is %s" % charset.group(1)[:40], "send it in UTF-8")


def _array(content: Bytes, name: str) -> Array:
    try:
        return bundle.read_array(content)
    except bundle.BundleError as error:
        raise ImageError("%s is not a .npy array of numbers: %s" % (name, error), "write it with numpy.save")


def _finite(array: Array) -> Array:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ImageError("some values of the sample are NaN or infinite", "send finite values")
    return array


def _named_arrays(body: Bytes) -> Dict[str, Array]:
    """Return the arrays of an .npz file by name. Together they are at most as large as the file.

    Raises:
        ImageError: the file is damaged, compressed, or has other members than arrays.
    """
    arrays: Dict[str, Array] = {}
    remaining = len(body)
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            infos = archive.infolist()
            if len(infos) > bundle.MAX_TENSORS:
                raise ImageError("the .npz file has %d members" % len(infos), "send at most %d" % bundle.MAX_TENSORS)
            for info in infos:
                remaining -= info.file_size  # overlapping members would unpack to more than the size of the file
                stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
                name = info.filename[: -len(".npy")]
                if not stored or remaining < 0 or not info.filename.endswith(".npy") or name in arrays:
                    what = "the member %.100r of the .npz file is compressed, or not a .npy array" % info.filename
                    raise ImageError(what, "write it with numpy.savez")
                arrays[name] = _finite(_array(archive.read(info), "the member %.100r" % info.filename))
    except bundle.ZIP_ERRORS as error:
        raise ImageError("the .npz file cannot be read: %s" % error, "write it with numpy.savez")
    return arrays


def decode_file(content: Bytes, decoding: Decoding = AS_THEY_ARE) -> Any:
    """Decode a trusted file: .npz, WAV, or an image in any format of the installed decoder. A model that takes texts
    takes every file as one.

    Raises:
        ImageError: the file has another format, or is damaged.
    """
    if decoding.text_bytes is not None:
        return text.sample_of(content, decoding.text_bytes)
    if content.startswith(_ZIP):
        return _named_arrays(content)
    if recording.is_wav(content) or decoding.sound_rate is not None:
        return recording.decode_wav(content, decoding.sound_rate, decoding.sound_channels)
    return pictures.decode(content, decoding.image_channels, orientation=decoding.orientation)


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
