"""Layers that keep their state between calls: the state becomes inputs and outputs of the imported model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.core.errors import ModelError
from compress.learning.quantization import post_training
from compress.learning.quantization.settings import PostTrainingSettings
from compress.model.importers import model_file
from compress.model.tflite.interpreter import LoadedModel

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file"),
]
Part = Callable[[Any, Any], Any]
CASES: dict[str, tuple[Part, int]] = {
    "lstm": (lambda layers, x: layers.LSTM(4, stateful=True)(x), 2),
    "gru in the middle": (
        lambda layers, x: layers.Dense(2)(layers.GRU(4, stateful=True, return_sequences=True)(layers.Dense(3)(x))),
        1,
    ),
    "two": (
        lambda layers, x: layers.SimpleRNN(3, stateful=True)(layers.LSTM(4, stateful=True, return_sequences=True)(x)),
        3,
    ),
    "both directions": (lambda layers, x: layers.Bidirectional(layers.LSTM(4, stateful=True))(x), 4),
    "cells": (lambda layers, x: layers.RNN([layers.LSTMCell(4), layers.GRUCell(3)], stateful=True)(x), 3),
    "maps": (
        lambda layers, x: layers.ConvLSTM2D(2, 2, padding="same", stateful=True)(layers.Reshape((3, 2, 3, 1))(x)),
        2,
    ),
}


def saved(library: Any, part: Part, path: Path) -> Any:
    library.utils.set_random_seed(0)
    sequence = library.Input((6, 3), batch_size=1)
    model = library.Model(sequence, part(library.layers, sequence))
    generator = np.random.default_rng(0)
    model.set_weights([weight + 0.2 * generator.standard_normal(weight.shape) for weight in model.get_weights()])
    model.save(path)
    return model


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.parametrize("name", CASES)
def test_the_states_fed_back_give_the_outputs_of_a_stateful_model(
    keras: Any, tf_keras: Any, tmp_path: Path, name: str, suffix: str
) -> None:
    part, count = CASES[name]
    path = tmp_path / f"model{suffix}"
    model = saved(tf_keras if suffix == ".h5" else keras, part, path)
    file = model_file.read(path)
    assert "keep their state between calls" in file.notes[0]
    imported = model_file.load(file).model
    assert len(imported.inputs) == len(imported.outputs) == count + 1
    for source, target in zip(imported.inputs[1:], imported.output_names[1:], strict=True):
        assert source.name.removesuffix("_in") == target.removesuffix("_out")
    states = [np.zeros((1, *source.shape[1:]), np.float32) for source in imported.inputs[1:]]
    for seed in range(3):
        sequence = np.random.default_rng(seed).standard_normal((1, 6, 3)).astype(np.float32)
        actual, *states = (np.asarray(tensor) for tensor in imported([sequence, *states]))
        np.testing.assert_allclose(actual, np.asarray(model(sequence)), atol=1e-5)


def test_a_stateful_layer_that_is_called_twice_is_refused(keras: Any, tmp_path: Path) -> None:
    def twice(layers: Any, x: Any) -> Any:
        layer = layers.LSTM(3, stateful=True, return_sequences=True, name="shared")
        return layer(layer(x))

    saved(keras, twice, tmp_path / "model.keras")
    with pytest.raises(ModelError, match=r"the layer 'shared' keeps its state between calls .* called several times"):
        model_file.load(model_file.read(tmp_path / "model.keras"))


def test_the_int8_file_computes_with_fed_back_states(keras: Any, tmp_path: Path) -> None:
    model = saved(keras, lambda layers, x: layers.GRU(4, stateful=True)(x), tmp_path / "model.keras")
    imported = model_file.load(model_file.read(tmp_path / "model.keras")).model
    generator = np.random.default_rng(1)
    sequences = generator.standard_normal((40, 18)).astype(np.float32)
    samples = np.concatenate([sequences, generator.uniform(-1, 1, (40, 4)).astype(np.float32)], axis=1)
    settings = PostTrainingSettings(ranges="minmax", equalize="off", correct_bias="off")
    result = post_training.quantize(imported, samples[:24], samples[24:], settings)
    (tmp_path / "model.tflite").write_bytes(result.content)
    loaded = LoadedModel(tmp_path / "model.tflite", reproducible=True)
    state = np.zeros(4, np.float32)
    for sequence in sequences[:5]:
        outputs = loaded.scores(np.concatenate([sequence, state])[None])
        state = outputs[0, 4:]
        expected = np.asarray(model(sequence.reshape(1, 6, 3)))
        np.testing.assert_allclose(outputs[:, :4], expected, atol=0.12)
