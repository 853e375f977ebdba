from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context

from compress.errors import ModelError, StageError
from compress.stage import Split
from compress.training import fit
from compress.training.fit import Augment, Batch, Head, Loss, TrainingSettings

pytestmark = pytest.mark.tensorflow


def network(keras: Any, softmax: bool = True) -> Any:
    layers = keras.layers
    activation = "softmax" if softmax else None
    return keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(2, activation)]
    )


@pytest.mark.parametrize("softmax", [True, False])
def test_training_learns_and_reports(keras: Any, tmp_path: Path, softmax: bool) -> None:
    keras.utils.set_random_seed(0)
    model, data, given = network(keras, softmax), Blobs(), context(Blobs(), tmp_path)
    head = fit.head_of(model, data)
    assert head == Head(softmax=softmax)
    facts = fit.fit(model, fit.label_loss(head), TrainingSettings(epochs=8, batch_size=16, learning_rate=0.02), given)
    assert len(facts["history"]) == 8
    assert facts["history"][-1]["val_accuracy"] == 1.0
    seen = given.progress.seen  # type: ignore[attr-defined]
    assert [done for done, _, _ in seen] == list(range(1, 49))
    assert seen[0][1] == 48
    assert {"loss", "accuracy", "val_accuracy"} <= set(seen[-1][2])


def test_the_same_seed_gives_the_same_weights(keras: Any, tmp_path: Path) -> None:
    augment = Augment(shift=0.1, rotate=10, zoom=0.1, flip=True)
    results = []
    for seed in (1, 1, 2):
        from compress.training.tensorflow import keras as seeded

        seeded(seed)
        model = network(keras)
        settings = TrainingSettings(epochs=2, batch_size=16, augment=augment)
        fit.fit(model, fit.label_loss(Head(softmax=True)), settings, context(Blobs(), tmp_path, seed))
        results.append(model.get_weights()[0])
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_divergence_is_an_error_that_says_so(keras: Any, tmp_path: Path) -> None:
    data = Blobs(scale=1e30)
    model = network(keras, softmax=False)
    settings = TrainingSettings(epochs=2, batch_size=16, learning_rate=10.0)
    with pytest.raises(StageError, match=r"training diverged.*smaller learning_rate"):
        fit.fit(model, fit.label_loss(Head(softmax=False)), settings, context(data, tmp_path))


def test_model_and_data_must_fit_together(keras: Any) -> None:
    layers = keras.layers
    small = keras.Sequential([keras.Input((4, 4, 1)), layers.Flatten(), layers.Dense(2)])
    with pytest.raises(ModelError, match=r"takes \[4, 4, 1\], but data.preprocess gives \[8, 8, 1\]"):
        fit.head_of(small, Blobs())
    many = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(7)])
    with pytest.raises(ModelError, match=r"shape \[7\], but the data has 2 classes"):
        fit.head_of(many, Blobs())
    image = keras.Input((8, 8, 1))
    flat = layers.Flatten()(image)
    double = keras.Model(image, [layers.Dense(2)(flat), layers.Dense(2)(flat)])
    with pytest.raises(ModelError, match="1 inputs and 2 outputs"):
        fit.head_of(double, Blobs())


def accuracy_of(model: Any, data: Blobs) -> float:
    found = model.predict(data.inputs("validation"), verbose=0).argmax(axis=1)
    return float((found == data.labels("validation")).mean())


class Hard(Blobs):
    """Half of the training labels are wrong: accuracy goes up and down."""

    def labels(self, split: Split) -> np.ndarray:
        right = super().labels(split)
        if split != "train":
            return right
        return np.where(np.random.default_rng(0).random(len(right)) < 0.45, 1 - right, right)

    def inputs(self, split: Split) -> np.ndarray:
        return Blobs().inputs(split)


@pytest.mark.parametrize("ema", [None, 0.8])
def test_early_stopping_keeps_the_best_epoch(keras: Any, tmp_path: Path, ema: float | None) -> None:
    keras.utils.set_random_seed(0)
    model, head = network(keras), Head(softmax=True)
    settings = TrainingSettings(epochs=40, batch_size=8, learning_rate=0.2, early_stopping=3, ema=ema)
    facts = fit.fit(model, fit.label_loss(head), settings, context(Hard(), tmp_path))
    found = [row["val_accuracy"] for row in facts["history"]]
    assert len(found) < 40
    assert len(found) - facts["best_epoch"] == 3
    assert found[facts["best_epoch"] - 1] == max(found) == pytest.approx(accuracy_of(model, Hard()))


def test_the_moving_average_is_what_is_validated_and_kept(keras: Any, tmp_path: Path) -> None:
    kept, plain = [], []
    for ema, found in ((0.98, kept), (None, plain)):
        keras.utils.set_random_seed(0)
        model = network(keras)
        settings = TrainingSettings(epochs=3, batch_size=16, learning_rate=0.05, ema=ema)
        facts = fit.fit(model, fit.label_loss(Head(softmax=True)), settings, context(Hard(), tmp_path))
        data = Hard()
        scores = model.predict(data.inputs("validation"), verbose=0)
        loss = -np.log(scores[np.arange(len(scores)), data.labels("validation")]).mean()
        assert facts["history"][-1]["val_loss"] == pytest.approx(loss, rel=1e-3)
        found.extend(model.get_weights())
    assert not np.allclose(kept[0], plain[0], atol=1e-3)


def test_the_learning_rate_rises_and_falls(keras: Any) -> None:
    settings = TrainingSettings(epochs=10, learning_rate=0.1, warmup=0.2)
    schedule = fit._optimizer(keras, settings, batches=10)._learning_rate
    rates = [float(schedule(step)) for step in (0, 10, 20, 60, 100)]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.05, 0], abs=1e-6)


def test_gradients_are_accumulated(keras: Any) -> None:
    settings = TrainingSettings(epochs=10, learning_rate=0.1, gradient_accumulation=2)
    optimizer, variable = fit._optimizer(keras, settings, batches=10), keras.Variable(np.zeros(1, np.float32))
    optimizer.build([variable])
    optimizer.apply([keras.ops.ones(1)])
    assert float(variable[0]) == 0
    optimizer.apply([keras.ops.ones(1)])
    assert float(variable[0]) == pytest.approx(-0.1, rel=0.01)


def test_balanced_classes_weigh_the_same(keras: Any) -> None:
    class Rare(Blobs):
        def labels(self, split: Split) -> np.ndarray:
            return (np.arange(100) >= 90).astype(np.int64)

    settings = TrainingSettings(epochs=1, class_weights="balanced")
    weighted = fit._weighted(Loss(lambda batch, outputs: keras.ops.ones(len(batch.labels))), settings, Rare())
    labels = Rare().labels("train")
    found = np.asarray(weighted.of(Batch(None, labels), None))
    assert found.mean() == pytest.approx(1)
    assert found[labels == 0].sum() == pytest.approx(found[labels == 1].sum())


def test_what_a_loss_brings_along_reaches_it_beside_its_samples(keras: Any, tmp_path: Path) -> None:
    """The loss is 0 only if every sample comes with the value that was made of it, however batches are shuffled."""
    data = Blobs()

    def value(samples: Any) -> Any:
        return keras.ops.mean(keras.ops.square(samples), axis=(1, 2))

    def loss(batch: Batch, outputs: Any) -> Any:
        return keras.ops.mean(keras.ops.square(batch.taught - value(batch.inputs)), axis=-1) + 0 * outputs[:, 0]

    taught = {split: np.asarray(value(data.inputs(split))) for split in ("train", "validation")}
    settings = TrainingSettings(epochs=2, batch_size=20)
    rows = fit.fit(network(keras), Loss(loss, taught), settings, context(data, tmp_path))["history"]
    assert [row["loss"] for row in rows] + [row["val_loss"] for row in rows] == pytest.approx([0] * 4, abs=1e-9)
    shifted = {split: np.roll(values, 1, axis=0) for split, values in taught.items()}
    rows = fit.fit(network(keras), Loss(loss, shifted), settings, context(data, tmp_path))["history"]
    assert min(rows[0]["loss"], rows[0]["val_loss"]) > 1e-4
