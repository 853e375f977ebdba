"""Models in a pipeline: .onnx files, float .tflite files, also those that Keras has no layers for, and model.keras."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scenes
import tiny
from one_node import Model, constant, node
from one_op import Op, Tensor, content, integers

from compress.core.artifact import MODEL_KERAS, Kind
from compress.core.errors import CorallineError
from compress.learning.quantization import export
from compress.model.tflite import graph
from compress.pipeline import runner as runs
from compress.pipeline.schema import load
from compress.pipeline.stages import working_model

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras, reading variables
]


def onnx_project(folder: Path, nodes: list[Any], *stages: object) -> Path:
    folder.mkdir()
    (folder / "model.onnx").write_bytes(Model(nodes, {"x": ("N", 1, "h", "w")}, ["y"]).proto().SerializeToString())
    tiny.data(folder / "data.npz")
    (folder / "model.tflite").touch()  # so that `tiny.project` writes no other model and data
    return tiny.project(folder, stages, model={"file": "model.onnx", "shape": {"x": [1, 1, 4, 4]}})


@pytest.mark.essential
def test_a_file_is_imported_quantized_and_measured(
    keras: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    draw = np.random.default_rng(0)

    def floats(*shape: int) -> Any:
        return constant(draw.normal(0, 0.5, shape).astype(np.float32))

    nodes = [
        node("Conv", ["x", floats(8, 1, 3, 3), floats(8)], ["c"], pads=[1] * 4),
        node("Clip", ["c", constant(np.float32(0)), constant(np.float32(6))], ["r"]),
        node("GlobalAveragePool", ["r"], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("Gemm", ["f", floats(8, 3), floats(3)], ["l"]),
        node("Softmax", ["l"], ["y"], axis=1),
    ]
    notes = tiny.Notes()
    path = onnx_project(tmp_path / "project", nodes, {"quantize": {"ranges": "minmax"}})
    record = runs.run(load(path), tmp_path / "out", notes).to_json()
    assert [row["kind"] for row in record["stages"]] == [Kind.KERAS, Kind.TFLITE]
    facts = record["stages"][0]["facts"]
    assert (facts["operators"], facts["parameters"]) == (6, 107)
    assert facts["parity"]["max_rel"] < 1e-5
    assert any("its input 'x', [1, 1, 4, 4], is now channel-last: [1, 4, 4, 1]" in note for note in notes.noted)
    assert "model.onnx: its input 'x' has the requested shape [1, 1, 4, 4]" in notes.noted
    content = (tmp_path / "out" / "tiny" / "model.tflite").read_bytes()
    assert not export.float_operators(content)
    assert {"TRANSPOSE", "RESHAPE"}.isdisjoint(operator.name for operator in graph.parse(content).operators)


def test_a_detector_keeps_how_its_outputs_are_read(keras: object, tmp_path: Path) -> None:
    draw, folder = np.random.default_rng(0), tmp_path / "project"
    head = constant(draw.normal(0, 0.1, (4, 3, 8, 8)).astype(np.float32))
    classes = constant(draw.normal(0, 0.1, (2, 3, 8, 8)).astype(np.float32))
    nodes = []
    for name, kernel, last in (("boxes", head, 4), ("scores", classes, 2)):
        nodes += [
            node("Conv", ["x", kernel], [f"{name}_map"], strides=[8, 8]),
            node("Transpose", [f"{name}_map"], [f"{name}_last"], perm=[0, 2, 3, 1]),
            node("Reshape", [f"{name}_last", constant(np.array([-1, 64, last]))], [name]),
        ]
    model = Model(nodes, {"x": ("N", 3, 64, 64)}, ["boxes", "scores"])
    detector = {"maps": [{"cells": [8, 8], "boxes": [[0.3, 0.3]]}], "scores": "logits"}
    stages = [{"quantize": {"ranges": "minmax", "equalize": "off", "held_out_samples": 8}}]
    path = scenes.pipeline(folder, (24, 8), {"file": "model.onnx", "detector": detector}, stages)
    (folder / "model.onnx").write_bytes(model.proto().SerializeToString())
    record = runs.run(load(path), tmp_path / "out", tiny.Notes()).to_json()
    assert record["stages"][0]["facts"]["specification"]["maps"] == detector["maps"]
    assert record["models"]["result"]["measurements"].keys() >= {"ap", "ap50"}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"file": "model.onnx"}, "its input 'x' has open dimensions: .*`shape` under `model` in a pipeline"),
        (
            {"file": "model.keras", "shape": {"x": [1, 4, 4, 1]}},
            "'shape' cannot be used with this format; allowed: 'shape' with an",
        ),
        ({"builder": "digits_cnn", "shape": {"x": [1, 4, 4, 1]}}, "'shape' can be used only with 'file'"),
        ({"file": "model.onnx", "shape": {"x": [1, 1, 0, 4]}}, "greater than 0"),
    ],
)
def test_shapes_that_are_missing_or_not_for_this_model(model: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = onnx_project(tmp_path / "project", [node("Relu", ["x"], ["y"])], "quantize")
    (path.parent / "model.keras").write_bytes(b"")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))
    with pytest.raises(CorallineError, match=says):
        runs.run(load(path), tmp_path / "out", tiny.Notes())


# --- float .tflite files ----------------------------------------------------------------


def classifier(resize: bool) -> bytes:
    """Return a model of convolution, mean and dense layer; `resize` adds one with aligned corners, unknown to Keras."""
    draw = np.random.default_rng(0).normal
    kernel, dense = draw(0, 0.5, (8, 3, 3, 1)), draw(0, 1, (3, 8))
    tensors = {
        "image": Tensor((1, 4, 4, 1), "FLOAT32"),
        "kernel": Tensor((8, 3, 3, 1), "FLOAT32", kernel),
        "bias": Tensor((8,), "FLOAT32", 0.1),
        "conv": Tensor((1, 4, 4, 8), "FLOAT32"),
        "size": integers(7, 7),
        "large": Tensor((1, 7, 7, 8), "FLOAT32"),
        "axes": integers(1, 2),
        "mean": Tensor((1, 8), "FLOAT32"),
        "dense": Tensor((3, 8), "FLOAT32", dense - dense.mean(axis=0)),
        "zero": Tensor((3,), "FLOAT32", 0.0),
        "scores": Tensor((1, 3), "FLOAT32"),
    }
    strides = {"strideH": 1, "strideW": 1, "fusedActivationFunction": 1}
    ops = [
        Op("CONV_2D", ["image", "kernel", "bias"], ["conv"], 1, strides),
        *([Op("RESIZE_BILINEAR", ["conv", "size"], ["large"], 1, {"alignCorners": True})] if resize else []),
        Op("MEAN", ["large" if resize else "conv", "axes"], ["mean"]),
        Op("FULLY_CONNECTED", ["mean", "dense", "zero"], ["scores"]),
    ]
    return content(tensors, ops, ["image"], ["scores"])


def float_project(folder: Path, model: bytes, *stages: object) -> Path:
    folder.mkdir()
    (folder / "model.tflite").write_bytes(model)
    tiny.data(folder / "data.npz")
    return tiny.project(folder, stages)


@pytest.mark.essential
def test_a_file_without_layers_is_quantized_as_it_is_and_measured(
    keras: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    path, notes = (
        float_project(tmp_path / "project", classifier(resize=True), "quantize", "compile", "package"),
        tiny.Notes(),
    )
    record = runs.run(load(path), tmp_path / "out", notes).to_json()
    rows = {row["id"]: row for row in record["stages"]}
    assert [row["kind"] for row in record["stages"]] == [Kind.FLOAT_TFLITE, Kind.TFLITE, Kind.COMPILED, Kind.BUNDLE]
    facts = rows["quantize"]["facts"]
    assert facts["ranges"] == "chosen by the converter, for a file without layers"
    assert facts["agreement"] > 0.9
    assert any("the converter chooses the ranges" in note for note in notes.noted)
    assert any("RESIZE_BILINEAR 'operator 1, large': Keras samples at pixel centres" in note for note in notes.noted)
    assert not export.float_operators((tmp_path / "out" / "tiny" / "model.tflite").read_bytes())
    assert rows["model"]["measurements"]["accuracy"]["value"] is not None
    assert "chosen by the converter" in (tmp_path / "out" / "tiny" / "report.html").read_text()


def test_the_original_is_the_file_itself(keras: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    model = classifier(resize=False)
    path = float_project(tmp_path / "project", model, {"quantize": {"ranges": "minmax"}})
    record = runs.run(load(path), tmp_path / "out", tiny.Notes()).to_json()
    first, quantized = record["stages"]
    assert first["kind"] == Kind.KERAS
    assert first["measurements"]["size_bytes"]["value"] == len(model)
    assert first["facts"]["operators"] == 3
    assert {trial["step"] for trial in quantized["facts"]["tried"]} >= {"ranges", "equalization", "bias"}
    assert (tmp_path / "out" / "tiny" / "model.keras").exists()


# --- model.keras ------------------------------------------------------------------------


def test_no_name_makes_the_archive_an_hdf5_file_too(keras: Any, tmp_path: Path) -> None:
    """HDF5 looks for its signature at 512 bytes and at every doubling; the weights must not begin there."""
    starts = []
    for length in range(1, 200, 33):
        values = keras.Input((2,))
        model = keras.Model(values, keras.layers.Dense(1)(values), name="m" * length)
        working_model.write_keras(model, tmp_path)
        assert not h5py.is_hdf5(tmp_path / MODEL_KERAS)
        with zipfile.ZipFile(tmp_path / MODEL_KERAS) as archive:
            starts += [info.header_offset for info in archive.infolist() if info.filename.endswith(".h5")]
    assert starts == [0] * 7
