"""Folders of recordings in WAV files."""

from __future__ import annotations

import math
from typing import Annotated, Any, BinaryIO, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.core.errors import DataError
from compress.data import files
from compress.data.file_listing import LabelledFiles
from compress.data.file_tree import Tree
from compress.data.source import Samples
from deploy.contract import recording
from deploy.contract.recording import MAX_RATE, Recording, RecordingError

MAX_TERM = 50_000
"""Largest term of the reduced ratio between two sample rates: memory and time grow with it. 44101 to 48000 Hz has a
smaller one."""
HALF = 10
"""Number of values on each side that scipy.signal.resample_poly uses, in multiples of the ratio's larger term."""


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
        return self.samples(self._read)

    def _read(self, tree: Tree, name: str) -> NDArray[np.float32]:
        with tree.open(name) as stream:
            return self._decoded(stream, tree.describe(name))

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
        try:
            values = sound.read(math.ceil(count * down / up) + beyond)
        except RecordingError as error:
            raise _broken(error, where) from error
        mono = values[:, 0] if self.channels == "first" else values.mean(axis=1, dtype=np.float32)
        if up != down:
            from scipy.signal import resample_poly

            mono = resample_poly(mono, up, down).astype(np.float32)
        return np.pad(mono[:count], (0, max(count - len(mono), 0)))


def opened(stream: BinaryIO, where: str) -> Recording:
    """Read the header of a WAV file, up to its values.

    Raises:
        DataError: the file is not a WAV file, damaged, cut short, or has another format than PCM and float.
    """
    try:
        return recording.opened(stream, files.size_of(stream))
    except RecordingError as error:
        raise _broken(error, where) from error


def _broken(error: RecordingError, where: str) -> DataError:
    allowed = "PCM of 8, 16, 24 or 32 bits, float of 32 or 64"
    return DataError(f"is not a readable WAV file: {error}", where=where, allowed=allowed, hint="remove or repair it")
