"""The lookup of an embedding is cut off if nothing else reads the input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.model.ir import keras_graph
from compress.model.ir.passes.cut_lookup import cut
from deploy.contract.tensors import TensorDescription

NUMBERS = np.random.default_rng(0).integers(0, 9, (7, 6)).astype(np.float32)


def network(keras: Any, middle: Any, **settings: Any) -> tuple[Any, keras_graph.Network]:
    """Return a model with an embedding and the layers of `middle` after it, and its network."""
    numbers = keras.Input((6,), name="numbers")
    vectors = keras.layers.Embedding(9, 4, name="words", **settings)(numbers)
    outputs = middle(keras.layers, numbers, vectors)
    model = keras.Model(numbers, outputs)
    return model, keras_graph.read(model)


def test_both_parts_compute_the_same(keras: Any) -> None:
    def middle(layers: Any, numbers: Any, vectors: Any) -> Any:
        del numbers
        x = layers.Conv1D(5, 3, padding="same")(vectors)
        x = layers.Add()([layers.Dense(4)(x), vectors])  # a second reader of the vectors
        return layers.Dense(2)(layers.GlobalAveragePooling1D()(x))

    model, read = network(keras, middle)
    parts = cut(read)
    assert parts is not None
    rows = parts.rows(NUMBERS)
    np.testing.assert_array_equal(parts.rows(NUMBERS + np.float32(0.7)), rows)
    np.testing.assert_array_equal(np.asarray(model(NUMBERS + np.float32(0.7))), np.asarray(model(NUMBERS)))
    assert rows.shape == (7, 6, 4)
    after = keras_graph.build(parts.network)
    assert after.input_shape == (None, 6, 4)
    assert "words" not in parts.network.layers
    np.testing.assert_allclose(np.asarray(after(rows)), np.asarray(model(NUMBERS)), atol=1e-6)
    tensor = TensorDescription("x", "x", (1, 6, 4), "int8", float(np.abs(parts.table).max()) / 127, 0)
    stored = parts.stored(tensor)
    assert (stored.shape, stored.dtype) == ((9, 4), np.int8)
    np.testing.assert_allclose(tensor.real(stored), parts.table, atol=0.51 * tensor.scale)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("middle", "settings"),
    [
        (lambda layers, _, vectors: layers.Dense(2)(layers.GlobalAveragePooling1D()(vectors)), {"mask_zero": True}),
        (lambda layers, numbers, vectors: layers.Concatenate()([layers.Flatten()(vectors), numbers]), {}),
        (lambda layers, numbers, vectors: [layers.Flatten()(vectors), numbers], {}),
    ],
    ids=["masks", "input again", "input is an output"],
)
def test_other_lookups_stay(keras: Any, middle: Any, settings: Any) -> None:
    _, read = network(keras, middle, **settings)
    assert cut(read) is None


def test_a_model_without_a_lookup_stays(keras: Any) -> None:
    x = keras.Input((6,))
    assert cut(keras_graph.read(keras.Model(x, keras.layers.Dense(2)(x)))) is None
    both = [keras.Input((6,)), keras.Input((6,))]
    vectors = [keras.layers.Embedding(9, 4)(tensor) for tensor in both]
    assert cut(keras_graph.read(keras.Model(both, keras.layers.Add()(vectors)))) is None
