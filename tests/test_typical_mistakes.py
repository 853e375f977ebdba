"""Typical mistakes with a model and data: each one is reported with the words of docs/typical_mistakes.md."""

from __future__ import annotations

import functools
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data_files
import numpy as np
import one_op
import onnx
import packages
import pytest
import tiny
from numpy.typing import NDArray
from one_op import Op, Tensor
from onnx import TensorProto, helper, numpy_helper
from paths import ROOT
from pictures import turned
from PIL import Image

from compress.data.sources import ImageFolder
from compress.surface.cli.main import main
from deploy.runner import images

pytestmark = pytest.mark.tensorflow

MANUAL = ROOT / "docs" / "typical_mistakes.md"
ROWS = re.findall(r"^\| (.+?) \| (.+?) \|$", MANUAL.read_text(), re.MULTILINE)[1:]
ANSWERS = {re.sub(r"`", "", name): answer for name, answer in ROWS}
"""The message for each mistake in the manual; "…" replaces text that depends on the case."""
TESTED: list[str] = []

CLASSES = ("apple", "beet", "cherry")
SIDE = 16
UNIT = [{"scale": {"from": [0, 255], "to": [0, 1]}}]


def tell(name: str, output: str) -> None:
    """Check that an output contains the manual's message for a mistake."""
    output = " ".join(output.split())
    start = 0
    for part in ANSWERS[name].split("…"):
        place = output.find(part.strip(), start)
        assert place >= 0, f"{part.strip()!r} is not in: {output}"
        start = place + len(part.strip())


def mistake(name: str) -> Callable[[Callable[..., str]], Callable[..., None]]:
    """Make a test of a function that makes a mistake and returns the output: it contains the manual's message."""
    TESTED.append(name)

    def wrap(function: Callable[..., str]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**fixtures: Any) -> None:
            tell(name, function(**fixtures))

        return test

    return wrap


def test_the_manual_names_exactly_these_mistakes() -> None:
    assert sorted([*TESTED, *WITH_PHOTOS, *WITH_AN_ODD_PHOTO, *WITH_ARRAYS, *WITH_A_TABLE, *IN_THE_FILE]) == sorted(
        ANSWERS
    )
    assert len(ANSWERS) >= 25


# --- models and data ---------------------------------------------------------------------


@dataclass(frozen=True)
class Project:
    """A folder for models and data, and the command line in it.

    Attributes:
        folder: the folder.
        output: returns the output of the command line.
    """

    folder: Path
    output: Callable[[], str]

    def run(self, *arguments: object, code: int | None = None) -> str:
        """Run a command; return stdout and stderr."""
        actual = main([*map(str, arguments)])
        output = self.output()
        assert code in (None, actual), output
        return output

    def pipeline(
        self,
        model: Path | Mapping[str, Any],
        source: Mapping[str, Any],
        preprocess: Sequence[Any] = (),
        stages: Sequence[Any] = ("quantize",),
        **more: Any,
    ) -> Path:
        """Write a pipeline file."""
        content = {
            "schema_version": 1,
            "name": "t",
            "model": {"file": str(model)} if isinstance(model, Path) else dict(model),
            "data": {"source": dict(source), "preprocess": list(preprocess)},
            "stages": list(stages),
            "measure": {"latency": {"runs": 2}},
        } | more
        path = self.folder / "pipeline.yaml"
        path.write_text(json.dumps(content))
        return path

    def npz(self, **arrays: Any) -> dict[str, Any]:
        """Write arrays; return the source."""
        np.savez(self.folder / "data.npz", **arrays)
        return {"npz": {"file": str(self.folder / "data.npz")}}

    def folders(self, x: NDArray[np.uint8], y: NDArray[np.int64], below: str = "") -> dict[str, Any]:
        """Write photos into class folders; return the source."""
        for index, (image, label) in enumerate(zip(x, y, strict=True)):
            path = self.folder / "photos" / below / CLASSES[label] / f"{index:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
        return {"folder": {"path": str(self.folder / "photos")}}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Project:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # no compiler

    def output() -> str:
        written = capfd.readouterr()
        return written.out + written.err

    return Project(tmp_path, output)


def photos(count: int = 150, side: int = SIDE) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return red, green and blue photos with a bright upper half, and their classes."""
    random = np.random.default_rng(0)
    labels = np.arange(count) % 3
    x = random.integers(60, 140, (count, side, side, 3))
    x[np.arange(count), :, :, labels] += random.integers(25, 60, (count, 1, 1))
    x[:, : side // 2] += 20
    return x.astype(np.uint8), labels


@dataclass(frozen=True)
class Models:
    """Models of three classes.

    Attributes:
        unit: with a batch norm, for values from 0 to 1.
        plain: the same without a batch norm.
        bytes: `plain` for values from 0 to 255.
        softmax: `unit` with a softmax.
        twice: `softmax` with a second one.
        constant: `unit` with biases only in its last layer.
        random: `unit` with random weights in its last layer.
        four: `unit` with a fourth class.
        slow: `unit` with the statistics of batch norms of momentum 0.999 after one step.
        quantized: `unit` as a full-integer file.
    """

    unit: Path
    plain: Path
    bytes: Path
    softmax: Path
    twice: Path
    constant: Path
    random: Path
    four: Path
    slow: Path
    quantized: Path


BLOCKS = (("first", "first_norm"), ("second", "second_norm"))


def network(normalized: bool, classes: int = 3) -> Any:
    import keras

    layers = keras.layers
    image = x = keras.Input((SIDE, SIDE, 3))
    for filters, (conv, norm) in zip((8, 16), BLOCKS, strict=True):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", name=conv)(x)
        if normalized:
            x = layers.BatchNormalization(momentum=0.9, name=norm)(x)
        x = layers.ReLU()(x)
    return keras.Model(image, layers.Dense(classes, name="scores")(layers.GlobalAveragePooling2D()(x)))


def without_norm(trained: Any) -> Any:
    """Return a network with the same function without batch norms."""
    model = network(normalized=False)
    for conv, norm in BLOCKS:
        kernel, bias = trained.get_layer(conv).get_weights()
        gamma, beta, mean, variance = trained.get_layer(norm).get_weights()
        factor = gamma / np.sqrt(variance + 1e-3)
        model.get_layer(conv).set_weights([kernel * factor, (bias - mean) * factor + beta])
    model.get_layer("scores").set_weights(trained.get_layer("scores").get_weights())
    return model


def with_slow_norms(trained: Any, momentum: float, steps: int) -> Any:
    """Return a network with the same weights, and with the batch norm statistics after this number of steps."""
    model = network(normalized=True)
    model.set_weights(trained.get_weights())
    start = momentum**steps
    for _, norm in BLOCKS:
        gamma, beta, mean, variance = trained.get_layer(norm).get_weights()
        average = [(1 - start) * mean, start + (1 - start) * variance]  # Keras starts with the variance 1
        model.get_layer(norm).set_weights([gamma, beta, *average])
    return model


def with_last(trained: Any, kernel: NDArray[Any], bias: NDArray[Any]) -> Any:
    """Return the same network with another last layer."""
    model = network(normalized=True, classes=len(bias))
    model.set_weights([*trained.get_weights()[:-2], kernel, bias])
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Train one model for a short time; derive the other models from its weights."""
    import keras

    folder = tmp_path_factory.mktemp("models")
    keras.utils.set_random_seed(0)
    x, y = photos(240)
    unit = network(normalized=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    unit.compile(keras.optimizers.Adam(0.01), loss)
    unit.fit(x / np.float32(255), y, epochs=12, batch_size=32, verbose=0)
    kernel, bias = unit.get_layer("scores").get_weights()
    plain = without_norm(unit)
    of_bytes = without_norm(unit)
    of_bytes.get_layer("first").set_weights([plain.get_weights()[0] / 255, plain.get_weights()[1]])
    softmax = keras.Model(unit.inputs, keras.layers.Softmax(name="first_softmax")(unit.output))
    random = np.random.default_rng(0)
    keras_models = {
        "unit": unit,
        "plain": plain,
        "bytes": of_bytes,
        "softmax": softmax,
        "twice": keras.Model(softmax.inputs, keras.layers.Softmax(name="second_softmax")(softmax.output)),
        "constant": with_last(unit, 0 * kernel, np.array([0, 3, 0], np.float32)),
        "random": with_last(unit, random.normal(size=kernel.shape).astype(np.float32), 0 * bias),
        "slow": with_slow_norms(unit, 0.999, 1),
        "four": with_last(unit, np.pad(kernel, ((0, 0), (0, 1))), np.append(bias, np.float32(-9))),
    }
    for name, model in keras_models.items():
        model.save(folder / f"{name}.keras")
    (folder / "quantized.tflite").write_bytes(quantized(unit, x / np.float32(255)))
    return Models(**{name: folder / f"{name}.keras" for name in keras_models}, quantized=folder / "quantized.tflite")


def quantized(model: Any, samples: NDArray[np.float32]) -> bytes:
    from compress.learning.quantization import post_training

    return post_training.quantize(model, samples[:64], samples[64:128]).content


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")


# --- the same without mistakes -----------------------------------------------------------

ALARMS = ("does not fit", "distorted", "are also in", "softmax twice", "no sample for", "cannot be decoded")


def test_correct_data_and_models_give_no_alarm(project: Project, models: Models) -> None:
    right = project.folders(*photos())
    for model, preprocess in ((models.unit, UNIT), (models.plain, UNIT), (models.softmax, UNIT), (models.bytes, [])):
        output = project.run(project.pipeline(model, right, preprocess), code=0)
        assert "verdict: usable\n" in output
    output = project.run(project.pipeline(models.quantized, right, UNIT, ["compile"]), code=0)
    assert not [text for text in ALARMS if text in output]


def test_a_model_that_is_often_wrong_gives_no_alarm_about_its_inputs(project: Project, models: Models) -> None:
    x, y = photos()
    random = np.random.default_rng(1)
    y = np.where(random.random(len(y)) < 0.5, random.integers(0, 3, len(y)), y)
    source = project.npz(x=x / np.float32(255), y=y)
    output = project.run(project.pipeline(models.plain, source))
    assert not [text for text in ALARMS if text in output]


# --- values, classes, useless models -----------------------------------------------------


COMPILED = ("compile",)
QUANTIZED = ("quantize",)
WITH_PHOTOS: dict[str, tuple[str, Sequence[Any], Sequence[str], int | None]] = {
    "samples from 0 to 1 for a model of 0 to 255": ("bytes", UNIT, QUANTIZED, None),
    "samples from 0 to 255 for a model of 0 to 1": ("unit", (), QUANTIZED, None),
    "samples of another scale for a quantized .tflite file": ("quantized", (), COMPILED, 7),
    "a model that gives the same answer to everything": ("constant", UNIT, QUANTIZED, 7),
    "a model with more classes than the data": ("four", UNIT, QUANTIZED, 4),
    "softmax applied twice": ("twice", UNIT, QUANTIZED, 0),
    "a loaded model whose batch norms saw too few training steps": ("slow", UNIT, QUANTIZED, None),
    "quantize for a file that is quantized already": ("quantized", UNIT, QUANTIZED, 2),
    "a model that is not compiled": ("quantized", UNIT, COMPILED, 0),
    "a model that is too small for the accelerator": ("quantized", UNIT, COMPILED, 0),
    "images of another size than the model's input": ("unit", [{"pad": {"size": [24, 24]}}, *UNIT], QUANTIZED, 4),
}
"""The attribute of Models, the preprocessing, the stages, and the exit code for a mistake with ordinary photos."""


@pytest.mark.parametrize("name", WITH_PHOTOS)
def test_a_mistake_with_photos(project: Project, models: Models, name: str) -> None:
    model, preprocess, stages, code = WITH_PHOTOS[name]
    source = project.folders(*photos(300 if model == "slow" else 150))
    tell(name, project.run(project.pipeline(getattr(models, model), source, preprocess, stages), code=code))


@mistake("BGR images for a model of RGB")
def test_the_order_of_the_channels(project: Project, models: Models) -> str:
    x, y = photos()
    return project.run(project.pipeline(models.unit, project.folders(x[..., ::-1], y), UNIT))


@mistake("class names in another order than the model's outputs")
def test_the_order_of_the_classes(project: Project, models: Models) -> str:
    source = project.folders(*photos())
    source["folder"]["classes"] = ["beet", "cherry", "apple"]
    return project.run(project.pipeline(models.unit, source, UNIT), code=7)


@mistake("a model that is no better than the most frequent class")
def test_a_useless_model(project: Project, models: Models) -> str:
    x, y = photos()
    source = project.npz(x=x / np.float32(255), y=np.random.default_rng(3).permutation(y))
    return project.run(project.pipeline(models.unit, source), code=7)


@mistake("a name in classes without samples")
def test_a_class_without_samples(project: Project, models: Models) -> str:
    source = project.folders(*photos())
    source["folder"]["classes"] = [*CLASSES, "dill"]
    return project.run(project.pipeline(models.four, source, UNIT), code=0)


@mistake("a class without test samples")
def test_a_class_without_test_samples(project: Project, models: Models) -> str:
    x, y = photos()
    project.folders(x[:90], y[:90], "train")
    source = project.folders(x[90:][y[90:] < 2], y[90:][y[90:] < 2], "test")
    return project.run(project.pipeline(models.unit, source, UNIT), code=0)


@mistake("the same samples in train and test")
def test_a_leak(project: Project, models: Models) -> str:
    x, y = photos()
    project.folders(x[:100], y[:100], "train")
    source = project.folders(x[90:], y[90:], "test")
    return project.run(project.pipeline(models.unit, source, UNIT), code=0)


# --- photos -------------------------------------------------------------------------------


def with_photo(project: Project, name: str, write: Callable[[Path], None]) -> dict[str, Any]:
    """Return a source of photos that contains an unusual one."""
    source = project.folders(*photos())
    write(project.folder / "photos" / "apple" / name)
    return source


def heic(path: Path) -> None:
    content = b"heic" + bytes(4) + b"mif1heic"
    path.write_bytes(struct.pack(">I", len(content) + 8) + b"ftyp" + content + bytes(100))


def rotated(path: Path) -> None:
    Image.fromarray(photos()[0][0]).save(path, exif=turned(6), quality=100)


def animated(path: Path) -> None:
    frames = [Image.new("RGB", (SIDE, SIDE), (value, 0, 0)) for value in (50, 200)]
    frames[0].save(path, format="GIF", save_all=True, append_images=frames[1:])


@mistake("photos that are rotated by their EXIF orientation")
def test_rotated_photos(project: Project, models: Models) -> str:
    source = with_photo(project, "odd.jpg", rotated)
    samples = ImageFolder(path=source["folder"]["path"]).load()
    index = next(number for number in range(151) if "odd" in samples.describe(number))
    content = (project.folder / "photos" / "apple" / "odd.jpg").read_bytes()
    np.testing.assert_array_equal(images.decode_file(content), samples.read(index))  # as on the device
    return project.run("data", project.pipeline(models.unit, source, UNIT), code=0)


DEEP = Image.fromarray(np.full((SIDE, SIDE), 40_000, np.uint16))
CMYK = Image.new("CMYK", (SIDE, SIDE), (1, 2, 3, 4))
WITH_AN_ODD_PHOTO: dict[str, tuple[str, Callable[[Path], None], str, int]] = {
    "HEIC photos beside others": ("odd.heic", heic, "run", 0),
    "a HEIC photo with the suffix .jpg": ("odd.jpg", heic, "run", 3),
    "images of 16 bits": ("odd.png", DEEP.save, "data", 0),
    "CMYK images": ("odd.jpg", CMYK.save, "data", 0),
    "animated GIF files": ("odd.gif", animated, "run", 0),
    "a GIF file with the suffix .png": ("odd.png", animated, "run", 3),
    "images of different sizes": ("odd.png", Image.new("RGB", (20, 12)).save, "run", 3),
}
"""The name of the photo, the function that writes it, the command and its exit code for a mistake with one photo."""


@pytest.mark.parametrize("name", WITH_AN_ODD_PHOTO)
def test_a_mistake_with_an_odd_photo(project: Project, models: Models, name: str) -> None:
    file, write, command, code = WITH_AN_ODD_PHOTO[name]
    tell(name, project.run(command, project.pipeline(models.unit, with_photo(project, file, write), UNIT), code=code))


@mistake("a HEIC photo among the photos for export --calibrate")
def test_a_heic_photo_for_export(project: Project, models: Models) -> str:
    with_photo(project, "odd.jpg", heic)
    return project.run("export", models.unit, "--calibrate", project.folder / "photos", code=0)


@mistake("images of another aspect ratio than the model's input")
def test_distorted_images(project: Project, models: Models) -> str:
    x, y = photos(side=48)
    source = project.folders(x[:, :, :12], y)
    return project.run(project.pipeline(models.unit, source, [{"resize": {"size": [SIDE, SIDE]}}, *UNIT]))


@mistake("colour images for a model of grey images")
def test_colour_for_grey(project: Project) -> str:
    (project.folder / "grey.tflite").write_bytes(tiny.classifier((SIDE, SIDE, 1)))
    path = project.pipeline(project.folder / "grey.tflite", project.folders(*photos()), UNIT, ["compile"])
    return project.run(path, code=4)


# --- arrays, tables, sounds ---------------------------------------------------------------

X, Y = photos()
WITH_ARRAYS: dict[str, tuple[dict[str, Any], int]] = {
    "class indices from 1 instead of 0": ({"x": X, "y": Y + 1}, 4),
    "grey images for a model of colour images": ({"x": X[..., 0], "y": Y}, 4),
    "channels-first arrays": ({"x": X.transpose(0, 3, 1, 2), "y": Y}, 4),
    "samples and labels that are swapped": ({"x": Y, "y": X}, 3),
    "a file without labels": ({"x": X}, 3),
    "one-hot labels": ({"x": X, "y": np.eye(3)[Y]}, 3),
}
"""The arrays and the exit code for a mistake with them."""


@pytest.mark.parametrize("name", WITH_ARRAYS)
def test_a_mistake_with_arrays(project: Project, models: Models, name: str) -> None:
    arrays, code = WITH_ARRAYS[name]
    tell(name, project.run(project.pipeline(models.unit, project.npz(**arrays), UNIT), code=code))


@mistake("a series [n, 100, 1] for a model of [n, 100]")
def test_a_series_with_a_channel(project: Project) -> str:
    import keras

    series = keras.Input((100,))
    keras.Model(series, keras.layers.Dense(3)(series)).save(project.folder / "series.keras")
    x = np.random.default_rng(0).random((90, 100, 1), np.float32)
    path = project.pipeline(project.folder / "series.keras", project.npz(x=x, y=np.arange(90) % 3))
    output = project.run(path, code=4)
    step = re.search(r"add `(.*?: {.*?})` to data.preprocess", output)
    assert step is not None
    followed = json.loads(path.read_text())
    followed["data"]["preprocess"] = [{"reshape": {"shape": [100]}}]
    assert step[1] == "reshape: {shape: [100]}"
    path.write_text(json.dumps(followed))
    assert "the model takes" not in project.run(path)
    return output


@mistake("NaN or infinity in a sample")
def test_nan(project: Project, models: Models) -> str:
    x, y = photos()
    x = x / np.float32(255)
    x[5, 3, 3, 0] = np.nan
    return project.run(project.pipeline(models.unit, project.npz(x=x, y=y)), code=3)


def table(project: Project, rows: Sequence[str], **settings: Any) -> dict[str, Any]:
    """Return a source of photos with a table of labels."""
    folder = project.folder / "table"
    folder.mkdir()
    for index, image in enumerate(photos(60)[0]):
        Image.fromarray(image).save(folder / f"{index}.png")
    (folder / "labels.csv").write_text("\n".join(["file,label", *rows, ""]))
    return {"folder": {"path": str(folder), **settings}}


LABELLED = [f"{index}.png,{CLASSES[label]}" for index, label in enumerate(photos(60)[1])]


WITH_A_TABLE: dict[str, tuple[str, dict[str, Any], int]] = {
    "a missing file in labels.csv": ("missing.png,apple", {}, 3),
    "a label that is not in classes": ("7.png,bet", {"classes": CLASSES}, 3),
    "a misspelt label without classes": ("7.png,bet", {}, 4),
}
"""The row in place of another one, the settings of the source, and the exit code for a mistake with a table."""


@pytest.mark.parametrize("name", WITH_A_TABLE)
def test_a_mistake_with_a_table(project: Project, models: Models, name: str) -> None:
    row, settings, code = WITH_A_TABLE[name]
    source = table(project, [*LABELLED[:7], row, *LABELLED[8:]], **settings)
    tell(name, project.run(project.pipeline(models.unit, source, UNIT), code=code))


@mistake("a WAV file of another sample rate")
def test_another_rate(project: Project) -> str:
    random = np.random.default_rng(0)
    for index in range(60):
        path = project.folder / "words" / CLASSES[index % 3] / f"{index}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data_files.sound(random.integers(-3000, 3000, 1600), 44_100 if index == 9 else 16_000))
    source = {"wav": {"path": str(project.folder / "words"), "rate": 16_000, "seconds": 0.1}}
    return project.run(
        "data", project.pipeline({"builder": "digits_cnn"}, source, stages=["train", "quantize"]), code=3
    )


@mistake("calibration samples that are not there")
def test_absent_calibration_samples(project: Project, models: Models) -> str:
    return project.run("export", models.unit, "--calibrate", "nowhere", code=3)


# --- models -------------------------------------------------------------------------------


@mistake("a softmax over many classes with low confidence")
def test_ties(project: Project) -> str:
    import keras

    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 3))
    start = keras.initializers.RandomNormal(stddev=0.03)
    scores = keras.layers.Dense(60, activation="softmax", kernel_initializer=start)(keras.layers.Flatten()(image))
    model = keras.Model(image, scores)
    model.save(project.folder / "ties.keras")
    x = np.random.default_rng(0).random((300, 8, 8, 3), np.float32)
    y = np.asarray(model(x)).argmax(axis=1)
    y[:60] = np.arange(60)
    return project.run(project.pipeline(project.folder / "ties.keras", project.npz(x=x, y=y)))


@mistake("a Lambda layer")
def test_a_lambda_layer(project: Project) -> str:
    import keras

    image = keras.Input((SIDE, SIDE, 3))
    keras.Model(image, keras.layers.Lambda(lambda x: x * 2, name="lambda")(image)).save(project.folder / "code.keras")
    return project.run("export", project.folder / "code.keras", code=4)


@mistake("a custom layer that is not registered")
def test_a_custom_layer(project: Project) -> str:
    import keras

    class Mine(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    image = keras.Input((SIDE, SIDE, 3))
    keras.Model(image, Mine()(image)).save(project.folder / "mine.keras")
    return project.run("export", project.folder / "mine.keras", "--trust", code=4)


@mistake("a file that is compiled already (_edgetpu.tflite)")
def test_a_compiled_file(project: Project) -> str:
    path = project.folder / "model_edgetpu.tflite"
    path.write_bytes(packages.compiled(tiny.classifier((SIDE, SIDE, 3))))
    assert "the compiler will reject this model: it is already compiled" in project.run("check", path, code=10)
    return project.run("export", path, code=4)


@mistake("a .tflite file with Flex operators")
def test_flex_operators(project: Project) -> str:
    path = project.folder / "flex.tflite"
    tensors = {"x": Tensor((1, 8)), "y": Tensor((1, 8))}
    path.write_bytes(one_op.content(tensors, [Op("FlexErf", "x", "y", custom=True)], "x", "y"))
    legalized = project.run("legalize", path, project.folder / "out.tflite", code=10)
    assert "does not know the custom operator FlexErf" in legalized
    return project.run("export", path, code=4)


@mistake("a Keras model with an open input size")
def test_an_open_input(project: Project) -> str:
    import keras

    image = keras.Input((None, None, 3))
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(4, 3)(image))
    keras.Model(image, keras.layers.Dense(3)(x)).save(project.folder / "open.keras")
    source = project.npz(x=photos()[0])
    source["npz"]["y"] = None
    return project.run(project.pipeline(project.folder / "open.keras", source, UNIT), code=0)


@mistake("an ONNX model with open dimensions")
def test_an_open_onnx_input(project: Project) -> str:
    path = project.folder / "open.onnx"
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"])]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4, "h", "w"])]
    kernel = numpy_helper.from_array(np.ones((4, 3, 1, 1), np.float32), "w")
    graph = helper.make_graph(nodes, "g", inputs, outputs, [kernel])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return project.run("export", path, code=4)


BUILDER = """
import keras

def build(input_shape, classes):
    layers = keras.layers
    image = x = keras.Input(input_shape)
    for filters in (8, 16, 16):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.999)(x))
    return keras.Model(image, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))
"""


@mistake("batch norms with momentum 0.999 and few training steps")
def test_slow_batch_norms(project: Project) -> str:
    """126 steps: the batch norms are recalibrated after the training, so the model is usable."""
    (project.folder / "net.py").write_text(BUILDER)
    model = {"builder": "net.py", "trust": True}
    stages = [{"train": {"epochs": 18, "batch_size": 16}}, "quantize"]
    source = project.folders(*photos(160))
    output = project.run(project.pipeline(model, source, UNIT, stages), code=0)
    record = json.loads((project.folder / "runs" / "t" / "report.json").read_text())
    norms = record["stages"][1]["facts"]["batch_norms"]
    assert norms["kept"]
    assert record["models"]["result"]["measurements"]["accuracy"]["value"] > 0.9
    return output


# --- the pipeline file --------------------------------------------------------------------


IN_THE_FILE: dict[str, dict[str, Any]] = {
    "a misspelt key in the pipeline file": {"bugdet": {"accuracy_drop": 0.1}},
    "a misspelt stage": {"stages": ["quantise"]},
    "a misspelt task": {"data": {"source": {"npz": {"file": "data.npz"}}, "task": "clasification"}},
}
"""The keys of the pipeline file for a mistake in it."""


@pytest.mark.parametrize("name", IN_THE_FILE)
def test_a_mistake_in_the_pipeline_file(project: Project, models: Models, name: str) -> None:
    tell(name, project.run(project.pipeline(models.unit, project.npz(x=[1]), **IN_THE_FILE[name]), code=2))
