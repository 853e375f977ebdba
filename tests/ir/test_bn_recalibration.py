from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.ir import keras_graph
from compress.ir.passes import bn_recalibration

pytestmark = pytest.mark.tensorflow


def net(keras: Any, rate: float = 0.5) -> Any:
    layers = keras.layers
    keras.utils.set_random_seed(0)
    image = keras.Input((6, 6, 2))
    x = layers.BatchNormalization(name="first")(layers.Conv2D(4, 3, activation="relu")(image))
    x = layers.Dropout(rate)(x)
    x = layers.BatchNormalization(name="second", center=False)(layers.Conv2D(4, 3, activation="relu")(x))
    return keras.Model(image, layers.Flatten()(x))


def at(keras: Any, given: keras_graph.Network, name: str, samples: np.ndarray) -> np.ndarray:
    """What a layer makes of samples."""
    model = keras_graph.build(keras_graph.observed(given, [keras_graph.Tensor(name)]))
    return np.asarray(keras.tree.flatten(model(samples))[0], np.float64)


def test_behind_every_norm_the_samples_have_mean_0_and_variance_1(keras: Any) -> None:
    samples = np.random.default_rng(0).normal(2, 3, (64, 6, 6, 2)).astype(np.float32)
    given = keras_graph.read(net(keras))
    made = bn_recalibration.remeasured(given, samples)
    for name in ("first", "second"):
        values = at(keras, made, name, samples).reshape(-1, 4)
        np.testing.assert_allclose(values.mean(axis=0), 0, atol=1e-3)
        np.testing.assert_allclose(values.var(axis=0), 1, atol=2e-2)  # epsilon
    assert set(made.layers) == set(given.layers)
    assert made.layers["second"].weights[0] is given.layers["second"].weights[0]


def test_all_batches_weigh_the_same(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(0).normal(2, 3, (60, 6, 6, 2)).astype(np.float32)
    given = keras_graph.read(net(keras))
    monkeypatch.setattr(bn_recalibration, "BATCH", 20)
    made = bn_recalibration.remeasured(given, samples)
    conv = next(each for each in given.layers.values() if each.kind == "Conv2D")
    values = at(keras, given, conv.name, samples)
    expected = [values[i : i + 20].reshape(-1, 4) for i in (0, 20, 40)]
    mean, variance = made.layers["first"].weights[-2:]
    np.testing.assert_allclose(mean, np.mean([part.mean(axis=0) for part in expected], axis=0), rtol=1e-4)
    np.testing.assert_allclose(variance, np.mean([part.var(axis=0) for part in expected], axis=0), rtol=1e-3)


def test_what_training_draws_at_random_is_left_out(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((6, 6, 2))
    plain = layers.BatchNormalization(name="norm")
    drawn = layers.RandomTranslation(0.4, 0.4)(layers.GaussianNoise(1.0)(image))
    samples = np.random.default_rng(0).normal(2, 3, (64, 6, 6, 2)).astype(np.float32)
    with_draws = bn_recalibration.remeasured(
        keras_graph.read(keras.Model(image, plain(layers.Dropout(0.5)(drawn)))), samples
    )
    without = bn_recalibration.remeasured(keras_graph.read(keras.Model(image, plain(image))), samples)
    for made, wanted in zip(with_draws.layers["norm"].weights, without.layers["norm"].weights, strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-6)


def test_without_norms_nothing_changes(keras: Any) -> None:
    image = keras.Input((6,))
    given = keras_graph.read(keras.Model(image, keras.layers.Dense(2)(image)))
    assert bn_recalibration.remeasured(given, np.zeros((4, 6), np.float32)) is given


def test_the_distance_of_two_models(keras: Any) -> None:
    image = keras.Input((3,))
    model = keras.Model(image, [image * 1.0, image * 2.0])
    other = keras.Model(image, [image * 1.0, image * 2.0 + 0.5])
    samples = np.random.default_rng(0).random((150, 3), np.float32)
    assert bn_recalibration.distance(model, model, samples) == 0
    assert bn_recalibration.distance(model, other, samples) == pytest.approx(0.25, rel=1e-5)
