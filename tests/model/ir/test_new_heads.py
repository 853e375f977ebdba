"""Heads that are cut off, batch norms that are restored, and weights that are copied into another model."""

from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest

from compress.core.errors import ModelError
from compress.model.ir import keras_graph
from compress.model.ir.passes import cut_head, fold
from compress.model.ir.passes.copy_weights import copy_weights

pytestmark = pytest.mark.tensorflow


def classifier(keras: Any, classes: int = 5, *, width: int = 6, side: int = 12, flat: bool = False) -> Any:
    layers = keras.layers
    image = keras.Input((side, side, 3), name="image")
    x = layers.Conv2D(width, 3, 2, "same", use_bias=False, name="stem")(image)
    x = layers.ReLU(6.0, name="stem_relu")(layers.BatchNormalization(name="stem_norm")(x))
    y = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="depthwise")(x)
    y = layers.BatchNormalization(name="depthwise_norm", scale=False)(y)
    x = layers.ReLU(name="features")(layers.Add(name="sum")([x, y]))
    x = layers.Flatten(name="flat")(x) if flat else layers.GlobalAveragePooling2D(name="pooled")(x)
    return keras.Model(
        image, layers.Dense(classes, "softmax", name="scores")(layers.Dense(7, "relu", name="hidden")(x))
    )


@pytest.mark.parametrize("flat", [False, True])
def test_the_head_begins_after_the_last_map(keras: Any, flat: bool) -> None:
    network = keras_graph.read(classifier(keras, flat=flat))
    assert cut_head.feature_map(network).layer == "features"
    cut = cut_head.without_head(network)
    assert not {"hidden", "scores", "pooled", "flat"} & cut.layers.keys()
    assert keras_graph.build(cut).output_shape == (None, 6, 6, 6)


def test_a_named_layer_is_the_end(keras: Any) -> None:
    network = keras_graph.read(classifier(keras))
    assert cut_head.without_head(network, "stem_relu").layers.keys() == {"image", "stem", "stem_norm", "stem_relu"}
    with pytest.raises(ModelError, match=r"no layer 'stem_rel'.*did you mean 'stem_relu'"):
        cut_head.without_head(network, "stem_rel")


def test_a_branch_is_not_crossed_by_all_paths(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((8, 8, 3))
    shared = layers.Conv2D(4, 3, name="shared")(image)
    one = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3, name="one")(shared))
    other = layers.GlobalMaxPooling2D()(layers.Conv2D(4, 3, name="other")(shared))
    model = keras.Model(image, [layers.Dense(2)(one), layers.Dense(3)(other)])
    assert cut_head.feature_map(keras_graph.read(model)).layer == "shared"


def test_dense_networks_end_before_their_last_layer(keras: Any) -> None:
    layers = keras.layers
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(3, name="last")(layers.Dense(4, "relu", name="first")(inputs)))
    assert cut_head.feature_map(keras_graph.read(model)).layer == "first"
    with pytest.raises(ModelError, match="the features of the model are not found"):
        cut_head.feature_map(keras_graph.read(keras.Model(inputs, layers.Dense(3)(inputs))))


def test_restored_batch_norms_change_nothing(keras: Any) -> None:
    model = networks.randomized(classifier(keras))
    folded = fold.folded(keras_graph.read(model))
    restored, names = fold.with_restored_norms(folded)
    assert len(names) == 2
    samples = np.random.default_rng(0).random((4, 12, 12, 3), np.float32)
    expected = np.asarray(model(samples))
    np.testing.assert_allclose(np.asarray(keras_graph.build(restored)(samples)), expected, atol=1e-5)
    norm = restored.layers[names[0]]
    draw = np.random.default_rng(1)
    other = fold.with_statistics(norm, draw.normal(size=6), draw.random(6) + 0.1)
    moved = keras_graph.build(restored.edited({norm.name: other}, {}))
    np.testing.assert_allclose(np.asarray(moved(samples)), expected, atol=1e-5)


def test_a_network_with_batch_norms_keeps_them(keras: Any) -> None:
    network = keras_graph.read(classifier(keras))
    assert fold.with_restored_norms(network) == (network, ())


def test_weights_are_copied_up_to_the_head(keras: Any) -> None:
    trained = networks.randomized(classifier(keras, 5))
    target = keras_graph.read(classifier(keras, 3))
    result = copy_weights(target, keras_graph.read(trained))
    assert (result.copied, result.others) == (("stem", "depthwise", "hidden"), ("scores",))
    assert result.norms == ("stem_norm", "depthwise_norm")
    samples = np.random.default_rng(0).random((4, 12, 12, 3), np.float32)

    def hidden(model: Any) -> Any:
        return np.asarray(keras.Model(model.input, model.get_layer("hidden").output)(samples))

    np.testing.assert_allclose(hidden(keras_graph.build(result.network)), hidden(trained), atol=1e-5)


def test_weights_of_another_width_are_refused(keras: Any) -> None:
    trained, target = (keras_graph.read(classifier(keras, width=width)) for width in (6, 8))
    with pytest.raises(ModelError, match=r"Conv2D \[3, 3, 3, 8\] and Conv2D \[3, 3, 3, 6\]"):
        copy_weights(target, trained)
