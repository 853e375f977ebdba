"""Image files on the device: the same values as in training, with every decoder."""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from compress.data.sources import ImageFolder
from compress.data.sources import images as training
from deploy.contract import pictures
from deploy.contract.decoding import Decoding
from deploy.contract.errors import ImageError
from deploy.contract.preprocessing import Array
from deploy.runner import images

Decode = Callable[[bytes], Array]
PHOTO = np.stack([*np.mgrid[0:30, 0:50] * 4, np.full((30, 50), 99)], axis=-1).astype(np.uint8)
"""Red increases from top to bottom, green from left to right: all rotations look different."""


@pytest.fixture(params=["Pillow", "OpenCV"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that hides all decoders except one, as on a device."""
    if request.param == "Pillow":
        return lambda: monkeypatch.setitem(sys.modules, "cv2", None)
    pytest.importorskip("cv2", reason="there is no OpenCV here")
    return lambda: monkeypatch.setitem(sys.modules, "PIL", None)


def written(image: Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def rotated(orientation: int, form: str = "JPEG", **options: Any) -> bytes:
    """Return a photo that viewers rotate or mirror."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return written(Image.fromarray(PHOTO), form, exif=exif, **options)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("decode", [images.decode_body, images.decode_file])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_an_orientation_is_applied_as_in_training(
    decode: Decode, orientation: int, form: str, device: Callable[[], None]
) -> None:
    options = {"JPEG": {"quality": 95}, "PNG": {}, "WEBP": {"lossless": True}}[form]
    content = rotated(orientation, form, **options)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
    in_training = ImageFolder(path="x").decoded(content, "photo")
    np.testing.assert_array_equal(in_training, expected)
    device()
    decoded = decode(content)
    if sys.modules["PIL"]:
        np.testing.assert_array_equal(decoded, in_training)
    np.testing.assert_allclose(decoded.astype(int), in_training, atol=2 if form == "JPEG" else 0)
    assert expected.shape == ((30, 50, 3) if orientation < 5 else (50, 30, 3))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("decode", [images.decode_body, images.decode_file])
def test_a_setting_ignores_the_orientation(decode: Any, orientation: int, device: Callable[[], None]) -> None:
    content = rotated(orientation, "PNG")
    np.testing.assert_array_equal(ImageFolder(path="x", orientation="ignore").decoded(content, "photo"), PHOTO)
    device()
    np.testing.assert_array_equal(decode(content, decoding=Decoding(orientation="ignore")), PHOTO)


DEEP = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
"""Levels of 16 bits, in steps of 16."""


@pytest.mark.parametrize("channels", [1, 3])
def test_the_upper_8_of_16_bits(channels: int, device: Callable[[], None]) -> None:
    content = written(Image.fromarray(DEEP), "PNG")
    expected = np.repeat((DEEP >> 8)[..., np.newaxis], channels, axis=2)
    device()
    decoded = pictures.decode(content, channels)
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, expected)
    if sys.modules["PIL"]:
        np.testing.assert_array_equal(training.decoded(content, channels, "x.png"), expected)


def test_the_upper_8_of_16_bits_where_nobody_asked_for_channels(device: Callable[[], None]) -> None:
    content = written(Image.fromarray(DEEP), "PNG")
    device()
    for decoded in (images.decode_body(content), images.decode_file(content)):
        assert (decoded == (DEEP >> 8)[..., np.newaxis]).all()


def test_16_bits_as_older_pillows_open_them() -> None:
    """Older versions of Pillow open a PNG file of 16 bits in mode I, which has 32 bits."""
    old = Image.fromarray(DEEP.astype(np.int32))
    old.format = "PNG"
    np.testing.assert_array_equal(pictures.pixels(old, 1)[..., 0], DEEP >> 8)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_more_than_16_bits_are_refused(dtype: Any, device: Callable[[], None]) -> None:
    content = written(Image.fromarray(np.ones((4, 4), dtype)), "TIFF")
    device()
    with pytest.raises(ImageError, match="its values have 32 bits, or are floats"):
        images.decode_file(content)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("channels", [1, 3])
def test_colours_and_grey_levels(mode: str, channels: int, device: Callable[[], None]) -> None:
    colours = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)).convert(mode)
    content = written(colours, "PNG")
    expected = np.asarray(colours.convert("RGB").convert("L" if channels == 1 else "RGB")).reshape(40, 50, channels)
    np.testing.assert_array_equal(training.decoded(content, channels, "x.png"), expected)
    device()
    np.testing.assert_array_equal(pictures.decode(content, channels), expected)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "WEBP"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_format_gets_the_channels_of_the_training(
    form: str, mode: str, channels: int, device: Callable[[], None]
) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)).resize((70, 50))
    content = written(picture.convert(mode), form, **({"lossless": True} if form == "WEBP" else {}))
    expected = training.decoded(content, channels, f"x.{form}").astype(int)
    device()
    for decode in (lambda: images.decode_body(content, decoding=Decoding(channels)),
                   lambda: images.decode_body(bytearray(content), decoding=Decoding(channels)),
                   lambda: images.decode_file(content, Decoding(channels))):  # fmt: skip
        decoded = decode()
        assert decoded.shape == (50, 70, channels)
        np.testing.assert_allclose(decoded, expected, atol=2 if form == "JPEG" else 0)


def webp(kind: bytes, content: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", len(content) + 12) + b"WEBP" + kind + struct.pack("<I", len(content)) + content


@pytest.mark.parametrize(
    ("content", "sides"),
    [
        (b"BM" + bytes(12) + struct.pack("<Iii", 40, 30000, -20000), "30000 x 20000"),
        (b"BM" + bytes(12) + struct.pack("<IHH4x", 12, 65535, 65535), "65535 x 65535"),
        (b"BM" + bytes(12) + struct.pack("<Iii", 40, -5, 7), "-5 x 7"),
        (b"BM", "0 x 0"),
        (webp(b"VP8X", bytes(4) + b"\xff\xff\xff\xff\xff\xff"), "16777216 x 16777216"),
        (webp(b"VP8L", b"\x2f\xff\xff\xff\x0f"), "16384 x 16384"),
        (webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a\xff\x3f\xff\xff"), "16383 x 16383"),
        (webp(b"VP9 ", bytes(30)), "0 x 0"),
        (webp(b"VP8X", b""), "0 x 0"),
    ],
)
def test_what_is_too_large_is_refused_before_it_is_decoded(content: bytes, sides: str) -> None:
    with pytest.raises(ImageError, match=f"the image has {sides} pixels; at most"):
        images.decode_body(content)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "WEBP"])
def test_damaged_ones_are_refused_or_read(form: str, device: Callable[[], None]) -> None:
    random = np.random.default_rng(0)
    content = written(Image.fromarray(random.integers(0, 256, (9, 11, 3), np.uint8)), form)
    device()
    refused = 0
    for _ in range(300):
        changed = bytearray(content)
        for place in random.integers(0, min(len(content), 120), 3):
            changed[place] = random.integers(256)
        try:
            assert images.decode_body(changed, decoding=Decoding(3)).shape[2] == 3
        except ImageError:
            refused += 1
    assert refused > 20
