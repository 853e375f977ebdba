"""WAV files of all kinds, as clients may send them."""

from __future__ import annotations

import io
import itertools
import struct
from pathlib import Path

import data_files
import numpy as np
import pytest
from data_files import chunk, riff

from compress.core.errors import DataError
from compress.data.sources.wav import opened
from deploy.contract.decoding import Decoding
from deploy.contract.errors import ImageError
from deploy.contract.recording import decode_wav
from deploy.runner import samples
from deploy.runner.images import decode_body, decode_file


def wav(values: np.ndarray, width: int = 2, rate: int = 8000) -> bytes:
    """Return a WAV file of values [samples, channels] that fit into `width` bytes."""
    stored = (values + 128 * (width == 1)).astype("<i4")
    content = stored.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    return riff(data_files.form(1, 8 * width, values.shape[1], rate), chunk(b"data", content))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_all_widths(width: int) -> None:
    full = 1 << (8 * width - 1)
    values = np.array([[-full], [-full // 2], [-1], [0], [1], [full // 2], [full - 1]], np.int64)
    samples = decode_wav(wav(values, width), 8000)
    assert samples.dtype == np.float32
    np.testing.assert_array_equal(samples, (values[:, 0] / full).astype(np.float32))


def test_a_wav_file_is_recognized_in_a_body() -> None:
    content = wav(np.array([[1], [2], [3]]))
    np.testing.assert_array_equal(decode_body(content), np.array([1, 2, 3]) / np.float32(32768))
    np.testing.assert_array_equal(decode_body(np.arange(3, dtype="<i2").tobytes(), "3", "int16"), [0, 1, 2])
    assert decode_body(b"\0" * 1_000_000, "1000000").shape == (1_000_000,)


@pytest.mark.parametrize("decoding", [Decoding(), Decoding(sound_rate=16000)])
def test_a_file_with_the_wrong_suffix_is_no_wav_file(tmp_path: Path, decoding: Decoding) -> None:
    (tmp_path / "mp3.wav").write_bytes(b"ID3\x04" + bytes(500))
    with pytest.raises(ImageError, match=r"mp3\.wav: it is not a WAV file"):
        samples.read(str(tmp_path / "mp3.wav"), decoding)


def test_another_rate_is_refused() -> None:
    with pytest.raises(ImageError, match="has 44100 samples per second, and the model takes 16000"):
        decode_wav(wav(np.zeros((9, 1)), rate=44100), 16000)


def extensible_form(tag: int, bits: int, channels: int) -> bytes:
    form = struct.pack("<HHIIHH", 0xFFFE, channels, 8000, 1000 * channels * bits, channels * bits // 8, bits)
    return chunk(b"fmt ", form + struct.pack("<HHIH", 22, bits, 0, tag) + bytes.fromhex("000000001000800000aa00389b71"))


@pytest.mark.parametrize(("tag", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
def test_the_same_numbers_as_in_training(tag: int, bits: int) -> None:
    for extensible, channels, kept in itertools.product((False, True), (1, 2, 3), ("mix", "first")):
        same_as_in_training(tag, bits, extensible, channels, kept)


def same_as_in_training(tag: int, bits: int, extensible: bool, channels: int, kept: str) -> None:
    random = np.random.default_rng(0)
    values = random.bytes(channels * bits // 8 * 50)
    if tag == 3:
        values = random.normal(size=channels * 50).astype(f"<f{bits // 8}").tobytes()
    form = extensible_form(tag, bits, channels) if extensible else data_files.form(tag, bits, channels)
    content = riff(form, chunk(b"LIST", b"abc"), chunk(b"data", values))
    frames = opened(io.BytesIO(content), "x.wav").read(1000)
    assert frames.shape == (50, channels)
    expected = frames[:, 0] if kept == "first" else frames.mean(axis=1, dtype=np.float32)
    decoding = Decoding(sound_channels=kept, sound_rate=8000)
    for decoded in (decode_body(content, decoding=decoding), decode_file(content, decoding)):
        assert decoded.dtype == np.float32
        np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ImageError, match="NaN or infinite"):
        decode_wav(riff(data_files.form(3, 64), chunk(b"data", np.array([0, value], "<f8").tobytes())))


def test_what_training_refuses_is_refused() -> None:
    for place, value in itertools.product(range(44), (0, 1, 2, 3, 0x7F, 0xFF)):
        content = GOOD[:place] + bytes([value]) + GOOD[place + 1 :]
        try:
            expected = opened(io.BytesIO(content), "x.wav").read(1000)
        except DataError:
            expected = np.zeros((0, 1), np.float32)
        if len(expected):
            np.testing.assert_array_equal(decode_wav(content), expected.mean(axis=1, dtype=np.float32))
        else:
            with pytest.raises(ImageError):
                decode_wav(content)


GOOD = wav(np.arange(20).reshape(10, 2))


def changed(place: int, form: str, value: int) -> bytes:
    content = bytearray(GOOD)
    struct.pack_into(form, content, place, value)
    return bytes(content)


def test_damaged_ones_are_refused() -> None:
    damaged = [GOOD[:end] for end in range(len(GOOD))] + [wav(np.zeros((0, 1)))]
    damaged += [changed(20, "<H", tag) for tag in (3, 0xFFFE)]  # a float of 16 bits; the longer header is missing
    damaged += [changed(22, "<H", 0)] + [changed(34, "<H", bits) for bits in (0, 64, 65535)]  # channels; bits
    for content in damaged:
        with pytest.raises(ImageError):
            decode_wav(content)
