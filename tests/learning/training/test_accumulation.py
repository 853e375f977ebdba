"""Gradient accumulation: batches that are left over, and learning rates that start later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, Noting, context

from compress.learning.training import loop, schedules
from compress.learning.training.loop import Rate, TrainingSettings
from compress.tasks.classification import ClassificationHead


@pytest.mark.parametrize(
    ("setting", "total", "count"),
    [
        (1, 7, 1),
        (4, 4, 4),
        (16, 1000, 16),  # 8 of 1000 are left over
        (6, 66, 6),
        (6, 10, 5),
        (64, 100, 50),
        (4, 11, 2),
        (6, 7, 6),  # 5 and 4 would leave over more
        (2, 3, 1),
    ],
)
def test_few_batches_are_left_over(setting: int, total: int, count: int) -> None:
    assert schedules.batches_per_update(setting, total) == count


@pytest.mark.parametrize("setting", range(1, 20))
def test_the_number_is_at_least_half_of_the_setting(setting: int) -> None:
    for total in range(setting, 200):
        count = schedules.batches_per_update(setting, total)
        assert setting / 2 <= count <= setting
        assert total % count <= total % setting


def test_what_differs_from_the_setting_is_noted() -> None:
    assert schedules.accumulation_note(16, 1000) is None
    lowered = "gradient_accumulation: 5 batches instead of 6 make an update, to leave over fewer"
    assert schedules.accumulation_note(6, 10) == lowered
    assert schedules.accumulation_note(6, 7) == "gradient_accumulation: the last 1 of 7 batches change no weight"


@pytest.mark.tensorflow
def test_a_short_training_uses_all_batches(keras: Any, tmp_path: Path) -> None:
    layers = keras.layers
    progress = Noting()
    training_context = replace(context(Blobs(), tmp_path), progress=progress)
    weights = []
    for accumulated in (6, 5):  # of 10 batches
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(2, "softmax")])
        settings = TrainingSettings(epochs=1, batch_size=10, gradient_accumulation=accumulated)
        loop.fit(model, loop.label_loss(ClassificationHead("softmax")), settings, training_context)
        weights.append(model.get_weights()[0])
    np.testing.assert_array_equal(*weights)
    (note,) = [note for note in progress.noted if "accumulation" in note]
    assert note.startswith("gradient_accumulation: 5 batches instead of 6")


@pytest.mark.tensorflow
@pytest.mark.parametrize("accumulated", [1, 4])
def test_a_rate_starts_after_its_part_of_the_batches(keras: Any, accumulated: int) -> None:
    settings = TrainingSettings(epochs=10, schedule="constant", gradient_accumulation=accumulated)
    variable = keras.Variable(np.zeros(1, np.float32), name="weight")
    optimizer = loop._optimizer(keras, settings, 4, {variable.path: Rate(1.0, 0.5)})
    optimizer.build([variable])
    values = []
    for _ in range(40):
        optimizer.apply([keras.ops.ones(1)])
        values.append(float(variable[0]))
    assert max(np.abs(values[:20])) == 0
    assert abs(values[20 + accumulated - 1]) > 0
