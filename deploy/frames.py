"""Frames of a video from a stream, as ffmpeg writes them to a pipe: JPEG images one after the other, or raw pixels.

ffmpeg -i rtsp://camera -f image2pipe -c:v mjpeg - | python3 runner.pyz run shop.coralline -
ffmpeg -i film.mp4 -f rawvideo -pix_fmt rgb24 - | python3 runner.pyz run shop.coralline - --frame-size 640x480
"""

from __future__ import annotations

import re
from typing import Any, Iterator, Tuple

import numpy as np

from deploy.contract.errors import ArgumentError, ImageError
from deploy.contract.preprocessing import Array

MAX_BYTES = 1 << 26
"""The largest frame: 64 MB."""
CHUNK = 1 << 16
_START, _END = b"\xff\xd8", 0xD9
_SCAN = 0xDA
_WITHOUT_LENGTH = (0x01, 0xD8, *range(0xD0, 0xD8))
"""Markers that no length follows (ITU T.81, B.1.1.3)."""


def size_of(text: str) -> Tuple[int, int]:
    """Return width and height from WIDTHxHEIGHT.

    Raises:
        ArgumentError: the text is something else.
    """
    match = re.match(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})\Z", text)
    if match is None:
        raise ArgumentError("--frame-size %s is not a size" % text[:40], "write it as 640x480: width, then height")
    return int(match.group(1)), int(match.group(2))


def raw(stream: Any, width: int, height: int) -> Iterator[Array]:
    """Yield the frames of raw RGB pixels: uint8 [height, width, 3].

    Args:
        stream: a binary stream.
        width: of a frame, in pixels.
        height: of a frame, in pixels.

    Raises:
        ImageError: the last frame is not complete.
    """
    size = width * height * 3
    reader = _Reader(stream)
    while reader.more():
        yield np.frombuffer(reader.take(size), np.uint8).reshape(height, width, 3)


def jpegs(stream: Any) -> Iterator[bytes]:
    """Yield the JPEG images of a stream, undecoded.

    Args:
        stream: a binary stream.

    Raises:
        ImageError: something else is between them, one is larger than MAX_BYTES, or the last one is not complete.
    """
    reader = _Reader(stream)
    while reader.more():
        yield _jpeg(reader)


def _jpeg(reader: _Reader) -> bytes:
    """Read one image, segment by segment: previews in its metadata are images too (ITU T.81, B.1)."""
    parts = [reader.take(2)]
    if parts[0] != _START:
        hint = "let ffmpeg write them: -f image2pipe -c:v mjpeg -; or give --frame-size for raw pixels"
        raise ImageError("the stream has no JPEG image where one must begin", hint)
    length = 2
    while True:
        marker = reader.take(2)
        if marker[0] != 0xFF:
            raise ImageError("a JPEG image of the stream is damaged", "look at what writes the stream")
        parts.append(marker)
        length += 2
        if marker[1] == _END:
            return b"".join(parts)
        if marker[1] not in _WITHOUT_LENGTH:
            size = reader.take(2)
            segment = reader.take(max(int.from_bytes(size, "big") - 2, 0))
            parts += [size, segment]
            length += 2 + len(segment)
        if marker[1] == _SCAN:
            scan = reader.until_marker(MAX_BYTES - length)
            parts.append(scan)
            length += len(scan)
        if length > MAX_BYTES:
            raise ImageError("a frame of the stream has more than %d bytes" % MAX_BYTES, "send smaller frames")


class _Reader:
    """Reads exact numbers of bytes from a stream."""

    def __init__(self, stream: Any) -> None:
        self._read = getattr(stream, "read1", stream.read)
        self._buffer = b""

    def more(self) -> bool:
        """Return whether there are more bytes."""
        return bool(self._buffer) or self._fill()

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        while len(self._buffer) < count:
            self._need(CHUNK)
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def until_marker(self, most: int) -> bytes:
        """Return the bytes in front of the next marker that is not part of compressed data (ITU T.81, F.1.2.3)."""
        start = 0
        while True:
            place = self._buffer.find(b"\xff", start)
            if place < 0 or place + 1 >= len(self._buffer):
                start = max(len(self._buffer) - 1, 0)
                if start > most:
                    raise ImageError("a frame of the stream has more than %d bytes" % MAX_BYTES, "send smaller frames")
                self._need(CHUNK)
                continue
            following = self._buffer[place + 1]
            if following == 0 or following == 0xFF or 0xD0 <= following < 0xD8:
                start = place + (1 if following == 0xFF else 2)
                continue
            return self.take(place)

    def _need(self, count: int) -> None:
        if not self._fill(count):
            raise ImageError("the stream ends in the middle of a frame", "look at what writes the stream")

    def _fill(self, count: int = CHUNK) -> bool:
        chunk = self._read(count)
        self._buffer += chunk
        return bool(chunk)
