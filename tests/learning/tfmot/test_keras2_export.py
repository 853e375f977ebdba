from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest

from compress.learning.tfmot import adapter
from compress.model.ir import keras_graph

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_a_network_computes_the_same_in_tf_keras(keras: Any, builder: networks.Builder) -> None:
    network = keras_graph.read(networks.randomized(builder(keras)))
    legacy = adapter.plain(network)
    assert legacy.frozen == {}
    assert legacy.weights().keys() == {layer.name for layer in network.layers.values() if layer.weights}
    for name, weights in legacy.weights().items():
        for actual, expected in zip(weights, network.layers[name].weights, strict=True):
            np.testing.assert_array_equal(actual, expected)


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
    legacy = adapter.plain(keras_graph.read(model))
    assert legacy.frozen == {"memory": "LSTM"}
    assert legacy.weights().keys() == {"conv", "one", "two"}
    assert len(legacy.model.losses) == 1
    x = np.random.default_rng(0).random((64, 6, 6, 3), np.float32)
    assert not np.allclose(legacy.model(x, training=True)[0], legacy.model(x, training=True)[0])  # dropout is active
