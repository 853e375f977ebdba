"""The conversion of preprocessed samples back into images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.data.preprocessed import displayed
from deploy.contract.preprocessing import Preprocessing

PHOTO = np.random.default_rng(0).integers(0, 256, (6, 8, 3)).astype(np.uint8)
PHOTO[0, 0], PHOTO[0, 1] = 0, 255
TORCH = {"normalize": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}}
CAFFE = {"normalize": {"mean": [103.939, 116.779, 123.68], "std": [1]}}


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [{"scale": {"from": [0, 255]}}],
        [{"scale": {"from": [0, 255], "to": [-1, 1]}}],
        [{"scale": {"from": [0, 255], "to": [1, 0]}}],
        [{"scale": {"from": [0, 255]}}, TORCH],
        [{"colour": {"to": "bgr"}}, CAFFE],
        [CAFFE, {"colour": {"to": "bgr"}}, {"clip": {"to": [-200, 200]}}],
        [{"normalize": {"mean": [127.5], "std": [127.5]}}],
    ],
)
def test_values_are_undone(steps: list[Any]) -> None:
    shown = displayed(Preprocessing(steps)(PHOTO)[np.newaxis], steps)
    assert shown is not None
    assert shown.dtype == np.uint8
    assert np.abs(shown[0].astype(int) - PHOTO).max() <= 1


def test_frames_of_opencv_are_shown_as_rgb() -> None:
    for steps in ([{"colour": {"from": "bgr", "to": "rgb"}}], [{"colour": {"from": "bgr", "to": "bgr"}}]):
        shown = displayed(Preprocessing(steps)(PHOTO[..., ::-1])[np.newaxis], steps)
        np.testing.assert_array_equal(shown, PHOTO[np.newaxis])


def test_grey_stays_grey_and_borders_stay() -> None:
    steps = [
        {"resize": {"size": [16, 16], "fit": "letterbox", "fill": 114}},
        {"colour": {"to": "grey"}},
        {"scale": {"from": [0, 255]}},
        {"squeeze": {}},
    ]
    shown = displayed(Preprocessing(steps)(PHOTO)[np.newaxis], steps)
    assert shown is not None
    assert shown.shape == (1, 16, 16, 3)
    assert (shown[0, 0] == 114).all()
    assert (shown[..., 0] == shown[..., 2]).all()


def test_the_range_is_that_of_the_first_scale_or_the_usual_one() -> None:
    digits = np.full((1, 8, 8, 1), 0.5, np.float32)
    assert (displayed(digits, [{"scale": {"from": [0, 16]}}]) == 128).all()
    for low, high in ((0, 1), (-1, 1), (0, 255), (-7, 9)):
        values = np.linspace(low, high, 64, dtype=np.float32).reshape(1, 8, 8, 1)
        shown = displayed(values, [])
        assert shown is not None
        assert (shown.min(), shown.max()) == (0, 255)
    assert (displayed(np.full((1, 4, 4, 1), np.nan, np.float32), []) == 0).all()


def test_sounds_and_rows_are_no_images() -> None:
    assert displayed(np.zeros((2, 100), np.float32), []) is None
    assert displayed(np.zeros((2, 10, 10, 4), np.float32), []) is None
    assert displayed(np.zeros((2, 300), np.float32), [{"reshape": {"shape": [-1]}}]) is None
