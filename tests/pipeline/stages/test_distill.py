"""`distill` as a stage: teachers, students, errors before any work, and the dependencies of a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from blobs import Blobs, Noting, context
from pipeline_files import COMPLETE

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts, Kind
from compress.core.errors import CorallineError, ModelError, UntrustedError
from compress.learning.context import Context
from compress.learning.distillation.settings import DistillationSettings, Features
from compress.learning.procedures.settings import QatSettings
from compress.model.importers.keras import keras_file
from compress.pipeline.schema import load
from compress.pipeline.stages.distill import Distill
from compress.pipeline.stages.origin import Origin
from compress.pipeline.stages.quantize import Quantize

BUILDER = """
import keras

def build(input_shape, classes):
    image = keras.Input(input_shape)
    x = keras.layers.Conv2D({filters}, 3, activation="relu", name="map")(image)
    return keras.Model(image, keras.layers.Dense(classes)(keras.layers.Flatten()(x)))
"""
QUICK = {"epochs": 2, "learning_rate": 0.02, "batch_size": 16}


def saved(keras: Any, path: Path, filters: int) -> Path:
    """Write an untrained model to a file."""
    keras.utils.set_random_seed(filters)
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(filters, 3, activation="relu", name="map")(image)
    keras.Model(image, layers.Dense(2, "softmax")(layers.Flatten()(x))).save(path)
    return path


@pytest.fixture
def stage_inputs(keras: Any, tmp_path: Path) -> tuple[Artifact, Context]:
    """The model that a stage gets, with 3 filters, and a context whose original has 8."""
    artifacts = []
    for name, filters in (("given", 3), ("original", 8)):
        (tmp_path / name).mkdir()
        path = saved(keras, tmp_path / name / MODEL_KERAS, filters)
        artifacts.append(Artifact("", Kind.KERAS, path.parent, {MODEL_KERAS: ""}, {}, 0))
    (tmp_path / "made").mkdir()
    stage_context = context(Blobs(), tmp_path / "made")
    return artifacts[0], replace(stage_context, original=artifacts[1], progress=Noting())


def filters_of(stage_context: Context) -> int:
    return int(keras_file.load(stage_context.folder / MODEL_KERAS).get_layer("map").filters)


def noted(stage_context: Context) -> list[str]:
    assert isinstance(stage_context.progress, Noting)
    return stage_context.progress.noted


@pytest.mark.tensorflow
def test_the_original_teaches_by_default_once(stage_inputs: tuple[Artifact, Context]) -> None:
    facts = Distill(**QUICK).run(*stage_inputs)
    assert facts["teachers"] == ["the original"]
    assert facts["teachers_run"] == "once, before the training"
    assert noted(stage_inputs[1]) == ["distill: teachers (the original) run once, before the training"]
    assert "features" not in facts
    assert filters_of(stage_inputs[1]) == 3
    assert (stage_inputs[1].folder / MODEL_TFLITE).exists()


@pytest.mark.tensorflow
def test_files_and_the_original_teach_features_and_scores(
    keras: Any, stage_inputs: tuple[Artifact, Context], tmp_path: Path
) -> None:
    saved(keras, tmp_path / "big.keras", 12)
    (tmp_path / "int8.tflite").write_bytes(tiny.classifier((8, 8, 1), classes=2))
    stage = Distill(
        teachers=(Path("big.keras"), "original", Path("int8.tflite")),
        teacher_weights=(2.0, 1.0, 0.5),
        features=Features(),
        **QUICK,
    )
    facts = stage.with_paths_from(tmp_path).run(*stage_inputs)
    assert facts["teachers"] == ["big.keras", "the original", "int8.tflite"]
    assert noted(stage_inputs[1]) == [
        "distill: teachers (big.keras, the original, int8.tflite) run once, before the training"
    ]
    assert facts["features"] == [["map", "map"]]
    student = keras_file.load(stage_inputs[1].folder / MODEL_KERAS)
    assert [type(layer).__name__ for layer in student.layers] == ["InputLayer", "Conv2D", "Flatten", "Dense"]
    assert len(student.outputs) == 1
    assert filters_of(stage_inputs[1]) == 3


@pytest.mark.tensorflow
@pytest.mark.parametrize("way", ["builder", "file"])
def test_a_student_is_trained_from_the_original(
    keras: Any, stage_inputs: tuple[Artifact, Context], tmp_path: Path, way: str
) -> None:
    (tmp_path / "small.py").write_text(BUILDER.format(filters=2))
    saved(keras, tmp_path / "small.keras", 2)
    origin = Origin(builder="small.py:build") if way == "builder" else Origin(file="small.keras")
    stage = Distill(student=origin, **QUICK).with_paths_from(tmp_path)
    assert stage.changes_cost()
    facts = stage.run(stage_inputs[0], replace(stage_inputs[1], trust=True))
    assert facts["teachers"] == ["the original"]
    assert ("healing" in facts) is (way == "file")  # a student from a builder is untrained
    assert filters_of(stage_inputs[1]) == 2
    assert {path.name for path in stage_inputs[1].folder.iterdir()} == {MODEL_KERAS, MODEL_TFLITE}


@pytest.mark.tensorflow
def test_a_builder_of_ones_own_is_not_run_without_trust(stage_inputs: tuple[Artifact, Context], tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("raise SystemExit('was run')")
    with pytest.raises(UntrustedError, match=r"loading would run the builder .*small.py, which is a program"):
        Distill(student=Origin(builder="small.py")).with_paths_from(tmp_path).run(*stage_inputs)


@pytest.mark.tensorflow
def test_a_quantized_original_teaches_a_student_of_its_own(
    keras: Any, stage_inputs: tuple[Artifact, Context], tmp_path: Path
) -> None:
    folder = tmp_path / "quantized"
    folder.mkdir()
    (folder / MODEL_TFLITE).write_bytes(tiny.classifier((8, 8, 1), classes=2))
    original = Artifact("", Kind.TFLITE, folder, {MODEL_TFLITE: ""}, {}, 0)
    saved(keras, tmp_path / "small.keras", 2)
    stage = Distill(student=Origin(file="small.keras"), **QUICK).with_paths_from(tmp_path)
    assert Kind.TFLITE in stage.accepted_kinds()
    assert Distill().accepted_kinds() == {Kind.KERAS}
    assert stage.run(original, replace(stage_inputs[1], original=original))["teachers"] == ["the original"]
    assert filters_of(stage_inputs[1]) == 2


def test_the_contents_of_files_are_part_of_the_key_and_their_names_are_not(tmp_path: Path) -> None:
    def key(content: str, name: str, way: Callable[[str], Facts]) -> Any:
        (tmp_path / name).write_text(content)
        return Distill(**way(name)).with_paths_from(tmp_path).identity()

    def taught(name: str) -> Facts:
        return {"teachers": (Path(name), "original")}

    def learning(name: str) -> Facts:
        return {"student": Origin(file=name)}

    for way in (taught, learning):
        assert key("1", "a.keras", way) == key("1", "b.keras", way) != key("2", "a.keras", way)
    (tmp_path / "a.keras").write_text("1")
    stage = Distill(teachers=(Path("a.keras"),)).with_paths_from(tmp_path)
    (tmp_path / "a.keras").unlink()
    with pytest.raises(
        ModelError, match=r"a.keras: cannot be read: No such file or directory; check the setting teachers"
    ):
        stage.identity()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("weight: 1, class_weights: balanced", "stages[0].distill: class_weights: balanced needs the labels"),
        (
            "teachers: [a.pth]",
            "stages[0]: teachers: a.pth has an unsupported format; allowed: .keras, .h5, .hdf5, .onnx, .tflite, or",
        ),
        ("teachers: [notes]", "stages[0]: teachers: notes has an unsupported format"),
        ("teachers: [photos.v2]", "stages[0]: teachers: {folder}/photos.v2: has no saved_model.pb"),
        ("teachers: [a.keras]", "stages[0]: teachers: the file {folder}/a.keras does not exist; check the path"),
        ("teacher_weights: [1, 2]", "teacher_weights: 2 weights for 1 teachers"),
        ("student: {}", "stages[0].distill.student: needs either the key 'builder' or the key 'file'"),
        ("student: {file: a.keras}", "stages[0]: the file {folder}/a.keras does not exist; check the path"),
        ("student: {builder: digits_cn}", "unknown builder 'digits_cn'; allowed: anchor_free, "),
        (
            "student: {file: tiny.tflite}",
            "student: cannot be trained: tiny.tflite is quantized already; choose another",
        ),
        ("features: {pairs: [{student: a}]}", "the key 'teacher' is missing"),
        ("features: {match: hints}", "should be 'projected' or 'attention'"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(tmp_path: Path, settings: str, message: str) -> None:
    (tmp_path / "tiny.tflite").write_bytes(tiny.classifier())
    for name in ("a.pth", "notes"):
        (tmp_path / name).write_text("no model")
    (tmp_path / "photos.v2").mkdir()
    path = tmp_path / "file.yaml"
    head, _, tail = COMPLETE.partition("stages:\n")
    head = head.replace("builder: digits_cnn", "file: teacher.keras")
    (tmp_path / "teacher.keras").write_text("read later")
    path.write_text(f"{head}stages:\n  - distill: {{{settings}}}\n{tail[tail.index('measure:') :]}")
    with pytest.raises(CorallineError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:")
    assert message.format(folder=tmp_path) in str(caught.value)


def test_training_with_rounding_takes_the_same_settings_and_refuses_the_same() -> None:
    taught = DistillationSettings(weight=1.0, temperature=2.0)
    assert Quantize(method="qat", qat=QatSettings(distill=taught)).qat.distill == taught
    with pytest.raises(ValueError, match="class_weights: balanced needs the labels"):
        Quantize(method="qat", class_weights="balanced", qat=QatSettings(distill=taught))


def test_a_quantized_model_needs_a_student_to_teach(tmp_path: Path) -> None:
    (tmp_path / "tiny.tflite").write_bytes(tiny.classifier())
    path = tmp_path / "file.yaml"
    head, _, tail = COMPLETE.partition("stages:\n")
    head, tail = head.replace("builder: digits_cnn", "file: tiny.tflite"), tail[tail.index("measure:") :]
    path.write_text(f"{head}stages:\n  - distill: {{student: {{builder: digits_cnn}}}}\n  - quantize\n{tail}")
    assert [step.makes for step in load(path).steps] == [Kind.TFLITE, Kind.KERAS, Kind.TFLITE]
    path.write_text(f"{head}stages:\n  - distill\n{tail}")
    with pytest.raises(CorallineError, match="needs a keras model, but would be given a quantized tflite model"):
        load(path)
