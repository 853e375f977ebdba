"""Frames of a video from a stream, as ffmpeg writes them to a pipe: JPEG images one after the other, or raw pixels.

A stream is buffered and binary (`io.BufferedReader`), such as `sys.stdin.buffer`.

ffmpeg -i rtsp://camera -f image2pipe -c:v mjpeg - | python3 runner.pyz run shop.coralline -
ffmpeg -i film.mp4 -f rawvideo -pix_fmt rgb24 - | python3 runner.pyz run shop.coralline - --frame-size 640x480
"""

from __future__ import annotations

import re
from typing import Any, Iterator, Tuple

import numpy as np

from deploy.contract.errors import ArgumentError, ImageError
from deploy.contract.preprocessing import Array
from deploy.runner.images import MAX_PIXELS

MAX_BYTES = 1 << 26
"""The largest JPEG image: 64 MB."""
_START, _END = b"\xff\xd8", 0xD9
_SCAN = 0xDA
"""The marker that compressed data follow (ITU T.81, B.1.1.3)."""
_WITHOUT_LENGTH = (0x01, 0xD8, *range(0xD0, 0xD8))
"""Markers that no length follows (ITU T.81, B.1.1.3)."""
_AFTER_DATA = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A marker that is not part of compressed data."""
_LOOK = "look at the messages of the program that writes the stream"


def size_of(text: str) -> Tuple[int, int]:
    """Return width and height from WIDTHxHEIGHT.

    Raises:
        ArgumentError: the text is something else, or a frame would have more than MAX_PIXELS.
    """
    match = re.match(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})\Z", text)
    if match is None:
        raise ArgumentError("--frame-size %s is not a size" % text[:40], "write it as 640x480: width, then height")
    width = int(match.group(1))
    height = int(match.group(2))
    if width * height > MAX_PIXELS:
        raise ArgumentError("--frame-size %s has more than %d pixels" % (text, MAX_PIXELS), "send smaller frames")
    return width, height


def raw(stream: Any, width: int, height: int) -> Iterator[Array]:
    """Yield the frames of raw RGB pixels: uint8 [height, width, 3].

    Raises:
        ImageError: the last frame is not complete.
    """
    size = width * height * 3
    while True:
        content = stream.read(size)
        if not content:
            return
        if len(content) < size:
            what = "the stream ends after %d of its %d bytes" % (len(content), size)
            raise ImageError(what, "compare --frame-size with the size that ffmpeg prints")
        yield np.frombuffer(content, np.uint8).reshape(height, width, 3)


def jpegs(stream: Any) -> Iterator[bytes]:
    """Yield the JPEG images of a stream, undecoded.

    Raises:
        ImageError: the stream has other data, an image larger than MAX_BYTES, or an incomplete image at its end.
    """
    while stream.peek(1):
        try:
            yield _jpeg(stream)
        except EOFError:
            raise ImageError("the stream ends in the middle of a JPEG image", _LOOK)


def _jpeg(stream: Any) -> bytes:
    """Read one image, segment by segment: previews in its metadata are images too (ITU T.81, B.1)."""
    parts = [_read(stream, 2)]
    if parts[0] != _START:
        hint = "let ffmpeg write them: -f image2pipe -c:v mjpeg -; or give --frame-size for raw pixels"
        raise ImageError("the stream has no JPEG image where one must begin", hint)
    length = 2
    marker = _marker(stream)
    while True:
        parts.append(bytes([0xFF, marker]))
        if marker == _END:
            return b"".join(parts)
        if marker not in _WITHOUT_LENGTH:
            size = _read(stream, 2)
            parts += [size, _read(stream, max(int.from_bytes(size, "big") - 2, 0))]
            length += 4 + len(parts[-1])
        if marker == _SCAN:
            data, marker = _scan(stream, MAX_BYTES - length)
            parts.append(data)
            length += len(data)
        else:
            marker = _marker(stream)
        if length > MAX_BYTES:
            raise _too_large()


def _marker(stream: Any) -> int:
    """Return the second byte of the next marker. Bytes 0xFF may be in front of a marker (ITU T.81, B.1.1.2)."""
    first = _read(stream, 1)
    second = _read(stream, 1)
    while second == b"\xff":
        second = _read(stream, 1)
    if first != b"\xff":
        raise ImageError("the JPEG image is damaged", _LOOK)
    return second[0]


def _scan(stream: Any, most: int) -> Tuple[bytes, int]:
    """Return compressed data, and the second byte of the marker after the data (ITU T.81, F.1.2.3).

    Raises:
        EOFError: the stream ends before the marker.
        ImageError: more than `most` bytes are in front of the marker.
    """
    data = bytearray()
    while len(data) <= most:
        waiting = stream.peek(1)
        marker = _AFTER_DATA.search(waiting)
        data += _read(stream, max(len(waiting), 1) if marker is None else marker.end() - 1)
        if data[-1] == 0xFF and _AFTER_DATA.match(b"\xff" + stream.peek(1)):  # or the marker is in two blocks
            return bytes(data[:-1]), _read(stream, 1)[0]
    raise _too_large()


def _too_large() -> ImageError:
    return ImageError("the JPEG image has more than %d bytes" % MAX_BYTES, "send smaller frames")


def _read(stream: Any, count: int) -> bytes:
    """Return the next bytes, or raise an EOFError if the stream ends before."""
    content: bytes = stream.read(count)
    if len(content) < count:
        raise EOFError
    return content
