"""EXIF orientation of files that Pillow has opened."""

from __future__ import annotations

import io
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from deploy.contract import pictures
from deploy.contract.decoding import parsed

PHOTO = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


def photo(value: int, form: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x010F] = "a maker"
    exif[0x0112] = value
    stream = io.BytesIO()
    Image.fromarray(PHOTO).save(stream, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
    return stream.getvalue()


def read(content: bytes) -> int:
    with Image.open(io.BytesIO(content)) as image:
        return pictures.orientation_of(image)


def tiff(order: str = "<", kind: int = 3, value: int = 6) -> bytes:
    mark = b"II*\0" if order == "<" else b"MM\0*"
    content = struct.pack(order + ("H2x" if kind == 3 else "I"), value)
    return mark + struct.pack(order + "IHHHI", 8, 1, 0x0112, kind, 1) + content


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
def test_blocks(block: bytes, expected: int) -> None:
    for form in ("JPEG", "PNG", "WEBP"):
        stream = io.BytesIO()
        Image.fromarray(PHOTO).save(stream, form, exif=b"Exif\0\0" + block)
        assert read(stream.getvalue()) == expected


def test_an_orientation_in_xmp_is_not_used() -> None:
    """Whether `getexif` uses it depends on the version of Pillow."""
    stream = io.BytesIO()
    Image.fromarray(PHOTO).save(stream, "WEBP", xmp=b'<x:xmpmeta tiff:Orientation="6"></x:xmpmeta>')
    assert read(stream.getvalue()) == 1


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_block_has_an_orientation_too() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        block = bytearray(photo(6)[photo(6).index(b"eXIf") + 4 :][: random.integers(64)])
        for place in random.integers(0, 64, 3):
            block[place : place + 1] = bytes([random.integers(256)])
        stand_in = SimpleNamespace(info={"exif": bytes(block)})
        assert pictures.orientation_of(stand_in) in range(1, 9)


def test_the_manifest() -> None:
    assert parsed({}).orientation == "exif"
    assert parsed({"orientation": "ignore"}).orientation == "ignore"
    with pytest.raises(ValueError, match="orientation cannot be 'upright'"):
        parsed({"orientation": "upright"})
