"""Gradual replacement of activations: its start, its result, and that the network learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context

from compress.learning.replacement import gradual
from compress.learning.replacement.activations import replace_by_relu
from compress.learning.training import loop
from compress.model.ir import keras_graph

pytestmark = pytest.mark.tensorflow


def network(keras: Any, dropout: float = 0.2) -> Any:
    """Convolutions of every kind with dropout; SiLU is a layer, a setting, and two operators."""
    keras.utils.set_random_seed(0)
    layers, silu = keras.layers, keras.activations.silu
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(12, 3, padding="same", use_bias=False)(image)
    x = layers.Activation("silu")(layers.BatchNormalization(name="norm")(x))
    x = layers.DepthwiseConv2D(3, 2, padding="same", activation="silu", bias_initializer="ones")(x)
    side = layers.Conv2D(12, 3, padding="same", groups=3, activation=silu)(x)
    x = layers.Conv2D(12, 1)(x)
    x = layers.Add()([layers.Multiply()([x, layers.Activation("sigmoid")(x)]), side])
    x = layers.Conv2DTranspose(6, 2, strides=2, activation="silu")(layers.Dropout(dropout)(x))
    return keras.Model(image, layers.Dense(2, activation="softmax")(layers.Flatten()(x)))


def settings(**changes: Any) -> loop.TrainingSettings:
    return loop.TrainingSettings(**{"epochs": 4, "batch_size": 32, "learning_rate": 0.01, **changes})


def how(model: Any, share: float = 0.5) -> gradual.GradualTraining:
    head = loop.head_of(model, Blobs())

    def loss(batch: loop.Batch, outputs: Any, teacher_outputs: Any) -> Any:
        targets = head.soft_targets([head.logits(teacher_outputs)], [1.0], 1.0)
        return head.divergence(targets, head.logits(outputs))

    return gradual.GradualTraining(("silu",), "relu", share, loss)


def observed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that collects the models that are trained from now on."""
    seen: list[Any] = []
    fit = gradual.fit

    def watched(model: Any, *rest: Any) -> Any:
        seen.append(model)
        return fit(model, *rest)

    monkeypatch.setattr(gradual, "fit", watched)
    return seen


def test_it_starts_at_the_original_and_the_result_is_what_was_trained(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(keras, dropout=0.0)
    model.get_layer("norm").set_weights(
        [np.linspace(start, end, 12) for start, end in ((-2, 2), (-1, 1), (0, 1), (1, 9))]
    )
    data, before = Blobs(), keras_graph.read(model)
    first: list[Any] = []
    monkeypatch.setattr(gradual, "_rising", lambda joint, share: first.append(joint) or keras.callbacks.Callback())
    seen = observed(monkeypatch)
    changed, replacements, facts = gradual.train(
        before, before, how(model), settings(learning_rate=1e-9), context(data, tmp_path)
    )
    samples = data.inputs("train")[:16]
    ours, theirs, *features = seen[0](samples, training=False)
    np.testing.assert_allclose(theirs, model(samples), atol=1e-5)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)  # the share stayed 0
    half = len(features) // 2
    assert half == 4  # without the depthwise convolution
    for feature, other in zip(features[:half], features[half:], strict=True):
        np.testing.assert_allclose(feature, other, atol=1e-3 * float(np.abs(other).max()))
    assert {kind: len(names) for kind, names in replacements.replaced.items()} == {"silu": 5}
    assert len(facts["history"]) == 4
    assert all(abs(row["loss"]) < 1e-4 for row in facts["history"])
    assert "silu" not in str([layer.config for layer in changed.layers.values()])


def test_the_folded_network_is_the_trained_one(keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = network(keras), Blobs()
    before = keras_graph.read(model)
    seen = observed(monkeypatch)
    changed, _, _ = gradual.train(before, before, how(model), settings(), context(data, tmp_path))
    result = keras_graph.build(changed)
    samples = data.inputs("validation")
    trained = seen[0](samples, training=False)[0]
    np.testing.assert_allclose(result(samples), trained, atol=1e-5)
    assert not any(layer.name.startswith(gradual.ORIGINAL) for layer in result.layers)
    assert [tuple(output.shape) for output in result.outputs] == [tuple(output.shape) for output in model.outputs]


def test_the_trained_network_answers_as_the_original(keras: Any, tmp_path: Path) -> None:
    model, data = network(keras, dropout=0.0), Blobs()
    before = keras_graph.read(model)
    at_once, _ = replace_by_relu(before, ("silu",), "relu")
    gradually, _, facts = gradual.train(before, before, how(model), settings(epochs=12), context(data, tmp_path))
    samples = data.inputs("validation")

    def error(network: keras_graph.Network) -> float:
        """Return the mean squared error of the centred logits."""
        one, other = (np.log(keras_model(samples)) for keras_model in (model, keras_graph.build(network)))
        return float(np.square((other - other.mean(1, keepdims=True)) - (one - one.mean(1, keepdims=True))).mean())

    assert error(gradually) < error(at_once) / 4
    losses = [row["loss"] for row in facts["history"]]
    assert losses[0] < max(losses) / 4  # the training begins near the original


def test_a_network_without_such_activations_is_not_trained(keras: Any, tmp_path: Path) -> None:
    before = keras_graph.read(
        keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(2, 8, activation="relu"), keras.layers.Flatten()])
    )
    training = gradual.GradualTraining(("silu",), "relu", 0.5, lambda *_: pytest.fail("it was trained"))
    network, replacements, facts = gradual.train(before, before, training, settings(), context(Blobs(), tmp_path))
    assert network is before
    assert not replacements.replaced
    assert not facts
