"""onnx and onnxruntime in processes of their own: what becomes of a file that wants too much, or kills them."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.errors import ModelError
from compress.importers.onnx import subprocesses


def expanded(size: int) -> bytes:
    """A model whose answer is its input repeated that often."""
    shape = numpy_helper.from_array(np.array([size], np.int64), "shape")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Expand", ["x", "shape"], ["y"])],
        "graph",
        [value("x", TensorProto.FLOAT, [1])],
        [value("y", TensorProto.FLOAT, None)],
        [shape],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(model.SerializeToString())


FEED = [{"x": np.ones(1, np.float32)}]


def test_answers() -> None:
    assert subprocesses.answers(expanded(3), FEED, ["y"])[0][0].tolist() == [1, 1, 1]


def test_a_model_that_wants_more_memory_than_it_may_have() -> None:
    with pytest.raises(subprocesses.NoAnswerError, match="onnxruntime cannot run it"):
        subprocesses.answers(expanded(subprocesses.MEMORY_BYTES // 4), FEED, ["y"])


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"onnx crashes when it reads it \(signal 11\)"),
        ("import time; time.sleep(60)", "onnx was not done reading it after 1 s"),
        ("from compress.importers.onnx import subprocesses; subprocesses.bound(); bytes(1 << 40)", "MemoryError"),
    ],
)
def test_a_file_that_ends_the_process_which_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    monkeypatch.setattr(subprocesses, "READ", code)
    if "sleep" in code:
        monkeypatch.setattr(subprocesses, "LONGEST_READ_S", 1)
    with pytest.raises(ModelError, match=says):
        subprocesses.try_reading(tmp_path / "model.onnx", {})


def test_this_process_is_not_bound(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    onnx.save(onnx.load_from_string(expanded(3)), tmp_path / "model.onnx")
    subprocesses.try_reading(tmp_path / "model.onnx", {})
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
