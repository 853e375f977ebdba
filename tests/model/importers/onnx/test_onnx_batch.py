"""The batch of ONNX files: a first dimension is a batch only if the original file computes each of its rows alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from one_node import Model, floats, node, number, whole
from onnx import helper

from compress.core.errors import ModelError
from compress.model.importers.onnx import onnx_file, original

Saved = Callable[[Model], Path]
pytestmark = pytest.mark.usefixtures("keras", "onnx_at_once")


def of_original(path: Path, feeds: Mapping[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def rows_of(*shape: int) -> Any:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def assert_rows_are_data(path: Path, file: onnx_file.OnnxFile, shape: Sequence[int]) -> None:
    """Compare the outputs of the original with those of the imported model, for which all rows are one sample."""
    model, _ = onnx_file.load(file)
    rows = rows_of(*shape)
    expected = of_original(path, {"x": rows})[0]
    actual = np.asarray(model(rows.reshape(1, *model.inputs[0].shape[1:])))
    np.testing.assert_allclose(actual.reshape(expected.shape), expected, atol=1e-5)


SOFTMAX = [node("Softmax", ["x"], ["y"], axis=0)]
CENTERED = [node("ReduceMean", ["x"], ["m"], axes=[0]), node("Sub", ["x", "m"], ["y"])]
ATTENTION = [
    node("Transpose", ["x"], ["t"], perm=[1, 0]),
    node("MatMul", ["x", "t"], ["s"]),
    node("Softmax", ["s"], ["p"], axis=-1),
    node("MatMul", ["p", "x"], ["y"]),
]
NEARLY = [
    node("Softmax", ["x"], ["s"], axis=0),
    node("Mul", ["s", number(1e-2)], ["t"]),
    node("Add", ["x", "t"], ["y"]),
]
LARGEST = [
    node("Gemm", ["x", floats(6, 5)], ["h"]),
    node("ReduceMax", ["h"], ["m"], axes=[0]),
    node("Gemm", ["m", floats(5, 4)], ["y"]),
]
MIXED = {"softmax": SOFTMAX, "centered": CENTERED, "attention": ATTENTION, "nearly": NEARLY, "largest": LARGEST}
ALONE = [node("Gemm", ["x", floats(6, 5)], ["h"]), node("Softmax", ["h"], ["y"], axis=1)]


@pytest.mark.parametrize("name", MIXED)
def test_a_fixed_first_dimension_whose_rows_are_mixed_is_data(name: str, saved_onnx: Saved) -> None:
    path = saved_onnx(Model(MIXED[name], {"x": (9, 6)}, ["y"], 13))
    file = onnx_file.read(path)
    assert_rows_are_data(path, file, (9, 6))
    assert "its first dimension is no batch: it is part of the data" in file.notes


def test_the_steps_of_a_recurrent_layer_are_data(saved_onnx: Saved) -> None:
    nodes = [node("LSTM", ["x", floats(1, 12, 4), floats(1, 12, 3)], ["y"], hidden_size=3)]
    path = saved_onnx(Model(nodes, {"x": (6, 1, 4)}, ["y"], 14))
    assert_rows_are_data(path, onnx_file.read(path), (6, 1, 4))


RESHAPED = [
    node("Conv", ["x", floats(3, 2, 3, 3)], ["c"]),
    node("Reshape", ["c", whole(4, -1)], ["f"]),
    node("Gemm", ["f", floats(108, 5)], ["y"]),
]
TOGETHER = [
    node("Reshape", ["x", whole(32, 64)], ["r"]),  # the rows of all samples together, as dense layers are exported
    node("Gemm", ["r", floats(64, 3)], ["d"]),
    node("Reshape", ["d", whole(4, 8, 3)], ["y"]),
]


@pytest.mark.parametrize(
    ("nodes", "shape"), [(ALONE, (4, 6)), (RESHAPED, (4, 2, 8, 8)), (TOGETHER, (4, 8, 64))], ids=["", "-1", "together"]
)
def test_a_fixed_batch_whose_rows_are_computed_alone_becomes_one(
    nodes: list[Any], shape: Sequence[int], saved_onnx: Saved
) -> None:
    path = saved_onnx(Model(nodes, {"x": shape}, ["y"], 13))
    file = onnx_file.read(path)
    model, _ = onnx_file.load(file)
    assert "its batch of 4 is set to 1" in file.notes
    rows = rows_of(*shape)
    placed = np.stack([file.imported.inputs["x"].placed(row[None]) for row in rows]) if file.imported else rows
    np.testing.assert_allclose(np.asarray(model(placed)), of_original(path, {"x": rows})[0], atol=1e-4)


@pytest.mark.parametrize("name", ["num_points", "batch", "unk__7"])
@pytest.mark.parametrize("nodes", [SOFTMAX, CENTERED, LARGEST, NEARLY])
def test_an_open_dimension_whose_rows_are_mixed_is_asked_for(name: str, nodes: list[Any], saved_onnx: Saved) -> None:
    path = saved_onnx(Model(nodes, {"x": (name, 6)}, ["y"], 13))
    with pytest.raises(
        ModelError, match=f"'{name}' is no batch: the outputs of a row depend on the other rows"
    ) as error:
        onnx_file.load(onnx_file.read(path))
    assert "--shape x=" in error.value.hint
    assert_rows_are_data(path, onnx_file.read(path, {"x": (9, 6)}), (9, 6))


def test_an_open_dimension_that_only_one_size_fits_is_asked_for(saved_onnx: Saved) -> None:
    nodes = [node("Add", ["x", floats(16, 6)], ["p"]), node("Relu", ["p"], ["y"])]  # 1 row fits by broadcasting
    with pytest.raises(ModelError, match="onnxruntime runs it only with a 'tokens' of 1"):
        onnx_file.load(onnx_file.read(saved_onnx(Model(nodes, {"x": ("tokens", 6)}, ["y"], 13))))


def test_an_open_batch_may_be_one_in_the_shapes(saved_onnx: Saved) -> None:
    nodes = [node("Reshape", ["x", whole(1, -1)], ["f"]), node("Gemm", ["f", floats(12, 5)], ["y"])]
    model, parity = onnx_file.load(onnx_file.read(saved_onnx(Model(nodes, {"x": ("batch", 3, 4)}, ["y"], 13))))
    assert model.inputs[0].shape == (None, 3, 4)
    assert parity.samples == 4


TWO = [
    node("Gemm", ["x", floats(6, 5)], ["h"]),
    node("Squeeze", ["s", whole(0)], ["t"]),
    node("Add", ["h", "t"], ["a"]),
    node("Mul", ["a", "w"], ["y"]),
]


@pytest.mark.parametrize("batch", ["batch", 4])
def test_some_inputs_have_the_batch_elsewhere_or_have_none(batch: Any, saved_onnx: Saved) -> None:
    state = (1, batch, 5) if isinstance(batch, str) else (1, 1, 5)
    path = saved_onnx(Model(TWO, {"x": (batch, 6), "s": state, "w": (1,)}, ["y"], 13))
    model, _ = onnx_file.load(onnx_file.read(path))
    states = rows_of(4, 5) if isinstance(batch, str) else np.repeat(rows_of(1, 5), 4, 0)
    feeds = {"x": rows_of(4, 6), "s": states[None] if isinstance(batch, str) else states[None, :1], "w": rows_of(1)}
    arrays = [feeds["x"], states.reshape(4, *model.inputs[1].shape[1:]), np.repeat(feeds["w"][None], 4, 0)]
    np.testing.assert_allclose(np.asarray(model(arrays)), of_original(path, feeds)[0], atol=1e-5)


def test_open_dimensions_that_no_batch_explains_are_asked_for(saved_onnx: Saved) -> None:
    nodes = [node("MatMul", ["a", "x"], ["h"]), node("Gemm", ["h", floats(6, 5)], ["y"])]
    path = saved_onnx(Model(nodes, {"x": ("N", 6), "a": ("N", "N")}, ["y"], 13))
    with pytest.raises(ModelError, match=r"its input 'a' has open dimensions: \['N', 'N'\]"):
        onnx_file.read(path)
    model, _ = onnx_file.load(onnx_file.read(path, {"a": (7, 7)}))  # the input x has the same dimension
    feeds = {"x": rows_of(7, 6), "a": rows_of(7, 7)}
    actual = np.asarray(model([feeds["x"][None], feeds["a"][None]]))[0]
    np.testing.assert_allclose(actual, of_original(path, feeds)[0], atol=1e-4)
    steps = [node("LSTM", ["x", floats(1, 12, 4), floats(1, 12, 3)], ["y"], hidden_size=3)]
    with pytest.raises(ModelError, match=r"open dimensions: \['time', 1, 4\]"):
        onnx_file.read(saved_onnx(Model(steps, {"x": ("time", "batch", 4)}, ["y"], 14)))


@pytest.mark.parametrize("size", ["batch", 9])
def test_the_model_is_compared_with_the_original(size: Any, saved_onnx: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows that are mixed are taken for a batch, the comparison on several rows finds it."""
    monkeypatch.setattr(original, "has_batch", lambda graph, runs: True)
    with pytest.raises(ModelError, match="the outputs of the rebuilt Keras model differ by"):
        onnx_file.load(onnx_file.read(saved_onnx(Model(CENTERED, {"x": (size, 6)}, ["y"], 13))))


TEXT_LINE = [  # of 48 pixels height, as a text recognition: the rows are pooled away, and their dimension is removed
    node("Conv", ["x", floats(4, 3, 3, 3)], ["c"], pads=[1] * 4, strides=[16, 4]),
    node("AveragePool", ["c"], ["p"], kernel_shape=[3, 2], strides=[3, 2]),
    node("Squeeze", ["p", whole(2)], ["y"]),
]
EITHER = [node("Conv", ["x", floats(4, 3, 3, 3)], ["c"]), node("GlobalAveragePool", ["c"], ["y"])]


@pytest.mark.parametrize(
    ("nodes", "metadata", "proposed"),
    [(EITHER, {}, "1,3,320,320"), (EITHER, {"imgsz": "[192, 256]"}, "1,3,192,256"), (TEXT_LINE, {}, "1,3,48,320")],
)
def test_a_refusal_proposes_a_size_that_the_model_accepts(
    nodes: list[Any], metadata: dict[str, str], proposed: str, tmp_path: Path
) -> None:
    proto = Model(nodes, {"x": ("batch", 3, "height", "width")}, ["y"], 13).proto()
    helper.set_model_props(proto, metadata)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=r"open dimensions: \[1, 3, 'height', 'width'\]") as error:
        onnx_file.read(path)
    assert "sizes that the model accepts" in error.value.hint
    assert error.value.hint.endswith(f"--shape x={proposed}")
    shape = [int(side) for side in proposed.split(",")]
    model, _ = onnx_file.load(onnx_file.read(path, {"x": shape}))
    assert model.inputs[0].shape == (None, *shape[2:], 3)
