"""The reader of WAV files, for training and for the device. The content is not trusted.

The format: Microsoft and IBM, Multimedia Programming Interface and Data Specifications 1.0 (1991), and Microsoft,
Multiple Channel Audio Data and WAVE Files (2007) for WAVE_FORMAT_EXTENSIBLE. A program that writes to a pipe cannot
return to the header, so the sizes there are only a start: such a recording is read to its end, as sox, ffmpeg and
libsndfile do.
"""

from __future__ import annotations

import dataclasses
import io
import struct
from typing import Any, BinaryIO, Dict, Optional, Tuple, Union

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
ENDLESS = 0x7FFFF000
"""The smallest size that stands for an unknown one: sox writes this size to a pipe, arecord 2^31, ffmpeg 2^32 - 1."""
_TAIL = bytes.fromhex("000000001000800000aa00389b71")
"""The end of the sub-format of an extensible file, after its first two bytes (KSDATAFORMAT_SUBTYPE_*)."""


class RecordingError(ValueError):
    """The file is not a WAV file, is damaged or cut short, or has another format than PCM and float."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """An open WAV file; the stream is at its values. A frame has a value for each channel; `rate` is in Hz."""

    stream: BinaryIO
    rate: int
    channels: int
    sample_format: SampleFormat
    frames: int

    def read(self, most: int) -> Array:
        """Read the first frames: float32 [frames, channels]; full scale is -1 to 1.

        Raises:
            RecordingError: there are fewer frames than the file says.
        """
        count = min(most, self.frames)
        size = count * self.channels * self.sample_format[1] // 8
        content = self.stream.read(size)
        if len(content) != size:
            raise RecordingError("it is cut short")
        return _values(content, self.sample_format).reshape(count, self.channels)


def is_wav(content: Bytes) -> bool:
    """Return whether a file begins like a WAV file."""
    return content[:4] == b"RIFF" and content[8:12] == b"WAVE"


def opened(stream: BinaryIO, total: int) -> Recording:
    """Read the header of a WAV file of `total` bytes from its start, up to its values.

    Raises:
        RecordingError: the file is damaged, or has another format than PCM and float.
    """
    magic = stream.read(12)
    if not is_wav(magic):
        raise RecordingError("it does not begin with RIFF and WAVE")
    header: Optional[bytes] = None
    for _ in range(MAX_CHUNKS):
        head = stream.read(8)
        if len(head) < 8:
            break
        name, size = struct.unpack("<4sI", head)
        if name == b"data":
            if header is None:
                raise RecordingError("its values come before its format")
            rate, channels, sample_format = _format(header)
            whole = struct.unpack_from("<I", magic, 4)[0]
            is_known = whole < ENDLESS and whole + 8 >= total
            size = _bytes_of_values(size, total - stream.tell(), is_known)
            frames = size // (channels * sample_format[1] // 8)
            if not frames:
                raise RecordingError("it has no frames")
            return Recording(stream, rate, channels, sample_format, frames)
        if name == b"fmt ":
            header = stream.read(min(size, 40))
            stream.seek(-len(header), 1)
        stream.seek(size + size % 2, 1)  # chunks begin at even offsets
    raise RecordingError("it has no values")


def decode_wav(content: Bytes, rate: Optional[int] = None, channels: str = "mix") -> Array:
    """Decode a WAV file to one channel: float32 [samples].

    Args:
        content: the bytes of the file: PCM with 8, 16, 24 or 32 bits, or float with 32 or 64 bits.
        rate: the samples per second that the file must have; None: any.
        channels: the channel of a file with several: "mix", their mean, or "first".

    Raises:
        ImageError: the file is not a WAV file, damaged, empty, or has another format or rate.
    """
    if not is_wav(content):
        raise ImageError("it is not a WAV file: it does not begin with RIFF and WAVE", HINT)
    try:
        sound = opened(io.BytesIO(content), len(content))
        if rate is not None and sound.rate != rate:
            what = "the WAV file has %d samples per second, and the model takes %d" % (sound.rate, rate)
            raise ImageError(what, "record or resample it at that rate")
        frames = sound.read(sound.frames)
    except RecordingError as error:
        raise ImageError("the WAV file cannot be read: %s" % error, HINT)
    mono = frames[:, 0] if channels == "first" else frames.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise ImageError("the WAV file cannot be read: some samples are NaN or infinite", HINT)
    return mono


def _bytes_of_values(size: int, available: int, is_known: bool) -> int:
    """Return the number of bytes of the chunk `data`, which says `size`; `is_known`: so does the header of the file.

    Raises:
        RecordingError: the file is cut short.
    """
    if (size > available and size >= ENDLESS) or (size == 0 and not is_known):
        return available
    if size > available:
        raise RecordingError("it is cut short: {:,} bytes of values, {:,} are there".format(size, available))
    return size


def _format(header: bytes) -> Tuple[int, int, SampleFormat]:
    """Return the sample rate, the number of channels, and the format of the values."""
    if len(header) < 16:
        raise RecordingError("its format is cut short")
    tag, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", header)
    if tag == EXTENSIBLE and header[26:40] == _TAIL:
        tag = struct.unpack_from("<H", header, 24)[0]
    if (tag, bits) not in TYPES:
        raise RecordingError("it is of format %d with %d bits" % (tag, bits))
    if not 1 <= channels <= MAX_CHANNELS or not 1 <= rate <= MAX_RATE or frame_bytes != channels * bits // 8:
        what = "it has %d channels, %d frames per second, %d bytes each"
        raise RecordingError(what % (channels, rate, frame_bytes))
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
