"""The steps for sounds: length, spectrogram, log_mel, mfcc. A sound is float32 [samples]; the result is an image.

All values are computed in float64 and rounded once. The differences between numpy versions and processors in Fourier
transforms and sums are then far smaller than one step of an 8-bit input.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Tuple

import numpy as np

from deploy.contract.step import (
    Array,
    Flag,
    Number,
    Numbers,
    Plan,
    PreprocessingError,
    Shape,
    Step,
    Whole,
    Word,
    count,
    key,
)

_BLOCK = 256
"""The number of frames in one transform, which limits the memory for intermediate values."""
_MOST_WEIGHTS = 1 << 24
"""The limit for twice the number of weights of the mel bands: 64 MB."""


@dataclasses.dataclass(frozen=True)
class Length(Step):
    """Cut or pad the first axis to the length `samples`."""

    samples: int = key(Whole(1, 1 << 24))
    """Number of samples of the result; for a series, of rows."""
    keep: str = key(Word("start", "centre", "end"), "start")
    """The part that is kept of a longer sample, and the position of a shorter one in the result."""
    fill: float = key(Number(), 0.0)
    """The value of the padding."""

    def planned(self, shape: Shape) -> Plan:
        """Return the shape of the result; of a longer sample, it is a view."""
        result = (self.samples,) + shape[1:]
        return Plan(result, 0 if shape[0] >= self.samples else count(result))

    def __call__(self, sample: Array) -> Array:
        """Return the changed sample."""
        more = len(sample) - self.samples
        first = {"start": 0, "centre": abs(more) // 2, "end": abs(more)}[self.keep]
        if more >= 0:
            return sample[first : first + self.samples]
        result = np.full((self.samples,) + sample.shape[1:], self.fill, np.float32)
        result[first : first + len(sample)] = sample
        return result


@dataclasses.dataclass(frozen=True)
class Spectrogram(Step):
    """Compute the magnitude of each frequency over time: [frames, fft / 2 + 1, 1], from a sound [samples].

    The result equals `tf.signal.stft`: the first frame begins at the first sample, incomplete frames are left out, and
    each frame is padded with zeros to `fft`. With `centre`, it equals librosa: frames are centred, and the sound is
    padded at both ends. An int16 sound is first divided by 32768, as WAV files are when they are read.
    """

    frame: int = key(Whole(2, 1 << 16))
    """Number of samples of a frame."""
    step: int = key(Whole(1, 1 << 16))
    """Number of samples from the start of a frame to the start of the next."""
    fft: Any = key(Whole(2, 1 << 16), None)
    """Length of the Fourier transform; by default the smallest power of two that is not less than a frame."""
    window: str = key(Word("hann", "hamming", "povey", "none"), "hann")
    """The window function; povey, from Kaldi, is hann to the power of 0.85."""
    periodic: bool = key(Flag(), True)
    """Whether the window is periodic (TensorFlow, librosa) or symmetric (Kaldi)."""
    centre: bool = key(Flag(), False)
    """Whether the sound is padded by half a transform at both ends, as in librosa."""
    fill: str = key(Word("zeros", "reflect"), "zeros")
    """The padding of `centre`."""
    remove_mean: bool = key(Flag(), False)
    """Whether the mean of each frame is subtracted first, as in Kaldi."""
    preemphasis: float = key(Number(0.0, 1.0), 0.0)
    """The fraction of the previous sample that is subtracted from each sample of a frame; 0.97 in Kaldi."""
    power: int = key(Whole(1, 2), 1)
    """1: magnitudes. 2: their squares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fft is None:
            object.__setattr__(self, "fft", 1 << (self.frame - 1).bit_length())
        if self.fft < self.frame:
            raise PreprocessingError("fft must be at least a frame of %d samples, not %d" % (self.frame, self.fft))

    def planned(self, shape: Shape) -> Plan:
        """Return the shape of the result, and the values that are computed at once."""
        frames, width = self._frames(shape), self._width
        sound = shape[0] * (4 if self.centre else 2)  # float64
        block = min(frames, _BLOCK) * (4 * self.frame + 6 * self.fft)
        return Plan((frames, width, 1), sound + block + frames * width)

    def __call__(self, sample: Array) -> Array:
        """Return the sound as an image."""
        return self._image(self._framed(sample), lambda spectrum: spectrum)

    @property
    def _width(self) -> int:
        """The width of the result."""
        return int(self.fft) // 2 + 1

    def _frames(self, shape: Shape) -> int:
        """Return the number of frames of a sound."""
        if len(shape) != 1 and shape[1:] != (1, 1):
            raise PreprocessingError("it takes a sound [samples], not %r" % (list(shape),))
        length = shape[0]
        if self.centre and self.fill == "reflect" and length <= self.fft // 2:
            raise PreprocessingError("%d samples are too few for a reflection over %d" % (length, self.fft // 2))
        padded = length + 2 * (self.fft // 2) - (self.fft - self.frame) if self.centre else length
        frames = 1 + (padded - self.frame) // self.step
        if frames < 1:
            short = "%d samples are less than one frame of %d: add the step length before it"
            raise PreprocessingError(short % (length, self.frame))
        return int(frames)

    def _framed(self, sample: Array) -> Array:
        """Return the frames of a sound: float64 [frames, samples], a view."""
        frames = self._frames(sample.shape)
        sound = sample.reshape(-1).astype(np.float64)
        if self.centre:
            half = self.fft // 2
            before = (self.fft - self.frame) // 2
            sound = np.pad(sound, half, "reflect" if self.fill == "reflect" else "constant")
            sound = sound[before : len(sound) - (self.fft - self.frame - before)]
        stride = sound.strides[0]
        strides = (stride * self.step, stride)
        return np.lib.stride_tricks.as_strided(sound, (frames, self.frame), strides, writeable=False)

    def _image(self, frames: Array, change: Any) -> Array:
        """Return the spectra of all frames after the function `change`: float32 [frames, width, 1]."""
        result = np.empty((len(frames), self._width, 1), np.float32)
        for start in range(0, len(frames), _BLOCK):
            spectrum = self._spectrum(frames[start : start + _BLOCK])
            result[start : start + _BLOCK, :, 0] = change(spectrum)
        return result

    def _spectrum(self, frames: Array) -> Array:
        if self.remove_mean:
            frames = frames - frames.mean(axis=1, keepdims=True)
        if self.preemphasis:
            before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
            frames = frames - self.preemphasis * before
        transformed = np.fft.rfft(frames * _window(self.window, self.frame, self.periodic), self.fft, axis=1)
        squares = transformed.real**2 + transformed.imag**2
        return squares if self.power == 2 else np.sqrt(squares)


@dataclasses.dataclass(frozen=True)
class LogMel(Spectrogram):
    """Compute a log-mel spectrogram: [frames, bins, 1], from a sound [samples].

    The default bands are those of `tf.signal.linear_to_mel_weight_matrix` and Kaldi. The bands of librosa are
    {mel: slaney, triangles: hertz, norm: slaney}; those of torchaudio are {triangles: hertz}.
    """

    rate: int = key(Whole(100, 1_000_000))
    """The sampling rate of the sound in Hz."""
    bins: int = key(Whole(1, 1024))
    """Number of bands."""
    range: Any = key(Numbers(2), None)
    """The start of the first band and the end of the last one in Hz; by default from 0 to half the rate."""
    mel: str = key(Word("htk", "slaney"), "htk")
    """The mel scale. htk: 2595 log10(1 + f / 700). slaney: linear up to 1000 Hz, logarithmic above."""
    triangles: str = key(Word("mel", "hertz"), "mel")
    """The frequency scale on which each band is a triangle: mel (TensorFlow, Kaldi) or hertz (librosa, torchaudio)."""
    norm: str = key(Word("none", "slaney"), "none")
    """slaney: each band is divided by half its width in Hz."""
    log: str = key(Word("natural", "log10", "db"), "natural")
    """db: 10 log10 of squares, 20 log10 of magnitudes."""
    offset: float = key(Number(0.0), 1e-6)
    """The number to add before the logarithm."""
    floor: float = key(Number(0.0), 0.0)
    """The smallest value before the logarithm; smaller values are raised to it."""
    relative: bool = key(Flag(), False)
    """Whether the result is relative to the largest value of the sample (`ref=np.max` in librosa)."""
    depth: Any = key(Number(0.0), None)
    """The largest difference to the largest value of the sample, after the logarithm (`top_db` in librosa)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.range is None:
            object.__setattr__(self, "range", (0.0, self.rate / 2))
        low, high = self.range
        if not 0 <= low < high <= self.rate / 2:
            raise PreprocessingError(
                "range must be two increasing frequencies from 0 to %g Hz, half the rate" % (self.rate / 2)
            )
        if not max(self.offset, self.floor) > 0:
            raise PreprocessingError("offset or floor must be larger than 0: the logarithm of silence is undefined")
        if self.fft * self.bins > _MOST_WEIGHTS:
            raise PreprocessingError("%d bins of an fft of %d are too many" % (self.bins, self.fft))
        self._bands()

    @property
    def _width(self) -> int:
        return self.bins

    def planned(self, shape: Shape) -> Plan:
        """Return the shape of the result, and the values that are computed at once."""
        plan = super().planned(shape)
        return Plan(plan.shape, plan.values + count(plan.shape))

    def __call__(self, sample: Array) -> Array:
        """Return the sound as an image."""
        bands = self._bands()
        values = self._image(self._framed(sample), lambda spectrum: self._log(spectrum @ bands))
        if self.depth is not None:
            values = np.maximum(values, values.max() - np.float32(self.depth))
        return values - values.max() if self.relative else values

    def _bands(self) -> Array:
        return _bands(self.rate, self.fft, self.bins, self.range, (self.mel, self.triangles, self.norm))

    def _log(self, strength: Array) -> Array:
        strength = np.maximum(strength, self.floor) + self.offset
        if self.log == "natural":
            return np.log(strength)
        return np.log10(strength) * ({1: 20, 2: 10}[self.power] if self.log == "db" else 1)


@dataclasses.dataclass(frozen=True)
class Mfcc(LogMel):
    """Compute mel-frequency cepstral coefficients: [frames, coefficients, 1], from a sound [samples].

    The step has all keys of log_mel too. `dct: ortho` equals librosa and scipy; `dct: htk` equals TensorFlow, where the
    first coefficient is larger by the square root of 2.
    """

    coefficients: int = key(Whole(1, 1024), 13)
    """Number of coefficients to keep, from the first on."""
    dct: str = key(Word("ortho", "htk"), "ortho")
    """The scaling of the cosine transform."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coefficients > self.bins:
            raise PreprocessingError("coefficients must be at most bins, %d, not %d" % (self.bins, self.coefficients))

    def planned(self, shape: Shape) -> Plan:
        """Return the shape of the result, and the values that are computed at once."""
        plan = super().planned(shape)
        result = (plan.shape[0], self.coefficients, 1)
        return Plan(result, plan.values + 2 * count(plan.shape) + 3 * count(result))

    def __call__(self, sample: Array) -> Array:
        """Return the sound as an image."""
        log_mel = super().__call__(sample)[..., 0].astype(np.float64)
        return (log_mel @ _cosines(self.bins, self.coefficients, self.dct))[..., np.newaxis].astype(np.float32)


@functools.lru_cache(maxsize=16)
def _window(name: str, length: int, periodic: bool) -> Array:
    """Return a window function, [length]. (The windows of tf.signal with an odd length are never periodic.)"""
    turn = np.cos(2 * np.pi * np.arange(length) / (length if periodic else length - 1))
    hann = np.maximum(0.5 - 0.5 * turn, 0)
    return {"hann": hann, "hamming": 0.54 - 0.46 * turn, "povey": hann**0.85, "none": np.ones(length)}[name]


def _to_mel(hertz: Array, scale: str) -> Array:
    if scale == "htk":
        return 2595 * np.log10(1 + hertz / 700)
    return np.where(hertz < 1000, hertz * 3 / 200, 15 + 27 * np.log(np.maximum(hertz, 1000) / 1000) / np.log(6.4))


def _to_hertz(mel: Array, scale: str) -> Array:
    if scale == "htk":
        return 700 * (10 ** (mel / 2595) - 1)
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp(np.log(6.4) * (np.maximum(mel, 15) - 15) / 27))


@functools.lru_cache(maxsize=16)
def _bands(rate: int, fft: int, bins: int, span: Tuple[float, float], form: Tuple[str, str, str]) -> Array:
    """Return the weight of each frequency in each band: [fft / 2 + 1, bins].

    Slaney's scale: M. Slaney, Auditory Toolbox, 1998. HTK's: S. Young and others, The HTK Book, 5.4.

    Raises:
        PreprocessingError: a band contains no frequency of the transform.
    """
    scale, triangles, norm = form
    low, high = _to_mel(np.array(span), scale)
    ends = np.linspace(low, high, bins + 2)
    hertz = np.arange(fft // 2 + 1) * (rate / fft)
    width = _to_hertz(ends[2:], scale) - _to_hertz(ends[:-2], scale)
    frequencies = _to_mel(hertz, scale) if triangles == "mel" else hertz
    ends = ends if triangles == "mel" else _to_hertz(ends, scale)
    rising = (frequencies[:, np.newaxis] - ends[:-2]) / (ends[1:-1] - ends[:-2])
    falling = (ends[2:] - frequencies[:, np.newaxis]) / (ends[2:] - ends[1:-1])
    weights = np.maximum(np.minimum(rising, falling), 0)
    empty = np.flatnonzero(~(weights > 1e-9).any(axis=0))
    if len(empty):
        named = ", ".join(map(str, empty[:5])) + (" and others" if len(empty) > 5 else "")
        raise PreprocessingError(
            "%d of %d mel bins are empty (%s): frequencies are %g Hz apart in an fft of %d; "
            "use fewer bins, a larger fft, or a range that starts higher" % (len(empty), bins, named, rate / fft, fft)
        )
    return weights * (2 / width) if norm == "slaney" else weights


@functools.lru_cache(maxsize=16)
def _cosines(bins: int, coefficients: int, form: str) -> Array:
    """Return the matrix of the DCT-II: [bins, coefficients]."""
    angles = np.outer(np.arange(bins) + 0.5, np.arange(coefficients)) * (np.pi / bins)
    cosines = np.cos(angles) * np.sqrt(2 / bins)
    if form == "ortho":
        cosines[:, 0] *= np.sqrt(0.5)
    return cosines
