"""The memory of a training, estimated before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context

from compress.core import memory
from compress.core.memory import Memory
from compress.learning.training import loop
from compress.learning.training.loop import TrainingSettings
from compress.learning.training.phases import TrainingMemory, memory_estimate

MB = 1 << 20
HEAVY = TrainingMemory(activations=10 * MB, weights=40 * MB, samples=20 * MB)


def test_a_training_that_fits_and_one_where_nothing_is_known() -> None:
    assert HEAVY.total(64) == 700 * MB
    assert HEAVY.note(64, Memory(4096 * MB, 1000 * MB, 0)) is None
    assert HEAVY.note(64, None) is None


def test_a_training_that_does_not_fit_says_what_takes_memory_and_what_fits() -> None:
    note = HEAVY.note(64, Memory(4096 * MB, 500 * MB, 100 * MB))
    assert note == (
        "training takes about 734 MB of memory (activations of a batch of 64: 671 MB, weights with optimizer: 42 MB, "
        "samples: 21 MB), but 524 MB of 4.3 GB of this machine are left; this process takes 105 MB; set batch_size: 32"
    )
    note = HEAVY.note(64, Memory(4096 * MB, 200 * MB, 0))
    assert note is not None
    assert note.endswith("set batch_size: 8")
    note = HEAVY.note(64, Memory(4096 * MB, 50 * MB, 0))
    assert note is not None
    assert note.endswith("lower batch_size, use smaller samples (resize in data.preprocess), or end other programs")


@pytest.mark.tensorflow
def test_what_is_counted(keras: Any, tmp_path: Path) -> None:
    layers = keras.layers
    inner = keras.Sequential([layers.Input((8, 8, 4)), layers.ReLU()])
    image = keras.Input((8, 8, 1))
    model = keras.Model(image, layers.Dense(2)(layers.Flatten()(inner(layers.Conv2D(4, 3, padding="same")(image)))))
    inputs = np.zeros((10, 8, 8, 1), np.float32)
    usage = memory_estimate(model, inputs)
    values = 64 + 256 + (256 + 256) + 256 + 2  # input, convolution, the inner model's two, flattened, dense
    assert usage.activations == values * 4 * 2
    assert usage.weights == model.count_params() * 4 * 4
    assert usage.samples == inputs.nbytes
    np.save(tmp_path / "inputs.npy", inputs)
    assert memory_estimate(model, np.load(tmp_path / "inputs.npy", mmap_mode="r")).samples == 0


@pytest.mark.tensorflow
def test_a_training_notes_it_before_it_starts(keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory", lambda: Memory(MB, 1000, 0))
    layers = keras.layers
    model = keras.Sequential([layers.Input((8, 8, 1)), layers.Flatten(), layers.Dense(2)])
    training_context, notes = context(Blobs(), tmp_path), []
    monkeypatch.setattr(training_context.progress, "note", notes.append)
    loop.fit(model, loop.own_loss(model, training_context), TrainingSettings(epochs=1, batch_size=32), training_context)
    (note,) = notes
    assert note.startswith("training takes about ")
