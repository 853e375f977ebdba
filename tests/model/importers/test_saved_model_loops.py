"""Loops in the graph of a SavedModel: recurrent layers and `tf.while_loop` become single steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.core.errors import ModelError
from compress.model.importers import model_file

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras, reading variables
    pytest.mark.filterwarnings("ignore:Compiled the loaded model"),
]
Part = Callable[[Any, Any], Any]
CASES: dict[str, Part] = {
    "stacked": lambda layers, x: layers.LSTM(3)(layers.GRU(4, return_sequences=True)(x)),
    "both directions": lambda layers, x: layers.Bidirectional(layers.GRU(3, return_sequences=True))(x),
    "backwards": lambda layers, x: layers.LSTM(3, go_backwards=True, return_sequences=True)(x),
    "maps": lambda layers, x: layers.ConvLSTM2D(2, 2, padding="same")(layers.Reshape((3, 2, 3, 1))(x)),
}


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize("name", CASES)
def test_recurrent_layers_of_a_graph_become_steps(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, library: str
) -> None:
    keras = request.getfixturevalue(library)
    sequence = keras.Input((6, 3))
    model = keras.Model(sequence, CASES[name](keras.layers, sequence))
    generator = np.random.default_rng(0)
    model.set_weights([weight + 0.2 * generator.standard_normal(weight.shape) for weight in model.get_weights()])
    model.export(tmp_path / "saved", verbose=False) if library == "keras" else model.export(str(tmp_path / "saved"))
    imported = model_file.load(model_file.read(tmp_path / "saved"))
    samples = generator.standard_normal((3, 6, 3)).astype(np.float32)
    np.testing.assert_allclose(np.asarray(imported.model(samples)), np.asarray(model(samples)), atol=1e-5)
    assert imported.model.output_names == ["output_0"]


def saved_loop(path: Path, steps: Callable[[Any], Any]) -> Path:
    """Write a SavedModel that doubles its input `steps(input)` times; return its path."""
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])
    def run(x: Any) -> dict[str, Any]:
        count = steps(x)
        _, y = tf.while_loop(lambda i, _: i < count, lambda i, y: (i + 1, 2 * y), (0, x))
        return {"y": tf.ensure_shape(y, [None, 4])}

    module = tf.Module()
    module.run = run
    tf.saved_model.save(module, path, signatures={"serving_default": run})
    return path


def test_a_loop_of_fixed_length_is_computed(tf_keras: Any, tmp_path: Path) -> None:
    imported = model_file.load(model_file.read(saved_loop(tmp_path / "saved", lambda x: 3)))
    samples = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_allclose(np.asarray(imported.model(samples)), 8 * samples)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (lambda x: 300, "while has more than 256 steps"),
        ("values", "depends on the values of an input"),
    ],
)
def test_other_loops_are_refused(tf_keras: Any, tmp_path: Path, steps: Any, reason: str) -> None:
    import tensorflow as tf

    chosen = (lambda x: tf.cast(x[0, 0], tf.int32)) if steps == "values" else steps
    with pytest.raises(ModelError, match=rf"cannot be converted: \w+.*{reason}"):
        model_file.load(model_file.read(saved_loop(tmp_path / "saved", chosen)))
