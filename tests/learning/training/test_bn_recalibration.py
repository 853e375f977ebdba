"""Batch norm recalibration: the statistics, the samples they are measured on, and when they are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, Bright, context
from networks import with_batch_norms as network

from compress.data.types import Objects, Split
from compress.learning.training import bn_recalibration, loop, validation
from compress.learning.training.bn_recalibration import recalibrate_batch_norms
from compress.learning.training.loop import TrainingSettings
from compress.tasks.classification import ClassificationHead

pytestmark = pytest.mark.tensorflow


def values(keras: Any, model: Any, name: str, data: Blobs) -> np.ndarray:
    """Return the outputs of a layer on the training split, by channel."""
    inner = keras.Model(model.inputs[0], model.get_layer(name).output)
    outputs = np.asarray(inner(data.inputs("train"), training=False), np.float64)
    return outputs.reshape(-1, outputs.shape[-1])


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep new statistics whatever the validation result: it has no meaning for an untrained network."""
    monkeypatch.setattr(validation.Quality, "is_worse_than", lambda mine, other: False)


def trained(model: Any, folder: Path, data: Blobs | None = None, **settings: Any) -> dict[str, Any]:
    data = data or Blobs()
    values: dict[str, Any] = {"epochs": 8, "batch_size": 16, "learning_rate": 0.02, **settings}
    loss = loop.label_loss(loop.head_of(model, data))
    return loop.fit(model, loss, TrainingSettings(**values), context(data, folder))


def test_a_short_training_with_a_large_momentum_recovers(keras: Any, tmp_path: Path) -> None:
    model, data = network(keras), Bright()
    facts = trained(model, tmp_path, data)
    report = facts["batch_norms"]
    assert facts["history"][-1]["accuracy"] == 1.0
    assert facts["history"][-1]["val_accuracy"] == report["validation_before"] == 0.5  # one answer for every sample
    assert (report["kept"], report["metric"], report["validation_after"]) == (True, "accuracy", 1.0)
    answers = model.predict(data.inputs("test"), verbose=0).argmax(axis=1)
    assert (answers == data.labels("test")).all()


@pytest.mark.usefixtures("kept")
def test_statistics_are_those_of_the_training_samples(keras: Any, tmp_path: Path) -> None:
    model, data = network(keras, dropout=0.5), Blobs()
    before = {layer.name: layer.get_weights() for layer in model.layers}
    assert recalibrate_batch_norms(model, context(data, tmp_path))["batch_norms"]["kept"]
    for name, input_layer, tolerance in (("first", "conv", 0.02), ("second", "hidden", 0.1)):
        # During recalibration, the input of "second" is normalized by batches, here by their average.
        outputs = values(keras, model, input_layer, data)
        mean, variance = model.get_layer(name).get_weights()[2:]
        np.testing.assert_allclose(mean, outputs.mean(axis=0), rtol=tolerance, atol=0.02)
        np.testing.assert_allclose(variance, outputs.var(axis=0), rtol=tolerance)
        for old, new in zip(before[name][:2], model.get_layer(name).get_weights()[:2], strict=True):
            np.testing.assert_array_equal(old, new)  # gamma and beta
        assert model.get_layer(name).momentum == 0.999
    for name in ("conv", "hidden"):
        np.testing.assert_array_equal(before[name][0], model.get_layer(name).get_weights()[0])
    assert not np.array_equal(model(data.inputs("train"), training=True), model(data.inputs("train"), training=True))


class Sorted(Blobs):
    """All samples of one class come before those of the other, as in the files of many data sets."""

    def labels(self, split: Split) -> np.ndarray:
        return np.sort(super().labels(split))


@pytest.mark.usefixtures("kept")
def test_samples_that_are_sorted_by_class_are_mixed(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = network(keras), Sorted()
    monkeypatch.setattr(bn_recalibration, "BATCH", 32)
    recalibrate_batch_norms(model, context(data, tmp_path))
    variance = model.get_layer("second").get_weights()[-1]
    expected = values(keras, model, "hidden", data).var(axis=0)
    np.testing.assert_allclose(variance, expected, rtol=0.2)


def shared(keras: Any) -> Any:
    """One batch norm that is called on two halves of an image with different means."""
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    norm = layers.BatchNormalization(name="norm")
    halves = [norm(layers.Flatten()(image[:, :4])), norm(layers.Flatten()(image[:, 4:] + 3.0))]
    return keras.Model(image, layers.Dense(2)(layers.Concatenate()(halves)))


def nested(keras: Any) -> Any:
    """A batch norm in a nested model, whose layers Keras has connected twice."""
    layers = keras.layers
    inner = keras.Sequential([keras.Input((8, 8, 1)), layers.BatchNormalization(name="norm"), layers.Flatten()])
    image = keras.Input((8, 8, 1))
    return keras.Model(image, layers.Dense(2)(inner(image)))


def in_layer(keras: Any) -> Any:
    """A batch norm in a layer that calls it for every row."""
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    rows = layers.TimeDistributed(layers.BatchNormalization(name="norm"))(image)
    return keras.Model(image, layers.Dense(2)(layers.Flatten()(rows)))


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(("build", "shift"), [(shared, 1.5), (nested, 0.0), (in_layer, 0.0)])
@pytest.mark.parametrize("batch", [64, 16])
def test_it_does_not_matter_who_calls_a_batch_norm(
    keras: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[Any], Any],
    shift: float,
    batch: int,
) -> None:
    monkeypatch.setattr(bn_recalibration, "BATCH", batch)
    keras.utils.set_random_seed(0)
    model, data = build(keras), Blobs()
    recalibrate_batch_norms(model, context(data, tmp_path))
    (norm,) = (layer for layer in model._flatten_layers() if layer.name == "norm")
    assert float(np.mean(norm.moving_mean)) == pytest.approx(data.inputs("train").mean() + shift, rel=1e-4)
    assert norm.momentum == 0.99


def test_a_model_without_batch_norms_stays_as_it_is(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dropout(0.5), layers.Dense(2)])
    monkeypatch.setattr(validation, "_outputs", lambda *arguments: pytest.fail("validated for nothing"))
    before = [np.asarray(variable).tobytes() for variable in model.variables]
    assert recalibrate_batch_norms(model, context(Blobs(), tmp_path)) == {}
    assert [np.asarray(variable).tobytes() for variable in model.variables] == before
    assert "batch_norms" not in trained(model, tmp_path, epochs=1)


def test_frozen_batch_norms_stay_as_they_are(keras: Any, tmp_path: Path) -> None:
    model = network(keras)
    model.get_layer("first").trainable = False
    recalibrate_batch_norms(model, context(Blobs(), tmp_path))
    assert not model.get_layer("first").get_weights()[2].any()
    assert model.get_layer("second").get_weights()[2].any()
    model.trainable = False
    before = model.get_weights()
    assert recalibrate_batch_norms(model, context(Blobs(), tmp_path)) == {}
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_it_is_kept_only_where_validation_is_no_worse(keras: Any, tmp_path: Path) -> None:
    """The statistics of training samples that are far from the validation samples do harm."""

    class Shifted(Blobs):
        def inputs(self, split: Split) -> np.ndarray:
            return super().inputs(split) * np.float32(-20 if split == "train" else 1)

    model = network(keras)
    trained(model, tmp_path)
    before = [weight.tobytes() for weight in model.get_weights()]
    report = recalibrate_batch_norms(model, context(Shifted(), tmp_path))["batch_norms"]
    assert report["kept"] is False
    assert report["validation_after"] < report["validation_before"] == 1.0
    assert [weight.tobytes() for weight in model.get_weights()] == before


@pytest.mark.usefixtures("kept")
def test_batch_renormalization_keeps_its_deviation_in_step(keras: Any, tmp_path: Path) -> None:
    image = keras.Input((8, 8, 1))
    norm = keras.layers.BatchNormalization(renorm=True, name="norm")
    model = keras.Model(image, keras.layers.Dense(2)(keras.layers.Flatten()(norm(image))))
    assert recalibrate_batch_norms(model, context(Blobs(), tmp_path))["batch_norms"]["kept"]
    inputs = Blobs().inputs("train")
    assert norm.renorm is True
    np.testing.assert_allclose(norm.moving_mean, [inputs.mean()], rtol=1e-4)
    np.testing.assert_allclose(norm.moving_stddev, np.sqrt(np.asarray(norm.moving_variance) + 1e-3), rtol=1e-5)


@pytest.mark.parametrize("more", [{"ema": 0.9}, {"early_stopping": 3}, {"precision": "mixed_bfloat16"}])
def test_the_weights_that_come_out_are_those_that_are_measured(
    keras: Any, tmp_path: Path, more: dict[str, Any]
) -> None:
    model = network(keras)
    facts = trained(model, tmp_path, epochs=12, **more)
    assert facts["batch_norms"]["kept"]
    outputs = values(keras, model, "conv", Blobs())
    mean, variance = model.get_layer("first").get_weights()[-2:]
    np.testing.assert_allclose(mean, outputs.mean(axis=0), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(variance, outputs.var(axis=0), rtol=1e-2)
    answers = model.predict(Blobs().inputs("validation"), verbose=0).argmax(axis=1)
    accuracy = float((answers == Blobs().labels("validation")).mean())
    assert facts["batch_norms"]["validation_after"] == pytest.approx(accuracy)


def test_an_interruption_in_it_changes_nothing(keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.learning.training import checkpoint
    from compress.model.ir.tensorflow import keras as seeded

    monkeypatch.setattr(checkpoint, "EVERY_S", 0.0)
    training_context = context(Blobs(), tmp_path)
    monkeypatch.setattr(training_context.progress, "note", lambda text: None)

    def result(folder: Path | None) -> tuple[Any, Any]:
        seeded(0)
        model = network(keras, dropout=0.2)
        loss, settings = loop.label_loss(ClassificationHead("softmax")), TrainingSettings(epochs=4, batch_size=16)
        return loop.fit(model, loss, settings, replace(training_context, unfinished=folder)), model.get_weights()

    facts, weights = result(None)
    folder = tmp_path / "unfinished"
    with monkeypatch.context() as stopped:
        stopped.setattr(bn_recalibration, "rows_of", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            result(folder)
    assert (folder / checkpoint.FILE).exists()
    again, resumed = result(folder)
    assert again == facts
    for mine, other in zip(resumed, weights, strict=True):
        np.testing.assert_array_equal(mine, other)


class Found(Blobs):
    """One bright square to find in each picture."""

    def __init__(self) -> None:
        super().__init__(class_names=("square",), task="detection")

    def objects(self, split: Split) -> list[Objects]:
        corners = np.random.default_rng(len(self.labels(split))).integers(0, 2, (len(self.labels(split)), 2)) / 2
        return [
            Objects(np.concatenate([corner, corner + 0.5])[None].astype(np.float32), np.zeros(1, np.int64))
            for corner in corners
        ]

    def inputs(self, split: Split) -> np.ndarray:
        objects = self.objects(split)
        images = np.random.default_rng(0).random((len(objects), 8, 8, 1), np.float32) * np.float32(0.2)
        for image, annotation in zip(images, objects, strict=True):
            top, left = (annotation.boxes[0, :2] * 8).astype(int)
            image[top : top + 4, left : left + 4] += 0.8
        return images


def test_of_a_detector_the_loss_decides(keras: Any, tmp_path: Path) -> None:
    layers = keras.layers
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 4, 4, use_bias=False)(image)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.999)(x))
    boxes = layers.Reshape((-1, 4))(layers.Conv2D(4, 1)(x))
    model = keras.Model(image, [boxes, layers.Reshape((-1, 1))(layers.Conv2D(1, 1)(x))])
    detector = {"maps": [{"cells": [2, 2], "boxes": [[0.5, 0.5]]}], "scores": "logits"}
    training_context = replace(context(Found(), tmp_path), specification=detector)
    settings = TrainingSettings(epochs=15, batch_size=16, learning_rate=0.02)
    facts = loop.fit(model, loop.own_loss(model, training_context), settings, training_context)
    report = facts["batch_norms"]
    assert (report["kept"], report["metric"]) == (True, "loss")
    assert report["validation_before"] == pytest.approx(facts["history"][-1]["val_loss"], rel=1e-4)
    assert report["validation_after"] < 0.5 * report["validation_before"]
    assert report["validation_after"] == pytest.approx(facts["history"][-1]["loss"], rel=0.5)


@pytest.mark.parametrize(
    ("metric", "mine", "other", "worse"),
    [
        ("accuracy", 0.5, 0.6, True),
        ("accuracy", 0.5, 0.5, False),
        ("loss", 0.6, 0.5, True),
        ("loss", 0.5, 0.6, False),
        ("loss", float("nan"), 0.5, True),
        ("loss", 0.5, float("nan"), False),
        ("loss", float("nan"), float("nan"), True),
    ],
)
def test_what_is_no_number_is_worse_than_everything(metric: Any, mine: float, other: float, worse: bool) -> None:
    assert validation.Quality(metric, mine).is_worse_than(validation.Quality(metric, other)) is worse


def test_an_error_on_the_way_leaves_the_layers_as_keras_has_them(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(keras)
    monkeypatch.setattr(bn_recalibration, "rows_of", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recalibrate_batch_norms(model, context(Blobs(), tmp_path))
    norm = model.get_layer("first")
    assert (norm.momentum, norm.renorm, "call" in vars(norm)) == (0.999, False, False)


@pytest.mark.usefixtures("kept")
def test_so_many_samples_are_read_and_all_batches_weigh_the_same(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bn_recalibration, "BATCH", 24)
    monkeypatch.setattr(bn_recalibration, "SAMPLES", 72)
    model, data = network(keras), Blobs()
    recalibrate_batch_norms(model, context(data, tmp_path))
    outputs = values(keras, model, "conv", data).reshape(96, -1, 6)
    parts = [outputs[part].reshape(-1, 6) for part in np.split(np.random.default_rng(0).permutation(96)[:72], 3)]
    mean, variance = model.get_layer("first").get_weights()[-2:]
    np.testing.assert_allclose(mean, np.mean([part.mean(axis=0) for part in parts], axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance, np.mean([part.var(axis=0) for part in parts], axis=0), rtol=1e-4)
