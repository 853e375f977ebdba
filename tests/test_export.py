"""`export`: from a model file to a compared int8 file and a bundle, without a pipeline file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import data_files
import numpy as np
import one_op
import pytest
import tiny
from one_op import Op, Tensor
from PIL import Image

import compress
from compress.core.errors import DataError, ModelError, StageError
from compress.surface.cli import main
from deploy.runner.answers import NamedOutputs
from deploy.runner.model import Model

KEYS = {
    *("schema_version", "model", "task", "preprocess", "outputs", "placement", "latency_ms", "verdict", "warnings"),
    "files",
}


def classifier(keras: Any, folder: Path, *, trained_on: float = 1.0, norm: bool = True) -> Path:
    """Save a classifier of photos 16x16 whose batch norm has seen pixels from 0 to `trained_on`."""
    layers = keras.layers
    keras.utils.set_random_seed(0)
    image = keras.Input((16, 16, 3), name="photo")
    x = layers.Conv2D(8, 3, use_bias=False)(image)
    if norm:
        batch_norm = layers.BatchNormalization(momentum=0.1)
        x = batch_norm(x)
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(x))
    model = keras.Model(image, layers.Dense(4, activation="softmax", name="classes")(x))
    if norm:
        for _ in range(8):
            model(np.random.default_rng(0).random((64, 16, 16, 3), np.float32) * trained_on, training=True)
    model.save(folder / "model.keras")
    return folder / "model.keras"


def photos(folder: Path, count: int = 40) -> Path:
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = random.integers(0, 256, (20, 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def scale_of(folder: Path) -> list[Any]:
    """Return the range that photos are scaled to in the pipeline that was written."""
    text = (folder / "pipeline.yaml").read_text()
    line = next(line for line in text.splitlines() if line.strip().startswith("preprocess:"))
    steps = json.loads(line.split(":", 1)[1])
    return next((step["scale"]["to"] for step in steps if "scale" in step), [0, 255])


@pytest.mark.parametrize("trained_on", [1.0, 255.0])
def test_photos_get_the_range_that_fits_the_model(keras: Any, tmp_path: Path, trained_on: float) -> None:
    model = classifier(keras, tmp_path, trained_on=trained_on)
    result = compress.export(model, calibrate=photos(tmp_path / "photos"), out=tmp_path / "out")
    assert scale_of(tmp_path / "out") == [0, trained_on]
    assert result.facts.keys() == KEYS
    (output,) = result.facts["outputs"]
    assert output["name"] == "classes"
    assert output["shape"] == [4]
    assert output["sqnr_db"] > 25
    assert output["agreement"] > 0.9
    assert result.facts["placement"]["mapped"] == result.facts["placement"]["total"] > 0
    assert set(result.facts["latency_ms"]) >= {"usb3", "usb2", "pcie", "devboard"}
    assert result.facts["verdict"] == "usable with warnings"
    assert any("not compiled" in warning for warning in result.facts["warnings"])
    for path in result.facts["files"].values():
        assert Path(path).exists()
    assert result.run.bundle is not None


def test_random_samples_are_named_in_the_warnings(
    keras: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = classifier(keras, tmp_path, norm=False)
    code = main.main(["export", str(model), "-o", str(tmp_path / "out"), "--json"])
    assert code == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts.keys() == KEYS
    assert any("random numbers" in warning for warning in facts["warnings"])
    assert main.main(["export", str(model), "-o", str(tmp_path / "out")]) == 0  # everything is in the store
    text = capsys.readouterr().out
    assert "output classes [4]: " in text
    assert "verdict: usable with warnings" in text
    assert "next: edit" in text


@pytest.mark.essential
def test_arrays_by_name_and_by_shape(keras: Any, tmp_path: Path) -> None:
    layers = keras.layers
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    keras.Model([left, right], [layers.Dense(3)(layers.Subtract()([left, right]))]).save(tmp_path / "two.keras")
    random = np.random.default_rng(0)
    np.savez(tmp_path / "named.npz", right=random.random((64, 6)), left=random.random((64, 6)) + 5)
    result = compress.export(tmp_path / "two.keras", calibrate=tmp_path / "named.npz", out=tmp_path / "out")
    assert '"x": ["left", "right"]' in (tmp_path / "out" / "pipeline.yaml").read_text()
    assert result.facts["outputs"][0]["sqnr_db"] > 20
    np.savez(tmp_path / "other.npz", a=random.random((64, 7)), b=random.random((64, 6)))
    with pytest.raises(DataError, match=r"has no array for the input 'right'; allowed: .*a \[64, 7\], b \[64, 6\]"):
        compress.export(tmp_path / "two.keras", calibrate=tmp_path / "other.npz", out=tmp_path / "out")


def test_clips_of_several_pictures(keras: Any, tmp_path: Path) -> None:
    layers = keras.layers
    clip = keras.Input((4, 12, 12, 3))
    x = layers.TimeDistributed(layers.Conv2D(4, 3, activation="relu"))(clip)
    x = layers.GRU(4)(layers.TimeDistributed(layers.GlobalAveragePooling2D())(x))
    keras.Model(clip, layers.Dense(3)(x)).save(tmp_path / "clips.keras")
    result = compress.export(tmp_path / "clips.keras", out=tmp_path / "out")
    assert result.facts["outputs"][0]["shape"] == [3]
    assert result.facts["placement"]["mapped"] > 0


def test_a_quantized_file_is_packed_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.tflite").write_bytes(tiny.classifier())
    result = compress.export(tmp_path / "model.tflite", out=tmp_path / "out")
    stages = [stage.stage for stage in result.run.record.stages]
    assert stages == ["load", "compile", "package"]
    assert result.facts["outputs"][0]["max_abs_error"] == 0
    assert result.run.model is not None
    assert result.run.model.read_bytes() == tiny.classifier()


def test_a_saved_model_without_keras_layers_is_rebuilt(keras: Any, tmp_path: Path) -> None:
    model = keras.saving.load_model(classifier(keras, tmp_path), compile=False)
    model.export(tmp_path / "graph", verbose=False)
    result = compress.export(tmp_path / "graph", calibrate=photos(tmp_path / "photos"), out=tmp_path / "out")
    assert [stage.stage for stage in result.run.record.stages][:2] == ["load", "quantize"]
    assert (tmp_path / "out" / "model.keras").exists()
    assert scale_of(tmp_path / "out") == [0, 1]  # by its batch norm, which is folded
    assert result.facts["outputs"][0]["sqnr_db"] > 25


@pytest.mark.parametrize(
    ("names", "used"),
    [
        ("0 cat\n1 dog\n2 bird\n3 nothing\n", True),
        ("cat\ndog\nbird\ncat\n", True),  # as "crane" in the labels of ImageNet
        ("cat\ndog\n", False),
        ("0: cat\n0: dog\n", False),
    ],
)
def test_the_labels_beside_a_model(
    keras: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], names: str, used: bool
) -> None:
    """Teachable Machine exports labels in this form."""
    model = classifier(keras, tmp_path)
    (tmp_path / "labels.txt").write_text(names)
    folder = photos(tmp_path / "photos")
    assert main.main(["export", str(model), "--calibrate", str(folder), "-o", str(tmp_path / "out")]) == 0
    captured = capfd.readouterr()
    with Model(tmp_path / "out" / "model" / "model.coralline", "int8") as loaded:
        answer = loaded(np.asarray(Image.open(folder / "0.png")))
    if used:
        assert answer.label in ("cat", "dog", "bird", "nothing")
    else:
        assert isinstance(answer, NamedOutputs)
        reason = "class 0 has two names" if "0:" in names else "names 2 classes, and the model has 4"
        assert f"labels.txt is not used: it {reason}" in captured.out + captured.err


def test_labels_that_the_user_gives(keras: Any, tmp_path: Path) -> None:
    model = classifier(keras, tmp_path, norm=False)
    (tmp_path / "animals.csv").write_text("id,name\n1,cat\n2,dog\n4,bird\n")
    arguments = ["export", str(model), "-o", str(tmp_path / "out"), "--labels", str(tmp_path / "animals.csv")]
    assert main.main(arguments) == 0
    assert '"labels": ["cat", "dog", "2", "bird"]' in (tmp_path / "out" / "pipeline.yaml").read_text()
    (tmp_path / "animals.csv").write_text("id,name\n0,cat\n1,dog\n")
    with pytest.raises(DataError, match=r"animals\.csv: names 2 classes, and the model has 4"):
        compress.export(model, out=tmp_path / "other", labels=tmp_path / "animals.csv")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "does not exist; allowed: a folder of photos or of WAV files"),
        ("empty", "contains no samples that are recognized"),
        ("text.npz", "is not a usable .npz file"),
    ],
)
def test_samples_that_cannot_be_used(keras: Any, tmp_path: Path, name: str, message: str) -> None:
    model = classifier(keras, tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(DataError, match=message):
        compress.export(model, calibrate=tmp_path / name, out=tmp_path / "out")


def test_an_open_size_of_images_gets_a_value(keras: Any, tmp_path: Path) -> None:
    image = keras.Input((None, None, 3))
    keras.Model(image, keras.layers.Conv2D(2, 3, strides=8)(image)).save(tmp_path / "open.keras")
    result = compress.export(tmp_path / "open.keras", out=tmp_path / "out")
    assert result.facts["outputs"][0]["shape"] == [28, 28, 2]


def test_another_open_size_is_refused(keras: Any, tmp_path: Path) -> None:
    series = keras.Input((None, 5))
    keras.Model(series, keras.layers.Conv1D(2, 3)(series)).save(tmp_path / "open.keras")
    with pytest.raises(ModelError, match=r"open shape \[None, 5\]; allowed: fixed sizes"):
        compress.export(tmp_path / "open.keras", out=tmp_path / "out")


def test_recordings_of_the_length_of_the_input(keras: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    sound = keras.Input((400,), name="sound")
    keras.Model(sound, keras.layers.Dense(3)(sound)).save(tmp_path / "sound.keras")
    (tmp_path / "sounds").mkdir()
    random = np.random.default_rng(0)
    for number in range(200):  # with fewer random samples, the test samples exceed the calibrated range
        values = random.integers(-8000, 8000, 500)
        (tmp_path / "sounds" / f"{number}.wav").write_bytes(data_files.sound(values))
    result = compress.export(tmp_path / "sound.keras", calibrate=tmp_path / "sounds", out=tmp_path / "out")
    assert result.facts["outputs"][0]["sqnr_db"] > 20
    assert result.run.record.data is not None
    assert result.run.record.data.input_shape == (400,)


@pytest.mark.tensorflow
def test_a_denoiser_that_subtracts_noise_from_its_input(keras: Any, tmp_path: Path) -> None:
    image = keras.Input((16, 16, 3), name="photo")
    noise = keras.layers.Conv2D(3, 3, padding="same", name="noise")(image)
    keras.Model(image, [keras.layers.Subtract(name="clean")([image, noise]), image]).save(tmp_path / "model.keras")
    facts = compress.export(tmp_path / "model.keras", out=tmp_path / "out").facts
    assert [output["name"] for output in facts["outputs"]] == ["clean", "photo"]
    assert min(output["sqnr_db"] for output in facts["outputs"]) > 30


def test_a_quantized_file_with_float_inputs_and_outputs_names_legalize(tmp_path: Path) -> None:
    """TFLiteConverter writes such files by default, also after quantization-aware training."""
    tensors = {
        "x": Tensor((1, 8), "FLOAT32", None, ()),
        "x8": Tensor((1, 8)),
        "w": Tensor((4, 8), data=np.arange(32).reshape(4, 8)),
        "y8": Tensor((1, 4), scales=(4.0,)),
        "y": Tensor((1, 4), "FLOAT32", None, ()),
    }
    operators = [
        Op("QUANTIZE", ["x"], ["x8"]),
        Op("FULLY_CONNECTED", ["x8", "w", ""], ["y8"], 4),
        Op("DEQUANTIZE", ["y8"], ["y"], 2),
    ]
    file, legal = tmp_path / "model.tflite", tmp_path / "legal.tflite"
    file.write_bytes(one_op.content(tensors, operators, ["x"], ["y"]))
    with pytest.raises(StageError, match=r"inputs and outputs are float; .*legalize .*--io int8"):
        compress.export(file, out=tmp_path / "first")
    compress.legalize(file, legal, io="int8")
    assert compress.export(legal, out=tmp_path / "second").facts["placement"]["total"] == 1
