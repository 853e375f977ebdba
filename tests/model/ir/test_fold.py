from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest

from compress.model.ir import keras_graph
from compress.model.ir.passes.fold import canonical

pytestmark = pytest.mark.tensorflow


def folded(model: Any) -> keras_graph.Network:
    """Return the canonical form of a model, after a check that it computes the same."""
    network = canonical(keras_graph.read(networks.randomized(model)))
    inputs = np.random.default_rng(3).random((3, *model.input_shape[1:]), np.float32)
    actual = np.asarray(keras_graph.build(network)(inputs))
    np.testing.assert_allclose(actual, np.asarray(model(inputs)), rtol=1e-4, atol=1e-5)
    return network


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_the_canonical_form_has_no_activation_in_a_layer_and_no_separable_layer(
    keras: Any, builder: networks.Builder
) -> None:
    weighted = [layer for layer in folded(builder(keras)).layers.values() if layer.weights]
    assert all(layer.config.get("activation", "linear") == "linear" for layer in weighted)
    assert not {layer.kind for layer in weighted} & {"SeparableConv2D", "BatchNormalization"}


def test_a_batch_norm_that_others_look_behind_becomes_a_layer_of_its_own(keras: Any) -> None:
    image = keras.Input((8, 8, 3))
    conv = keras.layers.Conv2D(4, 3)(image)
    norm = keras.layers.BatchNormalization()(conv)
    out = keras.layers.GlobalAveragePooling2D()(keras.layers.Add()([conv, norm]))
    network = folded(keras.Model(image, out))
    kinds = [layer.kind for layer in network.layers.values()]
    assert kinds.count("Conv2D") == kinds.count("DepthwiseConv2D") == 1
    assert "BatchNormalization" not in kinds


def test_a_batch_norm_that_is_shared_with_its_layer_folds(keras: Any) -> None:
    layers = keras.layers
    body = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(3, 3, padding="same"), layers.BatchNormalization()])
    image = keras.Input((8, 8, 3))
    network = folded(keras.Model(image, layers.Flatten()(body(body(image)))))
    assert [layer.kind for layer in network.layers.values() if layer.weights] == ["Conv2D"]


def test_a_batch_norm_without_scale_or_centre_folds(keras: Any) -> None:
    image = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, use_bias=True)(image)
    x = keras.layers.BatchNormalization(scale=False)(x)
    x = keras.layers.DepthwiseConv2D(3, depth_multiplier=2, use_bias=False)(x)
    x = keras.layers.BatchNormalization(center=False)(x)
    network = folded(keras.Model(image, keras.layers.Flatten()(x)))
    assert "BatchNormalization" not in {layer.kind for layer in network.layers.values()}


@pytest.mark.parametrize("used", ["once", "by another layer", "as an output", "of integers"])
def test_a_division_by_a_square_root_becomes_a_product(keras: Any, used: str) -> None:
    """A root that something else uses too stays, and a root of integers."""
    image = keras.Input((8,))
    squares = keras.ops.sum(keras.ops.square(image), axis=-1, keepdims=True) + 1.0
    root = keras.ops.sqrt(keras.ops.cast(squares, "int32") if used == "of integers" else squares)
    quotient = image / root
    outputs = {"by another layer": quotient + root, "as an output": [quotient, root]}.get(used, quotient)
    model = keras.Model(image, outputs)
    network = canonical(keras_graph.read(model))
    inputs = np.random.default_rng(3).random((3, 8), np.float32)
    actual, expected = (keras.tree.flatten(made(inputs)) for made in (keras_graph.build(network), model))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    kinds = {layer.kind for layer in network.layers.values()}
    assert ("Sqrt" in kinds) == (used != "once")
    assert ("Rsqrt" in kinds) == (used == "once")
