"""The choice of a part of the data: its samples, that nothing else is read, and its cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, Noting, context
from pydantic import ValidationError

from compress.core.errors import StageError
from compress.data.types import Split
from compress.learning.training import loop, subset
from compress.learning.training.loop import TrainingSettings
from compress.learning.training.subset import Part, Subset
from compress.tasks.classification import ClassificationHead

LABELS = np.array([0] * 60 + [1] * 30 + [2] * 10)
RANDOM = np.random.default_rng(0)
LOSS = loop.label_loss(ClassificationHead("softmax"))


class Hidden(Blobs):
    """Data whose test split must not be read."""

    def labels(self, split: Split) -> np.ndarray:
        assert split != "test"
        return super().labels(split)

    def inputs(self, split: Split) -> np.ndarray:
        assert split != "test"
        return super().inputs(split)


def network(keras: Any, softmax: bool = True) -> Any:
    layers = keras.layers
    keras.utils.set_random_seed(0)  # a dead ReLU would learn nothing
    last = [layers.Dense(2, "softmax")] if softmax else [layers.Dense(2), layers.Activation("linear")]
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), *last])


# --- the choice, from plain values ------------------------------------------------------


def test_classes_keep_their_proportions() -> None:
    errors, features = RANDOM.random(100), RANDOM.random((100, 5), np.float32)
    for indices in (
        subset.stratified(20, LABELS, 3),
        subset.by_error(20, LABELS, errors),
        subset.by_error(20, LABELS, errors, "middle"),
        subset.covering(20, LABELS, features),
    ):
        assert len(set(indices.tolist())) == 20
        np.testing.assert_array_equal(np.bincount(LABELS[indices]), [12, 6, 2])
        assert (np.diff(indices) > 0).all()


def test_random_is_of_all_and_by_its_seed() -> None:
    first, same, other = (subset.at_random(20, LABELS, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert set(first) != set(other)


def test_by_error() -> None:
    labels, errors = np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([0.1, 0.4, 0.2, 0.3, 5, 8, 6, 7])
    np.testing.assert_array_equal(subset.by_error(4, labels, errors), [1, 3, 5, 7])
    np.testing.assert_array_equal(subset.by_error(4, labels, errors, "middle"), [2, 3, 6, 7])


def test_covering_reaches_every_cluster() -> None:
    centres = np.array([[0, 0], [10, 0], [0, 10], [10, 10]], np.float32)
    points = np.repeat(centres, 25, axis=0) + RANDOM.random((100, 2), np.float32)
    indices = subset.covering(5, np.zeros(100, int), points)
    assert set(indices // 25) == {0, 1, 2, 3}
    same = subset.covering(9, np.zeros(10, int), np.ones((10, 2), np.float32))
    assert len(set(same.tolist())) == 9


def test_error_is_the_distance_to_the_label() -> None:
    scores = np.array([[1, 0, 0], [0, 1, 0], [0.5, 0.25, 0.25]], np.float32)
    errors = ClassificationHead("softmax").sample_errors(np.array([0, 0, 0]), scores)
    np.testing.assert_allclose(np.asarray(errors), [0, np.sqrt(2), np.sqrt(0.375)], atol=1e-5)


def test_a_part_is_the_training_split_alone() -> None:
    full_data = Blobs()
    part = Part(full_data, np.array([3, 5, 8]))
    np.testing.assert_array_equal(part.labels("train"), [1, 1, 0])
    np.testing.assert_array_equal(part.inputs("train"), full_data.inputs("train")[[3, 5, 8]])
    np.testing.assert_array_equal(part.raw("train", np.array([1]))[0], full_data.inputs("train")[5])
    for split in ("validation", "test"):
        np.testing.assert_array_equal(part.labels(split), full_data.labels(split))  # type: ignore[arg-type]
        np.testing.assert_array_equal(part.inputs(split), full_data.inputs(split))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [{"by": "hardness"}, {"by": "luck", "share": 0.5}, {"by": "random", "share": 1}, {"by": "random", "share": 0}],
)
def test_settings_that_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Subset(**settings)


# --- the choice, by the outputs of models -----------------------------------------------


@pytest.mark.tensorflow
@pytest.mark.parametrize("softmax", [True, False])
def test_features_are_what_the_last_layer_is_given(keras: Any, softmax: bool) -> None:
    model, inputs = network(keras, softmax), Blobs().inputs("train")
    features = subset.features(model, inputs)
    assert features.shape == (96, 144)
    dense = next(layer for layer in model.layers if type(layer).__name__ == "Dense")
    kernel, bias = dense.get_weights()
    logits = features @ kernel + bias
    head = ClassificationHead("softmax" if softmax else "logits")
    expected = np.asarray(head.logits(model.predict(inputs, verbose=0)))
    np.testing.assert_allclose(
        logits - logits.mean(1, keepdims=True), expected - expected.mean(1, keepdims=True), atol=1e-4
    )
    wide = RANDOM.random((20, 3000), np.float32)
    near = subset._projected(wide)
    assert near.shape == (20, 256)
    ratio = np.linalg.norm(near[1:] - near[0], axis=1) / np.linalg.norm(wide[1:] - wide[0], axis=1)
    assert (abs(ratio - 1) < 0.3).all()


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "settings",
    [
        {"by": "random"},
        {"by": "stratified"},
        {"by": "hardness", "keep": "middle"},
        {"by": "hardness", "of": "model"},
        {"by": "coverage"},
        {"by": "coverage", "of": "model"},
    ],
)
def test_training_on_a_part(keras: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    data, notes = Hidden(), Noting()
    training_context = replace(context(data, tmp_path), progress=notes, unfinished=tmp_path / "left")
    part = Subset(share=0.25, epochs=1, **settings)
    training = TrainingSettings(epochs=20, batch_size=8, learning_rate=0.02, subset=part)
    model = network(keras)
    facts = loop.fit(model, LOSS, training, training_context)
    assert len(facts["history"]) == 20
    assert facts["history"][-1]["val_accuracy"] == 1.0
    report = facts["subset"]
    assert (report["samples"], report["of"]) == (24, 96)
    assert report["seconds"] >= 0
    assert "24 of 96 samples for training" in notes.noted[0]
    assert "75% saved" in notes.noted[0]
    kept = np.load(tmp_path / "left" / subset.FILE)["indices"]
    assert len(set(kept.tolist())) == 24
    if settings["by"] != "random":
        np.testing.assert_array_equal(np.bincount(data.labels("train")[kept]), [12, 12])


@pytest.mark.tensorflow
def test_an_interrupted_choice_is_found_again(keras: Any, tmp_path: Path) -> None:
    training_context = replace(context(Blobs(), tmp_path), progress=Noting(), unfinished=tmp_path)
    part = Subset(by="hardness", share=0.25, epochs=1)
    np.savez(tmp_path / subset.FILE, indices=np.arange(24), seconds=4.2)

    def trained(number: int) -> Any:
        raise AssertionError(number)

    indices, facts = subset.chosen(part, ClassificationHead("softmax"), None, trained, training_context)
    np.testing.assert_array_equal(indices, np.arange(24))
    assert facts["subset"]["seconds"] == 4.2
    for damaged in (b"", b"garbage", (tmp_path / subset.FILE).read_bytes()[:-9]):
        (tmp_path / subset.FILE).write_bytes(damaged)
        with pytest.raises(AssertionError):
            subset.chosen(part, ClassificationHead("softmax"), None, trained, training_context)


@pytest.mark.tensorflow
def test_hard_samples_are_those_near_the_border(keras: Any, tmp_path: Path) -> None:
    """If one number tells the class, the samples with the smallest distance to the border are the hardest."""

    class Line(Blobs):
        def inputs(self, split: Split) -> np.ndarray:
            labels = self.labels(split)
            distance = np.linspace(0.05, 1, len(labels), dtype=np.float32) * (labels * 2 - 1)
            return np.broadcast_to(distance[:, None, None, None], (len(labels), 8, 8, 1)).astype(np.float32)

    data = Line()
    training_context = replace(context(data, tmp_path), progress=Noting())
    model = network(keras)
    training = TrainingSettings(epochs=5, batch_size=8, learning_rate=0.02)
    loop.fit(model, LOSS, training, training_context)
    part = Subset(by="hardness", share=0.25, of="model")
    indices, _ = subset.chosen(part, ClassificationHead("softmax"), model, lambda number: None, training_context)
    assert indices.max() < 30


@pytest.mark.tensorflow
def test_too_small_a_share(keras: Any, tmp_path: Path) -> None:
    training = TrainingSettings(epochs=1, subset=Subset(by="stratified", share=0.01))
    with pytest.raises(StageError, match="leaves 1 samples of 96 for 2 classes"):
        loop.fit(network(keras), LOSS, training, context(Blobs(), tmp_path))
