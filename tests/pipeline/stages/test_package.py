"""The package stage: a bundle that verifies, and that reproduces its golden outputs from its own content alone."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import data_files
import numpy as np
import pytest
import tiny
from PIL import Image

import compress
from compress.bundling import packing, runner_pyz
from compress.core.artifact import BUNDLE_FILE, MODEL_COMPILED, RUNNER_FILE, Artifact, Kind
from compress.core.errors import ModelError
from compress.data.dataset import Dataset
from compress.data.source import Samples, Source
from compress.data.sources import ImageFolder, Npz
from compress.learning.context import Context
from compress.model.tflite import graph
from compress.model.tflite.interpreter import LoadedModel
from compress.pipeline.stages.package import Package
from compress.targets import load
from deploy.contract import bundle
from deploy.contract.preprocessing import Preprocessing

STEPS = [{"scale": {"from": [0, 1], "to": [0, 1]}}, {"resize": {"size": [4, 4]}}]


@pytest.fixture
def artifact(tmp_path: Path) -> Callable[..., Artifact]:
    def make(**files: bytes) -> Artifact:
        named = {f"{name}.tflite": content for name, content in files.items()}
        folder = tmp_path / hashlib.sha256(b"".join(named.values())).hexdigest()
        folder.mkdir(exist_ok=True)
        for name, content in named.items():
            (folder / name).write_bytes(content)
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in named.items()}
        return Artifact("0" * 64, Kind.COMPILED, folder, digests, {}, 0.0)

    return make


@pytest.fixture
def context(tmp_path: Path, artifact: Any) -> Callable[..., Context]:
    """Return a function for contexts with 4x5 samples and a float original."""
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(1).random((90, 4, 5, 1), np.float32), y=np.arange(90) % 3)
    data = Dataset(
        Npz(file=str(tmp_path / "data.npz"), classes=("tea", "caf\u00e9", "\u6c34")), Preprocessing(STEPS), None
    )

    def make(name: str = "work", original: bytes | None = None) -> Context:
        (tmp_path / name).mkdir()
        first = artifact(model=original or tiny.classifier(int8=False))
        return Context("tiny", tmp_path / name, data, first, load("edgetpu"), 0, False, tiny.Notes())

    return make


class Sounds(Source):
    """Sounds of two lengths, int16, of three classes."""

    name = "sounds"

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def load(self) -> Samples:
        random = np.random.default_rng(2)
        sounds = [(random.normal(size=150 + 20 * (index % 2)) * 3000).astype(np.int16) for index in range(90)]
        return Samples(np.arange(90) % 3, ("a", "b", "c"), sounds.__getitem__)


def test_sounds_come_raw_and_give_the_same_on_the_device(artifact: Any, context: Any, tmp_path: Path) -> None:
    steps = [
        {"length": {"samples": 160}},
        {"log_mel": {"rate": 8000, "frame": 64, "step": 32, "bins": 4, "log": "log10", "offset": 0.01}},
        {"scale": {"from": [-2, 1]}},
    ]
    data = Dataset(Sounds(), Preprocessing(steps), None)
    around = replace(context(), data=data)
    Package(evaluation=12).run(artifact(model=tiny.classifier()), around)
    path = around.folder / BUNDLE_FILE
    read = bundle.read(str(path))
    assert read.preprocessing.rate == 8000
    assert read.array("golden-input-0.npy").dtype == np.int16
    assert {read.array(name).shape for name in read.manifest["golden"]["inputs"]} <= {(150,), (170,)}
    samples, labels = read.evaluation()
    assert (len(samples), len(labels), {sample.ndim for sample in samples}) == (12, 12, {1})
    (around.folder / "x.wav").write_bytes(data_files.sound(samples[0]))
    np.save(around.folder / "x.npy", samples[0])
    ran = [sys.executable, around.folder / RUNNER_FILE]
    done = [
        subprocess.run([*ran, *more, "--json"], capture_output=True, text=True, check=False, cwd=tmp_path)
        for more in (["verify", path], ["run", path, around.folder / "x.wav", around.folder / "x.npy"], ["bench", path])
    ]
    assert [process.returncode for process in done] == [0, 0, 0], [process.stderr for process in done]
    assert {comparison["verdict"] for comparison in json.loads(done[0].stdout)["golden"].values()} == {"equal"}
    first, second = (answer["top"] for answer in json.loads(done[1].stdout)["answers"])
    assert first == second
    accuracy = json.loads(done[2].stdout)["accuracy"]
    assert accuracy["models"]["int8"]["accuracy"] == read.manifest["evaluation"]["metrics"]["accuracy_int8"] | {
        "note": accuracy["models"]["int8"]["accuracy"]["note"]
    }


def test_the_runner_takes_the_files_of_the_training(artifact: Any, context: Any, tmp_path: Path) -> None:
    """Colour photos that are trained on as grey photos."""
    random = np.random.default_rng(5)
    for index in range(60):
        path = tmp_path / "photos" / "abc"[index % 3] / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (4, 5, 3), np.uint8)).save(path)
    source = ImageFolder(path=str(tmp_path / "photos"), channels=1)
    data = Dataset(source, Preprocessing([{"scale": {"from": [0, 255]}}, {"resize": {"size": [4, 4]}}]), None)
    around = replace(context(), data=data)
    read = evaluated(around, artifact)
    assert read.manifest["decoding"] == {"image_channels": 1, "orientation": "exif"}
    assert (read.decoding.image_channels, read.decoding.orientation) == (1, "exif")
    np.save(tmp_path / "x.npy", source.load().read(0))
    arguments = [
        around.folder / RUNNER_FILE,
        "run",
        around.folder / BUNDLE_FILE,
        path.parents[1] / "a" / "00.png",
        "x.npy",
    ]
    done = subprocess.run(
        [sys.executable, *arguments, "--json"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    first, second = (answer["top"] for answer in json.loads(done.stdout)["answers"])
    assert first == second


@pytest.mark.essential
def test_the_bundle(artifact: Any, context: Any) -> None:
    around = context()
    facts = Package(golden=3).run(artifact(model=tiny.classifier()), around)
    assert sorted(path.name for path in around.folder.iterdir()) == [BUNDLE_FILE, RUNNER_FILE]
    assert (around.folder / RUNNER_FILE).read_bytes() == runner_pyz.content()
    read = bundle.read(str(around.folder / BUNDLE_FILE))
    size = (around.folder / BUNDLE_FILE).stat().st_size
    opens = "on boards with TensorFlow 2.5 too"
    metrics = read.manifest["evaluation"]["metrics"]
    confidence = read.manifest["confidence"]
    assert (confidence["logits"], sorted(confidence["measured"])) == ("scores", ["test", "unknown", "validation"])
    expected = {"members": sorted(read.members), "bytes": size, "original_opens": opens, "evaluation": metrics}
    assert facts == {**expected, "confidence": confidence}
    inputs = [f"golden-input-{index}.npy" for index in range(3)]
    outputs = {role: f"golden-output-{role}.npy" for role in ("original", "int8")}
    assert sorted(name for name in read.members if not name.startswith("evaluation")) == sorted(
        ["original.tflite", "int8.tflite", *inputs, *outputs.values()]
    )
    assert read.members["original.tflite"] == tiny.classifier(int8=False)
    assert read.members["int8.tflite"] == tiny.classifier()
    assert read.labels == ["tea", "caf\u00e9", "\u6c34"]
    assert read.manifest["name"] == "tiny"
    assert read.manifest["coralline"] == compress.__version__
    assert read.manifest["golden"] == {"inputs": inputs, "outputs": outputs, "machine": platform.machine()}
    assert read.manifest["preprocessing"] == {"version": 1, "digest": Preprocessing(STEPS).digest, "steps": STEPS}
    (input_entry,) = read.manifest["models"]["int8"]["inputs"]
    assert input_entry == {
        "name": "image",
        "tensor": "image",
        "shape": [1, 4, 4, 1],
        "dtype": "int8",
        "scale": pytest.approx(1 / 255),
        "zero_point": -128,
    }
    for index, raw in enumerate(around.data.raw("validation", np.arange(3))):
        np.testing.assert_array_equal(read.array(inputs[index]), raw)
    assert read.array(outputs["int8"]).shape == (3, 3)
    assert read.array(outputs["int8"]).dtype == np.int8
    assert read.array(outputs["original"]).dtype == np.float32
    json.dumps(facts)


def test_a_float_original_that_old_boards_do_not_open_is_named(artifact: Any, context: Any) -> None:
    newer = graph.parse(tiny.classifier(int8=False))
    newer = replace(newer, operators=tuple(replace(op, version=op.version + 20) for op in newer.operators))
    assert load("edgetpu").newer_than_boards(newer) == ["CONV_2D 21", "FULLY_CONNECTED 21"]
    assert load("edgetpu").newer_than_boards(graph.parse(tiny.classifier(int8=False))) == []


def test_a_compiled_model_travels_along(artifact: Any, context: Any) -> None:
    around = context()
    name = MODEL_COMPILED.removesuffix(".tflite")
    Package().run(artifact(**{"model": tiny.classifier(), name: b"compiled"}), around)
    read = bundle.read(str(around.folder / BUNDLE_FILE))
    assert read.members["compiled.tflite"] == b"compiled"
    int8, compiled = read.manifest["models"]["int8"], read.manifest["models"]["compiled"]
    assert compiled == {**int8, "file": "compiled.tflite"}
    assert "compiled" not in read.manifest["golden"]["outputs"]  # only a device can run it
    assert "compiled" not in read.manifest["evaluation"]["outputs"]
    assert "edgetpu_compiler" not in read.manifest["tools"]
    again = context("again")
    compiled_artifact = replace(
        artifact(**{"model": tiny.classifier(), name: b"compiled"}), facts={"reports": [{"version": "16.0"}]}
    )
    Package().run(compiled_artifact, again)
    assert bundle.read(str(again.folder / BUNDLE_FILE)).manifest["tools"]["edgetpu_compiler"] == "16.0"


def test_equal_input_is_equal_bytes(artifact: Any, context: Any) -> None:
    first, second = context("one"), context("two")
    for around in (first, second):
        Package().run(artifact(model=tiny.classifier()), around)
    assert (first.folder / BUNDLE_FILE).read_bytes() == (second.folder / BUNDLE_FILE).read_bytes()
    third = context("three")
    Package().run(artifact(model=tiny.classifier(seed=1)), third)
    assert (first.folder / BUNDLE_FILE).read_bytes() != (third.folder / BUNDLE_FILE).read_bytes()


def test_no_more_golden_samples_than_there_are(artifact: Any, context: Any) -> None:
    around = context()
    Package(golden=100).run(artifact(model=tiny.classifier()), around)
    count = len(around.data.labels("validation"))
    assert 0 < count < 100
    read = bundle.read(str(around.folder / BUNDLE_FILE))
    assert len(read.manifest["golden"]["inputs"]) == count
    assert len(read.array("golden-output-int8.npy")) == count


def test_a_model_for_other_samples(artifact: Any, context: Any) -> None:
    around = context(original=tiny.classifier((5, 5, 1), int8=False))
    with pytest.raises(ModelError, match=r"takes \[1, 5, 5, 1\], but the data gives \[1, 4, 4, 1\]"):
        Package().run(artifact(model=tiny.classifier()), around)
    assert list(around.folder.iterdir()) == []


def test_a_file_that_is_no_model(artifact: Any, context: Any) -> None:
    around = context()
    with pytest.raises(ModelError, match="the TFLite runtime refuses it"):
        Package().run(artifact(model=b"no model"), around)
    assert list(around.folder.iterdir()) == []


# --- the evaluation sample --------------------------------------------------------------


def evaluated(around: Context, artifact: Any, **settings: Any) -> bundle.Bundle:
    Package(**settings).run(artifact(model=tiny.classifier()), around)
    return bundle.read(str(around.folder / BUNDLE_FILE))


def test_the_evaluation_sample(artifact: Any, context: Any, tmp_path: Path) -> None:
    around = context()
    read = evaluated(around, artifact, evaluation=10)
    samples, labels = read.evaluation()
    entry = read.manifest["evaluation"]
    assert entry["split"] == "test"
    assert entry["inputs"] == ["evaluation-inputs-0.npy"]  # all of one shape: one stack
    assert len(samples) == len(labels) == 10
    assert sorted(np.bincount(labels)) == [3, 3, 4]  # a third each, as in the data
    there = around.data.raw("test", np.arange(len(around.data.labels("test"))))
    indices = [[np.array_equal(sample, other) for other in there].index(True) for sample in samples]
    assert len(set(indices)) == 10
    np.testing.assert_array_equal(around.data.labels("test")[indices], labels)
    right, predictions = {}, {}
    for role, int8 in (("original", False), ("int8", True)):
        (tmp_path / "model.tflite").write_bytes(tiny.classifier(int8=int8))
        model = LoadedModel(tmp_path / "model.tflite", reproducible=True)
        outputs = np.concatenate([model.raw(model.feed(read.preprocessing(sample))) for sample in samples])
        np.testing.assert_array_equal(read.array(entry["outputs"][role]), outputs)
        predictions[role] = outputs.argmax(axis=1)
        right[role] = int((predictions[role] == labels).sum())
        accuracy = entry["metrics"][f"accuracy_{role}"]
        assert accuracy["value"] == right[role] / 10
        assert accuracy["low"] < accuracy["value"] < accuracy["high"]
        assert accuracy["how"] == "measured"
        assert "10 samples" in accuracy["note"]
    assert 0 < right["int8"] < 10
    assert entry["metrics"]["accuracy_drop"]["value"] == (right["original"] - right["int8"]) / 10
    assert entry["metrics"]["agreement"]["value"] == np.mean(predictions["original"] == predictions["int8"])


def test_samples_of_several_shapes_are_stacked_by_shape(artifact: Any, context: Any) -> None:
    around = context()
    shapes = [(4, 5, 1), (6, 6), (4, 5, 1), (3, 3, 1)]

    class Uneven(Dataset):
        def raw(self, split: Any, indices: Any) -> list[np.ndarray]:
            return [np.full(shapes[index % 4], index, "<u2") for index in indices]

    data = Uneven(around.data.source, around.data._preprocessing, None)
    read = evaluated(replace(around, data=data), artifact, evaluation=12)
    samples, labels = read.evaluation()
    stacks = [read.array(name) for name in read.manifest["evaluation"]["inputs"]]
    assert {stack.shape[1:] for stack in stacks} == set(shapes)
    assert len(stacks) == 3
    assert sum(map(len, stacks)) == len(samples) == len(labels) == 12
    for sample, label in zip(samples, labels, strict=True):
        index = int(sample.flat[0])
        assert sample.shape == shapes[index % 4]
        assert data.labels("test")[index] == label


def test_an_evaluation_sample_has_limits(artifact: Any, context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    around = context("all")
    everything = len(around.data.labels("test"))
    assert len(evaluated(around, artifact, evaluation=2000).evaluation()[1]) == everything < 100
    size = 4 * 5 * 4 + 3 * 4 + 3  # bytes of a sample and of the outputs of both models
    around = context("bytes")
    monkeypatch.setattr(packing, "MAX_EVALUATION_BYTES", 4 * size + size - 1)
    few = evaluated(around, artifact, evaluation=10)
    assert len(few.evaluation()[0]) == 4
    assert around.progress.noted == ["4 of 10 evaluation samples and their outputs fit into 474 bytes"]
    for name, count, limit in (("none", 0, size), ("small", 10, size - 1)):
        monkeypatch.setattr(packing, "MAX_EVALUATION_BYTES", limit)
        none = evaluated(context(name), artifact, evaluation=count)
        assert none.manifest["evaluation"] is None
        assert none.evaluation()[0] == []
        assert not [member for member in none.members if member.startswith("evaluation")]


def test_a_model_that_has_other_classes_than_the_data(artifact: Any, context: Any) -> None:
    with pytest.raises(ModelError, match="gives 5 scores, but the data has 3 classes"):
        Package().run(artifact(model=tiny.classifier(classes=5)), context())


# --- what the bundle depends on ---------------------------------------------------------


def test_versions_are_part_of_the_key_and_of_the_manifest(artifact: Any, context: Any) -> None:
    versions = Package().environment()
    assert versions["coralline"] == compress.__version__
    assert versions["runner"] == hashlib.sha256(runner_pyz.content()).hexdigest()
    tools = evaluated(context(), artifact).manifest["tools"]
    assert tools == {name: version for name, version in versions.items() if name != "runner"}
    assert tools["numpy"] == np.__version__
    assert tools["python"] == platform.python_version()
    assert {"tensorflow", "keras", "tf-keras", "ai-edge-litert"} < tools.keys()
