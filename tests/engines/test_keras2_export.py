from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest

from compress.engines.tfmot import keras2_export
from compress.importers.keras.keras2 import TOLERANCE, difference
from compress.ir import keras_graph

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_a_network_computes_the_same_in_tf_keras(keras: Any, builder: networks.Builder) -> None:
    given = keras_graph.read(networks.randomized(builder(keras)))
    made = keras2_export.plain(given)
    assert made.frozen == {}
    assert made.weights().keys() == {layer.name for layer in given.layers.values() if layer.weights}
    for name, weights in made.weights().items():
        for found, wanted in zip(weights, given.layers[name].weights, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_what_tf_keras_lacks_or_defines_otherwise_runs_as_it_is(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, activation="hard_sigmoid", kernel_regularizer="l2", name="conv")(image)
    x = keras.ops.relu6(x) * 2.0 - 0.5
    x = layers.UnitNormalization()(x)
    x = layers.Dropout(0.5)(x)
    x = layers.Reshape((-1, 4))(x)
    x = layers.LSTM(3, name="memory")(x)
    model = keras.Model(image, [layers.Dense(2, "gelu", name="one")(x), layers.Dense(3, name="two")(x)])
    made = keras2_export.plain(keras_graph.read(model))
    assert made.frozen == {"memory": "LSTM"}
    assert made.weights().keys() == {"conv", "one", "two"}
    assert len(made.model.losses) == 1
    x = np.random.default_rng(0).random((64, 6, 6, 3), np.float32)
    assert not np.allclose(made.model(x, training=True)[0], made.model(x, training=True)[0])  # dropout is active


def test_a_layer_can_be_replaced_and_a_difference_is_seen(keras: Any) -> None:
    given = keras_graph.read(networks.randomized(networks.plain(keras)))
    seen: list[str] = []

    def change(layer: keras_graph.Layer, counterpart: Any) -> Any:
        if counterpart is not None:
            seen.append(layer.name)
            counterpart.set_weights([each * 1.01 for each in counterpart.get_weights()])
        return counterpart

    made = keras2_export.legacy(given, change)
    assert set(seen) == {layer.name for layer in given.layers.values() if layer.weights}
    assert difference(made.model, keras_graph.build(given)) > 100 * TOLERANCE
