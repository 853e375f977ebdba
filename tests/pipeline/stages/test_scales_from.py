"""`quantize: {scales_from: …}`: a retrained model gets exactly the scales of an earlier file, or is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from blobs import Blobs, context
from pydantic import ValidationError

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts, Kind
from compress.core.errors import StageError
from compress.model.tflite import graph, structure
from compress.pipeline.stages import working_model
from compress.pipeline.stages.quantize import Quantize
from compress.targets import load

pytestmark = pytest.mark.tensorflow
PLAIN = Quantize(ranges="minmax", equalize="off", correct_bias="off")


def trained(keras: Any, seed: int, filters: int = 4) -> Any:
    """A network with a shortcut and a concatenation; another seed stands for another training."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    image = keras.Input((8, 8, 1), name="image")
    first = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", name="first")(image)))
    second = layers.Conv2D(filters, 3, padding="same", name="second")(first)
    joined = layers.Concatenate()([layers.Add()([first, second]), layers.DepthwiseConv2D(3, padding="same")(first)])
    scores = layers.Dense(2, "softmax", name="scores")(layers.GlobalAveragePooling2D()(joined))
    return keras.Model(image, scores)


def quantized(model: Any, folder: Path, stage: Quantize) -> Facts:
    before, output_folder = folder / "before", folder / "made"
    for directory in (before, output_folder):
        directory.mkdir(parents=True, exist_ok=True)
    working_model.write(model, before)
    artifact = Artifact("", Kind.KERAS, before, {MODEL_KERAS: "", MODEL_TFLITE: ""}, {}, 0.0)
    return stage.run(artifact, replace(context(Blobs(), output_folder), progress=tiny.Notes(), target=load("edgetpu")))


@pytest.mark.parametrize("io", ["int8", "uint8"])
def test_every_activation_has_the_old_scale_and_zero_point(keras: Any, tmp_path: Path, io: str) -> None:
    stage = PLAIN.model_copy(update={"io": io})
    quantized(trained(keras, 0), tmp_path / "old", stage)
    old_file = tmp_path / "old" / "made" / MODEL_TFLITE
    facts = quantized(trained(keras, 1), tmp_path / "new", stage.model_copy(update={"scales_from": old_file}))
    old, new = graph.read(old_file), graph.read(tmp_path / "new" / "made" / MODEL_TFLITE)
    pairs = structure.matching_tensors(old, new)
    activations = [(a, b) for a, b in pairs.items() if not new.tensors[b].is_constant]
    assert len(activations) > 6
    for first, second in activations:
        assert old.tensors[first].quantization == new.tensors[second].quantization
    dense = next(operator for operator in new.operators if operator.name == "FULLY_CONNECTED")
    twin = old.operators[dense.index]
    assert new.tensors[dense.inputs[1]].quantization == old.tensors[twin.inputs[1]].quantization
    assert facts["scales_from"]["agreement"] > 0.5
    assert facts["scales_from"]["agreement_own_scales"] > 0.9


def test_the_scales_of_its_own_file_change_nothing(keras: Any, tmp_path: Path) -> None:
    model = trained(keras, 0)
    quantized(model, tmp_path / "old", PLAIN)
    old_file = tmp_path / "old" / "made" / MODEL_TFLITE
    facts = quantized(model, tmp_path / "new", PLAIN.model_copy(update={"scales_from": old_file}))
    old, new = graph.read(old_file), graph.read(tmp_path / "new" / "made" / MODEL_TFLITE)
    for first, second in structure.matching_tensors(old, new).items():
        assert old.tensors[first].quantization == new.tensors[second].quantization
    assert facts["scales_from"]["agreement"] == facts["scales_from"]["agreement_own_scales"]


def test_training_keeps_the_old_scales(keras: Any, tmp_path: Path) -> None:
    quantized(trained(keras, 0), tmp_path / "old", PLAIN)
    old_file = tmp_path / "old" / "made" / MODEL_TFLITE
    settings = {"ranges": "minmax", "equalize": "off", "correct_bias": "off", "method": "qat", "epochs": 1}
    stage = Quantize.model_validate({**settings, "qat": {"ranges": "fixed"}, "scales_from": old_file})
    facts = quantized(trained(keras, 1), tmp_path / "new", stage)
    old, new = graph.read(old_file), graph.read(tmp_path / "new" / "made" / MODEL_TFLITE)
    for first, second in structure.matching_tensors(old, new).items():
        if not new.tensors[second].is_constant:
            assert old.tensors[first].quantization == new.tensors[second].quantization
    assert facts["kept"] in ("ptq", "qat")
    assert "scales_from" in facts


def test_another_architecture_is_refused(keras: Any, tmp_path: Path) -> None:
    quantized(trained(keras, 0), tmp_path / "old", PLAIN)
    stage = PLAIN.model_copy(update={"scales_from": tmp_path / "old" / "made" / MODEL_TFLITE})
    with pytest.raises(StageError, match="the file of `scales_from` has another structure"):
        quantized(trained(keras, 1, filters=8), tmp_path / "new", stage)


def test_what_changes_ranges_is_refused_with_scales_from() -> None:
    with pytest.raises(ValidationError, match=r"qat: \{ranges: fixed\}"):
        Quantize(scales_from=Path("old.tflite"), method="qat")
    with pytest.raises(ValidationError, match="a `plan` has ranges already"):
        Quantize(scales_from=Path("old.tflite"), plan=Path("plan.json"))
