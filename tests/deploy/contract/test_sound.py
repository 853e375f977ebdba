"""Sounds: length, spectrograms, mel bands and cepstra, against TensorFlow, scipy, librosa, Kaldi, and by hand."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT

from deploy.contract.preprocessing import Preprocessing, PreprocessingError, quantize

DATA = Path(os.environ.get("CORALLINE_SHARED", ROOT.parent / "shared")) / "data"
YAMNET = {"rate": 16000, "frame": 400, "step": 160, "bins": 64, "range": [125, 7500], "offset": 0.001}
SPOKEN = {"rate": 8000, "frame": 256, "step": 128, "bins": 40, "range": [80, 3800], "offset": 0.001}
DECIBELS = {
    "rate": 16000,
    "step": 160,
    "bins": 40,
    "centre": True,
    "power": 2,
    "triangles": "hertz",
    "log": "db",
    "offset": 0,
    "floor": 1e-10,
}
LIBROSA = {**DECIBELS, "frame": 512, "mel": "slaney", "norm": "slaney", "depth": 80}
OTHER_LIBROSA = {**DECIBELS, "frame": 400, "fft": 512, "range": [20, 7600], "fill": "reflect", "relative": True}
KALDI = {
    "rate": 16000,
    "frame": 400,
    "step": 160,
    "bins": 40,
    "range": [20, 8000],
    "window": "povey",
    "periodic": False,
    "remove_mean": True,
    "preemphasis": 0.97,
    "power": 2,
    "offset": 0,
    "floor": 1.1920929e-7,
}


def apply(sample: Any, *steps: Any) -> np.ndarray:
    return Preprocessing(list(steps))(np.asarray(sample))


def chirp() -> np.ndarray:
    """Return half a second at 16 kHz, made without a random generator: float32 [8000]."""
    place = np.arange(8000)
    t, noise = place / 16000, ((place * 7919) % 1009) / 1009 - 0.5
    rising, dying = np.sin(2 * np.pi * (200 + 1500 * t) * t), np.sin(2 * np.pi * 3000 * t) * np.exp(-4 * t)
    return (0.5 * rising + 0.2 * dying + 0.02 * noise).astype(np.float32)


@pytest.fixture(scope="module")
def recordings() -> list[np.ndarray]:
    """Return real recordings: spoken digits, int16 at 8 kHz."""
    path = DATA / "fsdd_8k.npz"
    if not path.exists():
        pytest.skip(f"{path} is not there; CORALLINE_SHARED names the folder of shared files")
    with np.load(path) as file:
        audio, offsets = file["audio"], file["offsets"]
    return [audio[offsets[index] : offsets[index + 1]] for index in range(0, 3000, 250)]


def steps_apart(ours: np.ndarray, theirs: np.ndarray) -> int:
    """Return the largest difference in steps of two images of a sound as int8 input with the range of both."""
    low, high = min(ours.min(), theirs.min()), max(ours.max(), theirs.max())
    scale = float(high - low) / 255
    zero_point = round(-128 - low / scale)
    stored = [quantize(image, scale, zero_point, np.int8).astype(int) for image in (ours, theirs)]
    return int(np.abs(stored[0] - stored[1]).max())


# --- against others ---------------------------------------------------------------------


@pytest.mark.tensorflow
@pytest.mark.parametrize("power", [1, 2])
def test_equals_tensorflow(tf: Any, recordings: list[np.ndarray], power: int) -> None:
    settings = {**SPOKEN, "power": power}
    weights = tf.signal.linear_to_mel_weight_matrix(40, 129, 8000, 80, 3800)
    for recording in recordings:
        spectrum = tf.abs(tf.signal.stft(recording.astype(np.float32) / 32768, 256, 128)) ** power
        frame = {"frame": 256, "step": 128, "power": power}
        features = apply(recording, {"spectrogram": frame})
        assert features.shape == (*spectrum.shape, 1)
        np.testing.assert_allclose(features[..., 0], spectrum, rtol=1e-4, atol=1e-4)
        logs = tf.math.log(spectrum @ weights + 0.001)
        features = apply(recording, {"log_mel": settings})[..., 0]
        np.testing.assert_allclose(features, logs, atol=1e-3)
        assert steps_apart(features, logs.numpy()) <= 1
        cepstra = tf.signal.mfccs_from_log_mel_spectrograms(logs)[..., :13].numpy()
        features = apply(recording, {"mfcc": {**settings, "dct": "htk"}})[..., 0]
        np.testing.assert_allclose(features, cepstra, atol=1e-3)
        assert steps_apart(features, cepstra) <= 1


REFERENCES = {
    "librosa_db": [{"log_mel": LIBROSA}],
    "librosa_htk": [{"log_mel": OTHER_LIBROSA}],
    "librosa_mfcc": [{"mfcc": LIBROSA}],
    "librosa_stft": [{"spectrogram": {"frame": 401, "fft": 512, "step": 100, "centre": True}}],
    "kaldi": [{"scale": {"from": [-1, 1], "to": [-32768, 32768]}}, {"log_mel": KALDI}],
}
"""The results of librosa 0.11 and kaldi-native-fbank 1.23 for `chirp()`, every fifth frame, are in mel_references.npz:
power_to_db(melspectrogram(n_fft=512, hop_length=160, n_mels=40)); the same with win_length=400, htk=True, norm=None,
fmin=20, fmax=7600, pad_mode="reflect", ref=np.max, top_db=None; mfcc(n_mfcc=13, n_fft=512, hop_length=160, n_mels=40);
abs(stft(n_fft=512, win_length=401, hop_length=100)); Fbank with 40 bins, energy_floor 0, dither 0, of 16-bit values."""


@pytest.mark.parametrize("name", REFERENCES)
def test_equals_librosa_and_kaldi(name: str) -> None:
    with np.load(Path(__file__).with_name("mel_references.npz")) as file:
        theirs = file[name]
    ours = apply(chirp(), *REFERENCES[name])[::5, :, 0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-3)
    assert steps_apart(ours, theirs) <= 1


def test_cepstra_are_those_of_scipy() -> None:
    from scipy.fft import dct

    logs = apply(chirp(), {"log_mel": YAMNET})[..., 0]
    ours = apply(chirp(), {"mfcc": {**YAMNET, "coefficients": 20}})[..., 0]
    np.testing.assert_allclose(ours, dct(logs, type=2, norm="ortho", axis=1)[:, :20], atol=1e-4)


def test_windows_are_those_of_scipy() -> None:
    from scipy.signal import get_window

    for window in ("hann", "hamming"):
        for periodic in (True, False):
            frame = {"frame": 401, "step": 200, "fft": 512, "window": window, "periodic": periodic, "power": 2}
            shape = get_window(window, 401, fftbins=periodic)
            frames = np.stack([chirp()[place : place + 401] * shape for place in range(0, 8000 - 400, 200)])
            expected = np.abs(np.fft.rfft(frames, 512)) ** 2
            np.testing.assert_allclose(apply(chirp(), {"spectrogram": frame})[..., 0], expected, rtol=1e-5, atol=1e-5)


# --- by hand ----------------------------------------------------------------------------


def test_length() -> None:
    sound = np.arange(1, 6)
    for keep, longer, shorter in (
        ("start", [1, 2, 3, 4, 5, 0, 0, 0], [1, 2]),
        ("centre", [0, 1, 2, 3, 4, 5, 0, 0], [2, 3]),
        ("end", [0, 0, 0, 1, 2, 3, 4, 5], [4, 5]),
    ):
        np.testing.assert_array_equal(apply(sound, {"length": {"samples": 8, "keep": keep}}), longer)
        np.testing.assert_array_equal(apply(sound, {"length": {"samples": 2, "keep": keep}}), shorter)
    np.testing.assert_array_equal(apply(sound, {"length": {"samples": 5}}), sound)
    series = apply(np.ones((2, 3)), {"length": {"samples": 4, "fill": 7}}, {"squeeze": {}})
    np.testing.assert_array_equal(series, [[1, 1, 1], [1, 1, 1], [7, 7, 7], [7, 7, 7]])


def test_int16_is_what_a_wav_file_is_read_as() -> None:
    pcm = (chirp() * 32767).astype(np.int16)
    read = pcm / np.float32(32768)
    np.testing.assert_array_equal(apply(pcm, {"log_mel": YAMNET}), apply(read, {"log_mel": YAMNET}))
    np.testing.assert_array_equal(apply(pcm[:, None], {"log_mel": YAMNET}), apply(read, {"log_mel": YAMNET}))
    np.testing.assert_array_equal(apply(pcm, {"length": {"samples": 9}}), pcm[:9])  # no spectrum: only values


def test_reshape_and_squeeze() -> None:
    settings = {"log_mel": YAMNET}
    image = apply(chirp(), settings)
    assert image.shape == (48, 64, 1)
    np.testing.assert_array_equal(apply(chirp(), settings, {"squeeze": {}}), image[..., 0])
    np.testing.assert_array_equal(apply(chirp(), settings, {"reshape": {"shape": [-1]}}), image.ravel())
    assert apply(chirp(), {"reshape": {"shape": [2, -1, 4]}}).shape == (2, 1000, 4)
    with pytest.raises(PreprocessingError, match=r"\[8000\] cannot be reshaped to \[7, -1\]"):
        apply(chirp(), {"reshape": {"shape": [7, -1]}})
    for axis, sample in ((-1, np.ones(4)), (0, np.ones((2, 3))), (5, np.ones((2, 3))), (0, np.ones(1))):
        with pytest.raises(PreprocessingError, match="is not one of length 1"):
            apply(sample, {"squeeze": {"axis": axis}})


def test_a_row_of_numbers_is_scaled_and_normalized() -> None:
    row = apply([1, 2, 3], {"scale": {"from": [0, 2]}}, {"normalize": {"mean": [0, 1, 2], "std": [1]}})
    np.testing.assert_allclose(row, [0.5, 0, -0.5])
    np.testing.assert_array_equal(apply([1, 2, 3], {"clip": {"to": [1.5, 2.5]}}), [1.5, 2, 2.5])


def test_depth_and_relative() -> None:
    plain = apply(chirp(), {"log_mel": {**YAMNET, "log": "db"}})
    deep = apply(chirp(), {"log_mel": {**YAMNET, "log": "db", "depth": 20}})
    np.testing.assert_array_equal(deep, np.maximum(plain, plain.max() - np.float32(20)))
    both = apply(chirp(), {"log_mel": {**YAMNET, "log": "db", "depth": 20, "relative": True}})
    assert (both.min(), both.max()) == (-20, 0)


# --- what is refused --------------------------------------------------------------------

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("length", {"samples": 0}, "samples must be a whole number from 1"),
    ("length", {"samples": 1 << 40}, "samples must be a whole number"),
    ("length", {"samples": 4, "keep": "middle"}, "keep must be 'start', 'centre' or 'end'"),
    ("spectrogram", {"frame": 1, "step": 1}, "frame must be a whole number from 2"),
    ("spectrogram", {"frame": 256, "step": 0}, "step must be a whole number from 1"),
    ("spectrogram", {"frame": 256, "step": 1, "fft": 1 << 40}, "fft must be a whole number"),
    ("spectrogram", {"frame": 256, "step": 1, "fft": 128}, "fft must be at least a frame of 256 samples, not 128"),
    ("spectrogram", {"frame": 256, "step": 1, "power": 3}, "power must be a whole number from 1 to 2"),
    ("spectrogram", {"frame": 256, "step": 1, "periodic": "yes"}, "periodic must be true or false"),
    ("log_mel", {"frame": 256, "step": 1, "bins": 4}, "log_mel needs the key 'rate'"),
    ("log_mel", {**SPOKEN, "rate": float("inf")}, "rate must be a number"),
    ("log_mel", {**SPOKEN, "range": [80, 4001]}, "from 0 to 4000 Hz, half the rate"),
    ("log_mel", {**SPOKEN, "range": [80, 80]}, "range must be two increasing"),
    ("log_mel", {**SPOKEN, "range": [-1, 80]}, "range must be two increasing frequencies from 0"),
    ("log_mel", {**SPOKEN, "offset": 0}, "the logarithm of silence is undefined"),
    (
        "log_mel",
        {**SPOKEN, "bins": 200},
        r"30 of 200 mel bins are empty \(0, 3, .* and others\): frequencies are 31.25 Hz",
    ),
    ("log_mel", {**SPOKEN, "frame": 65536, "bins": 1024}, "1024 bins of an fft of 65536 are too many"),
    ("mfcc", {**SPOKEN, "coefficients": 41}, "coefficients must be at most bins, 40, not 41"),
    ("mfcc", {**SPOKEN, "dct": "dct"}, "dct must be 'ortho' or 'htk'"),
]


@pytest.mark.parametrize(("name", "settings", "says"), BAD, ids=lambda value: str(value)[:40])
def test_absurd_settings_are_refused_at_once(name: str, settings: dict[str, Any], says: str) -> None:
    began = time.monotonic()
    with pytest.raises(PreprocessingError, match=says) as caught:
        Preprocessing([{"clip": {"to": [0, 1]}}, {name: settings}])
    assert caught.value.step == 1
    assert str(caught.value).startswith(name)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("sample", "settings", "says"),
    [
        (np.ones(399), YAMNET, "399 samples are less than one frame of 400: add the step length before it"),
        (np.ones(1), YAMNET, "1 samples are less"),
        (
            np.ones(200),
            {**YAMNET, "centre": True, "fill": "reflect"},
            "200 samples are too few for a reflection over 256",
        ),
        (np.ones((400, 2)), YAMNET, r"takes a sound \[samples\], not \[400, 2, 1\]"),
        (np.ones((4, 4, 3)), YAMNET, r"takes a sound \[samples\], not \[4, 4, 3\]"),
        (np.ones(4_000_000), {**YAMNET, "step": 1, "bins": 100}, "MB of memory here; allowed: 1024 MB"),
    ],
)
def test_sounds_that_do_not_fit(sample: np.ndarray, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(PreprocessingError, match=says) as caught:
        apply(sample, {"clip": {"to": [0, 1]}}, {"log_mel": settings})
    assert caught.value.step == 1


def test_silence_is_finite() -> None:
    for settings in (YAMNET, LIBROSA, OTHER_LIBROSA, KALDI):
        assert np.isfinite(apply(np.zeros(16000), {"log_mel": settings})).all()
        assert np.isfinite(apply(np.zeros(16000, np.int16), {"mfcc": settings})).all()
