"""`replace_activations` as a stage: its record, its training, and the placement of the result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from blobs import Blobs, context
from pydantic import ValidationError
from run_records import rendered, with_stages

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts, Kind
from compress.core.errors import ModelError
from compress.data.dataset import Dataset
from compress.data.sources import Digits as Source
from compress.learning.quantization import export
from compress.learning.training import loop
from compress.learning.training.validation import Quality
from compress.model.importers.keras import keras_file
from compress.model.tflite import graph
from compress.pipeline.stages import working_model
from compress.pipeline.stages.replace_activations import ReplaceActivations
from compress.targets import load
from compress.targets.edgetpu.check import check
from deploy.contract.preprocessing import Preprocessing

pytestmark = pytest.mark.tensorflow


class Digits:
    """The shipped digits without a resize: 8x8, in [0, 1]."""

    def __new__(cls) -> Any:
        return Dataset(Source(), Preprocessing([{"scale": {"from": [0, 16], "to": [0, 1]}}]), None)


def network(keras: Any, activation: Any, classes: int = 2, shape: tuple[int, ...] = (8, 8, 1)) -> Any:
    """An inverted residual block with a gate, as a classifier."""
    keras.utils.set_random_seed(0)
    layers = keras.layers

    def normed(x: Any) -> Any:
        return activation(layers.BatchNormalization(momentum=0.9)(x))

    image = keras.Input(shape)
    x = normed(layers.Conv2D(12, 3, padding="same", use_bias=False)(image))
    x = normed(layers.DepthwiseConv2D(3, 2, padding="same", use_bias=False)(x))
    gate = layers.Conv2D(4, 1, activation="relu")(layers.GlobalAveragePooling2D(keepdims=True)(x))
    gate = layers.Conv2D(12, 1, activation="sigmoid")(gate)
    x = layers.Multiply(name="gated")([x, gate])
    x = layers.Flatten()(normed(layers.Conv2D(16, 1, use_bias=False)(x)))
    return keras.Model(image, layers.Dense(classes, activation="softmax")(x))


def artifact_of(model: Any, folder: Path) -> Artifact:
    folder.mkdir(exist_ok=True)
    working_model.write(model, folder)
    return Artifact("", Kind.KERAS, folder, {MODEL_KERAS: "", MODEL_TFLITE: ""}, {}, 0.0)


def replaced(model: Any, folder: Path, stage: ReplaceActivations, data: Any = None) -> tuple[Facts, list[str]]:
    """Run the stage, which writes its model to folder/made; return its facts and notes."""
    (folder / "made").mkdir(exist_ok=True)
    notes = tiny.Notes()
    given_context = replace(context(data or Blobs(), folder / "made"), progress=notes)
    return stage.run(artifact_of(model, folder / "given"), given_context), notes.noted


def operators(content: bytes) -> dict[str, str]:
    """Return the placement of each kind of operator."""
    return {op.op: op.placement for op in check(graph.parse(content), load("edgetpu")).ops}


def hard(keras: Any) -> Any:
    return lambda x: keras.layers.Multiply()([x, keras.layers.ReLU(6.0)(x + 3.0) * (1 / 6)])


def test_training_recovers_the_loss_of_accuracy(keras: Any, tmp_path: Path) -> None:
    data, model = Digits(), network(keras, hard(keras), 10)
    settings = loop.TrainingSettings(epochs=10, learning_rate=0.01)
    loop.fit(model, loop.label_loss(loop.head_of(model, data)), settings, context(data, tmp_path))
    stage = ReplaceActivations(squeeze_and_excite="remove", epochs=5)
    facts, notes = replaced(model, tmp_path, stage, data)
    accuracy = {when: measurement["value"] for when, measurement in facts["accuracy"].items()}
    assert accuracy["before"] > 0.93
    assert accuracy["replaced"] < accuracy["before"] - 0.02
    assert accuracy["healed"] > accuracy["replaced"] + 0.02
    assert accuracy["healed"] >= accuracy["before"] - 0.03
    validation = len(data.labels("validation"))
    assert {measurement["n"] for measurement in facts["accuracy"].values()} == {validation}
    assert all(
        measurement["how"] == "measured" and "validation split" in measurement["note"]
        for measurement in facts["accuracy"].values()
    )
    assert len(facts["history"]) == 5
    counts = {what: entry["count"] for what, entry in facts["replaced"].items()}
    assert counts == {"hard_silu": 3, "squeeze_and_excite": 1}
    assert facts["replaced"]["squeeze_and_excite"]["layers"] == ["gated"]
    assert facts["details"].keys() == {"gated"}
    assert (facts["unchanged"], facts["not_found"], facts["skipped"]) == (False, [], {})
    assert "replace_activations: 3 hard_silu -> relu" in notes
    # The model on disk is the one after healing.
    answers = np.asarray(keras_file.load(tmp_path / "made" / MODEL_KERAS)(data.inputs("validation"))).argmax(axis=1)
    assert float((answers == data.labels("validation")).mean()) == pytest.approx(accuracy["healed"])
    json.dumps(facts)


@pytest.mark.parametrize("activation", ["hard_silu", "gelu", "leaky_relu", "mish", "prelu"])
@pytest.mark.essential
def test_everything_is_mapped_that_was_not(keras: Any, tmp_path: Path, activation: str) -> None:
    def act(x: Any) -> Any:
        return keras.layers.PReLU()(x) if activation == "prelu" else keras.layers.Activation(activation)(x)

    model, samples = network(keras, act), Blobs().inputs("train")[:32]
    before = operators(export.convert_calibrated(model, samples, "int8"))
    assert "cpu" in before.values()
    replaced(model, tmp_path, ReplaceActivations(epochs=0))
    after = export.convert_calibrated(keras_file.load(tmp_path / "made" / MODEL_KERAS), samples, "int8")
    assert set(operators(after).values()) == {"tpu"}


@pytest.mark.parametrize("kept", [True, False])
def test_batch_norms_are_recalibrated_where_validation_is_no_worse(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr(Quality, "is_worse_than", lambda mine, other: not kept)
    facts, _ = replaced(network(keras, keras.layers.Activation("silu")), tmp_path, ReplaceActivations(epochs=0))
    assert facts["batch_norms"]["kept"] is kept
    assert facts["accuracy"].keys() == {"before", "replaced"}
    assert "history" not in facts
    layers = keras_file.load(tmp_path / "made" / MODEL_KERAS).layers
    (mean, *_) = (layer.get_weights()[2] for layer in layers if type(layer).__name__ == "BatchNormalization")
    assert mean.any() == kept  # the mean of an untrained batch norm is 0


def test_healing_that_does_harm_is_not_kept(keras: Any, tmp_path: Path) -> None:
    data, model = Digits(), network(keras, hard(keras), 10)
    settings = loop.TrainingSettings(epochs=4, learning_rate=0.01)
    loop.fit(model, loop.label_loss(loop.head_of(model, data)), settings, context(data, tmp_path))
    facts, notes = replaced(
        model, tmp_path, ReplaceActivations(epochs=1, learning_rate=10.0, schedule="constant"), data
    )
    accuracy = {when: measurement["value"] for when, measurement in facts["accuracy"].items()}
    assert accuracy["healed"] == accuracy["replaced"] > 0.3
    assert facts["healing"]["kept"] is False
    assert facts["healing"]["validation_before"] == pytest.approx(accuracy["replaced"], abs=1e-6)
    assert facts["healing"]["validation_after"] < 0.3
    assert facts["batch_norms"]["validation_after"] == facts["healing"]["validation_before"]
    assert any("the weights from before the training are kept" in note for note in notes)


def test_with_nothing_to_replace_the_model_is_passed_on_unchanged(keras: Any, tmp_path: Path) -> None:
    model = network(keras, keras.layers.Activation("relu"))
    facts, notes = replaced(model, tmp_path, ReplaceActivations())
    assert facts["unchanged"] is True
    assert facts["replaced"] == {}
    assert facts["not_found"] == []  # no activation was requested by name
    assert notes == ["replace_activations: nothing to replace; the model is passed on unchanged"]
    for name in (MODEL_KERAS, MODEL_TFLITE):
        assert (tmp_path / "made" / name).read_bytes() == (tmp_path / "given" / name).read_bytes()


def test_what_was_asked_for_and_is_not_there_is_named(keras: Any, tmp_path: Path) -> None:
    image = keras.Input((8, 8, 1))
    x = keras.layers.Flatten()(keras.layers.Conv2D(2, 3, activation="gelu")(image))
    model = keras.Model(image, keras.layers.Dense(2, activation="softmax")(x))
    stage = ReplaceActivations(activations=["gelu", "silu"], squeeze_and_excite="remove", epochs=0)
    facts, notes = replaced(model, tmp_path, stage)
    assert facts["not_found"] == ["silu", "squeeze_and_excite"]
    for name in facts["not_found"]:
        assert any(name in note and "the model has none" in note for note in notes)
    assert [*facts["replaced"]] == ["gelu"]


def test_only_what_is_listed_is_replaced(keras: Any, tmp_path: Path) -> None:
    model = network(keras, keras.layers.Activation("silu"))
    facts, _ = replaced(model, tmp_path, ReplaceActivations(activations=[], squeeze_and_excite="remove", epochs=0))
    assert [*facts["replaced"]] == ["squeeze_and_excite"]


def test_several_outputs_are_replaced_but_not_measured_and_it_says_why(keras: Any, tmp_path: Path) -> None:
    image = keras.Input((8, 8, 1))
    x = keras.layers.Flatten()(keras.layers.Conv2D(2, 3, activation="gelu")(image))
    model = keras.Model(image, [keras.layers.Dense(2)(x), keras.layers.Dense(3)(x)])
    facts, _ = replaced(model, tmp_path, ReplaceActivations(epochs=0))
    assert facts["replaced"]["gelu"]["count"] == 1
    assert facts["batch_norms"]["kept"] is False
    assert "2 outputs" in facts["batch_norms"]["reason"]
    for measurement in facts["accuracy"].values():
        assert (measurement["value"], measurement["how"]) == (None, "missing")
        assert "2 outputs" in measurement["note"]


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_model_that_does_not_take_the_data_is_refused(keras: Any, tmp_path: Path, epochs: int) -> None:
    model = network(keras, keras.layers.Activation("silu"), shape=(16, 16, 1))
    with pytest.raises(ModelError, match=r"takes \[16, 16, 1\], but data.preprocess gives \[8, 8, 1\]"):
        replaced(model, tmp_path, ReplaceActivations(epochs=epochs))
    images = [keras.Input((8, 8, 1)), keras.Input((8, 8, 1))]
    two = keras.Model(images, keras.layers.Dense(2)(keras.layers.Flatten()(keras.ops.silu(images[0] + images[1]))))
    with pytest.raises(ModelError, match=r"the model takes \[128\], but data.preprocess gives \[8, 8, 1\]"):
        replaced(two, tmp_path, ReplaceActivations(epochs=epochs))


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(ValidationError, match="swish_beta"):
        ReplaceActivations(activations=["swish_beta"])  # type: ignore[list-item]


def test_the_report_tells_it(keras: Any, tmp_path: Path) -> None:
    model = network(keras, keras.layers.Activation("silu"))
    facts, _ = replaced(
        model, tmp_path, ReplaceActivations(epochs=1, squeeze_and_excite="remove", activations=["silu", "gelu"])
    )
    files = rendered(with_stages({"stage": "replace_activations", "facts": facts}))
    for page in (files["report.html"].decode(), files["report.md"].decode()):
        assert "Activation replacement" in page
        for text in ("silu", "squeeze and excite", "after training", "gelu", "of the energy of the product"):
            assert text in page
    assert "Activation replacement" not in rendered(with_stages())["report.html"].decode()


def test_gradually_with_gates_removed(keras: Any, tmp_path: Path) -> None:
    data, model = Digits(), network(keras, lambda x: keras.layers.Activation("silu")(x), 10)
    settings = loop.TrainingSettings(epochs=8, learning_rate=0.01)
    loop.fit(model, loop.label_loss(loop.head_of(model, data)), settings, context(data, tmp_path))
    stage = ReplaceActivations(squeeze_and_excite="remove", gradual=0.5, epochs=6, learning_rate=0.01)
    facts, _ = replaced(model, tmp_path, stage, data)
    accuracy = {when: measurement["value"] for when, measurement in facts["accuracy"].items()}
    assert accuracy["healed"] > max(accuracy["before"] - 0.02, accuracy["replaced"])
    assert {what: entry["count"] for what, entry in facts["replaced"].items()} == {"silu": 3, "squeeze_and_excite": 1}
    assert len(facts["history"]) == 6
    answers = np.asarray(keras_file.load(tmp_path / "made" / MODEL_KERAS)(data.inputs("validation"))).argmax(axis=1)
    assert float((answers == data.labels("validation")).mean()) == pytest.approx(accuracy["healed"])
    assert set(operators((tmp_path / "made" / MODEL_TFLITE).read_bytes())) <= {
        "CONV_2D",
        "DEPTHWISE_CONV_2D",
        "FULLY_CONNECTED",
        "RESHAPE",
        "SOFTMAX",
    }


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"epochs": 0}, "has none"),
        ({"early_stopping": 2}, "cannot be combined with early_stopping"),
    ],
)
def test_gradually_needs_a_whole_training(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        ReplaceActivations(gradual=0.5, **settings)
