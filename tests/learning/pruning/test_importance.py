"""The importance of channels, and the loss of a network without them."""

from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest
from blobs import Blobs

from compress.learning.pruning.importance import (
    ImportanceSamples,
    gated_model,
    taylor_scores,
    weight_scores,
)
from compress.learning.pruning.prunable import prepare
from compress.learning.pruning.sensitivity import losses_by_width, sensitivity_curves
from compress.learning.training import loop
from compress.model.ir import channel_groups as structure
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import LayerOutput
from compress.tasks.classification import ClassificationHead

pytestmark = pytest.mark.tensorflow


def samples(model: Any, count: int = 24) -> ImportanceSamples:
    random = np.random.default_rng(3)
    inputs = random.random((count, *model.input_shape[1:]), np.float32)
    return ImportanceSamples(
        inputs,
        random.integers(0, model.output_shape[-1], count),
        ClassificationHead("softmax" if "Softmax" in str(model) else "logits"),
    )


def losses(model: Any, importance_samples: ImportanceSamples, gates: np.ndarray) -> np.ndarray:
    """Return the cross-entropy of each sample, computed in numpy."""
    rows = np.repeat(gates[np.newaxis].astype(np.float32), len(importance_samples.inputs), axis=0)
    logits = np.asarray(model([importance_samples.inputs, rows]), np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    cross_entropy = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), importance_samples.labels]
    return np.asarray(cross_entropy)


@pytest.mark.parametrize("builder", [networks.inverted_residual, networks.branches, networks.nested])
def test_taylor_is_the_derivative_of_the_loss_by_a_factor_on_the_channel(keras: Any, builder: Any) -> None:
    model = networks.randomized(builder(keras))
    net = keras_graph.read(model)
    channels = structure.find_groups(net)
    importance_samples = samples(model)
    score = taylor_scores(net, channels, importance_samples)
    gated = gated_model(net, channels)
    for root in np.unique(channels.group[~channels.pinned])[::7]:
        step = np.zeros(len(channels.group))
        step[root] = 3e-3
        slope = (losses(gated, importance_samples, 1 + step) - losses(gated, importance_samples, 1 - step)) / 6e-3
        assert score[root] == pytest.approx(float((slope**2).mean()), rel=0.1, abs=1e-7)  # kinks of ReLU in the step
    assert (score == score[channels.group]).all()


def test_gates_take_no_name_of_a_layer(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((6, 6, 2))
    x = layers.Conv2D(6, 3, name="channel_gates")(image)
    x = layers.ReLU(name="dense_gate_0")(layers.GlobalAveragePooling2D()(x))
    model = networks.randomized(keras.Model(image, layers.Dense(3, name="dense")(x)))
    net = keras_graph.read(model)
    channels = structure.find_groups(net)
    inputs = samples(model).inputs
    gates = np.ones((len(inputs), len(channels.group)), np.float32)
    np.testing.assert_allclose(gated_model(net, channels)([inputs, gates]), model(inputs), rtol=1e-5)


@pytest.mark.parametrize("method", ["l1", "l2", "batch_norm"])
def test_norms_of_weights(keras: Any, method: Any) -> None:
    model = networks.randomized(networks.plain(keras))
    net = keras_graph.read(model)
    channels = structure.find_groups(net)
    conv, norm = model.layers[1], model.layers[2]
    kernel = conv.get_weights()[0]
    expected = np.abs(kernel).sum(axis=(0, 1, 2)) if method == "l1" else np.sqrt((kernel**2).sum(axis=(0, 1, 2)))
    if method == "batch_norm":
        gamma, _, _, variance = norm.get_weights()
        expected = expected * np.abs(gamma) / np.sqrt(variance + norm.epsilon)
    score = weight_scores(net, channels, method)[channels.layouts[LayerOutput(conv.name)]]
    np.testing.assert_allclose(score, expected / expected.mean(), 1e-5)


def test_curves_say_what_removing_does(keras: Any) -> None:
    """Each point is the divergence of a network that is really built without those channels."""
    from compress.targets import load

    keras.utils.set_random_seed(0)
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.RandomTranslation(0.5, 0.5)(image)  # in training only
    x = layers.Conv2D(12, 3, activation="relu", name="first")(x)
    x = layers.Conv2D(8, 3, activation="relu", name="second")(x)
    model = keras.Model(image, layers.Dense(2)(layers.Flatten()(x)))
    data = Blobs()
    head = loop.head_of(model, data)
    importance_samples = ImportanceSamples(data.inputs("train"), data.labels("train"), head)
    prunable = prepare(keras_graph.read(model), load("edgetpu"), "taylor", importance_samples)
    updates: list[tuple[int, int]] = []
    curves = sensitivity_curves(prunable, importance_samples, lambda done, of: updates.append((done, of)))
    assert [curve.layers for curve in curves] == [("first",), ("second",)]
    assert curves[0].kept == (12, 8, 4)  # steps of four, at least four
    assert updates == [(done, 3) for done in (1, 2, 3)]
    for index, curve in enumerate(curves):
        for place, kept in enumerate(curve.kept):
            widths = tuple(kept if group == index else full for group, full in enumerate(prunable.full_widths))
            smaller = keras_graph.build(prunable.pruned(widths))
            logits = [
                np.asarray(keras_model(importance_samples.inputs, training=False)) for keras_model in (model, smaller)
            ]
            before, after = map(keras.ops.log_softmax, logits)
            divergence = float(np.mean(np.sum(np.exp(before) * (np.asarray(before) - np.asarray(after)), axis=1)))
            assert curve.divergence[place] == pytest.approx(divergence, abs=1e-5)
            assert curve.accuracy[place] == float(
                (np.asarray(after).argmax(axis=1) == importance_samples.labels).mean()
            )
        interpolated = losses_by_width(curve)
        assert interpolated[curve.kept[0]] == 0
        assert (np.diff(interpolated) <= 0).all()
