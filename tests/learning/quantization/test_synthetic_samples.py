"""Samples made from the statistics of batch norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import networks
import numpy as np
import pytest
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.learning.quantization import activation_statistics, calibration, synthetic_samples
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import LayerOutput, Network
from compress.model.ir.passes.fold import canonical

pytestmark = pytest.mark.tensorflow
SHAPE = (12, 12, 3)


def within(low: float, high: float, shape: tuple[int, ...] = SHAPE) -> NDArray[np.float32]:
    """Return two samples with the lowest and the highest value."""
    return np.stack([np.full(shape, low, np.float32), np.full(shape, high, np.float32)])


def real(count: int = 200) -> NDArray[np.float32]:
    """Return dark images with one bright half, unlike noise."""
    generator = np.random.default_rng(5)
    images = 0.2 * generator.random((count, *SHAPE), np.float32)
    images[::2, :6] += 0.7
    images[1::2, :, 6:] += 0.5
    return images


@pytest.fixture(scope="module")
def trained(keras: Any) -> Network:
    """A network whose batch norms have the statistics of `real`."""
    layers = keras.layers
    image = keras.Input(SHAPE)
    x = image
    for channels in (8, 16, 24):
        x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.0)(x))
    model = keras.Model(image, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))
    model = networks.randomized(model)
    model(real(), training=True)
    return keras_graph.read(model)


def test_synthetic_samples_have_the_ranges_of_real_ones(trained: Network) -> None:
    synthetic = synthetic_samples.synthesize(trained, 40, within(0.0, 1.0))
    assert synthetic.samples.shape == (40, *SHAPE)
    assert synthetic.samples.min() >= 0
    assert synthetic.samples.max() <= 1
    assert synthetic.distance < 0.1 * synthetic.initial_distance
    noise = np.random.default_rng(0).random((40, *SHAPE), np.float32)
    network = canonical(trained)
    expected, synthetic_statistics, poor = (
        activation_statistics.collect(network, samples, histograms=False)
        for samples in (real(), synthetic.samples, noise)
    )
    points = [point for point in expected.high if "re_lu" in point]
    assert len(points) == 3

    def error(statistics: activation_statistics.Statistics) -> float:
        ratios = [statistics.high[point].max() / expected.high[point].max() for point in points]
        return float(np.abs(np.log(ratios)).mean())

    assert error(synthetic_statistics) < 0.5
    assert error(synthetic_statistics) < error(poor)


def test_the_same_seed_gives_the_same_samples(trained: Network) -> None:
    first, again, other = (synthetic_samples.synthesize(trained, 8, within(-1.0, 1.0), seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.samples, again.samples)
    assert (first.samples != other.samples).any()


def test_small_batches_are_drawn_to_all_classes(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_samples, "BATCHES", (8, 8))
    monkeypatch.setattr(synthetic_samples, "CLASS_WEIGHT", 100.0)
    layers = keras.layers
    image = keras.Input(SHAPE)
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(16, 3)(image)))
    scores = layers.Dense(12, activation="softmax")(layers.GlobalAveragePooling2D()(x))
    model = networks.randomized(keras.Model(image, scores))
    kernel, bias = model.layers[-1].get_weights()
    model.layers[-1].set_weights([20 * kernel, 0 * bias])
    synthetic = synthetic_samples.synthesize(keras_graph.read(model), 12, within(0.0, 1.0))
    probabilities = model.predict(synthetic.samples[8:], verbose=0)
    others = model.predict(synthetic.samples[:8], verbose=0)
    assert probabilities[range(4), range(8, 12)].mean() > 2 * others[:, 8:].mean()
    assert others[range(8), range(8)].mean() > 2 * probabilities[:, :8].mean()


def test_the_split_says_that_it_has_no_data(trained: Network) -> None:
    split = calibration.without_data(trained, real(4), 200, 512, 0)
    assert len(split.calibration) == len(split.held_out) == synthetic_samples.MOST
    facts = split.to_json()
    assert facts["calibration_samples"] == synthetic_samples.MOST
    assert facts["synthetic"]["distance_after"] < facts["synthetic"]["distance_before"]
    assert "calibration" not in facts


def test_a_network_without_statistics_is_refused(keras: Any, trained: Network) -> None:
    plain = keras_graph.read(networks.randomized(networks.plain(keras)))
    folded = canonical(trained)
    for network in (folded, plain):
        if not synthetic_samples.norms_of(network):
            with pytest.raises(StageError, match="needs batch norms"):
                synthetic_samples.synthesize(network, 8, within(0.0, 1.0))
    assert not synthetic_samples.norms_of(folded)


def test_integers_are_refused(keras: Any) -> None:
    layers = keras.layers
    words = keras.Input((6,), dtype="int32")
    x = layers.BatchNormalization()(layers.Embedding(10, 4)(words))
    network = keras_graph.read(keras.Model(words, layers.Dense(2)(layers.GlobalAveragePooling1D()(x))))
    with pytest.raises(StageError, match="takes integers"):
        synthetic_samples.synthesize(network, 8, within(0.0, 9.0, (6,)))


def test_statistics_that_are_not_finite_are_refused(trained: Network) -> None:
    (norm, *_) = synthetic_samples.norms_of(trained)
    weights = (*norm.weights[:-1], np.full_like(norm.weights[-1], np.nan))
    broken = trained.edited({norm.name: replace(norm, weights=weights)}, {})
    assert LayerOutput(norm.name) in broken.shapes
    with pytest.raises(StageError, match="not finite"):
        synthetic_samples.synthesize(broken, 8, within(0.0, 1.0))


def test_each_of_several_inputs_has_its_own_range(keras: Any) -> None:
    layers = keras.layers
    image, table = keras.Input(SHAPE), keras.Input((4,))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3)(image)))
    y = layers.ReLU()(layers.BatchNormalization()(layers.Dense(8)(table)))
    joined = layers.Concatenate()([layers.GlobalAveragePooling2D()(x), y])
    network = keras_graph.read(networks.randomized(keras.Model([image, table], layers.Dense(3)(joined))))
    pixels = int(np.prod(SHAPE))
    like = np.concatenate([within(0.0, 255.0, (pixels,)), within(-1.0, 1.0, (4,))], axis=1)
    samples = calibration.without_data(network, like, 8, 8, 0).calibration
    assert samples.shape == (8, pixels + 4)
    assert samples[:, :pixels].min() >= 0
    assert samples[:, :pixels].max() > 50
    assert -1 <= samples[:, pixels:].min() < 0
    assert samples[:, pixels:].max() <= 1


def test_statistics_of_a_shared_batch_norm_are_means_over_its_calls(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input(SHAPE)
    convolution, norm = layers.Conv2D(3, 3, padding="same"), layers.BatchNormalization()
    x = norm(convolution(norm(convolution(image))))
    network = keras_graph.read(
        networks.randomized(keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(x))))
    )
    assert [len(layer.calls) for layer in synthetic_samples.norms_of(network)] == [2]
    synthetic = synthetic_samples.synthesize(network, 8, within(0.0, 1.0))
    assert synthetic.distance < 0.8 * synthetic.initial_distance


def test_a_batch_norm_along_another_axis_is_named(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input(SHAPE)
    x = layers.BatchNormalization(axis=1, name="rows")(layers.Conv2D(8, 3)(image))
    network = keras_graph.read(keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(x))))
    with pytest.raises(StageError, match="another axis than the last one: rows"):
        synthetic_samples.synthesize(network, 8, within(0.0, 1.0))


def test_batch_norms_without_a_derivative_are_refused(keras: Any) -> None:
    layers, ops = keras.layers, keras.ops
    image = keras.Input(SHAPE)
    largest = ops.expand_dims(ops.cast(ops.argmax(layers.Conv2D(8, 3)(image), axis=-1), "float32"), -1)
    x = layers.BatchNormalization()(layers.Conv2D(4, 1)(largest))
    network = keras_graph.read(keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(x))))
    with pytest.raises(StageError, match="have none: they follow an operation such as argmax") as refused:
        synthetic_samples.synthesize(network, 8, within(0.0, 1.0))
    assert "samples without labels" in refused.value.hint
