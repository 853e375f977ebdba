from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, Silence, context

from compress.core.errors import StageError
from compress.learning.tfmot import adapter
from compress.learning.training.loop import TrainingSettings
from compress.model.ir import keras_graph, weight_sparsity

pytestmark = pytest.mark.tensorflow

SETTINGS = TrainingSettings(epochs=2, batch_size=8, learning_rate=0.01)


def mixed(keras: Any) -> keras_graph.Network:
    """A network with kernels of every kind, batch norm, and a layer that is called twice."""
    layers = keras.layers
    image = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(8, 3, padding="same", activation="relu", name="first")(image)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(x)
    x = layers.SeparableConv2D(12, 3, padding="same", activation="relu", name="separable")(x)
    x = layers.Conv2DTranspose(6, 2, 2, name="transposed")(x)
    shared = layers.Conv2D(6, 1, name="shared")
    x = layers.MaxPooling2D(4)(shared(shared(x)))
    x = layers.Flatten()(x)
    model = keras.Model(image, layers.Dense(2, activation="softmax", name="scores")(x), name="mixed")
    return keras_graph.read(model)


def test_every_kernel_gets_its_share_of_zeros_and_the_function_is_learnt(keras: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    network, data = mixed(keras), Blobs()
    where = context(data, tmp_path)
    sparse_network, facts = adapter.sparsify(network, 0.6, SETTINGS, where)
    redundancy = weight_sparsity.by_layer(sparse_network)
    for name in ("first", "separable", "transposed", "shared", "scores"):
        assert redundancy[name].zeros == pytest.approx(0.6, abs=0.5 / redundancy[name].weights + 1e-9), name
    assert redundancy["depthwise"].zeros == 0
    assert facts["left"] == {"depthwise": adapter.DEPTHWISE}
    assert len(facts["history"]) == 2
    assert isinstance(where.progress, Silence)
    assert where.progress.seen[-1][:2] == (24, 24)
    assert sparse_network.layers.keys() == network.layers.keys()
    outputs = np.asarray(keras_graph.build(sparse_network)(data.inputs("validation"), training=False))
    assert (outputs.argmax(1) == data.labels("validation")).mean() > 0.9


def test_clusters_keep_the_zeros_of_sparse_kernels(keras: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    network = mixed(keras)
    dense = network.layers["scores"].weights[0].copy()
    dense[::2] = 0
    scores = network.layers["scores"]
    network = adapter.taken_back(network, {"scores": (dense, *scores.weights[1:])})
    clustered_network, facts = adapter.cluster(network, 8, SETTINGS, context(Blobs(), tmp_path))
    redundancy = weight_sparsity.by_layer(clustered_network)
    assert facts["left"] == {"depthwise": adapter.DEPTHWISE}
    for name in ("first", "separable", "transposed", "shared", "scores"):
        assert redundancy[name].distinct <= 8, name
    assert not clustered_network.layers["scores"].weights[0][::2].any()
    assert redundancy["scores"].zeros == pytest.approx(0.5, abs=0.1)
    assert redundancy["depthwise"].distinct > 8


def test_a_kernel_smaller_than_its_clusters_is_left(keras: Any, tmp_path: Path) -> None:
    _, facts = adapter.cluster(mixed(keras), 40, TrainingSettings(epochs=1), context(Blobs(), tmp_path))
    assert facts["left"]["shared"] == "it has 36 weights, no more than clusters"


def test_two_clusters_are_too_few_for_a_sparse_kernel(keras: Any, tmp_path: Path) -> None:
    network = mixed(keras)
    kernel, *others = network.layers["first"].weights
    sparse = replace(
        network.layers["first"],
        weights=(np.where(np.arange(kernel.size).reshape(kernel.shape) % 4, 0, kernel), *others),
    )
    _, facts = adapter.cluster(
        network.edited({"first": sparse}, {}), 2, TrainingSettings(epochs=1), context(Blobs(), tmp_path)
    )
    assert facts["left"]["first"] == "it is sparse, and needs at least three clusters, one of them for zeros"


def test_the_same_seed_gives_the_same_weights(keras: Any, tmp_path: Path) -> None:
    network = mixed(keras)
    settings = TrainingSettings(epochs=1, batch_size=32)
    once, again = (adapter.cluster(network, 4, settings, context(Blobs(), tmp_path))[0] for _ in range(2))
    for name in ("first", "norm", "separable", "scores"):
        for one, two in zip(once.layers[name].weights, again.layers[name].weights, strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_model_that_tfmot_can_do_nothing_with_is_refused(keras: Any, tmp_path: Path) -> None:
    image = keras.Input((8, 8, 1))
    x = keras.layers.DepthwiseConv2D(8, depth_multiplier=2, name="only")(image)
    network = keras_graph.read(keras.Model(image, keras.layers.Flatten()(x)))
    with pytest.raises(StageError, match="DepthwiseConv2D 'only': tfmot leaves depthwise") as caught:
        adapter.sparsify(network, 0.5, SETTINGS, context(Blobs(), tmp_path))
    assert caught.value.hint == "remove `sparsify`"


def test_training_that_diverges_is_told(keras: Any, tmp_path: Path) -> None:
    image = keras.Input((8, 8, 1))  # without pooling or ReLU, which may turn NaN into a number
    linear = keras.Model(image, keras.layers.Dense(2, "softmax")(keras.layers.Flatten()(image)))
    with pytest.raises(StageError, match="training diverged"):
        adapter.sparsify(keras_graph.read(linear), 0.5, SETTINGS, context(Blobs(scale=float("nan")), tmp_path))


def test_importing_tfmot_leaves_the_environment_alone() -> None:
    adapter.tfmot()
    assert "TF_USE_LEGACY_KERAS" not in os.environ
