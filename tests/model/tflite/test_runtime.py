"""Models that end or occupy the process of the TFLite runtime."""

from __future__ import annotations

import os
import signal
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny

from compress.core.errors import ModelError
from compress.model.tflite import comparison, graph, runtime
from compress.model.tflite.interpreter import LoadedModel


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.tflite"
    path.write_bytes(tiny.classifier())
    return path


def process() -> Any:
    return runtime._children[-1]._process


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_a_crash_is_an_error_of_the_model(path: Path, number: signal.Signals) -> None:
    model, other = (LoadedModel(path, reproducible=True) for _ in range(2))
    sample = np.zeros((4, 4, 1), np.float32)
    expected = model.scores(sample[None])
    os.kill(process().pid, number)
    with pytest.raises(ModelError, match=rf"cannot run it: it crashed the runtime \(signal {number}, {number.name}\)"):
        model.scores(sample[None])
    with pytest.raises(ModelError, match="an earlier model ended the process"):
        other.scores(sample[None])
    np.testing.assert_array_equal(LoadedModel(path, reproducible=True).scores(sample[None]), expected)


def test_a_run_without_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel(path, reproducible=True)
    stopped = process()
    os.kill(stopped.pid, signal.SIGSTOP)
    monkeypatch.setattr(runtime, "RUN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(runtime, "EXIT_TIMEOUT_S", 0.1)
    with pytest.raises(ModelError, match=r"it did not finish in 0\.3 s"):
        model.scores(np.zeros((1, 4, 4, 1), np.float32))
    assert stopped.poll() == -signal.SIGKILL


def test_memory_is_limited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for child in runtime._children:
        child.close()
    monkeypatch.setattr(runtime, "MEMORY_BYTES", 1 << 20)
    with pytest.raises(ModelError, match="the TFLite runtime refuses it: it crashed the runtime"):
        LoadedModel(path, reproducible=True)


def test_one_process_for_all_models(path: Path) -> None:
    LoadedModel(path, reproducible=True)
    before = process().pid
    parsed = graph.read(path)
    runner = comparison.Runner(parsed, keep=True)
    runner.run(comparison.random_feed(parsed, np.random.default_rng(0)))
    assert runner.shape(parsed.outputs[0]) == (1, 3)
    assert process().pid == before


def test_inputs_that_do_not_fit(path: Path) -> None:
    runner = comparison.Runner(graph.read(path))
    with pytest.raises(ModelError, match="cannot run it: Cannot set tensor"):
        runner.run([np.zeros((1, 9, 9, 1), np.int8)])


OBJECTS = b'{"arrays":[["object",[1]]]}'
MESSAGES = (b"", b"\xff" * 4, b"\x02\0\0\0{}", runtime._packed({}, [np.zeros(3)])[:-1])


@pytest.mark.parametrize("message", [*MESSAGES, struct.pack("<I", len(OBJECTS)) + OBJECTS + bytes(8)])
def test_an_invalid_message_ends_the_runtime(path: Path, monkeypatch: pytest.MonkeyPatch, message: bytes) -> None:
    model = LoadedModel(path, reproducible=True)
    pipe = runtime._children[-1]._pipe
    monkeypatch.setattr(runtime._children[-1], "_pipe", SimpleNamespace(
        send_bytes=pipe.send_bytes, poll=lambda _: True, recv_bytes=lambda _: message, close=pipe.close
    ))  # fmt: skip
    with pytest.raises(ModelError, match="it crashed the runtime"):
        model.scores(np.zeros((1, 4, 4, 1), np.float32))


def test_arrays_of_every_type_arrive() -> None:
    arrays = [np.arange(6).astype(dtype).reshape(2, 3) for dtype in graph.DTYPES.values()]
    arrays += [np.zeros((), np.int8), np.zeros((0, 4), np.float32), None]  # type: ignore[list-item]
    header, received = runtime._unpacked(runtime._packed({"a": 1}, arrays))
    assert header["a"] == 1
    for sent, actual in zip(arrays, received, strict=True):
        if sent is None:
            assert actual is None
            continue
        assert actual is not None
        assert actual.dtype == sent.dtype
        np.testing.assert_array_equal(actual, sent)
