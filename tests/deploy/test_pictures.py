"""Image files on the device: the same numbers as in training, whichever decoder is there."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compress.data.sources import images as training
from deploy import images
from deploy.preprocessing import Array

Decode = Callable[[bytes], Array]
GRADIENT = np.mgrid[0:30, 0:50][0] * 8
"""Dark above, light below: [30, 50], 0 to 232."""


@pytest.fixture(params=["Pillow", "OpenCV"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it makes this a device with one decoder and no other one."""
    if request.param == "Pillow":
        return lambda: monkeypatch.setitem(sys.modules, "cv2", None)
    pytest.importorskip("cv2", reason="there is no OpenCV here")
    return lambda: monkeypatch.setitem(sys.modules, "PIL", None)


def written(image: Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def turned(orientation: int) -> bytes:
    """A photo that viewers turn."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return written(Image.fromarray(GRADIENT.astype(np.uint8)).convert("RGB"), "JPEG", exif=exif, quality=95)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("decode", [images.decoded, images.of_file])
def test_an_orientation_is_ignored(decode: Decode, orientation: int, device: Callable[[], None]) -> None:
    content = turned(orientation)
    wanted = training.decoded(content, 3, "photo")
    device()
    np.testing.assert_allclose(decode(content).astype(int), wanted, atol=2)
    np.testing.assert_allclose(wanted[..., 0].astype(int), GRADIENT, atol=4)
