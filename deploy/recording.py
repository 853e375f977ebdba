"""A WAV file as a sound: float32 [samples] from -1 to 1, one channel. Anyone may have sent it.

Runs on Python 3.7 with numpy.
"""

from __future__ import annotations

import io
import struct
import wave
from typing import Optional, Union

import numpy as np

from deploy.errors import ImageError
from deploy.preprocessing import Array


def recognized(content: Union[bytes, bytearray]) -> bool:
    """Whether a file begins as a WAV file does."""
    return content[:4] == b"RIFF" and content[8:12] == b"WAVE"


def sound(content: Union[bytes, bytearray], rate: Optional[int] = None) -> Array:
    """The sound in a WAV file of whole numbers: of several channels, their mean.

    Args:
        content: the bytes of the file: PCM of 8, 16, 24 or 32 bits.
        rate: samples in a second that it must have, where that is known.

    Raises:
        ImageError: it is damaged, of another kind, empty, or of another rate.
    """
    try:
        with wave.open(io.BytesIO(content)) as file:
            width, channels, found = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(len(content))
    except (wave.Error, EOFError, struct.error, ValueError, ZeroDivisionError, RuntimeError) as error:
        todo = "send PCM of 8, 16, 24 or 32 bits, or a .npy array"
        raise ImageError("the WAV file cannot be read: %s" % (error or "it is cut off"), todo)
    if rate is not None and found != rate:
        what = "the WAV file has %d samples in a second, and the model takes %d" % (found, rate)
        raise ImageError(what, "record or resample it at that rate")
    data = data[: len(data) // (width * channels) * (width * channels)]
    if not data or width not in (1, 2, 3, 4):
        raise ImageError("the WAV file has no samples of 8 to 32 bits", "send another one")
    values = _whole(data, width).reshape(-1, channels).astype(np.float32)
    return values.mean(axis=1) / np.float32(1 << (8 * width - 1))


def _whole(data: bytes, width: int) -> Array:
    """The samples as whole numbers around 0."""
    if width == 1:  # the only unsigned ones
        return np.frombuffer(data, np.uint8).astype(np.int16) - 128
    if width == 3:
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return padded.view("<i4").ravel() >> 8
    return np.frombuffer(data, "<i%d" % width)
