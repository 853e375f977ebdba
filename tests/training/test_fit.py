from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context

from compress.errors import ModelError, StageError
from compress.stage import Split
from compress.training import fit
from compress.training.fit import Augment, Head, TrainingSettings

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


def test_a_student_learns_from_its_teacher_alone(keras: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    head = Head(softmax=True)

    class Mislabelled(Blobs):
        def labels(self, split: Split) -> np.ndarray:
            right = super().labels(split)
            return np.zeros_like(right) if split == "train" else right

        def inputs(self, split: Split) -> np.ndarray:
            return Blobs().inputs(split)

    teacher = network(keras)
    settings = TrainingSettings(epochs=8, batch_size=16, learning_rate=0.02)
    fit.fit(teacher, fit.label_loss(head), settings, context(Blobs(), tmp_path))
    before = [w.copy() for w in teacher.get_weights()]
    student = network(keras)
    loss = fit.distillation_loss(head, teacher, head, temperature=2.0, weight=1.0)
    facts = fit.fit(student, loss, settings, context(Mislabelled(), tmp_path))
    assert facts["history"][-1]["val_accuracy"] == 1.0
    for a, b in zip(before, teacher.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_distillation_is_zero_gradient_when_student_equals_teacher(keras: Any) -> None:
    head = Head(softmax=False)
    teacher = network(keras, softmax=False)
    loss = fit.distillation_loss(head, teacher, head, temperature=4.0, weight=1.0)
    x = keras.ops.convert_to_tensor(Blobs().inputs("validation"))
    labels = keras.ops.convert_to_tensor(Blobs().labels("validation"))
    same = np.asarray(loss(x, labels, teacher(x)))
    moved = np.asarray(loss(x, labels, teacher(x) + np.array([[0.5, -0.5]], np.float32)))
    assert (moved > same).all()


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
