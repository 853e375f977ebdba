"""The hard cases of benchmarks/quantization.py have their stated properties."""

from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest
import quantization_cases as cases

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_an_injected_imbalance_does_not_change_the_function(keras: Any, builder: networks.Builder) -> None:
    model = networks.randomized(builder(keras))
    samples = np.random.default_rng(1).random((8, 12, 12, 3), np.float32)
    changed, pairs = cases.imbalanced(model, 16, 0, samples)  # `imbalanced` asserts it, too
    expected, actual = (np.asarray(variant(samples)) for variant in (model, changed))
    np.testing.assert_allclose(actual, expected, atol=1e-4 * max(1.0, np.abs(expected).max()))
    assert (pairs == 0) == (builder in (networks.inverted_residual, networks.nested))  # ReLU6, additions, shared layers


def test_one_sample_is_corrupt() -> None:
    samples = np.random.default_rng(0).random((200, 4, 4, 1), np.float32)
    for change in cases.CORRUPTIONS.values():
        changed = change(samples, 3)
        assert (changed != samples).any(axis=(1, 2, 3)).sum() == 1
