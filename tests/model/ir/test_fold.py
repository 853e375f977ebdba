from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest

from compress.model.ir import keras_graph
from compress.model.ir.passes.fold import canonical

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_the_canonical_form_computes_the_same(keras: Any, builder: networks.Builder) -> None:
    model = networks.randomized(builder(keras))
    folded = keras_graph.build(canonical(keras_graph.read(model)))
    inputs = np.random.default_rng(3).random((3, 12, 12, 3), np.float32)
    np.testing.assert_allclose(np.asarray(folded(inputs)), np.asarray(model(inputs)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_no_activation_hides_in_a_layer_and_no_separable_layer_is_left(keras: Any, builder: networks.Builder) -> None:
    folded = canonical(keras_graph.read(builder(keras)))
    weighted = [layer for layer in folded.layers.values() if layer.weights]
    assert all(layer.config.get("activation", "linear") == "linear" for layer in weighted)
    assert not {layer.kind for layer in weighted} & {"SeparableConv2D", "BatchNormalization"}


def test_a_batch_norm_that_others_look_behind_becomes_a_layer_of_its_own(keras: Any) -> None:
    image = keras.Input((8, 8, 3))
    conv = keras.layers.Conv2D(4, 3)(image)
    norm = keras.layers.BatchNormalization()(conv)
    out = keras.layers.GlobalAveragePooling2D()(keras.layers.Add()([conv, norm]))
    model = networks.randomized(keras.Model(image, out))
    folded = canonical(keras_graph.read(model))
    kinds = [layer.kind for layer in folded.layers.values()]
    assert kinds.count("Conv2D") == kinds.count("DepthwiseConv2D") == 1
    assert "BatchNormalization" not in kinds
    inputs = np.random.default_rng(3).random((2, 8, 8, 3), np.float32)
    np.testing.assert_allclose(np.asarray(keras_graph.build(folded)(inputs)), np.asarray(model(inputs)), atol=1e-5)


def test_a_batch_norm_that_is_shared_with_its_layer_folds(keras: Any) -> None:
    layers = keras.layers
    body = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(3, 3, padding="same"), layers.BatchNormalization()])
    image = keras.Input((8, 8, 3))
    model = networks.randomized(keras.Model(image, layers.Flatten()(body(body(image)))))
    folded = canonical(keras_graph.read(model))
    assert [layer.kind for layer in folded.layers.values() if layer.weights] == ["Conv2D"]
    inputs = np.random.default_rng(3).random((2, 8, 8, 3), np.float32)
    np.testing.assert_allclose(
        np.asarray(keras_graph.build(folded)(inputs)), np.asarray(model(inputs)), rtol=1e-4, atol=1e-5
    )


def test_a_batch_norm_without_scale_or_centre_folds(keras: Any) -> None:
    image = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, use_bias=True)(image)
    x = keras.layers.BatchNormalization(scale=False)(x)
    x = keras.layers.DepthwiseConv2D(3, depth_multiplier=2, use_bias=False)(x)
    x = keras.layers.BatchNormalization(center=False)(x)
    model = networks.randomized(keras.Model(image, keras.layers.Flatten()(x)))
    folded = canonical(keras_graph.read(model))
    assert "BatchNormalization" not in {layer.kind for layer in folded.layers.values()}
    inputs = np.random.default_rng(3).random((2, 8, 8, 3), np.float32)
    np.testing.assert_allclose(
        np.asarray(keras_graph.build(folded)(inputs)), np.asarray(model(inputs)), rtol=1e-4, atol=1e-5
    )
