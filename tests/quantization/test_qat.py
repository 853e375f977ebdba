from __future__ import annotations

from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
from blobs import Blobs, context

from compress.quantization import calibration, conversion, fake, points, training
from compress.quantization.plan import on_grid
from compress.tflite.runtime import Model
from compress.training import network
from compress.training.fit import TrainingSettings
from compress.training.folding import canonical

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_what_training_computes_is_what_the_file_computes(
    keras: Any, builder: networks.Builder, tmp_path: Path
) -> None:
    folded = canonical(network.read(networks.randomized(builder(keras))))
    samples = np.random.default_rng(5).random((40, 12, 12, 3), np.float32)
    plan = calibration.calibrate(folded, samples)
    trained = network.build(fake.with_rounded_weights(fake.insert(folded, points.find(folded), plan)))
    expected = np.asarray(trained(samples, training=False))
    (tmp_path / "m.tflite").write_bytes(conversion.convert(folded, plan))
    found = Model(tmp_path / "m.tflite", reproducible=True).scores(samples)
    step = (expected.max() - expected.min()) / 255 or 1.0
    assert np.mean(np.abs(found - expected) <= 2.5 * step) > 0.95
    assert np.mean(found.argmax(1) == expected.argmax(1)) >= 0.9


def test_weights_are_rounded_in_training_and_their_gradient_passes(keras: Any) -> None:
    import tensorflow

    layer = fake.layers()["QuantizedConv2D"](4, 3)
    x = tensorflow.random.stateless_normal((2, 6, 6, 3), (1, 2))
    layer(x)
    kernel = layer.get_weights()[0]
    plain = keras.layers.Conv2D(4, 3)
    plain(x)
    plain.set_weights([on_grid(kernel, (0, 1, 2)), layer.get_weights()[1]])
    np.testing.assert_allclose(np.asarray(layer(x)), np.asarray(plain(x)), atol=1e-5)
    with tensorflow.GradientTape() as tape:
        loss = tensorflow.reduce_sum(layer(x) ** 2)
    assert float(tensorflow.reduce_max(tensorflow.abs(tape.gradient(loss, layer.trainable_weights[0])))) > 0
    np.testing.assert_array_equal(layer.get_weights()[0], kernel)  # looking does not change it


def test_ranges_follow_the_data_in_training_only(keras: Any) -> None:
    layer = fake.layers()["FakeQuantize"](-1.0, 1.0, average=0.5)
    x = np.array([[-3.0, 5.0]], np.float32)
    layer(x, training=False)
    assert [float(w) for w in layer.get_weights()] == [-1.0, 1.0]
    layer(x, training=True)
    assert [float(w) for w in layer.get_weights()] == [-2.0, 3.0]


def test_a_range_that_does_not_follow_is_no_variable(keras: Any) -> None:
    layer = fake.layers()["FakeQuantize"](-1.0, 127 / 128)
    x = np.array([[-3.0, 0.5 + 1 / 300, 5.0]], np.float32)
    np.testing.assert_allclose(np.asarray(layer(x, training=True)), [[-1.0, 0.5, 127 / 128]], atol=1e-6)
    assert layer.get_weights() == []


def test_training_with_rounding_gives_network_and_plan(keras: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3)(image))
    x = layers.Flatten()(layers.ReLU()(x))
    model = keras.Model(image, layers.Dense(2, activation="softmax")(x))
    folded, data = canonical(network.read(model)), Blobs()
    plan = calibration.calibrate(folded, data.inputs("train"))
    settings = TrainingSettings(epochs=8, batch_size=16, learning_rate=0.02)
    trained, learnt, facts = training.train(folded, plan, settings, context(data, tmp_path))
    assert len(facts["history"]) == 8
    assert learnt.ranges.keys() == plan.ranges.keys()
    softmax = next(name for name, limits in plan.ranges.items() if limits == (0.0, 255 / 256))
    assert learnt.ranges[softmax] == plan.ranges[softmax]
    (tmp_path / "m.tflite").write_bytes(conversion.convert(trained, learnt))
    scores = Model(tmp_path / "m.tflite", reproducible=True).scores(data.inputs("validation"))
    assert (scores.argmax(1) == data.labels("validation")).mean() == 1.0
