"""Image files on the device: the same values as in training."""

from __future__ import annotations

import io
import resource
import struct
import sys
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from pictures import encoded
from PIL import Image, ImageOps

from compress.data.sources import ImageFolder
from deploy.contract import pictures
from deploy.contract.bundle import array_bytes
from deploy.contract.decoding import Decoding, parsed
from deploy.contract.errors import ImageError
from deploy.contract.preprocessing import Array
from deploy.runner import images

PHOTO = np.stack([*np.mgrid[0:30, 0:50] * 4, np.full((30, 50), 99)], axis=-1).astype(np.uint8)
"""Red increases from top to bottom, green from left to right: all rotations look different."""


def rotated(orientation: int, form: str = "JPEG", **options: Any) -> bytes:
    """Return a photo that viewers rotate or mirror."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.fromarray(PHOTO), form, exif=exif, **options)


def in_training(content: bytes, channels: Literal[1, 3] = 3, orientation: Literal["exif", "ignore"] = "exif") -> Array:
    return ImageFolder(path="x", channels=channels, orientation=orientation).decoded(content, "photo")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_an_orientation_is_applied_as_in_training(orientation: int, form: str) -> None:
    options = {"JPEG": {"quality": 95}, "PNG": {}, "WEBP": {"lossless": True}}[form]
    content = rotated(orientation, form, **options)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
    assert expected.shape == ((30, 50, 3) if orientation < 5 else (50, 30, 3))
    for decoded in (in_training(content), images.decode_body(content), images.decode_file(content)):
        np.testing.assert_array_equal(decoded, expected)
        assert decoded.flags.c_contiguous


def test_a_setting_ignores_the_orientation() -> None:
    content = rotated(6, "PNG")
    ignored = Decoding(orientation="ignore")
    for decoded in (
        in_training(content, orientation="ignore"),
        images.decode_body(content, decoding=ignored),
        images.decode_file(content, decoding=ignored),
    ):
        np.testing.assert_array_equal(decoded, PHOTO)


def tiff(order: str = "<", kind: int = 3, value: int = 6) -> bytes:
    """Return an EXIF block with an orientation: a number of 16 bits (kind 3), of 32 (4), or another value."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    content = struct.pack(order + ("H2x" if kind == 3 else "I"), value)
    return mark + struct.pack(order + "IHHHI", 8, 1, 0x0112, kind, 1) + content


def orientation(content: bytes) -> int:
    with Image.open(io.BytesIO(content)) as image:
        return pictures.orientation_of(image)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (tiff("<"), 6),
        (tiff(">"), 6),
        (tiff(">", 4), 6),
        (tiff(value=0), 1),
        (tiff(value=9), 1),
        (tiff(kind=7), 1),
        (b"XX" + tiff()[2:], 1),
        (tiff()[:12], 1),
        (b"", 1),
    ],
)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_blocks_of_exif(block: bytes, expected: int) -> None:
    for form in ("JPEG", "PNG", "WEBP"):
        assert orientation(encoded(Image.fromarray(PHOTO), form, exif=b"Exif\0\0" + block)) == expected


def test_an_orientation_in_xmp_is_not_used() -> None:
    """Whether `getexif` uses it depends on the version of Pillow."""
    xmp = b'<x:xmpmeta tiff:Orientation="6"></x:xmpmeta>'
    assert orientation(encoded(Image.fromarray(PHOTO), "WEBP", xmp=xmp)) == 1


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_block_has_an_orientation_too() -> None:
    random = np.random.default_rng(0)
    content = rotated(6, "PNG")
    for _ in range(300):
        block = bytearray(content[content.index(b"eXIf") + 4 :][: random.integers(64)])
        for place in random.integers(0, 64, 3):
            block[place : place + 1] = bytes([random.integers(256)])
        assert pictures.orientation_of(SimpleNamespace(info={"exif": bytes(block)})) in range(1, 9)


def test_the_orientation_of_the_manifest() -> None:
    assert parsed({}).orientation == "exif"
    assert parsed({"orientation": "ignore"}).orientation == "ignore"


def test_a_host_without_pillow_or_with_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(Image.fromarray(PHOTO), "PNG")
    monkeypatch.setattr("PIL.__version__", "5.4.1")
    with pytest.raises(ImageError, match=r"Pillow 5\.4\.1 is too old for photos; version 8 or newer is needed"):
        images.decode_body(content)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImageError, match="Pillow is not installed, and photos need it"):
        images.decode_file(content)
    np.testing.assert_array_equal(images.decode_body(array_bytes(PHOTO)), PHOTO)


DEEP = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
"""Levels of 16 bits, in steps of 16."""


@pytest.mark.parametrize("channels", [1, 3])
def test_the_upper_8_of_16_bits(channels: Literal[1, 3]) -> None:
    content = encoded(Image.fromarray(DEEP), "PNG")
    expected = np.repeat((DEEP >> 8)[..., np.newaxis], channels, axis=2)
    decoded = pictures.decode(content, channels)
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(in_training(content, channels), expected)
    for decoded in (images.decode_body(content), images.decode_file(content)):
        assert (decoded == (DEEP >> 8)[..., np.newaxis]).all()


def test_16_bits_as_older_pillows_open_them() -> None:
    """Older versions of Pillow open a PNG file of 16 bits in mode I, which has 32 bits."""
    old = Image.fromarray(DEEP.astype(np.int32))
    old.format = "PNG"
    np.testing.assert_array_equal(pictures.pixels(old, 1)[..., 0], DEEP >> 8)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_more_than_16_bits_are_refused(dtype: Any) -> None:
    content = encoded(Image.fromarray(np.ones((4, 4), dtype)), "TIFF")
    with pytest.raises(ImageError, match="its values have 32 bits, or are floats"):
        images.decode_file(content)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("channels", [1, 3])
def test_colours_and_grey_levels(mode: str, channels: Literal[1, 3]) -> None:
    colours = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)).convert(mode)
    content = encoded(colours, "PNG")
    expected = np.asarray(colours.convert("RGB").convert("L" if channels == 1 else "RGB")).reshape(40, 50, channels)
    np.testing.assert_array_equal(in_training(content, channels), expected)
    np.testing.assert_array_equal(pictures.decode(content, channels), expected)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "WEBP"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_format_gets_the_channels_of_the_training(form: str, mode: str, channels: Literal[1, 3]) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)).resize((70, 50))
    content = encoded(picture.convert(mode), form, **({"lossless": True} if form == "WEBP" else {}))
    expected = in_training(content, channels)
    for decode in (lambda: images.decode_body(content, decoding=Decoding(channels)),
                   lambda: images.decode_body(bytearray(content), decoding=Decoding(channels)),
                   lambda: images.decode_file(content, Decoding(channels))):  # fmt: skip
        decoded = decode()
        assert decoded.shape == (50, 70, channels)
        np.testing.assert_array_equal(decoded, expected)


def webp(kind: bytes, content: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", len(content) + 12) + b"WEBP" + kind + struct.pack("<I", len(content)) + content


@pytest.mark.parametrize(
    "content",
    [
        b"BM" + struct.pack("<I4xI", 100, 54) + struct.pack("<IiiHHI20x", 40, 30000, -20000, 1, 24, 0),
        b"BM" + bytes(12) + struct.pack("<IHH4x", 12, 65535, 65535),
        b"BM",
        webp(b"VP8X", bytes(4) + b"\xff\xff\xff\xff\xff\xff"),
        webp(b"VP8X", bytes(4) + b"\xff\x3f\x00\xff\x3f\x00"),
        webp(b"VP8L", b"\x2f\xff\xff\xff\x0f"),
        webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a\xff\x3f\xff\xff"),
        webp(b"VP9 ", bytes(30)),
        encoded(Image.new("1", (8000, 8000)), "PNG"),
    ],
)
def test_giant_and_empty_images_take_no_memory(content: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ImageError):
        images.decode_body(content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KB


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "WEBP"])
def test_damaged_ones_are_refused_or_read(form: str) -> None:
    random = np.random.default_rng(0)
    content = encoded(Image.fromarray(random.integers(0, 256, (9, 11, 3), np.uint8)), form)
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
