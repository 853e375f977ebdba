"""Folders of recordings in WAV files.

The format: Microsoft and IBM, Multimedia Programming Interface and Data Specifications 1.0 (1991), and Microsoft,
Multiple Channel Audio Data and WAVE Files (2007) for WAVE_FORMAT_EXTENSIBLE.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.data import files
from compress.data.file_listing import LabelledFiles
from compress.data.source import Samples
from compress.errors import DataError

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
MAX_RATE, MAX_CHANNELS, MAX_CHUNKS = 768_000, 64, 10_000
MAX_TERM = 50_000
"""Largest term of the reduced ratio between two sample rates: memory and time grow with it. 44101 to 48000 Hz has a
smaller one."""
HALF = 10
"""Number of values on each side that scipy.signal.resample_poly uses, in multiples of the ratio's larger term."""
TYPES: dict[tuple[int, int], Any] = {(PCM, 8): "u1", (PCM, 16): "<i2", (PCM, 24): "u1", (PCM, 32): "<i4"}
TYPES |= {(FLOAT, 32): "<f4", (FLOAT, 64): "<f8"}
_TAIL = bytes.fromhex("000000001000800000aa00389b71")
"""The bytes of an extensible file's sub-format after the first two (KSDATAFORMAT_SUBTYPE_*)."""


class Wav(LabelledFiles):
    """A folder of WAV files, arranged as in `folder` or with a table of labels. PCM of 8, 16, 24 or 32 bits, or float.

    A sample is one channel of `seconds` at `rate`: float32 [samples]; full scale is -1 to 1.
    """

    name: ClassVar[str] = "wav"
    suffixes: ClassVar[tuple[str, ...]] = (".wav", ".wave")

    rate: Annotated[int, Field(ge=1, le=MAX_RATE)]
    """Sample rate in Hz."""
    seconds: Annotated[float, Field(gt=0, le=3600)]
    """Length of every sample in seconds. Longer recordings are cut; shorter ones are padded with silence at the end."""
    channels: Literal["mix", "first"] = "mix"
    """How several channels are reduced to one. mix: their mean. first: the first channel."""
    resample: bool = False
    """Resample recordings with another sample rate. By default they are refused."""

    @property
    def decoding(self) -> dict[str, Any]:
        """How the device decodes recordings."""
        return {"sound_channels": self.channels, "sound_rate": self.rate}

    def load(self) -> Samples:
        """Read labels from folders or a table; recordings are decoded when they are used."""
        opened = self.open_files()

        def read(index: int) -> NDArray[np.float32]:
            name = opened.listed[index].file
            with opened.tree.open(name) as stream:
                return self._decoded(stream, opened.tree.describe(name))

        return opened.samples(read, skip=self.corrupt == "skip")

    def _decoded(self, stream: BinaryIO, where: str) -> NDArray[np.float32]:
        sound = opened(stream, where)
        if sound.rate != self.rate and not self.resample:
            raise DataError(
                f"has {sound.rate} samples per second",
                where=where,
                allowed=str(self.rate),
                hint="set resample: true, or another rate",
            )
        count = round(self.seconds * self.rate)
        common = math.gcd(self.rate, sound.rate)
        up, down = self.rate // common, sound.rate // common
        if max(up, down) > MAX_TERM:
            what = f"has {sound.rate} samples per second, which are to {self.rate} as {down} to {up}"
            raise DataError(
                what, where=where, allowed=f"a ratio of numbers up to {MAX_TERM}", hint="resample it before"
            )
        beyond = 0 if up == down else math.ceil(HALF * max(up, down) / up) + 1  # that the last values depend on
        values = sound.read(math.ceil(count * down / up) + beyond)
        mono = values[:, 0] if self.channels == "first" else values.mean(axis=1, dtype=np.float32)
        if up != down:
            from scipy.signal import resample_poly

            mono = resample_poly(mono, up, down).astype(np.float32)
        return np.pad(mono[:count], (0, max(count - len(mono), 0)))


@dataclass(frozen=True)
class Sound:
    """An open WAV file; the stream is at its values.

    Attributes:
        stream: the file.
        where: what to call it.
        rate: frames per second.
        channels: values in a frame.
        kind: format and bits of a value.
        frames: how many there are.
    """

    stream: BinaryIO
    where: str
    rate: int
    channels: int
    kind: tuple[int, int]
    frames: int

    def read(self, most: int) -> NDArray[np.float32]:
        """Read the first frames: [frames, channels]; full scale is -1 to 1.

        Raises:
            DataError: there are fewer than the file says.
        """
        count = min(most, self.frames)
        size = count * self.channels * self.kind[1] // 8
        content = self.stream.read(size)
        if len(content) != size:
            raise _broken("it is cut short", self.where)
        raw: NDArray[Any] = np.frombuffer(content, TYPES[self.kind])
        if self.kind == (PCM, 24):
            parts = raw.reshape(-1, 3).astype(np.int32)
            raw = (parts[:, 0] << 8 | parts[:, 1] << 16 | parts[:, 2] << 24) >> 8
        values: NDArray[Any] = raw.astype(np.float64 if self.kind[1] > 16 else np.float32)
        if self.kind[0] == PCM:
            full = 2.0 ** (self.kind[1] - 1)
            values = (values - full if self.kind[1] == 8 else values) / values.dtype.type(full)
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as such
            return values.astype(np.float32).reshape(count, self.channels)


def opened(stream: BinaryIO, where: str) -> Sound:
    """Read the header of a WAV file, up to its values.

    Raises:
        DataError: it is none, damaged, cut short, or of another kind than PCM and float.
    """
    total = files.size_of(stream)
    magic = stream.read(12)
    if magic[:4] != b"RIFF" or magic[8:] != b"WAVE":
        raise _broken("it does not begin with RIFF and WAVE", where)
    form: bytes | None = None
    for _ in range(MAX_CHUNKS):
        head = stream.read(8)
        if len(head) < 8:
            break
        name, size = struct.unpack("<4sI", head)
        if name == b"data":
            if form is None:
                raise _broken("its values come before its format", where)
            if size > total - stream.tell():
                raise _broken(f"it is cut short: {size:,} bytes of values, {total - stream.tell():,} are there", where)
            rate, channels, kind = _format(form, where)
            frames = size // (channels * kind[1] // 8)
            if not frames:
                raise _broken("it has no frames", where)
            return Sound(stream, where, rate, channels, kind, frames)
        if name == b"fmt ":
            form = stream.read(min(size, 40))
            stream.seek(-len(form), 1)
        stream.seek(size + size % 2, 1)  # chunks begin at even offsets
    raise _broken("it has no values", where)


def _format(form: bytes, where: str) -> tuple[int, int, tuple[int, int]]:
    """Return rate, channels, and type of the values."""
    if len(form) < 16:
        raise _broken("its format is cut short", where)
    tag, channels, rate, _, block, bits = struct.unpack("<HHIIHH", form[:16])
    if tag == EXTENSIBLE and len(form) >= 40 and form[26:40] == _TAIL:
        (tag,) = struct.unpack("<H", form[24:26])
    if (tag, bits) not in TYPES:
        allowed = "PCM of 8, 16, 24 or 32 bits, float of 32 or 64"
        raise DataError(f"is of format {tag} with {bits} bits", where=where, allowed=allowed, hint="convert it")
    if not 1 <= channels <= MAX_CHANNELS or not 1 <= rate <= MAX_RATE or block != channels * bits // 8:
        raise _broken(f"{channels} channels, {rate} frames per second, {block} bytes each", where)
    return rate, channels, (tag, bits)


def _broken(reason: str, where: str) -> DataError:
    return DataError(f"is not a readable WAV file: {reason}", where=where, hint="remove or repair it")
