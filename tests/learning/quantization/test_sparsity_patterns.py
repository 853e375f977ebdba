"""Zeros and clusters of weights stay through QAT, and are in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
from blobs import Blobs, context
from numpy.typing import NDArray

from compress.learning.quantization import calibration, export, qat
from compress.learning.quantization.plan import on_grid
from compress.learning.quantization.settings import RoundedTraining
from compress.learning.training.loop import TrainingSettings
from compress.model.ir import keras_graph, weight_sparsity
from compress.model.ir.keras_graph import Network
from compress.model.ir.passes import fold
from compress.model.ir.passes.fold import canonical
from compress.model.tflite import graph

pytestmark = pytest.mark.tensorflow


def sparse(kernel: NDArray[Any]) -> NDArray[Any]:
    """Return a kernel with half of its weights 0."""
    return np.where(np.abs(kernel) > np.median(np.abs(kernel)), kernel, 0)


def clustered(kernel: NDArray[Any]) -> NDArray[Any]:
    """Return a kernel with four different values."""
    values = np.quantile(kernel, [0.1, 0.4, 0.6, 0.9]).astype(kernel.dtype)
    return values[np.abs(kernel[..., None] - values).argmin(axis=-1)]


def edited(keras: Any, change: Any) -> Network:
    """A network with a batch norm after its convolutions, and kernels that are changed before folding."""
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, name="first")(image)))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(6, 3, strides=2, name="conv")(x)))
    x = layers.Conv2DTranspose(4, 2, 2, name="transposed")(x)
    model = networks.randomized(keras.Model(image, layers.Dense(2, name="scores")(layers.Flatten()(x))))
    for name in ("conv", "transposed", "scores"):
        kernel, *rest = model.get_layer(name).get_weights()
        model.get_layer(name).set_weights([change(kernel), *rest])
    return keras_graph.read(model)


def after_training(read: Network, folder: Path, how: RoundedTraining) -> tuple[Network, Network, dict[str, Any]]:
    """Return the canonical network before and after QAT, and the facts."""
    folded, data = canonical(read), Blobs()
    plan = calibration.calibrate(folded, data.inputs("train"))
    settings = TrainingSettings(epochs=1, batch_size=16, learning_rate=0.01)
    trained, learnt, facts = qat.train(folded, plan, settings, context(data, folder), how, fold.folded_norms(read))
    (folder / "m.tflite").write_bytes(export.convert(trained, learnt))
    return folded, trained, facts


@pytest.mark.parametrize("batch_norm", ["folded", "trained"])
def test_zeros_stay_zero(keras: Any, tmp_path: Path, batch_norm: Any) -> None:
    before, after, facts = after_training(edited(keras, sparse), tmp_path, RoundedTraining(batch_norm=batch_norm))
    assert facts["kept_zeros"] == {"conv": 0.5, "transposed": 0.5, "scores": 0.5}
    assert facts["kept_clusters"] == {}
    for name in facts["kept_zeros"]:
        pair = [net.layers[name].weights[0] for net in (before, after)]
        np.testing.assert_array_equal(*(kernel == 0 for kernel in pair))
        assert (pair[0] != pair[1]).any()  # the other weights have changed
    parsed = graph.parse((tmp_path / "m.tflite").read_bytes())
    kernels = [parsed.tensors[op.inputs[1]] for op in parsed.operators if op.name in ("CONV_2D", "FULLY_CONNECTED")]
    assert [bool((kernel.array() == 0).mean() >= 0.5) for kernel in kernels] == [False, True, True]


@pytest.mark.parametrize("batch_norm", ["folded", "trained"])
def test_clusters_stay_clusters(keras: Any, tmp_path: Path, batch_norm: Any) -> None:
    before, after, facts = after_training(edited(keras, clustered), tmp_path, RoundedTraining(batch_norm=batch_norm))
    assert facts["kept_clusters"] == {"conv": 4, "transposed": 4, "scores": 4}
    assert facts["kept_zeros"] == {}
    for name in facts["kept_clusters"]:
        pair = [net.layers[name].weights[0] for net in (before, after)]
        assert (pair[0] != pair[1]).any()
        axes = {"conv": (0, 1, 2), "transposed": (0, 1, 3), "scores": (0, 1)}[name]
        rounded = on_grid(pair[1], axes)
        channels = weight_sparsity.output_channels(after.layers[name])
        counts = [len(np.unique(rounded[channels == channel])) for channel in range(channels.max() + 1)]
        assert max(counts) <= 4


def test_ordinary_weights_are_left_free(keras: Any) -> None:
    for builder in networks.ALL:
        assert weight_sparsity.patterns(canonical(keras_graph.read(networks.randomized(builder(keras))))) == {}


def test_a_dead_kernel_can_come_to_life(keras: Any) -> None:
    folded = canonical(edited(keras, np.zeros_like))
    assert weight_sparsity.patterns(folded) == {}


def test_zeros_and_clusters_together(keras: Any) -> None:
    folded = canonical(edited(keras, lambda kernel: clustered(kernel) * (sparse(kernel) != 0)))
    patterns = weight_sparsity.patterns(folded)
    assert patterns.keys() == {"conv", "transposed", "scores"}
    for name, pattern in patterns.items():
        kernel = folded.layers[name].weights[0]
        np.testing.assert_array_equal(pattern.codes == 0, kernel == 0)
        assert pattern.clusters
        assert len(np.unique(pattern.codes)) == pattern.codes.max() + 1
        for code in np.unique(pattern.codes):
            assert len(np.unique(kernel[pattern.codes == code])) == 1


def test_the_channels_of_a_depthwise_kernel_are_its_last_two_axes(keras: Any) -> None:
    image = keras.Input((8, 8, 3))
    read = keras_graph.read(
        keras.Model(image, keras.layers.DepthwiseConv2D(5, depth_multiplier=2, name="depthwise")(image))
    )
    channels = weight_sparsity.output_channels(read.layers["depthwise"])
    np.testing.assert_array_equal(channels[0, 0], [[0, 1], [2, 3], [4, 5]])
    assert (channels == channels[0, 0]).all()
