from __future__ import annotations

from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
from blobs import Blobs, context

from compress.core.errors import StageError
from compress.learning.quantization import calibration, export
from compress.learning.quantization.plan import gridded
from compress.learning.tfmot import adapter
from compress.learning.training.loop import TrainingSettings
from compress.model.ir import keras_graph, weight_sparsity
from compress.model.ir.layer_specs.functions import PRESCRIBED_RANGES
from compress.model.ir.passes import fold
from compress.model.tflite.interpreter import LoadedModel

pytestmark = pytest.mark.tensorflow

SETTINGS = TrainingSettings(epochs=2, batch_size=8, learning_rate=0.002)


def channels(keras: Any) -> Any:
    """A concatenation, a transposed convolution, a depth multiplier of 2, and batch norm after a dense layer."""
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(6, 3, padding="same", activation="relu", name="wide")(image)
    y = layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2, name="depthwise")(x)
    y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
    y = layers.Conv2DTranspose(4, 2, 2, name="transposed")(layers.MaxPooling2D()(y))
    y = layers.ReLU()(layers.BatchNormalization()(y))
    x = layers.Concatenate()([y, x])
    x = layers.BatchNormalization(name="late")(layers.Dense(24, name="dense")(layers.Flatten()(x)))
    return keras.Model(image, layers.Dense(2, activation="softmax", name="scores")(layers.ReLU()(x)), name="channels")


def prepared(network: keras_graph.Network, samples: np.ndarray) -> adapter.Prepared:
    return adapter.prepare(network, calibration.calibrate(fold.canonical(network), samples), 0)


def agreement(preparation: adapter.Prepared, samples: np.ndarray, folder: Path) -> float:
    """Return the share of outputs of the file and the tf-keras model that differ by at most two and a half steps."""
    expected = np.asarray(preparation.legacy.model(samples, training=False))
    (folder / "m.tflite").write_bytes(export.convert(*preparation.trained("")))
    actual = LoadedModel(folder / "m.tflite", reproducible=True).scores(samples)
    step = (expected.max() - expected.min()) / 255 or 1.0
    return float(np.mean(np.abs(actual - expected) <= 2.5 * step))


@pytest.mark.parametrize(
    "builder", [networks.plain, networks.inverted_residual, networks.squeeze_excite, networks.nested]
)
def test_what_tfmot_computes_is_what_the_file_computes(keras: Any, builder: networks.Builder, tmp_path: Path) -> None:
    network = keras_graph.read(networks.randomized(builder(keras)))
    samples = np.random.default_rng(5).random((60, 12, 12, 3), np.float32)
    preparation = prepared(network, samples)
    # A call in training mode without an optimizer: weights get their ranges.
    preparation.legacy.model(samples, training=True)
    assert agreement(preparation, samples, tmp_path) > 0.95


def test_the_known_traps_are_repaired(keras: Any, tmp_path: Path) -> None:
    network, data = keras_graph.read(networks.randomized(channels(keras))), Blobs()
    preparation = prepared(network, data.inputs("train"))
    ranges = preparation.trained("not at all")[1].ranges
    for name in preparation.rounded:  # the calibrated range, not +-6
        assert ranges[name] == pytest.approx(preparation.plan.ranges[name], rel=1e-5, abs=1e-6)
    assert "late" not in preparation.network.layers
    adapter.fit(preparation.legacy.model, preparation.network, SETTINGS, context(data, tmp_path))
    assert agreement(preparation, data.inputs("validation"), tmp_path) > 0.95
    trained, plan = preparation.trained("tested")
    assert plan.ranges.keys() == preparation.plan.ranges.keys()
    assert any(plan.ranges[name] != preparation.plan.ranges[name] for name in preparation.rounded)
    softmax = next(name for name, limits in preparation.plan.ranges.items() if limits == PRESCRIBED_RANGES["softmax"])
    assert plan.ranges[softmax] == preparation.plan.ranges[softmax]
    before = fold.canonical(network)
    for name in ("wide", "depthwise", "transposed", "dense", "scores"):
        assert trained.layers[name].weights[0].shape == before.layers[name].weights[0].shape
        assert not np.array_equal(trained.layers[name].weights[0], before.layers[name].weights[0])


def test_zeros_and_clusters_survive_into_the_file(keras: Any, tmp_path: Path) -> None:
    network, data = keras_graph.read(networks.randomized(channels(keras))), Blobs()
    random = np.random.default_rng(1)
    sparse = random.normal(size=network.layers["dense"].weights[0].shape).astype(np.float32)
    sparse[np.abs(sparse) < 0.8] = 0
    shared = random.choice(np.linspace(-1, 1, 4), network.layers["transposed"].weights[0].shape).astype(np.float32)
    shared.ravel()[::2] = 0
    few = random.choice(np.array([0, -0.3, 0.1, 0.5], np.float32), network.layers["scores"].weights[0].shape)
    few.ravel()[::2] = 0
    changed = {"dense": sparse, "transposed": shared, "scores": few}
    layers = network.layers
    network = adapter.taken_back(network, {name: (new, *layers[name].weights[1:]) for name, new in changed.items()})
    preparation = prepared(network, data.inputs("train"))
    assert preparation.preserved == {"dense": "zeros", "transposed": "zeros", "scores": "zeros and clusters"}
    adapter.fit(preparation.legacy.model, preparation.network, SETTINGS, context(data, tmp_path))
    trained, _ = preparation.trained("")
    on_grid = gridded(trained)
    for name, before in changed.items():
        after = on_grid.layers[name].weights[0]
        assert not after[before == 0].any(), name
        assert not np.array_equal(trained.layers[name].weights[0], fold.canonical(network).layers[name].weights[0])
    assert weight_sparsity.of(on_grid.layers["scores"].weights[0]).distinct <= 4


def test_layers_that_tfmot_rejects_are_named_together(keras: Any, tmp_path: Path) -> None:
    network = keras_graph.read(networks.randomized(networks.branches(keras)))
    layers = keras.layers
    image = keras.Input((8, 4))
    x = layers.PReLU(shared_axes=[1], name="slope")(layers.Conv1D(4, 3, name="line")(image))
    line = keras_graph.read(keras.Model(image, layers.Dense(2)(layers.Flatten()(x))))
    samples = np.random.default_rng(0).random((8, 8, 4), np.float32)
    with pytest.raises(StageError, match="tfmot cannot quantize Conv1D 'line', PReLU 'slope'") as caught:
        prepared(line, samples)
    assert "engine: coralline" in caught.value.hint
    with pytest.raises(StageError, match="cannot quantize PReLU"):
        prepared(network, np.random.default_rng(0).random((8, 12, 12, 3), np.float32))
