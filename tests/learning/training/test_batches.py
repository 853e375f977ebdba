"""Batches from memory and from files: the same, in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context

from compress.data import rows
from compress.data.types import Split
from compress.learning.training import batches, loop
from compress.learning.training.augmentation import Augment
from compress.learning.training.batches import EpochSettings
from compress.learning.training.loop import TrainingSettings
from compress.tasks.classification import ClassificationHead

X = np.random.default_rng(0).random((50, 3, 2)).astype(np.float32)


def in_a_file(folder: Path, array: np.ndarray) -> Any:
    np.save(folder / "x.npy", array)
    return np.load(folder / "x.npy", mmap_mode="r")


def test_rows(tmp_path: Path) -> None:
    places = np.array([49, 0, 7, 7])
    samples = rows.rows(in_a_file(tmp_path, X), places)
    assert type(samples) is np.ndarray
    np.testing.assert_array_equal(samples, X[places])
    np.testing.assert_array_equal(rows.rows(X, places), X[places])


def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BLOCK", 32)
    parts = list(rows.blocks(in_a_file(tmp_path, X)))
    assert [len(part) for part in parts] == [32, 18]
    np.testing.assert_array_equal(np.concatenate(parts), X)
    (block,) = rows.blocks(X)
    assert block is X


@pytest.mark.tensorflow
@pytest.mark.parametrize("nested", [False, True])
def test_the_order_does_not_depend_on_where_samples_are(keras: Any, tmp_path: Path, nested: bool) -> None:
    labels = np.arange(50)
    targets: Any = {"labels": labels, "taught": X[:, 0]} if nested else labels
    seen = []
    for inputs in (X, in_a_file(tmp_path, X)):
        keras.utils.set_random_seed(3)
        dataset = batches.batches(inputs, targets, EpochSettings(epochs=2, batch_size=16), 5)
        assert len(dataset) == 8
        seen.append(list(dataset.as_numpy_iterator()))
    for one, other in zip(*seen, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        for name in ("labels", "taught") if nested else ():
            np.testing.assert_array_equal(one[1][name], other[1][name])
        batch_labels = one[1]["labels"] if nested else one[1]
        np.testing.assert_array_equal(one[0], X[batch_labels])
    assert not np.array_equal(seen[0][0][0], seen[0][4][0])  # the order differs between epochs


@dataclass
class Filed(Blobs):
    """The same data, from files."""

    folder: Path = Path()

    def inputs(self, split: Split) -> np.ndarray:
        path = self.folder / f"{split}.npy"
        if not path.exists():
            np.save(path, super().inputs(split))
        return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]


@pytest.mark.tensorflow
def test_training_from_files_gives_the_same_weights(keras: Any, tmp_path: Path) -> None:
    from compress.model.ir.tensorflow import keras as seeded

    weights, histories = [], []
    for data in (Blobs(), Filed(folder=tmp_path)):
        seeded(1)
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(2)]
        )
        settings = TrainingSettings(epochs=2, batch_size=16, augment=Augment(shift=0.1, flip=True))
        facts = loop.fit(model, loop.label_loss(ClassificationHead("logits")), settings, context(data, tmp_path, 1))
        weights.append(model.get_weights())
        histories.append(facts["history"])
    assert histories[0] == histories[1]
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.tensorflow
def test_augmentation_from_files_is_the_same(keras: Any, tmp_path: Path) -> None:
    augment = Augment(shift=0.1, rotate=20, flip=True, brightness=0.2, contrast=0.2, erase=0.3, mixup=0.4)
    settings = EpochSettings(epochs=2, batch_size=21, augment=augment)  # 96 samples: the last batch has 12
    targets = {"labels": Blobs().labels("train")}
    sources = (Blobs(), Filed(folder=tmp_path))
    seen = [
        list(batches.batches(data.inputs("train"), targets, settings, 5, 1).as_numpy_iterator()) for data in sources
    ]
    assert [len(samples) for samples, _ in seen[0]] == [21, 21, 21, 21, 12]
    for (samples, fields), (same_samples, same_fields) in zip(*seen, strict=True):
        np.testing.assert_array_equal(samples, same_samples)
        for name in ("labels", "partner_labels", "share"):
            np.testing.assert_array_equal(fields[name], same_fields[name])


@pytest.mark.tensorflow
@pytest.mark.parametrize("data", [Blobs, Filed])
def test_validation_samples_in_batches(keras: Any, tmp_path: Path, data: Any) -> None:
    inputs = (data(folder=tmp_path) if data is Filed else data()).inputs("train")[:50]
    held_out = list(batches.held_out(inputs, np.arange(50), in_batches=True).as_numpy_iterator())
    assert [len(samples) for samples, _ in held_out] == [32, 18]
    np.testing.assert_array_equal(np.concatenate([samples for samples, _ in held_out]), inputs)
    np.testing.assert_array_equal(np.concatenate([targets for _, targets in held_out]), np.arange(50))


@pytest.mark.tensorflow
@pytest.mark.parametrize("data", [Blobs, Filed])
def test_no_tuning_thread_delays_the_end_of_a_training(keras: Any, tmp_path: Path, data: Any) -> None:
    inputs = (data(folder=tmp_path) if data is Filed else data()).inputs("train")
    training = batches.batches(inputs, Blobs().labels("train"), EpochSettings(epochs=1), 0)
    validation = batches.held_out(inputs, Blobs().labels("train"), in_batches=True)
    assert not training.options().autotune.enabled
    assert not validation.options().autotune.enabled
