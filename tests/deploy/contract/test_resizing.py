"""Images: resize with its filters and fits, crop, pad, colour, against TensorFlow, Pillow and by hand."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT

from deploy.contract.preprocessing import Preprocessing, PreprocessingError, quantize

RANDOM = np.random.default_rng(0)
DATA = Path(os.environ.get("CORALLINE_SHARED", ROOT.parent / "shared")) / "data"
WEIGHED = [("bilinear", True), ("bicubic", True), ("bicubic", False), ("area", False)]


def apply(sample: Any, *steps: Any) -> np.ndarray:
    return Preprocessing(list(steps))(np.asarray(sample))


def resize(*size: int, **more: Any) -> dict[str, Any]:
    return {"resize": {"size": list(size), **more}}


@pytest.fixture(scope="module")
def photos() -> list[np.ndarray]:
    """Return real photos: uint8 [240, 320, 3] or [320, 240, 3], and [96, 96, 3]."""
    from PIL import Image

    images = []
    for name in ("cards320.tar", "grocery96.tar"):
        if not (DATA / name).exists():
            pytest.skip(f"{DATA / name} is not there; CORALLINE_SHARED names the folder of shared files")
        with tarfile.open(DATA / name) as archive:
            members = [entry for entry in archive if entry.name.endswith(".jpg")]
            for member in members[:: len(members) // 4][:4]:
                stream = archive.extractfile(member)
                assert stream is not None
                images.append(np.asarray(Image.open(io.BytesIO(stream.read())).convert("RGB")))
    return images


def steps_apart(ours: np.ndarray, theirs: np.ndarray) -> int:
    """Return the largest difference in steps of two images of 0 to 255 as a model's int8 input."""
    stored = [quantize(image.astype(np.float32), 1.0, -128, np.int8).astype(int) for image in (ours, theirs)]
    return int(np.abs(stored[0] - stored[1]).max())


# --- resize -----------------------------------------------------------------------------


def test_by_hand() -> None:
    row = np.array([[0.0, 4, 8, 12]])
    np.testing.assert_array_equal(apply(row, resize(1, 2, filter="area"))[0, :, 0], [2, 10])
    np.testing.assert_allclose(apply(row[:, :3], resize(1, 2, filter="area"))[0, :, 0], [4 / 3, 20 / 3], rtol=1e-6)
    np.testing.assert_array_equal(apply(row[:, :2], resize(1, 4, filter="area"))[0, :, 0], [0, 0, 4, 4])
    # A triangle of twice the width: weights 1, 3, 3 of 7 at the edge.
    np.testing.assert_allclose(
        apply(row, resize(1, 2, antialias=True))[0, :, 0],
        [(3 * 0 + 3 * 4 + 8) / 7, (4 + 3 * 8 + 3 * 12) / 7],
        rtol=1e-6,
    )


@pytest.mark.tensorflow
@pytest.mark.parametrize(("method", "antialias"), WEIGHED)
def test_filters_are_those_of_tensorflow(tf: Any, photos: list[np.ndarray], method: str, antialias: bool) -> None:
    for photo in photos:
        for size in ([96, 96], [61, 224], [33, 20], [400, 110]):
            ours = apply(photo, resize(*size, filter=method, antialias=antialias))
            theirs = tf.image.resize(photo.astype(np.float32), size, method=method, antialias=antialias).numpy()
            # TensorFlow takes bicubic weights without antialiasing from a table of 1024 entries.
            np.testing.assert_allclose(ours, theirs, atol=0.2 if (method, antialias) == ("bicubic", False) else 0.02)
            assert steps_apart(ours, theirs) <= 1


@pytest.mark.tensorflow
def test_fits_are_those_of_tensorflow_and_keras(tf: Any, keras: Any) -> None:
    for sides in ((240, 77), (240, 320), (7, 9), (100, 33), (333, 101), (1, 50)):
        sample = RANDOM.random((*sides, 2), np.float32) + 1
        for size in ([128, 64], [96, 96], [50, 70]):
            padded = tf.image.resize_with_pad(sample, *size).numpy()
            np.testing.assert_array_equal(apply(sample, resize(*size, fit="pad")), padded)
            cropped = keras.preprocessing.image.smart_resize(sample, size)  # `tf.keras` may be Keras 2
            np.testing.assert_array_equal(apply(sample, resize(*size, fit="crop")), cropped)


def test_filters_are_those_of_pillow(photos: list[np.ndarray]) -> None:
    from PIL import Image

    for photo in photos:
        for size in ((60, 77), (95, 33)):
            for method in ("bilinear", "bicubic"):
                kind = Image.Resampling[method.upper()]
                plain = apply(photo[..., :1], resize(*size, filter=method, antialias=True))
                exact = Image.fromarray(photo[..., 0].astype(np.float32)).resize(size[::-1], kind)
                np.testing.assert_allclose(plain[..., 0], np.asarray(exact), atol=1e-3)
                resized = apply(photo, resize(*size, filter=method, antialias=True, levels=True))
                theirs = np.asarray(Image.fromarray(photo).resize(size[::-1], kind))
                assert steps_apart(resized, theirs) <= 1
                assert (resized != theirs).mean() < 0.02  # halves that Pillow rounds the other way in fixed point


def test_pad_fills() -> None:
    image = apply(np.full((2, 4, 3), 9.0), resize(4, 4, fit="pad", fill=[1, 2, 3]))
    np.testing.assert_array_equal(image[:, 0, 1], [2, 9, 9, 2])
    with pytest.raises(PreprocessingError, match="2 fill values for 3 channels"):
        apply(np.ones((2, 4, 3)), resize(4, 4, fit="pad", fill=[1, 2]))


def test_extreme_sides() -> None:
    assert apply(np.ones((1, 5000)), resize(9, 8, fit="pad")).shape == (9, 8, 1)
    assert apply(np.ones((1, 5000)), resize(9, 8, fit="crop", filter="area")).shape == (9, 8, 1)
    with pytest.raises(PreprocessingError, match="height or width up to 65536, not 70000"):
        apply(np.ones((1, 70_000)), resize(1, 8, filter="area"))
    with pytest.raises(PreprocessingError, match=r"needs \d+ MB of memory here; allowed: 1024 MB"):
        apply(np.ones((1, 1, 5)), resize(8192, 8192))


# --- crop, pad, colour ------------------------------------------------------------------


def test_crop() -> None:
    image = np.arange(30).reshape(5, 6)
    np.testing.assert_array_equal(apply(image, {"crop": {"size": [2, 3]}})[..., 0], image[1:3, 1:4])
    np.testing.assert_array_equal(apply(image, {"crop": {"share": 0.5}})[..., 0], image[1:4, 1:5])
    np.testing.assert_array_equal(apply(image, {"crop": {"share": 1}})[..., 0], image)
    with pytest.raises(PreprocessingError, match=r"crop to \[6, 6\]: the image has \[5, 6\]; resize or pad"):
        apply(image, {"crop": {"size": [6, 6]}})


def test_pad() -> None:
    image = apply(np.ones((2, 3)), {"pad": {"size": [5, 4], "fill": -1}})[..., 0]
    np.testing.assert_array_equal(image[:, 0], [-1, 1, 1, -1, -1])
    np.testing.assert_array_equal(image[1], [1, 1, 1, -1])
    with pytest.raises(PreprocessingError, match=r"pad to \[1, 3\]: the image has \[2, 3\]"):
        apply(np.ones((2, 3)), {"pad": {"size": [1, 3]}})


@pytest.mark.tensorflow
def test_crop_and_pad_are_those_of_tensorflow(tf: Any) -> None:
    image = RANDOM.random((37, 52, 3), np.float32)
    for share in (0.3, 0.5, 0.875, 0.99):
        theirs = tf.image.central_crop(image, share).numpy()
        np.testing.assert_array_equal(apply(image, {"crop": {"share": share}}), theirs)
    for step, size in (("pad", [60, 61]), ("pad", [38, 60]), ("crop", [30, 31]), ("crop", [36, 40])):
        theirs = tf.image.resize_with_crop_or_pad(image, *size).numpy()
        np.testing.assert_array_equal(apply(image, {step: {"size": size}}), theirs)


def test_colour() -> None:
    image = RANDOM.integers(0, 256, (4, 5, 3)).astype(np.uint8)
    np.testing.assert_array_equal(apply(image, {"colour": {"to": "bgr"}}), image[..., ::-1])
    np.testing.assert_array_equal(apply(image, {"colour": {"to": "rgb"}}), image)
    back = apply(image[..., ::-1], {"colour": {"from": "bgr", "to": "grey"}})
    np.testing.assert_array_equal(back, apply(image, {"colour": {"to": "grey"}}))
    np.testing.assert_array_equal(
        apply(image[..., 0], {"colour": {"from": "grey", "to": "rgb"}})[..., 2], image[..., 0]
    )
    for step, channels in (({"to": "grey"}, 1), ({"from": "grey", "to": "rgb"}, 3), ({"to": "bgr"}, 4)):
        with pytest.raises(PreprocessingError, match=f"channels, not {channels}"):
            apply(np.ones((2, 2, channels)), {"colour": step})


def test_grey_is_that_of_pillow(photos: list[np.ndarray]) -> None:
    from PIL import Image

    for photo in photos:
        theirs = np.asarray(Image.fromarray(photo).convert("L"))
        assert steps_apart(apply(photo, {"colour": {"to": "grey"}})[..., 0], theirs) <= 1


def test_steps_for_images_refuse_sounds() -> None:
    for step in (resize(2, 2), {"crop": {"size": [2, 2]}}, {"pad": {"size": [2, 2]}}, {"colour": {"to": "grey"}}):
        with pytest.raises(
            PreprocessingError, match=r"takes an image \[height, width, channels\], not \[9\]"
        ) as caught:
            apply(np.ones(9), {"clip": {"to": [0, 1]}}, step)
        assert caught.value.step == 1
