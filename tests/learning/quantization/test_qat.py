from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context

from compress.core.artifact import Facts
from compress.learning.context import Context
from compress.learning.distillation import losses, teachers
from compress.learning.distillation.settings import DistillationSettings
from compress.learning.quantization import calibration, export, fake_quantization, qat
from compress.learning.quantization.plan import QuantizationPlan, on_grid
from compress.learning.quantization.search import file_outputs
from compress.learning.quantization.settings import RoundedTraining
from compress.learning.training.loop import Loss, TrainingSettings, fit, head_of, label_loss
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import Network
from compress.model.ir.passes import fold
from compress.model.ir.passes.fold import canonical
from compress.model.ir.tensorflow import keras as seeded
from compress.tasks.classification import ClassificationHead

pytestmark = pytest.mark.tensorflow


def test_weights_are_rounded_in_training_and_their_gradient_passes(keras: Any) -> None:
    import tensorflow

    layer = fake_quantization.layers()["QuantizedConv2D"](4, 3)
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
    np.testing.assert_array_equal(layer.get_weights()[0], kernel)  # the calls do not change the weights


def test_ranges_follow_the_data_in_training_only(keras: Any) -> None:
    layer = fake_quantization.layers()["FakeQuantize"](-1.0, 1.0, average=0.5)
    x = np.array([[-3.0, 5.0]], np.float32)
    layer(x, training=False)
    assert [float(layer.low), float(layer.high)] == [-1.0, 1.0]
    layer(x, training=True)
    assert [float(layer.low), float(layer.high)] == [-2.0, 3.0]
    layer.moves.assign(0.0)
    layer(x, training=True)
    assert [float(layer.low), float(layer.high)] == [-2.0, 3.0]


def test_a_range_that_does_not_follow_is_no_variable(keras: Any) -> None:
    layer = fake_quantization.layers()["FakeQuantize"](-1.0, 127 / 128)
    x = np.array([[-3.0, 0.5 + 1 / 300, 5.0]], np.float32)
    np.testing.assert_allclose(np.asarray(layer(x, training=True)), [[-1.0, 0.5, 127 / 128]], atol=1e-6)
    assert layer.get_weights() == []


@pytest.mark.parametrize("kind", ["Conv2D", "DepthwiseConv2D", "Conv2DTranspose", "Dense"])
def test_rates_follow_the_size_of_each_output_channel(keras: Any, kind: str) -> None:
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 6))
    arguments = {"Dense": (6,), "DepthwiseConv2D": (3,)}.get(kind, (6, 3))
    layer = fake_quantization.layers()[f"Quantized{kind}"](*arguments)
    model = keras.Model(image, layer(image))
    shape = layer.kernel.shape
    new = np.random.default_rng(0).normal(0, np.sqrt(2 / layer.axes.fan(shape)), shape)
    factors = np.array([1, 1, 100, 0, 0.01, 1.0])
    layer.kernel.assign(layer.axes.times_outputs(new, factors))
    (rate,) = qat._relative_rates(model).values()
    assert rate.factor.shape == shape
    by_output = np.unique(rate.factor)
    assert by_output.max() == pytest.approx(100, rel=0.5)
    assert 0 < by_output.min() <= 1.5e-3 * by_output.max()
    layer.kernel.assign(np.zeros(shape))
    assert (next(iter(qat._relative_rates(model).values())).factor > 0).all()


def test_kernels_of_any_size_learn_alike(keras: Any, tmp_path: Path) -> None:
    """Inputs that are a thousand times as large, and kernels a thousandth as large, are the same function."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, activation="relu")(image)
    model = keras.Model(image, layers.Dense(2, activation="softmax")(layers.Flatten()(x)))
    network = canonical(keras_graph.read(model))
    losses = []
    for scale in (1.0, 1000.0):
        layer = network.layers[model.layers[1].name]
        kernel, bias = layer.weights
        scaled = network.edited({layer.name: replace(layer, weights=(kernel / np.float32(scale), bias))}, {})
        data = Blobs(scale=scale)
        plan = calibration.calibrate(scaled, data.inputs("train"))
        settings = TrainingSettings(epochs=4, batch_size=16, learning_rate=0.01)
        _, _, facts = qat.train(scaled, plan, settings, context(data, tmp_path / f"{scale:g}"))
        losses.append([row["loss"] for row in facts["history"]])
    assert losses[0][-1] < 0.8 * losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)


def test_training_with_rounding_gives_network_and_plan(keras: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3)(image))
    x = layers.Flatten()(layers.ReLU()(x))
    model = keras.Model(image, layers.Dense(2, activation="softmax")(x))
    folded, data = canonical(keras_graph.read(model)), Blobs()
    plan = calibration.calibrate(folded, data.inputs("train"))
    settings = TrainingSettings(epochs=8, batch_size=16, learning_rate=0.02)
    trained, learnt, facts = qat.train(folded, plan, settings, context(data, tmp_path))
    assert len(facts["history"]) == 8
    assert learnt.ranges.keys() == plan.ranges.keys()
    softmax = next(name for name, limits in plan.ranges.items() if limits == (0.0, 255 / 256))
    assert learnt.ranges[softmax] == plan.ranges[softmax]
    scores = file_outputs(export.convert(trained, learnt), data.inputs("validation"))
    assert (scores.argmax(1) == data.labels("validation")).mean() == 1.0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Network:
    """A trained network with a batch norm after convolutions of each kind and a dense layer."""
    layers = seeded(0).layers
    image = seeded().Input((8, 8, 1))
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(layers.Conv2D(6, 3, name="conv", use_bias=False)(image)))
    x = layers.BatchNormalization(momentum=0.9)(layers.DepthwiseConv2D(3, name="depthwise")(x))
    x = layers.Conv2DTranspose(4, 2, 2, name="transposed")(layers.ReLU(6.0)(x))
    x = layers.Flatten()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.BatchNormalization(momentum=0.9)(layers.Dense(8, name="hidden")(x))
    model = seeded().Model(image, layers.Dense(2, name="scores")(layers.ReLU()(x)))
    settings = TrainingSettings(epochs=8, batch_size=16, learning_rate=0.01)
    fit(model, label_loss(ClassificationHead("logits")), settings, context(Blobs(), tmp_path_factory.mktemp("small")))
    return keras_graph.read(model)


def taught(network: Network, settings: TrainingSettings, run: Context, teaching: DistillationSettings) -> Loss:
    """Return the loss of QAT with the float network as the teacher."""
    model = keras_graph.build(network)
    teacher = teachers.of_model(model, run.data, "the float model")
    return losses.loss_of(head_of(model, run.data), [teacher], teaching, settings, run)


def trained(
    read: Network,
    folder: Path,
    how: RoundedTraining,
    data: Blobs | None = None,
    teaching: DistillationSettings | None = None,
) -> tuple[Network, QuantizationPlan, Facts]:
    """Train a network with QAT, and check that the file agrees with the simulation; return network, plan and facts."""
    folded, data = canonical(read), data or Blobs()
    plan = calibration.calibrate(folded, data.inputs("train"))
    settings = TrainingSettings(epochs=3, batch_size=16, learning_rate=0.003)
    run = context(data, folder)
    loss = None if teaching is None else taught(folded, settings, run, teaching)
    trained_network, learnt, facts = qat.train(folded, plan, settings, run, how, fold.folded_norms(read), loss)
    samples = data.inputs("validation")
    scores = file_outputs(export.convert(trained_network, learnt), samples)
    simulated = np.asarray(qat.simulated(trained_network, learnt)(samples, training=False))
    assert (scores.argmax(1) == simulated.argmax(1)).mean() >= 0.99
    assert np.abs(scores - simulated).max() <= 0.03 * np.ptp(simulated)
    assert (scores.argmax(1) == Blobs().labels("validation")).mean() == 1.0
    return trained_network, learnt, facts


@pytest.mark.parametrize("ranges", ["averaged", "learned", "fixed"])
@pytest.mark.parametrize("batch_norm", ["folded", "trained"])
def test_every_way_to_train_ends_in_a_file_that_agrees(
    small: Network, tmp_path: Path, ranges: Any, batch_norm: Any
) -> None:
    plan = calibration.calibrate(canonical(small), Blobs().inputs("train"))
    _, learnt, facts = trained(small, tmp_path, RoundedTraining(ranges=ranges, batch_norm=batch_norm, freeze=0.3))
    assert (learnt.ranges == plan.ranges) == (ranges == "fixed")
    assert f"then {ranges} in 3 epochs" in learnt.method
    assert facts["kept_zeros"] == facts["kept_clusters"] == {}


def test_distilled_training_listens_to_the_float_network_alone(small: Network, tmp_path: Path) -> None:
    class Mislabelled(Blobs):
        def labels(self, split: Any) -> np.ndarray:
            return 1 - super().labels(split)

        def inputs(self, split: Any) -> np.ndarray:
            return Blobs().inputs(split)

    trained(small, tmp_path, RoundedTraining(), Mislabelled(), DistillationSettings(weight=1.0, temperature=2.0))


def test_a_learnt_range_has_the_gradient_of_its_error(keras: Any) -> None:
    """The mean gradient over many values has the sign that reduces the error."""
    import tensorflow

    x = np.random.default_rng(0).normal(0, 1, (4096,)).astype(np.float32)

    def loss(value: Any) -> Any:
        return tensorflow.reduce_mean((value - x) ** 2)

    for high in (0.5, 30.0):  # too narrow: it must grow; too wide: it must shrink
        layer = fake_quantization.layers()["LearnedFakeQuantize"](-high, high, average=0.0)
        layer(x)
        with tensorflow.GradientTape() as tape:
            rounded = layer(x, training=True)
            value = loss(rounded)
        np.testing.assert_allclose(rounded, layer(x), atol=1e-5)
        gradient = tape.gradient(value, layer.stretch).numpy()
        assert (np.sign(gradient) == (-1 if high == 0.5 else 1)).all()


def test_a_learnt_range_stands_still_once_it_has_settled(keras: Any) -> None:
    import tensorflow

    layer = fake_quantization.layers()["LearnedFakeQuantize"](-1.0, 2.0, average=0.0)
    x = np.linspace(-3, 3, 64, dtype=np.float32)
    layer(x)
    layer.stretch.assign([0.5, -0.5])
    layer(x, training=True)
    np.testing.assert_allclose([layer.low, layer.high], [-np.exp(0.5), 2 * np.exp(-0.5)], rtol=1e-6)
    layer.moves.assign(0.0)
    layer.stretch.assign([0.0, 0.0])
    with tensorflow.GradientTape() as tape:
        value = tensorflow.reduce_sum(layer(x, training=True) ** 2)
    np.testing.assert_allclose([layer.low, layer.high], [-np.exp(0.5), 2 * np.exp(-0.5)], rtol=1e-6)
    assert (tape.gradient(value, layer.stretch).numpy() == 0).all()


@pytest.mark.parametrize("name", ["conv", "depthwise", "transposed", "hidden"])
def test_a_batch_norm_taken_up_again_changes_nothing_at_first(small: Network, name: str) -> None:
    folded, norms = canonical(small), fold.folded_norms(small)
    assert norms.keys() == {"conv", "depthwise", "transposed", "hidden"}
    plan = QuantizationPlan({}, "", factors={name: (2.0,)}, bias_shifts={name: (0.25,)})
    moments = qat._moments(folded, plan, {name: norms[name]})
    start = qat._prepared(fake_quantization.with_rounded_weights(folded), {}, moments)
    x = np.random.default_rng(0).random((16, 8, 8, 1), np.float32)
    plain, normed = keras_graph.build(fake_quantization.with_rounded_weights(folded)), keras_graph.build(start)
    np.testing.assert_allclose(np.asarray(normed(x)), np.asarray(plain(x)), rtol=1e-3, atol=1e-4)
    weights = normed.get_layer(name).plain_weights()
    for actual, expected in zip(weights, folded.layers[name].weights, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_batch_norm_in_training_normalizes_by_the_batch_until_it_settles(keras: Any) -> None:
    layer = fake_quantization.layers()["QuantizedConv2D"](3, 3, use_bias=False, normalized=True)
    x = np.random.default_rng(0).normal(2, 5, (64, 8, 8, 2)).astype(np.float32)
    layer.build(x.shape)
    outputs = np.asarray(layer(x, training=True))
    np.testing.assert_allclose(outputs.mean(axis=(0, 1, 2)), 0, atol=0.05)
    np.testing.assert_allclose(outputs.std(axis=(0, 1, 2)), 1, atol=0.05)
    assert np.abs(layer.mean.numpy()).max() > 0
    for _ in range(100):
        layer(x, training=True)
    np.testing.assert_allclose(np.asarray(layer(x)), outputs, atol=0.05)  # the moving statistics have converged
    layer.moves.assign(0.0)
    before = layer.mean.numpy()
    np.testing.assert_allclose(np.asarray(layer(x * 3, training=True)), np.asarray(layer(x * 3)), atol=1e-5)
    np.testing.assert_array_equal(layer.mean.numpy(), before)
