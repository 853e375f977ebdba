"""Frozen layers, learning rates by layer, gradual unfreezing, and the loss of mixed and smoothed labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context

from compress.core.errors import ModelError, StageError
from compress.data.types import Split
from compress.learning.training import augmentation, loop, transfer
from compress.learning.training.augmentation import Augment
from compress.learning.training.batches import batches
from compress.learning.training.loop import Batch, Loss, Rate, TrainingSettings
from compress.learning.training.transfer import TransferSettings
from compress.model.importers.keras import keras_file
from compress.model.ir import keras_graph
from compress.tasks.base import Draws
from compress.tasks.classification import ClassificationHead

pytestmark = pytest.mark.tensorflow
LOSS = loop.label_loss(ClassificationHead("softmax"))


def network(keras: Any) -> Any:
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, name="first", use_bias=False)(image)
    x = layers.ReLU(name="first_relu")(layers.BatchNormalization(name="norm")(x))
    x = layers.Conv2D(4, 3, activation="relu", name="second")(x)
    return keras.Model(image, layers.Dense(2, "softmax", name="head")(layers.GlobalAveragePooling2D()(x)))


def layout(keras: Any, name: str) -> Any:
    """Return a model of layers `base_…`, which may be a nested model, and a head whose `conv` is named as in there."""
    layers = keras.layers
    base = [layers.Conv2D(4, 3, name="conv"), layers.BatchNormalization(name="norm"), layers.ReLU(name="relu")]
    head = [layers.Conv2D(4, 3, name="conv"), layers.Flatten(), layers.Dense(2, "softmax", name="dense")]
    image = keras.Input((8, 8, 1))
    functional = image
    for layer in base:
        functional = layer(functional)
    inner = (
        keras.Sequential(base, name="base") if "of sequential" in name else keras.Model(image, functional, name="base")
    )
    if name == "sequential":
        renamed = [type(layer).from_config({**layer.get_config(), "name": f"base_{layer.name}"}) for layer in base]
        return keras.Sequential([keras.Input((8, 8, 1)), *renamed, *head])
    if name.startswith("sequential of"):
        return keras.Sequential([keras.Input((8, 8, 1)), inner, *head])
    entrance = keras.Input((8, 8, 1))
    x = inner(entrance)
    for layer in head:
        x = layer(x)
    model = keras.Model(entrance, x)
    return keras_graph.build(keras_graph.read(model)) if name == "flat" else model


LAYOUTS = [
    "flat",
    "sequential",
    "sequential of functional",
    "sequential of sequential",
    "functional of functional",
    "functional of sequential",
]


def trained(
    model: Any, folder: Path, settings: TransferSettings, epochs: int = 3, precision: Any = "float32"
) -> set[str]:
    """Train a model; return the layers with weights that changed, as they are named without nested models."""
    before = keras_graph.read(model).layers
    fitted = TrainingSettings(epochs=epochs, batch_size=16, learning_rate=0.02, precision=precision)
    with transfer.frozen(model, settings), transfer.flat(model, settings) as copied:
        rates = transfer.rates(copied, settings)
        loop.fit(copied, LOSS, fitted, context(Blobs(), folder), rates=rates)
    return {
        layer.name
        for layer in keras_graph.read(model).layers.values()
        if any(not np.array_equal(*pair) for pair in zip(before[layer.name].weights, layer.weights, strict=True))
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_nested_model_or_a_layer_in_it_is_frozen(keras: Any, tmp_path: Path, name: str) -> None:
    model = layout(keras, name)
    cases = {
        "base" if " of " in name else "base_relu": {"conv", "dense"},
        "backbone": {"dense"},
        "base_conv": {"base_norm", "conv", "dense"},
    }
    for freeze, changed in cases.items():
        assert trained(model, tmp_path / freeze, TransferSettings(freeze=freeze), epochs=1) == changed
    assert all(layer.trainable for layer in model._flatten_layers())


def test_unknown_layers_and_nothing_to_train_are_refused(keras: Any) -> None:
    model, nested = network(keras), layout(keras, "sequential of functional")
    many = keras.Sequential([keras.Input((2,)), *(keras.layers.Dense(2, name=f"layer{index}") for index in range(50))])
    for refused, freeze, message in (
        (model, "secnd", r"no layer 'secnd'.*did you mean 'second'"),
        (nested, "x", "allowed: backbone, or a layer: base, base_conv, base_norm, conv, dense"),
        (many, "x", r"layer38, layer39, 10 more$"),
        (model, "head", "leaves no weights to train"),
    ):
        with pytest.raises(ModelError, match=message), transfer.frozen(refused, TransferSettings(freeze=freeze)):
            pass
    assert all(layer.trainable for layer in model.layers)


def test_layers_near_the_input_start_later_and_learn_more_slowly(keras: Any) -> None:
    rates = transfer.rates(network(keras), TransferSettings(unfreeze_until=0.6, backbone_rate=0.5, layer_decay=0.5))
    layer_rates = {path.split("/")[0]: rate for path, rate in rates.items()}
    assert layer_rates == {"second": Rate(0.5, 0.6 / 3), "norm": Rate(0.25, 0.6 / 3 * 2), "first": Rate(0.125, 0.6)}
    assert transfer.rates(network(keras), TransferSettings()) == {}


@pytest.mark.parametrize(
    ("name", "precision"),
    [("functional of sequential", "float32"), *((name, "mixed_bfloat16") for name in LAYOUTS)],
)
def test_learning_rates_of_layers_in_nested_models(keras: Any, tmp_path: Path, name: str, precision: str) -> None:
    model = layout(keras, name)
    if name != "flat":
        model.save(tmp_path / "model.keras")
        model = keras_file.load(tmp_path / "model.keras")  # Keras names the weights differently in its copies
    settings = TransferSettings(unfreeze_until=1.0)
    kinds = [type(layer) for layer in model._flatten_layers()]
    assert trained(model, tmp_path / "run", settings, 1, precision) == {"base_norm", "conv", "dense"}
    assert [type(layer) for layer in model._flatten_layers()] == kinds
    slower = TransferSettings(backbone_rate=0.5, layer_decay=0.5)
    with transfer.flat(model, slower) as copied:
        factors = {path.split("/")[0]: rate.factor for path, rate in transfer.rates(copied, slower).items()}
    assert factors == {"conv": 0.5, "base_norm": 0.25, "base_conv": 0.125}


def test_a_layer_of_two_nested_models_has_no_learning_rate_of_its_own(keras: Any, tmp_path: Path) -> None:
    image = keras.Input((8, 8, 1))
    shared = keras.layers.Conv2D(1, 3, padding="same", name="conv")
    inner = [keras.Sequential([keras.Input((8, 8, 1)), shared], name=name) for name in ("left", "right")]
    outputs = keras.layers.Dense(2)(keras.layers.Flatten()(inner[1](inner[0](image))))
    model = keras.Model(image, outputs)
    with (
        pytest.raises(ModelError, match="left_conv, right_conv are the same layer"),
        transfer.flat(model, TransferSettings(layer_decay=0.5)),
    ):
        pass
    with transfer.frozen(model, TransferSettings(freeze="left")) as count:
        assert count == 1
        assert not shared.trainable


def test_weight_decay_reduces_kernels_alone(keras: Any) -> None:
    model = network(keras)
    settings = TrainingSettings(epochs=1, schedule="constant", learning_rate=0.1, weight_decay=0.5)
    optimizer = loop._optimizer(keras, settings, 1, {"second/kernel": Rate(0.5)})
    optimizer.build(model.trainable_variables)
    before = {variable.path: variable.numpy() for variable in model.trainable_variables}
    optimizer.apply([keras.ops.zeros_like(variable) for variable in model.trainable_variables])
    for variable in model.trainable_variables:
        expected = {"second/kernel": 0.975}.get(variable.path, 0.95 if "kernel" in variable.path else 1.0)
        np.testing.assert_allclose(variable.numpy(), before[variable.path] * expected, rtol=1e-5)


def test_smoothed_labels_count_every_class_a_little(keras: Any) -> None:
    head = ClassificationHead("softmax")
    probabilities = np.array([[0.7, 0.2, 0.1]], np.float32)
    smoothed = loop.smoothed_loss(Loss(lambda batch, outputs: head.loss(batch.labels, outputs), head=head), 0.3)
    actual = float(smoothed.of(Batch(None, np.array([0])), probabilities)[0])
    target = np.array([0.7 + 0.1, 0.1, 0.1])
    assert actual == pytest.approx(-(target * np.log(probabilities[0])).sum(), rel=1e-4)


def test_mixed_samples_have_the_loss_of_both(keras: Any) -> None:
    import tensorflow as tf

    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    labels = np.array([0, 1, 0, 1])
    draws = Draws(tf.constant([1, 2]), 4)
    mixed, targets = augmentation.mixup(0.5)(tf.constant(x), {"labels": tf.constant(labels)}, draws)
    share = np.asarray(targets[augmentation.SHARE])
    assert ((share >= 0.5) & (share <= 1)).all()
    np.testing.assert_allclose(
        np.asarray(mixed), share[:, None] * x + (1 - share[:, None]) * np.roll(x, 1, axis=0), rtol=1e-6
    )
    assert np.asarray(targets[augmentation.PARTNER]).tolist() == [1, 0, 1, 0]
    settings = TrainingSettings(epochs=1, augment=Augment(mixup=0.5))
    loss = loop._mixed(Loss(lambda batch, outputs: outputs[:, 0] * 0 + batch.labels), settings)
    batch = Batch(x, tf.constant([0.0, 1, 0, 1]), None, tf.constant([1.0, 0, 1, 0]), share)
    values = loss.of(batch, tf.constant(x))
    np.testing.assert_allclose(np.asarray(values), share * [0, 1, 0, 1] + (1 - share) * [1, 0, 1, 0], rtol=1e-5)


def test_numbers_of_rows_are_not_mixed(keras: Any, tmp_path: Path) -> None:
    stack = [keras.Input((64,)), keras.layers.Embedding(8, 4), keras.layers.Flatten(), keras.layers.Dense(2)]
    settings = TrainingSettings(epochs=1, augment=Augment(mixup=0.5))
    loss = Loss(lambda batch, outputs: outputs[:, 0] * 0)
    with pytest.raises(StageError, match=r"augment\.mixup .* indices of its rows"):
        loop.fit(keras.Sequential(stack), loss, settings, context(Blobs(), tmp_path))


@dataclass
class Colours(Blobs):
    input_shape: tuple[int, ...] = (8, 8, 3)

    def inputs(self, split: Split) -> np.ndarray:
        return np.repeat(super().inputs(split), 3, axis=-1) * 2 - 1


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "erase"])
def test_values_change_within_the_range_of_the_samples(keras: Any, name: str) -> None:
    import tensorflow as tf

    inputs = Colours().inputs("train") * np.float32([1, 0.5, 0.2])
    limits = augmentation.value_range(inputs)
    change = augmentation.value_changes(Augment(**{name: 0.5}), limits)
    draws = Draws(tf.constant([3, 4]), len(inputs))
    changed, _ = change(tf.constant(inputs), {}, draws)
    again, _ = change(tf.constant(inputs), {}, draws)
    values = np.asarray(changed)
    assert limits[0] <= values.min() <= values.max() <= limits[1]
    assert not np.allclose(values, inputs)
    np.testing.assert_array_equal(values, np.asarray(again))
    if name == "erase":
        share = (values != inputs).any(axis=-1).mean(axis=(1, 2))
        assert share.max() <= 0.5 + 2 / 8
        assert share.std() > 0.02


def test_a_training_with_all_augmentation_learns(keras: Any, tmp_path: Path) -> None:
    layers = keras.layers
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(2, "softmax")])
    augment = Augment(shift=0.05, brightness=0.1, contrast=0.2, saturation=0.2, erase=0.1, mixup=0.2)
    settings = TrainingSettings(epochs=8, batch_size=16, learning_rate=0.02, augment=augment, weight_decay=0.001)
    facts = loop.fit(model, LOSS, settings, context(Colours(), tmp_path))
    assert facts["history"][-1]["val_accuracy"] > 0.9


def test_images_alone_have_colours(keras: Any) -> None:
    series = np.zeros((8, 10, 3), np.float32)
    settings = TrainingSettings(epochs=1, augment=Augment(brightness=0.1))
    with pytest.raises(StageError, match="augment changes images, and the samples are"):
        batches(series, {"labels": np.zeros(8)}, settings, 0)
    mixed = batches(series, {"labels": np.zeros(8)}, TrainingSettings(epochs=1, augment=Augment(mixup=0.2)), 0)
    assert next(iter(mixed))[0].shape == (8, 10, 3)
