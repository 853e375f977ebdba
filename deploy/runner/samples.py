"""The samples of `runner.pyz run`: files, folders, and the frames of a video or the lines of a text from
stdin."""

from __future__ import annotations

import os
import sys
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from deploy.contract import pictures, recording, text
from deploy.contract.bundle import Bundle
from deploy.contract.decoding import AS_THEY_ARE, Decoding
from deploy.contract.errors import ArgumentError, ImageError
from deploy.contract.text import MAX_BYTES
from deploy.runner import frames, images

STDIN = "-"
SOUNDS = (".wav", ".wave")
IN_FOLDERS = (".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".webp", ".tif", ".tiff", ".npy", ".npz", *SOUNDS)
"""The suffixes of files that are samples in a folder."""
TEXTS_IN_FOLDERS = (".txt", ".npy")
"""The same if the model takes texts."""


def listed(paths: Sequence[str], decoding: Decoding = AS_THEY_ARE) -> List[str]:
    """Return the paths with the files of each folder and its subfolders instead of the folder, sorted by name.

    Of a folder, the files with a suffix of a sample are taken. Hidden files are not: systems put files of their own
    next to photos.

    Raises:
        ArgumentError: a folder has no samples.
    """
    suffixes = IN_FOLDERS if decoding.text_bytes is None else TEXTS_IN_FOLDERS
    files: List[str] = []
    for path in paths:
        files += _in_folder(path, suffixes) if os.path.isdir(path) else [path]
    return files


def named(paths: Sequence[str], opened: Bundle, frame_size: Optional[str] = None) -> Iterator[Tuple[str, Any]]:
    """Yield samples with their names, one at a time: a video may have no end.

    The paths are files, or STDIN alone: the frames of a video (JPEG images, or raw frames of `frame_size`,
    WIDTHxHEIGHT), or lines of text for a model that takes texts. Without paths: the golden inputs of the bundle.

    Raises:
        ArgumentError: there are no samples, or STDIN is not alone.
        ImageError: a sample cannot be decoded.
    """
    if frame_size is not None and list(paths) != [STDIN]:
        raise ArgumentError("--frame-size belongs to frames from stdin", "name - as the only sample")
    if STDIN in paths:
        if len(paths) > 1:
            raise ArgumentError("- is stdin, and there are other samples", "name - alone")
        if opened.decoding.text_bytes is not None and frame_size is not None:
            raise ArgumentError("--frame-size belongs to images, and the bundle takes texts", "leave out --frame-size")
        if opened.decoding.text_bytes is not None:
            yield from _lines(opened.decoding.text_bytes)
        else:
            yield from _frames(opened.decoding, frame_size)
        return
    if not paths:
        golden = opened.manifest["golden"]["inputs"]
        if not golden:
            raise ArgumentError("the bundle has no golden inputs", "name the files of samples after the bundle")
        for name in golden:
            yield name, opened.array(name)
    for path in paths:
        yield path, read(path, opened.decoding)


def _in_folder(folder: str, suffixes: Tuple[str, ...]) -> List[str]:
    def refuse(error: OSError) -> None:
        raise error

    files = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        visible = [name for name in sorted(names) if not name.startswith(".")]
        files += [os.path.join(parent, name) for name in visible if os.path.splitext(name)[1].lower() in suffixes]
    if not files:
        raise ArgumentError("the folder %s has no samples" % folder, "it needs files of %s" % ", ".join(suffixes))
    return files


def _lines(size: int) -> Iterator[Tuple[str, Any]]:
    """Yield the lines of stdin as texts of `size` bytes, without blank lines. A long line is cut."""
    if sys.stdin is None:
        raise ArgumentError("stdin is closed", "send lines of text to it")
    number = text_count = 0
    is_continued = False
    while True:
        line = sys.stdin.buffer.readline(MAX_BYTES + 1)  # a text that is cut needs the byte after its end
        if not line:
            break
        is_start, is_continued = not is_continued, not line.endswith(b"\n")
        number += is_start
        if is_start and line.strip():
            text_count += 1
            yield "line-%06d" % number, text.sample_of(line.rstrip(b"\r\n"), size)
    if not text_count:
        raise ImageError("stdin has no text", "send lines of text in UTF-8 to it")


def _frames(decoding: Decoding, frame_size: Optional[str]) -> Iterator[Tuple[str, Any]]:
    """Yield the frames of stdin, decoded. An error names the frame."""
    if sys.stdin is None:
        raise ArgumentError("stdin is closed", "send the frames of a video to it")
    stream = sys.stdin.buffer
    encoded: Iterator[Any] = frames.jpegs(stream)
    if frame_size is not None:
        encoded = frames.raw(stream, *frames.size_of(frame_size))
    number = 0
    while True:
        try:
            frame = next(encoded, None)
            if isinstance(frame, bytes):
                frame = pictures.decode(frame, decoding.image_channels, images.MAX_PIXELS, decoding.orientation)
            elif frame is not None and decoding.image_channels == 1:
                frame = pictures.to_grey(frame)
        except ImageError as error:
            raise ImageError("frame %d of stdin: %s" % (number + 1, error.what), error.hint)
        if frame is None:
            break
        number += 1
        yield "frame-%06d" % number, frame
    if number == 0:
        raise ImageError("stdin has no frames", "look at the messages of the program that writes to it")


def read(path: str, decoding: Decoding) -> Any:
    """Read a sample: .npy; .npz for several inputs; a .wav file; or an image if Pillow is installed.

    Raises:
        ImageError: the file cannot be decoded.
    """
    if path.lower().endswith(".npy"):
        return _array(path)
    with open(path, "rb") as stream:
        content = stream.read()
    try:
        if path.lower().endswith(SOUNDS) and decoding.text_bytes is None:
            return recording.decode_wav(content, decoding.sound_rate, decoding.sound_channels)
        return images.decode_file(content, decoding)
    except ImageError as error:
        raise ImageError("%s: %s" % (path, error.what), error.hint)


def _array(path: str) -> Any:
    with open(path, "rb") as stream:
        try:
            return np.lib.format.read_array(stream, allow_pickle=False)
        except (ValueError, EOFError, MemoryError) as error:
            raise ImageError("%s is not an array: %s" % (path, error), "write it with numpy.save")
