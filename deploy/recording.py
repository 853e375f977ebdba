"""Decoding of WAV files to one channel, float32 [samples] from -1 to 1. The content is not trusted.

The values equal those of training (`compress.data.sources.wav`, which names the specifications).
"""

from __future__ import annotations

import struct
from typing import Any, Dict, Optional, Tuple, Union

import numpy as np

from deploy.contract.errors import ImageError
from deploy.contract.preprocessing import Array

Bytes = Union[bytes, bytearray]
SampleFormat = Tuple[int, int]
"""The format tag, and the bits per value."""
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
MAX_RATE, MAX_CHANNELS, MAX_CHUNKS = 768000, 64, 10000
TYPES: Dict[SampleFormat, str] = {
    (PCM, 8): "u1",
    (PCM, 16): "<i2",
    (PCM, 24): "u1",
    (PCM, 32): "<i4",
    (FLOAT, 32): "<f4",
    (FLOAT, 64): "<f8",
}
HINT = "send PCM of 8, 16, 24 or 32 bits, float of 32 or 64, or a .npy array"
_TAIL = bytes.fromhex("000000001000800000aa00389b71")
"""The end of the sub-format of an extensible file, after its first two bytes (KSDATAFORMAT_SUBTYPE_*)."""


def is_wav(content: Bytes) -> bool:
    """Return whether a file begins like a WAV file."""
    return content[:4] == b"RIFF" and content[8:12] == b"WAVE"


def decode_wav(content: Bytes, rate: Optional[int] = None, channels: str = "mix") -> Array:
    """Decode a WAV file.

    Args:
        content: the bytes of the file: PCM with 8, 16, 24 or 32 bits, or float with 32 or 64 bits.
        rate: the samples per second that the file must have; None: any.
        channels: the channel of a file with several: "mix", their mean, or "first".

    Raises:
        ImageError: the file is damaged, empty, or has another format or rate.
    """
    header, data = _chunks(content)
    file_rate, count, sample_format = _format(header)
    if rate is not None and file_rate != rate:
        what = "the WAV file has %d samples per second, and the model takes %d" % (file_rate, rate)
        raise ImageError(what, "record or resample it at that rate")
    frame_bytes = count * sample_format[1] // 8
    frames = _values(data[: len(data) // frame_bytes * frame_bytes], sample_format).reshape(-1, count)
    if not len(frames):
        raise _invalid("it has no samples")
    mono = frames[:, 0] if channels == "first" else frames.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise _invalid("some samples are NaN or infinite")
    return mono


def _chunks(content: Bytes) -> Tuple[Bytes, Bytes]:
    """Return the content of the chunks `fmt ` and `data`."""
    if not is_wav(content):
        raise _invalid("it does not begin with RIFF and WAVE")
    header: Optional[Bytes] = None
    offset = 12
    for _ in range(MAX_CHUNKS):
        if offset + 8 > len(content):
            break
        name, size = struct.unpack_from("<4sI", content, offset)
        offset += 8
        if name == b"data":
            if header is None:
                raise _invalid("its values come before its format")
            if size > len(content) - offset:
                raise _invalid("it is truncated")
            return header, content[offset : offset + size]
        if name == b"fmt ":
            header = content[offset : offset + min(size, 40)]
        offset += size + size % 2  # chunks begin at even offsets
    raise _invalid("it has no values")


def _format(header: Bytes) -> Tuple[int, int, SampleFormat]:
    """Return sample rate, number of channels, and the format of the values."""
    if len(header) < 16:
        raise _invalid("its format is truncated")
    tag, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", header)
    if tag == EXTENSIBLE and header[26:40] == _TAIL:
        tag = struct.unpack_from("<H", header, 24)[0]
    if (tag, bits) not in TYPES:
        raise _invalid("its format is %d with %d bits" % (tag, bits))
    if not 1 <= channels <= MAX_CHANNELS or not 1 <= rate <= MAX_RATE or frame_bytes != channels * bits // 8:
        raise _invalid("it has %d channels, %d frames per second, %d bytes each" % (channels, rate, frame_bytes))
    return rate, channels, (tag, bits)


def _values(data: Bytes, sample_format: SampleFormat) -> Array:
    """Return the values of all channels as float32; full scale is -1 to 1."""
    raw: Any = np.frombuffer(data, TYPES[sample_format])
    tag, bits = sample_format
    if sample_format == (PCM, 24):
        padded = np.zeros((len(raw) // 3, 4), np.uint8)
        padded[:, 1:] = raw.reshape(-1, 3)
        raw = padded.view("<i4").ravel() >> 8
    values = raw.astype(np.float64 if bits > 16 else np.float32)
    if tag == PCM:
        full_scale = 2.0 ** (bits - 1)
        if bits == 8:  # PCM with 8 bits is unsigned
            values -= values.dtype.type(full_scale)
        values /= values.dtype.type(full_scale)
    with np.errstate(over="ignore"):  # a float64 above the range of float32 becomes infinite, which is refused
        return values.astype(np.float32)


def _invalid(reason: str) -> ImageError:
    return ImageError("the WAV file cannot be read: %s" % reason, HINT)
