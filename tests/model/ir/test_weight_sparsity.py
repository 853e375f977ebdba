from __future__ import annotations

import numpy as np
import pytest

from compress.model.ir import weight_sparsity

RANDOM = np.random.default_rng(0)


def test_trained_weights_are_neither_sparse_nor_clustered() -> None:
    redundancy = weight_sparsity.of(RANDOM.normal(size=(3, 3, 8, 16)).astype(np.float32))
    assert (redundancy.weights, redundancy.zeros, redundancy.distinct) == (1152, 0.0, 1152)
    assert not redundancy.sparse
    assert not redundancy.clustered


@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_shared_values_are_found_with_and_without_zeros(zeros: float) -> None:
    kernel = RANDOM.choice(np.linspace(0.1, 1, 15), size=(20, 30)).astype(np.float32)
    kernel.ravel()[: int(600 * zeros)] = 0
    redundancy = weight_sparsity.of(kernel)
    assert redundancy.zeros == pytest.approx(zeros)
    assert redundancy.sparse == (zeros > 0)
    assert redundancy.clustered


def test_zeros_alone_are_no_clusters() -> None:
    kernel = RANDOM.normal(size=(40, 40)).astype(np.float32)
    kernel[np.abs(kernel) < 1.5] = 0
    redundancy = weight_sparsity.of(kernel)
    assert redundancy.sparse
    assert not redundancy.clustered
    assert not weight_sparsity.of(np.zeros((4, 4), np.float32)).clustered


def test_zeros_of_several_layers_count_by_their_weights() -> None:
    redundancies = {"a": weight_sparsity.Redundancy(300, 1.0, 1), "b": weight_sparsity.Redundancy(100, 0.0, 100)}
    assert weight_sparsity.zeros(redundancies) == 0.75
    assert weight_sparsity.zeros({}) == 0.0
