"""The whole `quantize` stage on layers that are decomposed, and on a layer that QAT does not support."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from blobs import Blobs, context

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts, Kind
from compress.learning.distillation.settings import DistillationSettings
from compress.learning.quantization import export
from compress.model.tflite import graph
from compress.pipeline.stages import working_model
from compress.pipeline.stages.quantize import QatSettings, Quantize
from compress.targets import load
from compress.targets.edgetpu.placement import place

pytestmark = pytest.mark.tensorflow


def quantized(model: Any, folder: Path, stage: Quantize) -> tuple[Facts, tiny.Notes]:
    """Run the stage on a model; return its facts and its notes."""
    for name in ("given", "made"):
        (folder / name).mkdir()
    working_model.write(model, folder / "given")
    artifact = Artifact("", Kind.KERAS, folder / "given", {MODEL_KERAS: "", MODEL_TFLITE: ""}, {}, 0)
    notes = tiny.Notes()
    return stage.run(
        artifact, replace(context(Blobs(), folder / "made"), target=load("edgetpu"), progress=notes)
    ), notes


def test_layers_of_several_steps_train_with_rounding(keras: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(6, 3)(layers.Rescaling(2.0, -1.0)(image))
    x = layers.Activation("hard_silu")(layers.BatchNormalization()(x))
    x = layers.LayerNormalization()(layers.Conv2D(6, 3, activation="hard_sigmoid")(x))
    model = keras.Model(image, layers.Dense(2)(layers.Flatten()(x)))
    how = QatSettings(ranges="learned", batch_norm="trained", freeze=0.5, distill=DistillationSettings(weight=0.1))
    stage = Quantize(
        method="qat", epochs=6, learning_rate=0.01, batch_size=16, ranges="minmax", correct_bias="off", qat=how
    )
    facts, _ = quantized(model, tmp_path, stage)
    assert facts["kept"] == "qat"
    assert facts["validation_accuracy"]["qat"] == 1.0 > facts["validation_accuracy"]["ptq"]
    assert facts["training_agrees"] >= 0.98
    assert {trial["step"] for trial in facts["tried"]} == {"ranges", "equalization"}
    parsed = graph.read(tmp_path / "made" / MODEL_TFLITE)
    assert not export.float_operators((tmp_path / "made" / MODEL_TFLITE).read_bytes())
    assert [op.op for op in place(parsed, load("edgetpu")).ops if op.placement == "cpu"] == []


def test_a_model_that_cannot_train_with_rounding_is_calibrated_and_says_why(keras: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 1))
    x = keras.layers.ReLU(4.0, 0.1, 0.2, name="jump")(keras.layers.Conv2D(4, 3)(image))
    model = keras.Model(image, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
    facts, notes = quantized(model, tmp_path, Quantize(method="qat", epochs=1))
    assert "ReLU 'jump'" in facts["ranges"]
    assert any("no quantization-aware training" in warning and "'jump'" in warning for warning in facts["warnings"])
    assert set(facts["warnings"]) <= {note.removeprefix("quantize: ") for note in notes.noted}
    assert np.prod(graph.read(tmp_path / "made" / MODEL_TFLITE).tensors[0].shape) > 0
