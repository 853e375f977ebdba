"""The samples of `runner.pyz run`: files, folders of images, and the frames of a video from stdin."""

from __future__ import annotations

import os
import sys
from typing import Any, Iterator, Optional, Sequence, Tuple

import numpy as np

from deploy import frames, images
from deploy.contract import pictures
from deploy.contract.bundle import Bundle
from deploy.contract.decoding import Decoding
from deploy.contract.errors import ArgumentError, ImageError

STDIN = "-"
IN_FOLDERS = (".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".webp", ".npy", ".wav")
"""The suffixes of files that are samples in a folder."""


def named(paths: Sequence[str], opened: Bundle, frame_size: Optional[str] = None) -> Iterator[Tuple[str, Any]]:
    """Yield samples with their names.

    Args:
        paths: files; folders, of which the files with a suffix of a sample are taken, sorted by name; STDIN for the
            frames of a video. Without any: the golden inputs of the bundle.
        opened: the bundle.
        frame_size: WIDTHxHEIGHT of raw frames in STDIN; None: they are JPEG images.

    Raises:
        ArgumentError: there are no samples, or STDIN is not alone.
        ImageError: a sample cannot be decoded.
        OSError: a file cannot be read.
    """
    if frame_size is not None and list(paths) != [STDIN]:
        raise ArgumentError("--frame-size belongs to frames from stdin", "name - as the only sample")
    if STDIN in paths:
        if len(paths) > 1:
            raise ArgumentError("- is stdin, and there are other samples", "name - alone")
        yield from _frames(opened.decoding, frame_size)
        return
    if not paths:
        golden = opened.manifest["golden"]["inputs"]
        if not golden:
            raise ArgumentError("the bundle has no golden inputs", "name the files of samples after the bundle")
        for name in golden:
            yield name, opened.array(name)
    for path in paths:
        for file in _files(path):
            yield file, read(file, opened.decoding)


def _files(path: str) -> Sequence[str]:
    """Return a file, or the files of a folder."""
    if not os.path.isdir(path):
        return [path]
    found = sorted(name for name in os.listdir(path) if os.path.splitext(name)[1].lower() in IN_FOLDERS)
    if not found:
        raise ArgumentError("the folder %s has no samples" % path, "it needs files " + ", ".join(IN_FOLDERS))
    return [os.path.join(path, name) for name in found]


def _frames(decoding: Decoding, frame_size: Optional[str]) -> Iterator[Tuple[str, Any]]:
    stream = sys.stdin.buffer
    found: Iterator[Any] = frames.jpegs(stream)
    if frame_size is not None:
        found = frames.raw(stream, *frames.size_of(frame_size))
    for number, frame in enumerate(found, 1):
        decoded = frame
        if frame_size is None:
            decoded = pictures.decode(frame, decoding.image_channels, images.MAX_PIXELS, decoding.orientation)
        elif decoding.image_channels == 1:
            decoded = pictures.to_grey(frame)
        yield "frame-%06d" % number, decoded


def read(path: str, decoding: Decoding) -> Any:
    """Read a sample: .npy; .npz for several inputs; a .wav file; or an image if Pillow or OpenCV is installed.

    Raises:
        ImageError: the file cannot be decoded.
        OSError: the file cannot be read.
    """
    if path.endswith(".npy"):
        try:
            return np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ImageError("%s is not an array: %s" % (path, error), "write it with numpy.save")
    with open(path, "rb") as stream:
        content = stream.read()
    try:
        return images.decode_file(content, decoding)
    except ImageError as error:
        raise ImageError("%s: %s" % (path, error.what), error.hint)
