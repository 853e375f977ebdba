"""The onnx and onnxruntime libraries in child processes: read a file, run a model."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core import sandbox
from compress.core.errors import CorallineError
from compress.model.importers.common import guarded_calls

RUN_TIMEOUT_S = 600
"""A graph with a loop may never end."""
MEMORY_BYTES = 6 * 2**30
"""Limit of each process: three times the largest .onnx file without external tensors."""


class OnnxRuntimeFailedError(Exception):
    """No outputs from onnxruntime: it refused the model, crashed, or exceeded its time limit."""


def check_readable(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Read a file once in a child process."""
    named = json.dumps({name: list(shape) for name, shape in shapes.items()})
    arguments = [str(path), named]
    guarded_calls.check_readable(path, "onnx", read_in_child, arguments, memory_bytes=MEMORY_BYTES)


def read_in_child(path: str, shapes: str) -> None:
    """Read a file. A refusal is not an error here: the parent reads the file again and reports it."""
    from compress.model.importers.onnx import onnx_graph

    try:
        graph = onnx_graph.read(Path(path), shapes=json.loads(shapes))
        if graph.batch.size > 1:
            onnx_graph.read(Path(path), shapes=json.loads(shapes), keep_batch=True)
    except CorallineError:
        return


def run_model(model: bytes, feeds: Sequence[Mapping[str, NDArray[Any]]], outputs: Sequence[str]) -> list[list[Any]]:
    """Return the outputs of a model on the CPU with one thread and without graph optimization.

    `model` is serialized with its tensors inside; `feeds` are the inputs by name, for each run.

    Raises:
        OnnxRuntimeFailedError: onnxruntime gave no outputs.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, model, feeds)
        (folder / "outputs").write_text("\0".join(outputs))
        run_folder(folder, len(feeds))
        return [_stored(folder / f"outputs{number}.npz", len(outputs)) for number in range(len(feeds))]


def first_accepted(model: bytes, feeds: Sequence[Mapping[str, NDArray[Any]]]) -> int | None:
    """Return the number of the first inputs with which a model runs; None if it runs with none of them."""
    with tempfile.TemporaryDirectory() as name:
        _write(Path(name), model, feeds)
        arguments = [name, str(len(feeds))]
        try:
            sandbox.run(try_in_child, arguments, timeout_s=RUN_TIMEOUT_S, memory_bytes=MEMORY_BYTES)
        except sandbox.SandboxTimeoutError:
            return None
        accepted = Path(name) / "accepted"
        return int(accepted.read_text()) if accepted.exists() else None


def try_in_child(folder: str, count: str) -> None:
    """Write the number of the first inputs in a folder with which its model runs."""
    session = _session(Path(folder))
    inputs = (Path(folder) / "inputs").read_text().split("\0")
    for number in range(int(count)):
        arrays = _stored(Path(folder) / f"inputs{number}.npz", len(inputs))
        try:
            session.run(None, dict(zip(inputs, arrays, strict=True)))
        except Exception:  # noqa: BLE001, S112 - as in `run_in_child`; the model may accept other inputs
            continue
        (Path(folder) / "accepted").write_text(str(number))
        return


def _write(folder: Path, model: bytes, feeds: Sequence[Mapping[str, NDArray[Any]]]) -> None:
    (folder / "model.onnx").write_bytes(model)
    for number, feed in enumerate(feeds):
        np.savez(folder / f"inputs{number}.npz", *feed.values())
    (folder / "inputs").write_text("\0".join(feeds[0]))


def _stored(path: Path, count: int) -> list[NDArray[Any]]:
    with np.load(path) as stored:
        return [stored[f"arr_{index}"] for index in range(count)]


def run_folder(folder: Path, count: int) -> None:
    """Run the model in a folder in a child process."""
    try:
        ended = sandbox.run(run_in_child, [str(folder), str(count)], timeout_s=RUN_TIMEOUT_S, memory_bytes=MEMORY_BYTES)
    except sandbox.SandboxTimeoutError as error:
        raise OnnxRuntimeFailedError(f"onnxruntime did not finish in {RUN_TIMEOUT_S} s") from error
    if ended.status:
        raise OnnxRuntimeFailedError(f"onnxruntime cannot run it: {ended.reason}")


def run_in_child(folder: str, count: str) -> None:
    """Run the model in a folder, and exit with status 1 if onnxruntime raises."""
    try:
        run_session(Path(folder), int(count))
    except Exception as error:  # noqa: BLE001 - onnxruntime raises many types, and the parent reports all of them
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)


def run_session(folder: Path, count: int) -> None:
    """Run the model in a folder on the inputs stored there, and store the outputs."""
    inputs = (folder / "inputs").read_text().split("\0")
    outputs = (folder / "outputs").read_text().split("\0")
    session = _session(folder)
    for number in range(count):
        arrays = _stored(folder / f"inputs{number}.npz", len(inputs))
        np.savez(folder / f"outputs{number}.npz", *session.run(outputs, dict(zip(inputs, arrays, strict=True))))


def _session(folder: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    content = (folder / "model.onnx").read_bytes()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
