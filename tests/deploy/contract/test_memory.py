"""Preprocessing allocates no more than its plan, and refuses a sample before it allocates anything."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from pictures import encoded
from PIL import Image

from compress.core.errors import DataError
from compress.data.sources import ImageFolder
from deploy.contract import pictures, resizing
from deploy.contract.errors import ImageError
from deploy.contract.preprocessing import MOST_BYTES, Preprocessing, PreprocessingError
from deploy.runner import images

SMALL = 1 << 18
"""Bytes that Python and numpy need in addition: headers, indices and weights."""
RESIZES: list[dict[str, Any]] = [
    {},
    {"filter": "nearest"},
    {"filter": "area"},
    {"filter": "bicubic"},
    {"antialias": True},
    {"antialias": True, "levels": True},
    {"filter": "bicubic", "antialias": True},
    {"filter": "bicubic", "antialias": True, "levels": True},
    {"fit": "crop"},
    {"fit": "pad", "antialias": True},
    {"fit": "letterbox", "filter": "area"},
]
SIZES = [(1, 1), (1, 300), (300, 1), (7, 5), (48, 31), (224, 301), (31, 48)]


def peak_bytes(steps: list[Any], sample: np.ndarray) -> int:
    """Return the most memory that Python and numpy had at once for a preprocessed sample."""
    preprocessing = Preprocessing(steps)
    tracemalloc.start()
    try:
        preprocessing(sample)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def png(size: tuple[int, int], mode: str = "L") -> bytes:
    return encoded(Image.new(mode, size), "PNG")


@pytest.mark.parametrize("settings", RESIZES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_values_do_not_depend_on_the_blocks(
    settings: dict[str, Any], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = np.random.default_rng(3).integers(0, 256, (61, 47, 3), np.uint8)
    step = Preprocessing([{"resize": {"size": list(size), **settings}}])
    expected = step(image)
    np.testing.assert_array_equal(step(image.astype(np.float32)), expected)
    monkeypatch.setattr(resizing, "BLOCK_VALUES", 1)
    np.testing.assert_array_equal(step(image), expected)


MANY = [
    *([{"resize": {"size": [96, 96], **settings}}] for settings in RESIZES),
    [{"scale": {"from": [0, 255]}}, {"resize": {"size": [64, 64]}}],
    [{"resize": {"size": [64, 64]}}, {"normalize": {"mean": [1, 2, 3], "std": [1, 1, 1]}}],
    [{"colour": {"to": "grey"}}, {"clip": {"to": [0, 1]}}],
    [{"crop": {"share": 0.5}}, {"pad": {"size": [512, 2048]}}],
]


@pytest.mark.parametrize("steps", MANY, ids=str)
@pytest.mark.parametrize("shape", [(500, 400, 3), (1, 40_000, 3), (40_000, 1, 3)], ids=str)
def test_an_image_needs_no_more_than_its_plan(steps: list[Any], shape: tuple[int, ...]) -> None:
    sample = np.zeros(shape, np.uint8)
    try:
        bound = most_needed(steps, shape)
    except PreprocessingError:  # the image does not fit into a padded one
        assert "pad" in str(steps)
        return
    assert peak_bytes(steps, sample) <= bound + SMALL


@pytest.mark.parametrize(
    "steps",
    [
        [{"length": {"samples": 60_000}}],
        [{"spectrogram": {"frame": 400, "step": 160}}],
        [{"spectrogram": {"frame": 400, "step": 160, "centre": True, "fill": "reflect"}}],
        [{"log_mel": {"rate": 16000, "frame": 400, "step": 160, "bins": 40, "preemphasis": 0.97, "relative": True}}],
        [{"mfcc": {"rate": 16000, "frame": 400, "step": 10, "bins": 40, "coefficients": 40, "remove_mean": True}}],
    ],
    ids=str,
)
def test_a_sound_needs_no_more_than_its_plan(steps: list[Any]) -> None:
    assert peak_bytes(steps, np.zeros(50_000, np.float32)) <= most_needed(steps, (50_000,)) + 4 * SMALL


def most_needed(steps: list[Any], shape: tuple[int, ...]) -> int:
    """Return the smallest limit with which a sample of this shape is not refused for its size."""
    low, high = 0, MOST_BYTES
    preprocessing = Preprocessing(steps)
    preprocessing.result_shape(shape)
    while low < high:
        middle = (low + high) // 2
        try:
            preprocessing.result_shape(shape, middle)
            high = middle
        except PreprocessingError:
            low = middle + 1
    return low


@pytest.mark.parametrize("shape", [(16_777_216, 1, 1), (1, 16_777_216, 1), (1, 8_388_607, 2), (5_592_405, 1, 3)])
@pytest.mark.parametrize("settings", [{}, {"filter": "nearest"}, {"fit": "crop"}, {"fit": "letterbox"}], ids=str)
def test_raw_values_with_an_extreme_side(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    sample = np.zeros(shape, np.uint8)
    assert peak_bytes([{"resize": {"size": [32, 32], **settings}}], sample) < 8 << 20


@pytest.mark.parametrize(
    ("steps", "shape"),
    [
        ([{"resize": {"size": [16, 16]}}], (1, 1, 16_777_216)),
        ([{"resize": {"size": [224, 224], "filter": "area"}}], (16_777_216, 1, 1)),
        ([{"spectrogram": {"frame": 64, "step": 1}}], (16_777_216,)),
        ([{"scale": {"from": [0, 255]}}], (16_777_216, 3, 3)),
        ([{"length": {"samples": 1 << 24}}], (16, 64, 1)),
        ([{"colour": {"to": "grey"}}], (16_777_216, 6, 3)),
    ],
    ids=str,
)
def test_refused_before_anything_is_allocated(steps: list[Any], shape: tuple[int, ...]) -> None:
    preprocessing = Preprocessing(steps)
    sample = np.broadcast_to(np.zeros((), np.uint8), shape)
    tracemalloc.start()
    try:
        with pytest.raises(PreprocessingError, match=r"allowed|takes a height or width"):
            preprocessing(sample)
        assert tracemalloc.get_traced_memory()[1] < SMALL
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [(1, 65_537), (65_537, 1), (8000, 8001)])
def test_pictures_are_refused_by_their_header(size: tuple[int, int]) -> None:
    content = png(size)
    reader = ImageFolder(path="x", channels=1)
    assert reader.decoded(png((2, 2)), "a.png").shape == images.decode_body(png((2, 2))).shape  # plugins are imported
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match="pixels; at most 33554432, and at most 65536 along a side"):
            images.decode_body(content)
        with pytest.raises(ImageError, match="pixels; at most 64000000"):
            pictures.decode(content)
        with pytest.raises(DataError, match="pixels; at most 64000000"):
            reader.decoded(content, "a.png")
        assert tracemalloc.get_traced_memory()[1] < SMALL
    finally:
        tracemalloc.stop()


def test_work_that_nobody_waits_for_ends() -> None:
    class StopError(Exception):
        pass

    seen = []

    def between() -> None:
        seen.append(1)
        if len(seen) == 2:
            raise StopError

    steps = [{"resize": {"size": [4, 4]}}, {"scale": {"from": [0, 255]}}, {"clip": {"to": [0, 1]}}]
    with pytest.raises(StopError):
        Preprocessing(steps)(np.zeros((8, 8, 1)), between)
    assert len(seen) == 2


def test_the_result_is_not_the_memory_of_the_sample() -> None:
    sample = np.zeros((4, 4, 1), np.float32)
    for steps in ([], [{"crop": {"size": [4, 4]}}], [{"resize": {"size": [4, 4]}}], [{"reshape": {"shape": [16]}}]):
        assert not np.shares_memory(Preprocessing(steps)(sample), sample)
