"""ONNX files in a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenes
import tiny
from one_node import Model, constant, node

from compress.core.artifact import Kind
from compress.core.errors import CorallineError, ModelError
from compress.learning.quantization import export
from compress.model.tflite import graph
from compress.pipeline import runner as runs
from compress.pipeline.schema import load

pytestmark = pytest.mark.tensorflow


def project(folder: Path, nodes: list[Any], *stages: object) -> Path:
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
    path = project(tmp_path / "project", nodes, {"quantize": {"ranges": "minmax"}})
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


def test_what_cannot_be_imported_ends_the_run_with_all_reasons(keras: object, tmp_path: Path) -> None:
    nodes = [node("Einsum", ["x"], ["a"], equation="ijkl->ijkl"), node("Hardmax", ["a"], ["y"])]
    path = project(tmp_path / "project", nodes, "quantize")
    with pytest.raises(
        ModelError, match=r"2 operators cannot be converted to Keras layers: Einsum 'a': .*; Hardmax 'y': "
    ):
        runs.run(load(path), tmp_path / "out", tiny.Notes())


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
    path = project(tmp_path / "project", [node("Relu", ["x"], ["y"])], "quantize")
    (path.parent / "model.keras").write_bytes(b"")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))
    with pytest.raises(CorallineError, match=says):
        runs.run(load(path), tmp_path / "out", tiny.Notes())
