"""Pipelines that start from a trained model of another task: new heads, dequantized files, copied weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from compress.core.artifact import MODEL_KERAS, Kind
from compress.core.errors import CorallineError
from compress.learning.quantization import export
from compress.model.importers.keras import keras_file
from compress.pipeline import runner as runs
from compress.pipeline.schema import load

pytestmark = pytest.mark.tensorflow


def backbone(keras: Any, classes: int = 7) -> Any:
    layers = keras.layers
    image = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(8, 3, padding="same", activation="relu", name="features")(image)
    x = layers.Dense(classes, "softmax", name="old")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(image, x)


def project(folder: Path, model: dict[str, Any], *stages: object) -> Path:
    tiny.data(folder / "data.npz")
    return tiny.project(folder, stages, model=model)


def run(path: Path, folder: Path, notes: tiny.Notes) -> dict[str, Any]:
    return runs.run(load(path), folder / "out", notes).to_json()


def facts(record: dict[str, Any], stage: str) -> dict[str, Any]:
    return next(row["facts"] for row in record["stages"] if row["id"] == stage)


@pytest.mark.parametrize("suffix", [".keras", ".tflite", "-int8.tflite"])
def test_a_file_gets_a_new_head_and_is_trained(keras: Any, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"old{suffix}"
    if suffix == ".keras":
        backbone(keras).save(file)
    else:
        content = tiny.classifier((4, 4, 1), 7) if "int8" in suffix else export.convert_float(backbone(keras))
        file.write_bytes(content)
    notes = tiny.Notes()
    train = {"train": {"epochs": 2, "backbone_rate": 0.5}}
    path = project(tmp_path, {"file": file.name, "head": "new"}, train)
    record = run(path, tmp_path, notes)
    assert [row["kind"] for row in record["stages"]] == [Kind.UNTRAINED, Kind.KERAS]
    loaded = facts(record, "model")
    assert len(facts(record, "train")["history"]) == 2
    assert any("the new head reads the output of the layer" in note for note in notes.noted)
    assert ("rounding" in loaded) == ("int8" in suffix)
    assert any("1 batch norms are restored" in note for note in notes.noted)


def test_the_size_of_the_samples_replaces_that_of_the_file(keras: Any, tmp_path: Path) -> None:
    backbone(keras).save(tmp_path / "old.keras")  # 8 x 8; the samples are 4 x 4
    path = project(tmp_path, {"file": "old.keras", "head": {"dropout": 0.0}}, {"train": {"epochs": 1}})
    record = run(path, tmp_path, tiny.Notes())
    assert facts(record, "model")["features"] == "features"


def test_a_dequantized_file_answers_as_before_and_can_be_quantized_again(keras: Any, tmp_path: Path) -> None:
    content = tiny.classifier((4, 4, 1), 3)
    (tmp_path / "old.tflite").write_bytes(content)
    path = project(tmp_path, {"file": "old.tflite", "dequantize": True}, "quantize")
    record = run(path, tmp_path, tiny.Notes())
    assert [row["kind"] for row in record["stages"]] == [Kind.KERAS, Kind.TFLITE]
    assert facts(record, "model")["rounding"]["largest_steps"] < 1
    assert facts(record, "quantize")["agreement"] > 0.9


def test_float_files_are_not_dequantized(tmp_path: Path) -> None:
    (tmp_path / "old.tflite").write_bytes(tiny.classifier((4, 4, 1), 3, int8=False))
    with pytest.raises(CorallineError, match=r"old.tflite is not quantized.*remove model.dequantize"):
        load(project(tmp_path, {"file": "old.tflite", "dequantize": True}, "quantize"))


def test_keras_files_are_not_dequantized(tmp_path: Path) -> None:
    (tmp_path / "old.keras").write_bytes(b"not read")
    with pytest.raises(CorallineError, match=r"old.keras is not quantized.*remove model.dequantize"):
        load(project(tmp_path, {"file": "old.keras", "dequantize": True}, "quantize"))


def test_tasks_of_other_outputs_get_no_new_head(tmp_path: Path) -> None:
    (tmp_path / "old.tflite").write_bytes(tiny.classifier((4, 4, 1), 3))
    np.savez(tmp_path / "data.npz", x=np.zeros((20, 4, 4, 1), np.float32), y=np.zeros((20, 4, 4, 1), np.float32))
    path = tiny.project(
        tmp_path,
        [{"train": {"epochs": 1}}],
        model={"file": "old.tflite", "head": "new"},
        data={"source": {"npz": {"file": "data.npz"}}, "task": "reconstruction"},
    )
    with pytest.raises(CorallineError, match=r"model.head: one dense layer cannot be the head of .*backbone: FILE"):
        load(path)


def test_a_head_is_new_so_classes_are_not_kept(keras: Any, tmp_path: Path) -> None:
    backbone(keras).save(tmp_path / "old.keras")
    model = {"file": "old.keras", "head": "new", "keep_classes": [0]}
    with pytest.raises(CorallineError, match="keep_classes cuts the head of a detector"):
        run(project(tmp_path, model, {"train": {"epochs": 1}}), tmp_path, tiny.Notes())


def test_a_trained_file_is_fine_tuned_only_if_asked(keras: Any, tmp_path: Path) -> None:
    layers = keras.layers
    image = keras.Input((4, 4, 1))
    keras.Model(image, layers.Dense(3, "softmax")(layers.Flatten()(image))).save(tmp_path / "old.keras")
    train = {"train": {"epochs": 1, "fine_tune": True}}
    record = run(project(tmp_path, {"file": "old.keras"}, train), tmp_path, tiny.Notes())
    assert "healing" in facts(record, "train")


BUILDER = """
import keras


def build(input_shape, classes, width=2):
    image = keras.Input(input_shape)
    x = keras.layers.Conv2D(width, 3, padding="same", use_bias=False, name="features")(image)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(name="norm")(x))
    return keras.Model(image, keras.layers.Dense(classes, "softmax")(keras.layers.GlobalAveragePooling2D()(x)))
"""


def test_a_builder_gets_arguments_and_weights(keras: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(BUILDER)
    model = backbone(keras)
    model.save(tmp_path / "old.keras")
    text = {"builder": "own.py", "trust": True, "arguments": {"width": 8}, "weights": "old.keras"}
    notes = tiny.Notes()
    record = run(project(tmp_path, text, {"train": {"epochs": 1, "learning_rate": 1e-9}}), tmp_path, notes)
    assert facts(record, "model")["copied_layers"] == ["features"]
    assert any("the weights of 1 of 2 layers are copied; new: " in note for note in notes.noted)
    files = sorted((tmp_path / "out").rglob(MODEL_KERAS))
    kernels = [keras_file.load(file).get_layer("features").get_weights()[0] for file in files]
    for kernel in kernels:
        np.testing.assert_allclose(kernel, model.get_layer("features").get_weights()[0], atol=1e-5)


def test_an_unknown_argument_is_refused_without_running_the_builder(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"raise SystemExit\n{BUILDER}")
    text = {"builder": "own.py", "trust": True, "arguments": {"witdh": 8}}
    with pytest.raises(CorallineError, match=r"unknown argument 'witdh'.*allowed: width; did you mean 'width'"):
        load(project(tmp_path, text, {"train": {"epochs": 1}}))
