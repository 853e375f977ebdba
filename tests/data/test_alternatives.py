"""Alternative preprocessings of the same samples."""

from __future__ import annotations

import numpy as np
import pytest

from compress.data.duplicates import fingerprint, shared
from compress.data.preprocessed import alternatives

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


def test_samples_in_two_splits() -> None:
    samples = RANDOM.random((5, 8, 8, 1), np.float32)
    prints = [fingerprint(sample) for sample in samples]
    assert len(set(prints)) == 5
    assert shared({0: prints[0], 1: prints[1]}, {0: prints[2], 1: prints[1]}, {}) == [1]
    assert shared({0: prints[0]}, {0: prints[3]}) == []


def test_samples_that_show_too_little_are_never_the_same() -> None:
    black = fingerprint(np.zeros((8, 8, 1), np.float32))
    row = fingerprint(np.arange(4, dtype=np.float32))
    assert black == row == b""
    assert shared({0: black, 1: row}, {0: black, 1: row}) == []
