from __future__ import annotations

from typing import Any

import layers
import numpy as np
import pytest

from compress.model.ir import keras_graph
from compress.model.ir.passes import decompose
from compress.model.ir.passes.fold import canonical

pytestmark = pytest.mark.tensorflow


def images(count: int) -> Any:
    return np.random.default_rng(count).random((count, 12, 12, 3), np.float32)


@pytest.mark.parametrize("name", layers.IN_STEPS)
def test_layers_in_single_steps_compute_the_same(keras: Any, name: str) -> None:
    read = keras_graph.read(model := layers.model(keras, layers.IN_STEPS[name]))
    steps = canonical(read)
    expected, actual = (
        np.asarray(keras_model(images(4), training=False)) for keras_model in (model, keras_graph.build(steps))
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert list(steps.layers) == list(canonical(read).layers)  # names do not depend on earlier Keras layers
    assert len(steps.layers) >= len(read.layers)
    assert all(decompose.decomposed(steps, layer_name) is steps for layer_name in steps.layers)


def test_a_layer_that_is_called_twice_is_taken_apart_at_both_places(keras: Any) -> None:
    image = keras.Input((6, 6, 4))
    norm = keras.layers.LayerNormalization()
    model = keras.Model(image, keras.layers.Flatten()(norm(keras.layers.ReLU()(norm(image)))))
    model.set_weights([np.linspace(0.5, 2, 4), np.linspace(-1, 1, 4)])
    steps = canonical(keras_graph.read(model))
    weighted = [layer for layer in steps.layers.values() if layer.weights]
    assert [(layer.kind, len(layer.calls)) for layer in weighted] == [("DepthwiseConv2D", 2)]
    inputs = np.random.default_rng(0).random((3, 6, 6, 4), np.float32)
    np.testing.assert_allclose(np.asarray(keras_graph.build(steps)(inputs)), np.asarray(model(inputs)), atol=1e-4)


def test_a_relu_with_a_jump_and_a_normalization_along_another_axis_stay_as_they_are(keras: Any) -> None:
    layers = keras.layers
    for layer in (layers.ReLU(2.0, threshold=0.5), layers.ReLU(threshold=0.5), layers.LayerNormalization(axis=1)):
        image = keras.Input((6, 4, 4))
        read = keras_graph.read(keras.Model(image, layer(image)))
        assert canonical(read) == read
