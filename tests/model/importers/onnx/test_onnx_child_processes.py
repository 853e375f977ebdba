"""onnx and onnxruntime in child processes: files that need too much memory, crash the library, or never end."""

from __future__ import annotations

import importlib
import resource
from pathlib import Path

import numpy as np
import pytest
from one_node import Model, node, whole

from compress.core import sandbox
from compress.core.errors import StageError
from compress.model.importers.onnx import child_processes


def expanded(size: int) -> bytes:
    """Return a model whose output is its input repeated `size` times."""
    nodes = [node("Expand", ["x", whole(size)], ["y"])]
    return bytes(Model(nodes, {"x": (1,)}, ["y"], 13).proto().SerializeToString())


FEED = [{"x": np.ones(1, np.float32)}]


def test_outputs() -> None:
    assert child_processes.run_model(expanded(3), FEED, ["y"])[0][0].tolist() == [1, 1, 1]


def test_a_model_over_the_memory_limit() -> None:
    with pytest.raises(child_processes.OnnxRuntimeFailedError, match="onnxruntime cannot run it"):
        child_processes.run_model(expanded(child_processes.MEMORY_BYTES // 4), FEED, ["y"])


def test_the_parent_has_no_limit(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    (tmp_path / "model.onnx").write_bytes(expanded(3))
    child_processes.check_readable(tmp_path / "model.onnx", {})
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_process_that_the_system_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short_of_memory.py").write_text(
        "import os, signal\ndef work(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("short_of_memory")
    with pytest.raises(StageError, match="was killed: most likely memory was short") as caught:
        sandbox.run(module.work, [], timeout_s=60, memory_bytes=1 << 30)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("line", ["MemoryError", "terminate called after throwing an instance of 'std::bad_alloc'"])
def test_a_process_at_its_memory_limit_says_so(line: str) -> None:
    assert sandbox.ChildExit(-6, line).reason == f"it needs more memory than allowed: {line}"
    assert sandbox.ChildExit(-6, "").reason == "signal 6, SIGABRT"
