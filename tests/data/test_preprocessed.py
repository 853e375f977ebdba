"""Values of preprocessed samples: as images again, and after other preprocessings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.data.preprocessed import alternatives, displayed
from deploy.contract.preprocessing import Preprocessing

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, {"-1 to 1", "0 to 255"}),
        (-1, 1, {"0 to 1", "0 to 255"}),
        (0, 255, {"0 to 1", "-1 to 1"}),
        (-3, 3, set()),
        (0, 1.5, set()),
        (0, 4000, set()),
    ],
)
def test_other_ranges(low: float, high: float, expected: set[str]) -> None:
    samples = np.linspace(low, high, 40, dtype=np.float32).reshape(2, 20)
    candidates = alternatives(samples)
    assert {candidate.description.split("from ")[1].split(" instead")[0] for candidate in candidates} == expected
    for alternative in candidates:
        changed = alternative(samples)
        assert changed.shape == samples.shape
        shown = f"{changed.min():g} to {changed.max():g}"
        assert shown in alternative.description


def test_other_channels() -> None:
    samples = RANDOM.random((4, 6, 6, 3), np.float32)
    samples[0, 0, 0, 0], samples[0, 0, 0, 1] = 0, 1
    by_topic = {alternative.description.split(" ")[1]: alternative for alternative in alternatives(samples)}
    np.testing.assert_array_equal(by_topic["channels"](samples), samples[..., ::-1])
    torch = (samples - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(by_topic["mean"](samples), torch, atol=1e-5)
    caffe = samples[..., ::-1] * 255 - np.array([103.939, 116.779, 123.68])
    np.testing.assert_allclose(by_topic["order"](samples), caffe, atol=1e-3)
    assert by_topic["channels"].advice == "`colour: {to: bgr}`"
    assert not [alternative for alternative in alternatives(samples[..., :1]) if "BGR" in alternative.description]


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
