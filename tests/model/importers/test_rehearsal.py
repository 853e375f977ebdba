"""Files that need too much memory, crash the library that reads them, or keep it busy: a child process reads them."""

from __future__ import annotations

import importlib
import json
import resource
import struct
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from one_node import Model, node, whole

from compress.core import sandbox
from compress.core.errors import ModelError, StageError
from compress.model.importers import model_file
from compress.model.importers.common import guarded_calls
from compress.model.importers.keras import hdf5_weights
from compress.model.importers.onnx import child_processes


@pytest.mark.parametrize(("name", "library"), [("model.onnx", "onnx"), ("model.h5", "HDF5"), ("model.keras", "HDF5")])
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("crash", r"{} crashes when it reads it \(signal 11, SIGSEGV\)"),
        ("wait", "{} did not finish reading it in 1 s"),
        ("allocate", r"{} needs more than [\d,]+ MiB of memory to read it"),
    ],
)
def test_a_file_that_ends_the_process_which_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, message: str, name: str, library: str
) -> None:
    (tmp_path / "hostile_library.py").write_text(
        "import os, signal, time\n"
        "def crash(*_): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "def wait(*_): time.sleep(60)\n"
        "def allocate(*_): bytes(1 << 40)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = sandbox.run
    function = getattr(importlib.import_module("hostile_library"), entry)
    monkeypatch.setattr(sandbox, "run", lambda _, *args, **limits: run(function, *args, **limits))
    monkeypatch.delitem(sys.modules, "hostile_library")
    if entry == "wait":
        monkeypatch.setattr(guarded_calls, "TIMEOUT_S", 1)
    (tmp_path / name).touch()
    with pytest.raises(ModelError, match=message.format(library)):
        model_file.read(tmp_path / name)


def test_a_text_of_a_length_that_is_damaged(tmp_path: Path) -> None:
    """A small file states a length of 2 GiB for the configuration; found by `make fuzz`."""
    config = json.dumps({"class_name": "Functional", "config": {"name": "a" * 1234}})
    with h5py.File(tmp_path / "model.h5", "w") as file:
        file.attrs["model_config"] = config
    content = (tmp_path / "model.h5").read_bytes()
    length = struct.pack("<I", len(config))  # first in the attribute, then with the text itself
    (tmp_path / "model.h5").write_bytes(content.replace(length, b"\xff\xff\xff\x7f", 1))
    with pytest.raises(ModelError, match=r"model\.h5: HDF5 needs more than 512 MiB of memory to read it"):
        model_file.read(tmp_path / "model.h5")


def test_every_weight_is_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "weights.h5", "w") as file:
        weights = file.create_dataset("layer/kernel", data=np.arange(10_000.0), compression="gzip", shuffle=True)
        start, size = weights.id.get_chunk_info(0).byte_offset, weights.id.get_chunk_info(0).size
    content = bytearray((tmp_path / "weights.h5").read_bytes())
    content[start + size // 2 : start + size // 2 + 8] = bytes(8)
    (tmp_path / "weights.h5").write_bytes(content)
    with h5py.File(tmp_path / "weights.h5", "r") as file:
        assert hdf5_weights.problem(file) is None
        with pytest.raises(OSError, match="read data"):
            hdf5_weights.read_all(file)


def expanded(size: int) -> bytes:
    """Return a model whose output is its input repeated `size` times."""
    nodes = [node("Expand", ["x", whole(size)], ["y"])]
    return bytes(Model(nodes, {"x": (1,)}, ["y"], 13).proto().SerializeToString())


FEED = [{"x": np.ones(1, np.float32)}]


def test_a_model_over_the_memory_limit() -> None:
    assert child_processes.run_model(expanded(3), FEED, ["y"])[0][0].tolist() == [1, 1, 1]
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
