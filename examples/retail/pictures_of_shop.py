"""The pictures that the shop looks at: photos of a folder, the frames of a video file, a camera, or stdin.

Photos are decoded by Pillow, `.npy` arrays do not need it. Video files and cameras need OpenCV. Without it,
ffmpeg can write JPEG images to stdin.
"""

from __future__ import annotations

import os
import struct
import sys
import time
import zlib
from typing import Any, Iterator, NamedTuple, Optional, Tuple

import numpy as np

from deploy.contract import pictures
from deploy.contract.decoding import Decoding
from deploy.contract.errors import ArgumentError, DeviceError, ImageError
from deploy.runner import frames, images, samples
from deploy.runner.drawing import encoded

CAMERA = "camera:"
VIDEOS = (".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".mjpeg", ".mjpg")
TYPES = {b"\xff\xd8\xff": "image/jpeg", b"\x89PNG": "image/png", b"BM": "image/bmp", b"RIFF": "image/webp"}
"""Types of files that a browser shows, by their first bytes."""
MAX_FILE_BYTES = 1 << 26
"""Chosen: more than a photo of any camera has."""


class Picture(NamedTuple):
    """A picture.

    Attributes:
        name: its file or number, for people.
        image: the decoded sample.
        content: an image file of it, for a browser.
        content_type: the type of `content`.
    """

    name: str
    image: Any
    content: bytes
    content_type: str


def opened(source: str, decoding: Decoding, repeat: bool, interval_s: Optional[float]) -> Iterator[Picture]:
    """Yield the pictures of a source. A photo that cannot be decoded is reported and skipped.

    Args:
        source: a folder, a photo, a video file, `camera:NUMBER`, or `-` for JPEG images from stdin.
        decoding: how the bundle decodes images.
        repeat: whether the photos and video files start again at their end.
        interval_s: the time between pictures; None: one second between photos, none between frames.

    Raises:
        ArgumentError: there is no such source, or OpenCV is needed and not installed.
        ImageError: a stream has a damaged frame.
        OSError: a file cannot be read.
    """
    if source == samples.STDIN:
        return _paced(_stdin(decoding), interval_s or 0.0)
    if source.startswith(CAMERA) or source.lower().endswith(VIDEOS):
        return _paced(_video(_opencv(source), _target(source), decoding, repeat), interval_s or 0.0)
    if not os.path.exists(source):
        raise ArgumentError("%s does not exist" % source, "name a folder, a photo, a video, camera:0 or -")
    return _paced(_photos(samples.listed([source]), decoding, repeat), 1.0 if interval_s is None else interval_s)


def _paced(source_pictures: Iterator[Picture], interval_s: float) -> Iterator[Picture]:
    for picture in source_pictures:
        yield picture
        time.sleep(interval_s)


def _photos(paths: Any, decoding: Decoding, repeat: bool) -> Iterator[Picture]:
    while True:
        usable = 0
        for path in paths:
            try:
                yield _photo(path, decoding)
                usable += 1
            except (DeviceError, OSError) as error:
                print("shop: skipped: %s" % error, file=sys.stderr, flush=True)
        if not usable:
            raise ArgumentError("no photo can be used", "look at the messages above")
        if not repeat:
            return


def _photo(path: str, decoding: Decoding) -> Picture:
    image = samples.read(path, decoding)
    if not isinstance(image, np.ndarray) or image.ndim not in (2, 3):
        raise ImageError("%s is not an image" % path, "name photos")
    with open(path, "rb") as stream:
        content = stream.read(MAX_FILE_BYTES)
    content_type = next((TYPES[start] for start in TYPES if content.startswith(start)), None)
    if content_type is not None:
        return Picture(os.path.basename(path), image, content, content_type)
    return Picture(os.path.basename(path), image, *shown(image))


def _stdin(decoding: Decoding) -> Iterator[Picture]:
    for number, content in enumerate(frames.jpegs(sys.stdin.buffer)):
        image = pictures.decode(content, decoding.image_channels, images.MAX_PIXELS, decoding.orientation)
        yield Picture("frame %d" % (number + 1), image, bytes(content), "image/jpeg")


def _opencv(source: str) -> Any:
    try:
        import cv2
    except ImportError:
        hint = "python3 -m pip install opencv-python-headless; or: ffmpeg … -f image2pipe -c:v mjpeg - | … shop.py … -"
        raise ArgumentError("OpenCV is not installed, and %s needs it" % source, hint)
    return cv2


def _video(cv2: Any, target: Any, decoding: Decoding, repeat: bool) -> Iterator[Picture]:
    """Yield the frames of a video file, or of the camera of a number."""
    number = 0
    while True:
        capture = cv2.VideoCapture(target)
        first = number
        while True:
            is_there, frame = capture.read()
            if not is_there:
                break
            number += 1
            rgb = np.ascontiguousarray(frame[..., ::-1])
            image = pictures.to_grey(rgb) if decoding.image_channels == 1 else rgb
            yield Picture("frame %d" % number, image, *shown(rgb))
        capture.release()
        if number == first:
            raise ArgumentError("%s gives no frames" % target, "check the file, or the number of the camera")
        if not repeat or isinstance(target, int):
            return


def _target(source: str) -> Any:
    """Return what OpenCV opens: the number of a camera, or the path of a file."""
    if not source.startswith(CAMERA):
        return source
    number = source[len(CAMERA) :]
    if not (number.isascii() and number.isdigit() and len(number) < 4):
        raise ArgumentError("%s is not a camera" % source[:40], "write camera:0, camera:1, …")
    return int(number)


def shown(image: Any) -> Tuple[bytes, str]:
    """Return an image as a file for a browser, and its type: JPEG, or PNG without Pillow."""
    pixels = image if image.ndim == 3 else image[..., np.newaxis]
    if pixels.dtype != np.uint8:
        pixels = np.clip(np.nan_to_num(pixels.astype(np.float32)), 0, 255).astype(np.uint8)
    rgb = np.ascontiguousarray(np.broadcast_to(pixels[..., :3], pixels.shape[:2] + (3,)))
    try:
        return encoded(rgb, ".jpg"), "image/jpeg"
    except ImageError:
        return png(rgb), "image/png"


def png(rgb: Any) -> bytes:
    """Return an image uint8 [height, width, 3] as a PNG file (PNG specification: 5.3, 11.2, 11.3.1)."""
    height, width = rgb.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), rgb.reshape(height, -1)], axis=1)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return content


def parts(image: Any, rows: int, columns: int) -> Any:
    """Return the parts of a picture of a shelf, row by row; with 1 x 1 the picture itself."""
    if rows == columns == 1:
        return [image]
    height, width = image.shape[:2]
    if height < rows or width < columns:
        raise ImageError("the picture has %d x %d pixels" % (width, height), "use fewer parts in --shelf")
    tops = [height * row // rows for row in range(rows + 1)]
    lefts = [width * column // columns for column in range(columns + 1)]
    return [
        image[tops[row] : tops[row + 1], lefts[column] : lefts[column + 1]]
        for row in range(rows)
        for column in range(columns)
    ]
