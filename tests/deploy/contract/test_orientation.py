"""EXIF orientation: read without a decoder, and applied, on every Python of Coral hosts."""

from __future__ import annotations

import io
import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from interpreters import executable, interpreters
from paths import ROOT
from PIL import Image, ImageOps

from deploy.contract import orientation
from deploy.contract.decoding import parsed

PHOTO = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


def photo(value: int, form: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x010F] = "a maker"
    exif[0x0112] = value
    stream = io.BytesIO()
    Image.fromarray(PHOTO).save(stream, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
    return stream.getvalue()


SCRIPT = """
import sys
import numpy as np
from deploy.contract import orientation
for value in range(1, 9):
    stored = np.load("stored.npy")
    for form in ("JPEG", "PNG", "WEBP"):
        with open("%d.%s" % (value, form), "rb") as stream:
            content = stream.read()
        upright = orientation.upright(stored, content)
        assert upright.flags.c_contiguous
        np.testing.assert_array_equal(upright, np.load("%d.npy" % value))
        np.testing.assert_array_equal(orientation.upright(stored, content, "ignore"), stored)
"""


@pytest.mark.parametrize("interpreter", interpreters())
def test_every_orientation_on_every_python(interpreter: str, tmp_path: Path) -> None:
    np.save(tmp_path / "stored.npy", PHOTO)
    for value in range(1, 9):
        for form in ("JPEG", "PNG", "WEBP"):
            (tmp_path / f"{value}.{form}").write_bytes(photo(value, form))
        np.save(tmp_path / f"{value}.npy", ImageOps.exif_transpose(Image.open(io.BytesIO(photo(value)))))
    done = subprocess.run(
        [executable(interpreter), "-W", "error", "-c", SCRIPT],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def tiff(order: str = "<", kind: int = 3, value: int = 6) -> bytes:
    mark = b"II*\0" if order == "<" else b"MM\0*"
    content = struct.pack(order + ("H2x" if kind == 3 else "I"), value)
    return mark + struct.pack(order + "IHHHI", 8, 1, 0x0112, kind, 1) + content


def jpeg(*segments: bytes) -> bytes:
    parts = (b"\xff" + bytes([0xE1]) + struct.pack(">H", len(content) + 2) + content for content in segments)
    return b"\xff\xd8" + b"".join(parts) + b"\xff\xda"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (jpeg(b"Exif\0\0" + tiff("<")), 6),
        (jpeg(b"Exif\0\0" + tiff(">")), 6),
        (jpeg(b"Exif\0\0" + tiff(">", 4)), 6),
        (jpeg(b"http://ns.adobe.com/xap/1.0/\0", b"Exif\0\0" + tiff()), 6),
        (b"\xff\xd8\xff" + jpeg(b"Exif\0\0" + tiff())[2:], 6),  # a fill byte
        (jpeg(b"Exif\0\0" + tiff(value=0)), 1),
        (jpeg(b"Exif\0\0" + tiff(value=9)), 1),
        (jpeg(b"Exif\0\0" + tiff(kind=7)), 1),
        (jpeg(b"Exif\0\0" + b"XX" + tiff()[2:]), 1),
        (jpeg(b"Exif\0\0" + tiff()[:12]), 1),
        (jpeg(b"Exif\0\0" + tiff())[:30], 1),
        (b"RIFF\0\0\0\0WEBPVP8X\3\0\0\0abc\0EXIF" + struct.pack("<I", 32) + b"Exif\0\0" + tiff(), 6),
        (b"BM", 1),
        (b"", 1),
    ],
)
def test_blocks(content: bytes, expected: int) -> None:
    assert orientation.read(io.BytesIO(content)) == expected


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_damaged_files_have_an_orientation_too(form: str) -> None:
    random = np.random.default_rng(0)
    content = photo(6, form)
    assert orientation.read(io.BytesIO(content)) == 6
    for _ in range(500):
        changed = bytearray(content[: random.integers(len(content))])
        for place in random.integers(0, len(content), 3):
            changed[place % max(len(changed), 1) : place % max(len(changed), 1) + 1] = bytes([random.integers(256)])
        assert orientation.read(io.BytesIO(changed)) in range(1, 9)


def test_the_manifest() -> None:
    assert parsed({}).orientation == "exif"
    assert parsed({"orientation": "ignore"}).orientation == "ignore"
    with pytest.raises(ValueError, match="orientation cannot be 'upright'"):
        parsed({"orientation": "upright"})
