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
"""The largest JPEG image: 64 MB."""
MAX_PIXELS = 1 << 25
"""The largest frame of raw pixels: 33 million pixels, 100 MB."""
CHUNK = 1 << 16
"""The bytes of one read: the capacity of a pipe on Linux (pipe(7))."""
_START, _END = b"\xff\xd8", 0xD9
_SCAN = 0xDA
"""The marker that compressed data follow (ITU T.81, B.1.1.3)."""
_WITHOUT_LENGTH = (0x01, 0xD8, *range(0xD0, 0xD8))
"""Markers that no length follows (ITU T.81, B.1.1.3)."""
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
    reader = _Reader(stream)
    while reader.more():
        try:
            content = reader.take(size)
        except EOFError:
            what = "the stream ends after %d of its %d bytes" % (reader.waiting, size)
            raise ImageError(what, "compare --frame-size with the size that ffmpeg prints")
        yield np.frombuffer(content, np.uint8).reshape(height, width, 3)


def jpegs(stream: Any) -> Iterator[bytes]:
    """Yield the JPEG images of a stream, undecoded.

    Raises:
        ImageError: the stream has other data, an image larger than MAX_BYTES, or an incomplete image at its end.
    """
    reader = _Reader(stream)
    while reader.more():
        try:
            yield _jpeg(reader)
        except EOFError:
            raise ImageError("the stream ends in the middle of a JPEG image", _LOOK)


def _jpeg(reader: _Reader) -> bytes:
    """Read one image, segment by segment: previews in its metadata are images too (ITU T.81, B.1)."""
    parts = [reader.take(2)]
    if parts[0] != _START:
        hint = "let ffmpeg write them: -f image2pipe -c:v mjpeg -; or give --frame-size for raw pixels"
        raise ImageError("the stream has no JPEG image where one must begin", hint)
    length = 2
    while True:
        marker = _marker(reader)
        parts.append(marker)
        if marker[1] == _END:
            return b"".join(parts)
        if marker[1] not in _WITHOUT_LENGTH:
            size = reader.take(2)
            parts += [size, reader.take(max(int.from_bytes(size, "big") - 2, 0))]
            length += 4 + len(parts[-1])
        if marker[1] == _SCAN:
            parts.append(reader.until_marker(MAX_BYTES - length))
            length += len(parts[-1])
        if length > MAX_BYTES:
            raise _too_large()


def _marker(reader: _Reader) -> bytes:
    """Return the next marker. Any number of bytes 0xFF may be in front of it (ITU T.81, B.1.1.2)."""
    first = reader.take(1)
    second = reader.take(1)
    while second == b"\xff":
        second = reader.take(1)
    if first != b"\xff":
        raise ImageError("the JPEG image is damaged", _LOOK)
    return first + second


def _too_large() -> ImageError:
    return ImageError("the JPEG image has more than %d bytes" % MAX_BYTES, "send smaller frames")


class _Reader:
    def __init__(self, stream: Any) -> None:
        self._read = getattr(stream, "read1", stream.read)
        self._buffer = bytearray()

    @property
    def waiting(self) -> int:
        """The number of bytes that were read and not yet taken."""
        return len(self._buffer)

    def more(self) -> bool:
        """Return whether there are more bytes."""
        return bool(self._buffer) or self._fill()

    def take(self, count: int) -> bytes:
        """Return the next bytes, or raise an EOFError if the stream ends before."""
        while len(self._buffer) < count:
            self._need()
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def until_marker(self, most: int) -> bytes:
        """Return the bytes in front of the next marker that is not part of compressed data (ITU T.81, F.1.2.3).

        Raises:
            EOFError: the stream ends before the marker.
            ImageError: more than `most` bytes are in front of the marker.
        """
        start = 0
        while True:
            position = self._buffer.find(b"\xff", start)
            if position < 0 or position + 1 >= len(self._buffer):
                start = max(len(self._buffer) - 1, 0)
                if start > most:
                    raise _too_large()
                self._need()
                continue
            following = self._buffer[position + 1]
            if following == 0 or following == 0xFF or 0xD0 <= following < 0xD8:
                start = position + (1 if following == 0xFF else 2)
                continue
            return self.take(position)

    def _need(self) -> None:
        if not self._fill():
            raise EOFError

    def _fill(self) -> bool:
        chunk = self._read(CHUNK)
        self._buffer += chunk
        return bool(chunk)
