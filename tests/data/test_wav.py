"""WAV files of every kind: cut, padded, mixed and resampled; and files that are refused."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import chunk, form, riff
from scipy.signal import resample_poly

from compress.core.errors import DataError
from compress.data.label_tables import Labels
from compress.data.sources import Wav
from deploy.contract.recording import decode_wav

WAVEFORM = np.sin(np.arange(800) / 9) * 0.75


def pcm(values: np.ndarray) -> bytes:
    """Return values from -1 to 1 as PCM with 16 bits for each sample."""
    return np.round(values * 32767).astype("<i2").tobytes()


def source(folder: Path, content: bytes, **settings: Any) -> Wav:
    (folder / "one").mkdir(parents=True, exist_ok=True)
    (folder / "one" / "a.wav").write_bytes(content)
    return Wav(path=str(folder), **{"rate": 8000, "seconds": 0.1} | settings)


def read(folder: Path, content: bytes, **settings: Any) -> np.ndarray:
    return source(folder, content, **settings).load().read(0)


def test_channels(tmp_path: Path) -> None:
    both = np.stack([WAVEFORM, -WAVEFORM / 2], axis=1)
    content = riff(form(channels=2), chunk(b"data", pcm(both)))
    np.testing.assert_allclose(read(tmp_path, content), WAVEFORM / 4, atol=1e-4)
    np.testing.assert_allclose(read(tmp_path, content, channels="first"), WAVEFORM, atol=1e-4)


def test_cut_and_filled_up(tmp_path: Path) -> None:
    content = riff(form(), chunk(b"data", pcm(WAVEFORM)))
    complete = read(tmp_path, content)
    np.testing.assert_array_equal(read(tmp_path, content, seconds=0.05), complete[:400])
    longer = read(tmp_path, content, seconds=0.2)
    np.testing.assert_array_equal(longer[:800], complete)
    np.testing.assert_array_equal(longer[800:], np.zeros(800))


@pytest.mark.parametrize("rate", [48_000, 44_100, 11_127, 8_000, 3])
def test_the_end_of_what_is_resampled_and_cut(tmp_path: Path, rate: int) -> None:
    """The result is the same as if the whole recording were resampled and then cut."""
    values = np.random.default_rng(0).integers(-9000, 9000, 2 * rate, dtype=np.int16)
    content = riff(form(rate=rate), chunk(b"data", values.tobytes()))
    common = math.gcd(rate, 16_000)
    resampled = resample_poly(values.astype(np.float32) / 32768, 16_000 // common, rate // common)
    samples = read(tmp_path, content, rate=16_000, seconds=1.0, resample=True)
    np.testing.assert_allclose(samples, resampled[:16_000], atol=1e-6)


def test_rates_that_have_no_small_ratio(tmp_path: Path) -> None:
    content = riff(form(rate=767_999), chunk(b"data", bytes(32_000)))
    message = (
        "has 767999 samples per second, which are to 16000 as 767999 to 16000; allowed: a ratio of numbers up to 50000"
    )
    with pytest.raises(DataError, match=message):
        read(tmp_path, content, rate=16_000, seconds=1.0, resample=True)


def test_other_rates(tmp_path: Path) -> None:
    tone = np.sin(np.arange(4410) / 44_100 * 2 * np.pi * 500) * 0.5
    content = riff(form(rate=44_100), chunk(b"data", pcm(tone)))
    with pytest.raises(DataError, match=r"a\.wav: has 44100 samples per second; allowed: 8000; set resample: true"):
        read(tmp_path, content)
    samples = read(tmp_path, content, resample=True)
    expected = np.sin(np.arange(800) / 8000 * 2 * np.pi * 500) * 0.5
    np.testing.assert_allclose(samples[50:-50], expected[50:-50], atol=0.01)


DATA = chunk(b"data", pcm(WAVEFORM))
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin with RIFF and WAVE"),
    "text": (b"this is no recording at all", "does not begin with RIFF"),
    "AIFF": (b"FORM" + riff(form(), DATA)[4:], "does not begin with RIFF"),
    "no format": (riff(DATA), "its values come before its format"),
    "no values": (riff(form()), "it has no values"),
    "header alone": (riff(form(), DATA)[:12], "it has no values"),
    "short format": (riff(chunk(b"fmt ", b"abc"), DATA), "its format is cut short"),
    "cut short": (riff(form(), DATA)[:-10], "it is cut short: 1,600 bytes of values, 1,590 are there"),
    "endless": (riff(form(), b"data\xff\xff\xff\xff"), "it has no frames"),
    "compressed": (riff(form(tag=85), DATA), "is of format 85 with 16 bits; allowed: PCM of"),
    "12 bits": (riff(form(bits=12), DATA), "is of format 1 with 12 bits"),
    "no channels": (riff(form(channels=0), DATA), "0 channels"),
    "many channels": (riff(form(channels=65_000, block=64_464), DATA), "65000 channels"),
    "no rate": (riff(form(rate=0), DATA), "0 frames per second"),
    "wrong block": (riff(form(block=3), DATA), "3 bytes each"),
    "huge chunk": (riff(b"LIST\xff\xff\xff\xff", form(), DATA), "it has no values"),
    "many chunks": (riff(chunk(b"junk", b"") * 20_000), "it has no values"),
}


@pytest.mark.parametrize("size", [0, 0x7FFFF000, 0x80000000, 0xFFFFFFFF])
@pytest.mark.parametrize("riff_size", [0, 36, 0x7FFFF024, 0x80000024, 0xFFFFFFFF])
def test_a_stream_is_read_to_its_end(tmp_path: Path, size: int, riff_size: int) -> None:
    """Programs that write to a pipe do not know the sizes."""
    whole = riff(form(), DATA)
    streamed = b"RIFF" + struct.pack("<I", riff_size) + whole[8:40] + struct.pack("<I", size) + whole[44:]
    np.testing.assert_array_equal(read(tmp_path, streamed), read(tmp_path, whole))
    np.testing.assert_array_equal(read(tmp_path, streamed + b"x"), read(tmp_path, whole))
    np.testing.assert_array_equal(decode_wav(streamed), decode_wav(whole))


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, content, resample=True)


def test_labels_in_folders_and_in_a_table(tmp_path: Path) -> None:
    content = riff(form(), DATA)
    wav_source = source(tmp_path, content)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "b.WAV").write_bytes(content)
    assert wav_source.load().class_names == ("one", "two")
    (tmp_path / "labels.csv").write_text("file,label\none/a.wav,x\ntwo/b.WAV,y\n")
    tabled = Wav(path=str(tmp_path), rate=8000, seconds=0.1, labels=Labels(table="labels.csv")).load()
    assert tabled.class_names == ("x", "y")
    np.testing.assert_array_equal(tabled.read(0), tabled.read(1))
