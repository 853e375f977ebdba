"""The first axis of the inputs is taken as a batch only if the model computes each sample as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.core.errors import ModelError
from compress.model.importers import model_file
from compress.model.importers.common import batches

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:You are using a softmax over axis"),
]
Mix = Callable[[Any, Any], Any]
MIXES: dict[str, Mix] = {
    "softmax": lambda ops, x: ops.softmax(x, axis=0),
    "mean": lambda ops, x: x - ops.mean(x, axis=0, keepdims=True),
    "order": lambda ops, x: ops.flip(x, axis=0),
    "all": lambda ops, x: ops.sum(x),
}


def loaded(keras: Any, path: Path, function: Callable[[Any], Any], batch: int | None) -> Any:
    x = keras.Input((6,), batch_size=batch, name="x")
    keras.Model(x, function(x)).save(path / "model.keras")
    return model_file.load(model_file.read(path / "model.keras")).model


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("name", MIXES)
def test_a_keras_model_that_mixes_samples_is_refused(keras: Any, tmp_path: Path, name: str, batch: int | None) -> None:
    reason = r"its first dimension is open" if batch is None else r"its input 'x' has a fixed first dimension of 3"
    with pytest.raises(ModelError, match=rf"model\.keras: {reason}, and it is not a batch: .*put a batch in front"):
        loaded(keras, tmp_path, lambda x: MIXES[name](keras.ops, x), batch)


@pytest.mark.parametrize("name", MIXES)
def test_nothing_is_mixed_in_one_sample(keras: Any, tmp_path: Path, name: str) -> None:
    model = loaded(keras, tmp_path, lambda x: MIXES[name](keras.ops, x), 1)
    assert model.input_shape == (1, 6)


def test_a_fixed_batch_of_independent_samples_becomes_open(keras: Any, tmp_path: Path) -> None:
    model = loaded(keras, tmp_path, lambda x: keras.ops.softmax(keras.layers.Dense(4)(x), axis=1), 3)
    assert model.input_shape == (None, 6)
    np.testing.assert_allclose(np.asarray(model(np.ones((1, 6), np.float32))).sum(), 1, rtol=1e-6)


def test_an_embedding_and_an_open_size_are_run(keras: Any, tmp_path: Path) -> None:
    """The comparison takes values that have a row in the table, and a size that the layers take."""
    words = keras.Input((5,))
    rows = keras.layers.Embedding(3, 4)(words)
    batches.of_any_batch(keras.Model(words, keras.layers.GlobalAveragePooling1D()(rows)))
    image = keras.Input((None, None, 3))
    deep = keras.layers.AveragePooling2D(40)(image)
    batches.of_any_batch(keras.Model(image, keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(2, 2)(deep))))


def test_an_output_without_a_batch_is_compared_as_a_whole() -> None:
    anchors, boxes = np.ones((4, 2)), np.arange(8.0).reshape(4, 2)
    part = batches.part_of_sample([anchors, boxes], [anchors, boxes[1:2]], 1, 4)
    assert [array.tolist() for array in part] == [anchors.tolist(), [[2, 3]]]
    with pytest.raises(ModelError, match="not those of one batch: a has any, b has 9"):
        batches.batch_of({"a": (None, 3), "b": (9, 3)})


@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_maps_of_inputs_and_outputs_keep_their_names(keras: Any, tmp_path: Path) -> None:
    """Keras takes the items of a map by name, in whatever order the model's author wrote them."""
    b, a = (keras.Input((3,), name=name) for name in "ba")
    outputs = {"y_b": keras.layers.Rescaling(2.0, name="of_b")(b), "y_a": keras.layers.Rescaling(3.0, name="of_a")(a)}
    keras.Model({"b": b, "a": a}, outputs).save(tmp_path / "model.keras")
    model = model_file.load(model_file.read(tmp_path / "model.keras")).model
    assert [tensor.name for tensor in model.inputs] == ["a", "b"]
    ones = np.ones((1, 3), np.float32)
    results = model([ones, 10 * ones])
    assert {name: np.asarray(values).tolist() for name, values in results.items()} == {
        "y_a": [[3] * 3],
        "y_b": [[20] * 3],
    }


def test_random_outputs_are_left_out(keras: Any, tmp_path: Path) -> None:
    """Dropout that is always active differs from run to run, so it does not show whether samples are mixed."""
    assert loaded(keras, tmp_path, lambda x: keras.layers.Dropout(0.5)(x, training=True), None).input_shape == (None, 6)
