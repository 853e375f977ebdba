from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context

from compress.core.errors import ModelError, StageError
from compress.data.types import Split
from compress.learning.training import checkpoint, loop, schedules, strategies
from compress.learning.training.augmentation import Augment
from compress.learning.training.loop import Batch, Loss, TrainingSettings
from compress.model.ir import mixed_precision
from compress.tasks.classification import ClassificationHead

pytestmark = pytest.mark.tensorflow
LOSS = loop.label_loss(ClassificationHead("softmax"))


def network(keras: Any, softmax: bool = True, dropout: float = 0.0) -> Any:
    layers = keras.layers
    features = [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten()]
    lost = [layers.Dropout(dropout)] if dropout else []
    return keras.Sequential([*features, *lost, layers.Dense(2, "softmax" if softmax else None)])


@pytest.mark.parametrize(
    ("scores", "end"),
    [
        ("logits", lambda layers, x: x),
        ("logits", lambda layers, x: layers.Reshape((2,))(x)),
        ("softmax", lambda layers, x: layers.Softmax()(x)),
        ("softmax", lambda layers, x: layers.Activation(layers.Softmax())(x)),
        ("softmax", lambda layers, x: layers.Activation("linear")(layers.Activation("softmax")(x))),
        ("softmax", lambda layers, x: layers.Reshape((2,))(layers.Softmax()(layers.Reshape((1, 2))(x)))),
        ("softmax", lambda layers, x: layers.Average()([layers.Softmax()(x), layers.Softmax()(x * 2.0)])),
        ("softmax", lambda layers, x: layers.Softmax()(x) * 1.0),
        ("logits", lambda layers, x: x * 1.0),
        ("sigmoid", lambda layers, x: layers.Dense(2, activation=layers.Activation("sigmoid"))(x)),
        ("sigmoid", lambda layers, x: layers.Dropout(0.1)(layers.Activation("sigmoid")(x))),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_what_scores_are_is_seen_wherever_they_are_made(
    keras: Any, scores: loop.Output, end: Callable[[Any, Any], Any], nested: bool
) -> None:
    features = keras.Input((8,))
    head = keras.Model(features, end(keras.layers, keras.layers.Dense(2)(features)))
    image = keras.Input((8, 8, 1))
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Reshape((8, 8))(image))
    model = keras.Model(image, head(x) if nested else end(keras.layers, keras.layers.Dense(2)(x)))
    assert loop.head_of(model, Blobs()) == ClassificationHead(scores)


def test_classes_with_a_sigmoid_each_are_learnt_as_such(keras: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(2, "sigmoid")])
    settings = TrainingSettings(epochs=20, batch_size=16, learning_rate=0.05)
    loop.fit(model, loop.label_loss(loop.head_of(model, Blobs())), settings, context(Blobs(), tmp_path))
    scores = model.predict(Blobs().inputs("test"), verbose=0)
    expected = np.eye(2)[Blobs().labels("test")]
    assert np.abs(scores - expected).max() < 0.3  # one near 1, the other near 0: the right order alone is not enough


@pytest.mark.parametrize("softmax", [True, False])
def test_training_learns_and_reports(keras: Any, tmp_path: Path, softmax: bool) -> None:
    keras.utils.set_random_seed(0)
    model, data, training_context = network(keras, softmax), Blobs(), context(Blobs(), tmp_path)
    head = loop.head_of(model, data)
    assert head == ClassificationHead("softmax" if softmax else "logits")
    facts = loop.fit(
        model, loop.label_loss(head), TrainingSettings(epochs=8, batch_size=16, learning_rate=0.02), training_context
    )
    assert len(facts["history"]) == 8
    assert facts["history"][-1]["val_accuracy"] == 1.0
    seen = training_context.progress.seen  # type: ignore[attr-defined]
    assert [done for done, _, _ in seen] == list(range(49))
    assert seen[0][1] == 48
    assert {"loss", "accuracy", "val_accuracy"} <= set(seen[-1][2])


def test_the_same_seed_gives_the_same_weights(keras: Any, tmp_path: Path) -> None:
    augment = Augment(shift=0.1, rotate=10, zoom=0.1, flip=True)
    results = []
    for seed in (1, 1, 2):
        from compress.model.ir.tensorflow import keras as seeded

        seeded(seed)
        model = network(keras)
        settings = TrainingSettings(epochs=2, batch_size=16, augment=augment)
        loop.fit(model, LOSS, settings, context(Blobs(), tmp_path, seed))
        results.append(model.get_weights()[0])
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_divergence_is_an_error_that_says_so(keras: Any, tmp_path: Path) -> None:
    data = Blobs(scale=1e30)
    model = network(keras, softmax=False)
    settings = TrainingSettings(epochs=2, batch_size=16, learning_rate=10.0)
    with pytest.raises(StageError, match=r"training diverged.*lower learning_rate"):
        loop.fit(model, loop.label_loss(ClassificationHead("logits")), settings, context(data, tmp_path))


def test_model_and_data_must_fit_together(keras: Any) -> None:
    layers = keras.layers
    small = keras.Sequential([keras.Input((4, 4, 1)), layers.Flatten(), layers.Dense(2)])
    with pytest.raises(ModelError, match=r"takes \[4, 4, 1\], but data.preprocess gives \[8, 8, 1\]"):
        loop.head_of(small, Blobs())
    many = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(7)])
    with pytest.raises(ModelError, match=r"shape \[7\], but the data has 2 classes"):
        loop.head_of(many, Blobs())
    image = keras.Input((8, 8, 1))
    flat = layers.Flatten()(image)
    double = keras.Model(image, [layers.Dense(2)(flat), layers.Dense(2)(flat)])
    with pytest.raises(ModelError, match="the model has 2 outputs; allowed: one output"):
        loop.head_of(double, Blobs())


class Hard(Blobs):
    """About 45% of the training labels are wrong: accuracy goes up and down."""

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
    model, head = network(keras), ClassificationHead("softmax")
    settings = TrainingSettings(epochs=40, batch_size=8, learning_rate=0.2, early_stopping=3, ema=ema)
    facts = loop.fit(model, loop.label_loss(head), settings, context(Hard(), tmp_path))
    accuracies = [row["val_accuracy"] for row in facts["history"]]
    assert len(accuracies) < 40
    assert len(accuracies) - facts["best_epoch"] == 3
    answers = model.predict(Hard().inputs("validation"), verbose=0).argmax(axis=1)
    accuracy = float((answers == Hard().labels("validation")).mean())
    assert accuracies[facts["best_epoch"] - 1] == max(accuracies) == pytest.approx(accuracy)


def test_the_moving_average_is_what_is_validated_and_kept(keras: Any, tmp_path: Path) -> None:
    kept, plain = [], []
    for ema, weights in ((0.98, kept), (None, plain)):
        keras.utils.set_random_seed(0)
        model = network(keras)
        settings = TrainingSettings(epochs=3, batch_size=16, learning_rate=0.05, ema=ema)
        facts = loop.fit(model, LOSS, settings, context(Hard(), tmp_path))
        data = Hard()
        scores = model.predict(data.inputs("validation"), verbose=0)
        loss = -np.log(scores[np.arange(len(scores)), data.labels("validation")]).mean()
        assert facts["history"][-1]["val_loss"] == pytest.approx(loss, rel=1e-3)
        weights.extend(model.get_weights())
    assert not np.allclose(kept[0], plain[0], atol=1e-3)


@pytest.mark.parametrize(("name", "last"), [("cosine", [0.05, 0]), ("constant", [0.1, 0.1])])
def test_the_learning_rate_rises_and_falls(keras: Any, name: Any, last: list[float]) -> None:
    settings = TrainingSettings(epochs=10, learning_rate=0.1, warmup=0.2, schedule=name)
    schedule = loop._optimizer(keras, settings, batches=10)._learning_rate
    rates = [float(schedule(step)) for step in (0, 10, 20, 60, 100)]
    assert rates == pytest.approx([0, 0.05, 0.1, *last], abs=1e-6)


@pytest.mark.parametrize("accumulated", [1, 4])
def test_accumulating_changes_neither_the_schedule_nor_the_average(keras: Any, accumulated: int) -> None:
    settings = TrainingSettings(epochs=10, learning_rate=0.1, gradient_accumulation=accumulated, ema=0.8)
    batches = 8 * accumulated
    optimizer, variable = loop._optimizer(keras, settings, batches=batches), keras.Variable(np.zeros(1, np.float32))
    optimizer.build([variable])
    for _ in range(5 * batches):
        optimizer.apply([keras.ops.ones(1)])
    assert float(optimizer._get_current_learning_rate()) == pytest.approx(0.05)
    behind = float(variable[0]) - float(optimizer._model_variables_moving_average[0][0])
    assert behind == pytest.approx(-0.24, abs=0.05)  # about 4 steps of 0.06: 0.8 / (1 - 0.8)


def test_a_training_of_less_than_one_step_is_refused(keras: Any, tmp_path: Path) -> None:
    settings = TrainingSettings(epochs=2, batch_size=50, gradient_accumulation=5)
    with pytest.raises(
        StageError, match=r"5 batches make one update, but the whole training has only 4 .*allowed: up to 4"
    ):
        loop.fit(network(keras), LOSS, settings, context(Blobs(), tmp_path))


def test_balanced_classes_weigh_the_same(keras: Any) -> None:
    class Rare(Blobs):
        def labels(self, split: Split) -> np.ndarray:
            return (np.arange(100) >= 90).astype(np.int64)

    settings = TrainingSettings(epochs=1, class_weights="balanced")
    weighted = loop._weighted(Loss(lambda batch, outputs: keras.ops.ones(len(batch.labels))), settings, Rare())
    labels = Rare().labels("train")
    losses = np.asarray(weighted.of(Batch(None, labels), None))
    assert losses.mean() == pytest.approx(1)
    assert losses[labels == 0].sum() == pytest.approx(losses[labels == 1].sum())


def test_what_a_loss_brings_along_reaches_it_beside_its_samples(keras: Any, tmp_path: Path) -> None:
    """The loss is 0 only if every sample comes with its own value, however batches are shuffled."""
    data = Blobs()

    def value(samples: Any) -> Any:
        return keras.ops.mean(keras.ops.square(samples), axis=(1, 2))

    def loss(batch: Batch, outputs: Any) -> Any:
        return keras.ops.mean(keras.ops.square(batch.soft_targets - value(batch.inputs)), axis=-1) + 0 * outputs[:, 0]

    taught = {split: np.asarray(value(data.inputs(split))) for split in ("train", "validation")}
    settings = TrainingSettings(epochs=2, batch_size=20)
    rows = loop.fit(network(keras), Loss(loss, taught), settings, context(data, tmp_path))["history"]
    assert [row["loss"] for row in rows] + [row["val_loss"] for row in rows] == pytest.approx([0] * 4, abs=1e-9)
    shifted = {split: np.roll(values, 1, axis=0) for split, values in taught.items()}
    rows = loop.fit(network(keras), Loss(loss, shifted), settings, context(data, tmp_path))["history"]
    assert min(rows[0]["loss"], rows[0]["val_loss"]) > 1e-4


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_trains_the_same_model(keras: Any, tmp_path: Path, policy: Any) -> None:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inner = keras.Sequential([keras.Input((8, 8, 4)), layers.Conv2D(4, 3), layers.BatchNormalization()], name="inner")
    image = keras.Input((8, 8, 1))
    x = inner(layers.Conv2D(4, 3, padding="same")(image))
    x = keras.ops.relu(x * 2.0)
    model = keras.Model(image, layers.Dense(2, "softmax")(layers.Flatten()(x)))
    twin = mixed_precision.lowered(model, policy)
    computed = [layer.compute_dtype for layer in twin.layers if layer.weights]
    assert computed[-1] == "float32"
    assert computed[0] == policy.removeprefix("mixed_")
    settings = TrainingSettings(epochs=8, batch_size=16, learning_rate=0.02, precision=policy)
    facts = loop.fit(model, LOSS, settings, context(Blobs(), tmp_path))
    assert facts["history"][-1]["val_accuracy"] == 1.0
    assert {str(weight.dtype) for weight in model.weights} == {"float32"}
    assert model.output.dtype == "float32"
    answers = np.asarray(model(Blobs().inputs("validation"))).argmax(axis=1)  # the weights were copied back
    assert (answers == Blobs().labels("validation")).all()


def test_tensorboard_is_given_every_figure(keras: Any, tmp_path: Path) -> None:
    import tensorflow

    training_context = replace(context(Blobs(), tmp_path), logs=tmp_path / "logs" / "train")
    settings = TrainingSettings(epochs=3, batch_size=16, tensorboard=True)
    facts = loop.fit(network(keras), LOSS, settings, training_context)
    (path,) = (tmp_path / "logs" / "train").glob("events.out.tfevents.*")
    scalars: dict[tuple[str, int], float] = {}
    for record in tensorflow.data.TFRecordDataset(str(path)).as_numpy_iterator():
        event = tensorflow.compat.v1.Event.FromString(record)
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "scalars"
            scalars[value.tag, event.step] = float(tensorflow.make_ndarray(value.tensor))
    assert scalars.keys() == {
        (name, epoch) for name in ("loss", "accuracy", "val_loss", "val_accuracy") for epoch in (1, 2, 3)
    }
    assert scalars["val_loss", 2] == pytest.approx(facts["history"][1]["val_loss"], abs=1e-5)


EVERY_CHANGE = Augment(flip=True, shift=0.2, rotate=20, zoom=0.2)


@pytest.mark.parametrize(
    "more",
    [{}, {"ema": 0.9}, {"early_stopping": 4}, {"gradient_accumulation": 2}, {"augment": EVERY_CHANGE}],
    ids=lambda more: ", ".join(more) or "plain",
)
def test_an_interrupted_training_goes_on(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    from compress.model.ir.tensorflow import keras as seeded

    monkeypatch.setattr(checkpoint, "EVERY_S", 0.0)
    notes: list[str] = []
    training_context = replace(context(Blobs(), tmp_path), unfinished=tmp_path / "unfinished")
    monkeypatch.setattr(training_context.progress, "note", notes.append)
    settings = TrainingSettings(epochs=6, batch_size=40, learning_rate=0.02, **more)

    def trained(*callbacks: Any, folder: Path | None) -> tuple[Any, Any]:
        seeded(0)
        model = network(keras, dropout=0.2)
        return model, loop.fit(model, LOSS, settings, replace(training_context, unfinished=folder), callbacks)

    expected, expected_facts = trained(folder=None)

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(lambda model: Stop(), folder=training_context.unfinished)
    model, facts = trained(folder=training_context.unfinished)
    (note,) = notes
    assert note in ("continues after epoch 2 of 6", "continues after epoch 3 of 6")
    assert len(facts["history"]) == len(expected_facts["history"])
    assert facts.get("best_epoch") == expected_facts.get("best_epoch")
    assert facts["history"] == expected_facts["history"]
    for mine, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a zip"])
def test_a_damaged_checkpoint_is_no_checkpoint(keras: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / checkpoint.FILE).write_bytes(content)
    training_context = replace(context(Blobs(), tmp_path), unfinished=tmp_path / "unfinished")
    assert len(loop.fit(network(keras), LOSS, TrainingSettings(epochs=2), training_context)["history"]) == 2


@pytest.mark.parametrize("rising", [0, 10])
def test_schedules_rise_and_fall(keras: Any, rising: int) -> None:
    library = keras.optimizers.schedules
    cosine = library.CosineDecay(
        0.0 if rising else 0.5, 100 - rising, warmup_target=0.5 if rising else None, warmup_steps=rising
    )
    linear = library.PolynomialDecay(0.5, 100 - rising, end_learning_rate=0.0)
    names: tuple[schedules.Name, ...] = ("cosine", "linear", "steps", "constant")
    rate_schedules = {name: schedules.schedule(name, 0.5, 100, rising) for name in names}
    for step in (0, 1, 5, 10, 37, 55, 80, 99, 100):
        rate = {name: float(rate_schedule(step)) for name, rate_schedule in rate_schedules.items()}
        assert rate["cosine"] == pytest.approx(float(cosine(step)), abs=1e-6)
        share = min(step / rising, 1.0) if rising else 1.0
        assert rate["linear"] == pytest.approx(share * float(linear(max(step - rising, 0))), abs=1e-6)
        done = (step - rising) / (100 - rising)
        assert rate["steps"] == pytest.approx(share * 0.5 * (0.01 if done >= 0.75 else 0.1 if done >= 0.5 else 1.0))
        assert rate["constant"] == pytest.approx(share * 0.5)


def test_logits_are_found_again_in_probabilities(keras: Any) -> None:
    logits = np.random.default_rng(0).normal(0, 2, (6, 3)).astype(np.float32)
    actual = np.asarray(ClassificationHead("sigmoid").logits(keras.ops.sigmoid(logits)))
    np.testing.assert_allclose(actual, logits, rtol=1e-4, atol=1e-4)
    actual = np.asarray(ClassificationHead("softmax").logits(keras.ops.softmax(logits)))
    np.testing.assert_allclose(actual - actual.max(1)[:, None], logits - logits.max(1)[:, None], atol=1e-4)


def test_workers_compare_their_samples(keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers with different photos under equal labels would mix their gradients without a message."""
    compared: list[Any] = []
    monkeypatch.setattr(
        strategies.Devices, "start_together", lambda self, trained, variables: compared.append(trained())
    )
    for scale in (1.0, 1.0, 0.5):
        settings = TrainingSettings(epochs=1, batch_size=32)
        loop.fit(network(keras), LOSS, settings, context(Blobs(scale=scale), tmp_path))
    assert compared[0] == compared[1] != compared[2]
