"""Float .tflite files in a pipeline, including those that Keras has no layers for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
from one_op import Op, Tensor, content, integers

from compress.core.artifact import Kind
from compress.core.errors import ModelError
from compress.learning.quantization import export
from compress.pipeline import runner as runs
from compress.pipeline.schema import load

pytestmark = pytest.mark.tensorflow


def classifier(resize: bool, outputs: int = 1) -> bytes:
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
    return content(tensors, ops, ["image"], ["scores", "mean"][:outputs])


def project(folder: Path, model: bytes, *stages: object) -> Path:
    folder.mkdir()
    (folder / "model.tflite").write_bytes(model)
    tiny.data(folder / "data.npz")
    return tiny.project(folder, stages)


@pytest.mark.essential
def test_a_file_without_layers_is_quantized_as_it_is_and_measured(
    keras: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    path, notes = project(tmp_path / "project", classifier(resize=True), "quantize", "compile", "package"), tiny.Notes()
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
    path = project(tmp_path / "project", model, {"quantize": {"ranges": "minmax"}})
    record = runs.run(load(path), tmp_path / "out", tiny.Notes()).to_json()
    first, quantized = record["stages"]
    assert first["kind"] == Kind.KERAS
    assert first["measurements"]["size_bytes"]["value"] == len(model)
    assert first["facts"]["operators"] == 3
    assert {trial["step"] for trial in quantized["facts"]["tried"]} >= {"ranges", "equalization", "bias"}
    assert (tmp_path / "out" / "tiny" / "model.keras").exists()


@pytest.mark.parametrize("resize", [False, True])
def test_several_outputs_do_not_fit_classes(keras: object, tmp_path: Path, resize: bool) -> None:
    path = project(tmp_path / "project", classifier(resize, outputs=2), "quantize")
    message = (
        "gives 11 scores, but the data has 3 classes" if resize else "the model has 2 outputs; allowed: one output"
    )
    with pytest.raises(ModelError, match=message):
        runs.run(load(path), tmp_path / "out", tiny.Notes())
