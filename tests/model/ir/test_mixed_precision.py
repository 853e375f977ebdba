"""The layers of a mixed-precision copy that stay in 32 bits: those of the outputs, and those before an embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compress.model.ir.mixed_precision import lowered

pytestmark = pytest.mark.tensorflow

WORDS = 4001
"""The number of rows of the embedding: bfloat16 holds integers up to 256, and float16 up to 2048."""


def computed(model: Any) -> dict[str, str]:
    """Return the type in which each layer of a model computes, also in nested models, by its name."""
    return {layer.name: layer.compute_dtype for layer in model._flatten_layers(include_self=False)}


def test_the_layers_of_the_outputs_stay_in_32_bits_in_a_nested_model(keras: Any) -> None:
    layers = keras.layers
    features = keras.Sequential([keras.Input((6, 6, 4)), layers.Flatten(), layers.Dense(8, name="hidden")])
    inner = keras.Input((8,))
    classes, box = layers.Dense(3, name="classes")(inner), layers.Dense(4, name="box")(layers.ReLU(name="relu")(inner))
    heads = keras.Model(inner, [classes, box])
    image = keras.Input((8, 8, 1))
    twin = lowered(keras.Model(image, heads(features(layers.Conv2D(4, 3, name="first")(image)))), "mixed_bfloat16")
    types = computed(twin)
    assert {types[name] for name in ("first", "hidden", "relu")} == {"bfloat16"}
    assert types["classes"] == types["box"] == "float32"
    assert [tensor.dtype for tensor in twin.outputs] == ["float32", "float32"]


def test_the_output_of_a_nested_model_in_a_nested_model_is_followed(keras: Any) -> None:
    layers = keras.layers
    deep = keras.Sequential([keras.Input((6, 6, 1)), layers.Flatten(name="flat"), layers.Dense(2, name="last")])
    outer = keras.Sequential([keras.Input((6, 6, 1)), keras.Sequential([keras.Input((6, 6, 1)), deep])])
    types = computed(lowered(outer, "mixed_float16"))
    assert (types["flat"], types["last"]) == ("float16", "float32")


def test_a_nested_model_may_read_its_own_outputs(keras: Any) -> None:
    layers = keras.layers
    inner = keras.Input((4,))
    twice = keras.Model(inner, layers.Dense(4, name="inside")(inner))
    values = keras.Input((4,))
    model = keras.Model(values, twice(layers.ReLU(name="between")(twice(layers.ReLU(name="before")(values)))))
    types = computed(lowered(model, "mixed_bfloat16"))
    assert (types["inside"], types["between"], types["before"]) == ("float32", "bfloat16", "bfloat16")


def embedding(keras: Any) -> Any:
    return keras.layers.Embedding(WORDS, 8)


def squared(keras: Any, words: Any) -> Any:
    return keras.layers.Reshape((4, 4))(words)


LOOKUPS: dict[str, Callable[[Any, Any], Any]] = {
    "directly": lambda keras, words: embedding(keras)(words),
    "reshaped": lambda keras, words: embedding(keras)(
        keras.layers.Identity()(keras.layers.Reshape((16,))(squared(keras, words)))
    ),
    "through layers of the outer model and of a nested one": lambda keras, words: keras.Sequential(
        [keras.Input((4, 4)), keras.layers.Reshape((16,)), embedding(keras)]
    )(squared(keras, words)),
    "after a nested model": lambda keras, words: embedding(keras)(
        keras.Sequential([keras.Input((16,)), keras.layers.Reshape((16,))])(words)
    ),
    "wrapped": lambda keras, words: keras.layers.Reshape((16, 8))(
        keras.layers.TimeDistributed(embedding(keras))(squared(keras, words))
    ),
}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_indices_of_words_stay_exact(keras: Any, lookup: str, policy: str) -> None:
    words = keras.Input((16,))
    x = keras.layers.Conv1D(8, 3, name="convolution")(LOOKUPS[lookup](keras, words))
    model = keras.Model(words, keras.layers.Dense(2)(keras.layers.GlobalMaxPooling1D(name="pooling")(x)))
    twin = lowered(model, policy)
    types = computed(twin)
    assert types["convolution"] == types["pooling"] == policy.removeprefix("mixed_")
    (table,) = [array for array in model.get_weights() if array.shape == (WORDS, 8)]
    rows = keras.Model(twin.inputs[0], twin.get_layer("convolution").input)
    indices = np.random.default_rng(0).integers(2049, WORDS, (5, 16))
    actual = np.asarray(keras.ops.cast(rows(indices.astype(np.float32)), "float32"))
    np.testing.assert_allclose(actual, table[indices], atol=1e-3)
