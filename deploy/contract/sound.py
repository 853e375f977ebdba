"""The steps for sounds: length, spectrogram, log_mel, mfcc. A sound is float32 [samples]; what they give, an image.

All is computed in float64 and rounded once, so that Fourier transforms and sums of other numpy versions and
processors agree far below one step of an 8-bit input.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Tuple

import numpy as np

from deploy.contract.step import Array, Flag, Number, Numbers, PreprocessingError, Step, Whole, Word, key, small

_BLOCK = 256
"""Frames that are transformed at a time: what is in between stays small."""
_MOST_WEIGHTS = 1 << 24
"""Twice the number of weights of the mel bands: 64 MB."""


@dataclasses.dataclass(frozen=True)
class Length(Step):
    """Makes the first axis `samples` long: what is too long is cut, what is too short is filled up."""

    samples: int = key(Whole(1, 1 << 24))
    """Samples of the result; rows, of a series."""
    keep: str = key(Word("start", "centre", "end"), "start")
    """What stays of a longer one; where a shorter one stands."""
    fill: float = key(Number(), 0.0)
    """What a shorter one is filled up with."""

    def __call__(self, sample: Array) -> Array:
        """The changed sample."""
        more = len(sample) - self.samples
        first = {"start": 0, "centre": abs(more) // 2, "end": abs(more)}[self.keep]
        if more >= 0:
            return sample[first : first + self.samples]
        small((self.samples,) + sample.shape[1:], "length")
        result = np.full((self.samples,) + sample.shape[1:], self.fill, np.float32)
        result[first : first + len(sample)] = sample
        return result


@dataclasses.dataclass(frozen=True)
class Spectrogram(Step):
    """The strength of each frequency over time: [frames, fft / 2 + 1, 1], from a sound [samples].

    As `tf.signal.stft` does it: frames from the first sample on, as many as are whole, each filled up with zeros to
    `fft`. With `centre`, as librosa does it: frames are around their place, and the sound is filled up at both ends.
    A sound of int16 is divided by 32768 first, so that it is what WAV files are read as.
    """

    frame: int = key(Whole(2, 1 << 16))
    """Samples of a frame."""
    step: int = key(Whole(1, 1 << 16))
    """Samples from one frame to the next."""
    fft: Any = key(Whole(2, 1 << 16), None)
    """Length of the Fourier transform; by default the power of two that holds a frame."""
    window: str = key(Word("hann", "hamming", "povey", "none"), "hann")
    """What a frame is multiplied by; povey, Kaldi's, is hann to the power of 0.85."""
    periodic: bool = key(Flag(), True)
    """Whether the window would go on after its last sample (TensorFlow, librosa), or ends at it (Kaldi)."""
    centre: bool = key(Flag(), False)
    """Whether the sound is filled up by half a transform at both ends, as librosa does it."""
    fill: str = key(Word("zeros", "reflect"), "zeros")
    """What `centre` fills up with."""
    remove_mean: bool = key(Flag(), False)
    """Whether each frame's mean is subtracted from it first, as Kaldi does it."""
    preemphasis: float = key(Number(0.0, 1.0), 0.0)
    """Share of the sample before that is subtracted from each, in each frame; 0.97 in Kaldi."""
    power: int = key(Whole(1, 2), 1)
    """1: magnitudes; 2: their squares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fft is None:
            object.__setattr__(self, "fft", 1 << (self.frame - 1).bit_length())
        if self.fft < self.frame:
            raise PreprocessingError("fft must hold a frame of %d samples, and is %d" % (self.frame, self.fft))

    def __call__(self, sample: Array) -> Array:
        """The sound as an image."""
        return self._image(self._framed(sample), lambda spectrum: spectrum, self.fft // 2 + 1)

    def _framed(self, sample: Array) -> Array:
        """The frames of a sound: float64 [frames, samples], a view."""
        if sample.ndim == 3 and sample.shape[1:] == (1, 1):
            sample = sample[:, 0, 0]
        if sample.ndim != 1:
            raise PreprocessingError("it takes a sound [samples], not %r" % (list(sample.shape),))
        sound = sample.astype(np.float64)
        if self.centre:
            half, aside = self.fft // 2, (self.fft - self.frame) // 2
            if self.fill == "reflect" and len(sound) <= half:
                raise PreprocessingError("%d samples are too few to be reflected over %d" % (len(sound), half))
            sound = np.pad(sound, half, "reflect" if self.fill == "reflect" else "constant")
            sound = sound[aside : len(sound) - (self.fft - self.frame - aside)]
        count = 1 + (len(sound) - self.frame) // self.step
        if count < 1:
            short = "%d samples are less than one frame of %d: put length before it"
            raise PreprocessingError(short % (len(sample), self.frame))
        stride = sound.strides[0]
        shape, strides = (count, self.frame), (stride * self.step, stride)
        return np.lib.stride_tricks.as_strided(sound, shape, strides, writeable=False)

    def _image(self, frames: Array, change: Any, width: int) -> Array:
        """The spectra of all frames, each changed as the step wants it: float32 [frames, width, 1]."""
        small((len(frames), width), "it")
        result = np.empty((len(frames), width, 1), np.float32)
        for place in range(0, len(frames), _BLOCK):
            spectrum = self._spectrum(frames[place : place + _BLOCK])
            result[place : place + _BLOCK, :, 0] = change(spectrum)
        return result

    def _spectrum(self, frames: Array) -> Array:
        if self.remove_mean:
            frames = frames - frames.mean(axis=1, keepdims=True)
        if self.preemphasis:
            before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
            frames = frames - self.preemphasis * before
        found = np.fft.rfft(frames * _window(self.window, self.frame, self.periodic), self.fft, axis=1)
        squares = found.real**2 + found.imag**2
        return squares if self.power == 2 else np.sqrt(squares)


@dataclasses.dataclass(frozen=True)
class LogMel(Spectrogram):
    """The logarithm of the strength in bands that are spaced as people hear: [frames, bins, 1], from a sound [samples].

    By default the bands are those of `tf.signal.linear_to_mel_weight_matrix`, which are Kaldi's too. librosa's are
    {mel: slaney, triangles: hertz, norm: slaney}; torchaudio's {triangles: hertz}.
    """

    rate: int = key(Whole(100, 1_000_000))
    """Samples in a second, of the sound as it comes."""
    bins: int = key(Whole(1, 1024))
    """Number of bands."""
    range: Any = key(Numbers(2), None)
    """Where the first band begins and the last one ends, in Hz; by default from 0 to half the rate."""
    mel: str = key(Word("htk", "slaney"), "htk")
    """How bands are spaced: 2595 log10(1 + f / 700), or Slaney's, which is straight up to 1000 Hz."""
    triangles: str = key(Word("mel", "hertz"), "mel")
    """Where the bands' sides are straight lines: over mel (TensorFlow, Kaldi), or over hertz (librosa, torchaudio)."""
    norm: str = key(Word("none", "slaney"), "none")
    """slaney: each band is divided by half its width in Hz."""
    log: str = key(Word("natural", "log10", "db"), "natural")
    """db: 10 log10 of squares, 20 log10 of magnitudes."""
    offset: float = key(Number(0.0), 1e-6)
    """What is added before the logarithm."""
    floor: float = key(Number(0.0), 0.0)
    """What less is raised to before the logarithm."""
    relative: bool = key(Flag(), False)
    """Whether the largest value of a sample becomes 0 (librosa's `ref=np.max`)."""
    depth: Any = key(Number(0.0), None)
    """How far below the largest value of a sample the others may lie, after the logarithm (librosa's `top_db`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.range is None:
            object.__setattr__(self, "range", (0.0, self.rate / 2))
        low, high = self.range
        if not 0 <= low < high <= self.rate / 2:
            raise PreprocessingError("range must rise from 0 or more to %g Hz at most, half the rate" % (self.rate / 2))
        if not max(self.offset, self.floor) > 0:
            raise PreprocessingError("offset or floor must be larger than 0: there is no logarithm of silence")
        if self.fft * self.bins > _MOST_WEIGHTS:
            raise PreprocessingError("%d bins of an fft of %d are too many" % (self.bins, self.fft))
        self._bands()

    def __call__(self, sample: Array) -> Array:
        """The sound as an image."""
        bands = self._bands()
        return self._settled(self._image(self._framed(sample), lambda spectrum: self._log(spectrum @ bands), self.bins))

    def _bands(self) -> Array:
        return _bands(self.rate, self.fft, self.bins, self.range, (self.mel, self.triangles, self.norm))

    def _log(self, strength: Array) -> Array:
        strength = np.maximum(strength, self.floor) + self.offset
        if self.log == "natural":
            return np.log(strength)
        return np.log10(strength) * ({1: 20, 2: 10}[self.power] if self.log == "db" else 1)

    def _settled(self, found: Array) -> Array:
        """Return the output of the steps that depend on the largest value."""
        if self.depth is not None:
            found = np.maximum(found, found.max() - np.float32(self.depth))
        return found - found.max() if self.relative else found


@dataclasses.dataclass(frozen=True)
class Mfcc(LogMel):
    """The first coefficients of each frame's log_mel after a cosine transform: [frames, coefficients, 1].

    It has the keys of log_mel too. `dct: ortho` is that of librosa and scipy; `dct: htk` that of TensorFlow, whose
    first coefficient is larger by the square root of 2.
    """

    coefficients: int = key(Whole(1, 1024), 13)
    """How many of each frame's are kept, from the first on."""
    dct: str = key(Word("ortho", "htk"), "ortho")
    """How the transform is scaled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coefficients > self.bins:
            raise PreprocessingError("coefficients must be at most bins, %d, not %d" % (self.bins, self.coefficients))

    def __call__(self, sample: Array) -> Array:
        """The sound as an image."""
        found = super().__call__(sample)[..., 0].astype(np.float64)
        return (found @ _cosines(self.bins, self.coefficients, self.dct))[..., np.newaxis].astype(np.float32)


@functools.lru_cache(maxsize=16)
def _window(name: str, length: int, periodic: bool) -> Array:
    """[length]. (tf.signal's windows of an odd length are never periodic.)"""
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
    """The weight of each frequency in each band: [fft / 2 + 1, bins].

    Slaney's scale: M. Slaney, Auditory Toolbox, 1998. HTK's: S. Young and others, The HTK Book, 5.4.

    Raises:
        PreprocessingError: a band has no frequency of the transform in it.
    """
    scale, triangles, norm = form
    low, high = _to_mel(np.array(span), scale)
    ends = np.linspace(low, high, bins + 2)
    hertz = np.arange(fft // 2 + 1) * (rate / fft)
    width = _to_hertz(ends[2:], scale) - _to_hertz(ends[:-2], scale)
    places = _to_mel(hertz, scale) if triangles == "mel" else hertz
    ends = ends if triangles == "mel" else _to_hertz(ends, scale)
    rising = (places[:, np.newaxis] - ends[:-2]) / (ends[1:-1] - ends[:-2])
    falling = (ends[2:] - places[:, np.newaxis]) / (ends[2:] - ends[1:-1])
    weights = np.maximum(np.minimum(rising, falling), 0)
    empty = np.flatnonzero(~(weights > 1e-9).any(axis=0))
    if len(empty):
        named = ", ".join(map(str, empty[:5])) + (" and others" if len(empty) > 5 else "")
        raise PreprocessingError(
            "%d of %d mel bins are empty (%s): frequencies are %g Hz apart in an fft of %d; "
            "use fewer bins, a larger fft, or a range that begins higher" % (len(empty), bins, named, rate / fft, fft)
        )
    return weights * (2 / width) if norm == "slaney" else weights


@functools.lru_cache(maxsize=16)
def _cosines(bins: int, coefficients: int, form: str) -> Array:
    """The DCT-II: [bins, coefficients]."""
    places = np.outer(np.arange(bins) + 0.5, np.arange(coefficients)) * (np.pi / bins)
    cosines = np.cos(places) * np.sqrt(2 / bins)
    if form == "ortho":
        cosines[:, 0] *= np.sqrt(0.5)
    return cosines
