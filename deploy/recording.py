"""A WAV file as a sound: float32 [samples] from -1 to 1, one channel. Anyone may have sent it.

The same numbers as training reads (`compress.data.sources.wav`, which names the specifications).
Runs on Python 3.7 with numpy.
"""

from __future__ import annotations

import struct
from typing import Any, Dict, Optional, Tuple, Union

import numpy as np

from deploy.contract.errors import ImageError
from deploy.contract.preprocessing import Array

Bytes = Union[bytes, bytearray]
Kind = Tuple[int, int]
"""The format of values, and their bits."""
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
MAX_RATE, MAX_CHANNELS, MAX_CHUNKS = 768000, 64, 10000
TYPES: Dict[Kind, str] = {
    (PCM, 8): "u1",
    (PCM, 16): "<i2",
    (PCM, 24): "u1",
    (PCM, 32): "<i4",
    (FLOAT, 32): "<f4",
    (FLOAT, 64): "<f8",
}
TODO = "send PCM of 8, 16, 24 or 32 bits, float of 32 or 64, or a .npy array"
_TAIL = bytes.fromhex("000000001000800000aa00389b71")
"""How the sub-format of an extensible file goes on behind its first two bytes (KSDATAFORMAT_SUBTYPE_*)."""


def recognized(content: Bytes) -> bool:
    """Whether a file begins as a WAV file does."""
    return content[:4] == b"RIFF" and content[8:12] == b"WAVE"


def sound(content: Bytes, rate: Optional[int] = None, channels: str = "mix") -> Array:
    """The sound in a WAV file.

    Args:
        content: the bytes of the file: PCM of 8, 16, 24 or 32 bits, or float of 32 or 64.
        rate: samples in a second that it must have, where that is known.
        channels: what becomes of several: "mix", their mean, or "first".

    Raises:
        ImageError: it is damaged, of another kind, empty, or of another rate.
    """
    form, data = _parts(content)
    found, count, kind = _format(form)
    if rate is not None and found != rate:
        what = "the WAV file has %d samples in a second, and the model takes %d" % (found, rate)
        raise ImageError(what, "record or resample it at that rate")
    block = count * kind[1] // 8
    frames = _values(data[: len(data) // block * block], kind).reshape(-1, count)
    if not len(frames):
        raise _broken("it has no samples")
    mono = frames[:, 0] if channels == "first" else frames.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise _broken("it has samples that are infinite or none")
    return mono


def _parts(content: Bytes) -> Tuple[Bytes, Bytes]:
    """What is in the chunks `fmt ` and `data`."""
    if not recognized(content):
        raise _broken("it does not begin with RIFF and WAVE")
    form: Optional[Bytes] = None
    place = 12
    for _ in range(MAX_CHUNKS):
        if place + 8 > len(content):
            break
        name, size = struct.unpack_from("<4sI", content, place)
        place += 8
        if name == b"data":
            if form is None:
                raise _broken("its values come before its format")
            if size > len(content) - place:
                raise _broken("it is cut off")
            return form, content[place : place + size]
        if name == b"fmt ":
            form = content[place : place + min(size, 40)]
        place += size + size % 2  # chunks begin at even places
    raise _broken("it has no values")


def _format(form: Bytes) -> Tuple[int, int, Kind]:
    """Rate, channels, and kind of the values."""
    if len(form) < 16:
        raise _broken("its format is cut off")
    tag, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", form)
    if tag == EXTENSIBLE and form[26:40] == _TAIL:
        tag = struct.unpack_from("<H", form, 24)[0]
    if (tag, bits) not in TYPES:
        raise _broken("it is of format %d with %d bits" % (tag, bits))
    if not 1 <= channels <= MAX_CHANNELS or not 1 <= rate <= MAX_RATE or block != channels * bits // 8:
        raise _broken("it has %d channels, %d frames in a second, %d bytes each" % (channels, rate, block))
    return rate, channels, (tag, bits)


def _values(data: Bytes, kind: Kind) -> Array:
    """All values of all channels: float32, full scale is -1 to 1."""
    raw: Any = np.frombuffer(data, TYPES[kind])
    bits = kind[1]
    if kind == (PCM, 24):
        padded = np.zeros((len(raw) // 3, 4), np.uint8)
        padded[:, 1:] = raw.reshape(-1, 3)
        raw = padded.view("<i4").ravel() >> 8
    values = raw.astype(np.float64 if bits > 16 else np.float32)
    if kind[0] == PCM:
        full = 2.0 ** (bits - 1)
        values = (values - full if bits == 8 else values) / values.dtype.type(full)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as such
        return values.astype(np.float32)


def _broken(reason: str) -> ImageError:
    return ImageError("the WAV file cannot be read: %s" % reason, TODO)
