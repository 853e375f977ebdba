"""onnx and onnxruntime in processes of their own: whether a file can be read, and what a model answers.

Both are C++, and a file that comes from anywhere may crash them (onnx' shape inference has done
so: github.com/onnx/onnx/issues/6180), or keep them busy for ever: then it is that process that
ends. So it does where it asks for more memory than a model needs.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError

LONGEST_S = 600
MEMORY_BYTES = 6 * 2**30
"""For each of these processes: three times the largest .onnx file without tensors beside it."""

READ = """
import json
import sys
from pathlib import Path
from compress.errors import CorallineError
from compress.importers.onnx import onnx_graph, subprocesses
subprocesses.bound()
try:
    onnx_graph.read(Path(sys.argv[1]), shapes=json.loads(sys.argv[2]))
except CorallineError:
    pass  # told to the user by the process that asked
"""
RUN = """
import sys
from pathlib import Path
from compress.importers.onnx import subprocesses
subprocesses.bound()
sys.exit(subprocesses.main(Path(sys.argv[1]), int(sys.argv[2])))
"""
LONGEST_READ_S = 120


class NoAnswerError(Exception):
    """onnxruntime refuses the model, or it crashed, or took too long; the message says which."""


def answers(model: bytes, feeds: Sequence[Mapping[str, NDArray[Any]]], outputs: Sequence[str]) -> list[list[Any]]:
    """What the model answers, on the CPU, with one thread, and with every operator computed as it is written.

    Args:
        model: a whole model, with its tensors inside.
        feeds: for each run the inputs by name.
        outputs: which of the model's to tell.

    Raises:
        NoAnswerError: there is no answer.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.onnx").write_bytes(model)
        (folder / "outputs").write_text("\0".join(outputs))
        for number, feed in enumerate(feeds):
            np.savez(folder / f"feed{number}.npz", *feed.values())
        (folder / "inputs").write_text("\0".join(feeds[0]))
        run_apart(folder, len(feeds))
        made = []
        for number in range(len(feeds)):
            with np.load(folder / f"made{number}.npz") as stored:
                made.append([stored[f"arr_{place}"] for place in range(len(outputs))])
        return made


def try_reading(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Reads a file once in a process of its own, its inputs of these shapes where it leaves them open.

    Raises:
        ModelError: that process crashed, or took too long.
    """
    command = ["-c", READ, str(path), json.dumps({name: list(sides) for name, sides in shapes.items()})]
    try:
        done = _run(command, LONGEST_READ_S)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"onnx was not done reading it after {LONGEST_READ_S} s", where=str(path)) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1][:200]
        how = last if done.returncode > 0 else f"signal {-done.returncode}"
        raise ModelError(f"onnx crashes when it reads it ({how})", where=str(path), todo="check the file")


def bound() -> None:
    """Lets this process fail, and not the machine, where a file asks for absurd amounts of memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run(arguments: Sequence[str], longest_s: float) -> subprocess.CompletedProcess[str]:
    """Python with our modules, and none of the working directory's."""
    command = [sys.executable, "-P", "-W", "ignore", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=longest_s, check=False)


def run_apart(folder: Path, count: int) -> None:
    """Runs `main` in a process of its own.

    Raises:
        NoAnswerError: it fails.
    """
    command = ["-c", RUN, str(folder), str(count)]
    try:
        done = _run(command, LONGEST_S)
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"onnxruntime was not done after {LONGEST_S} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it crashed (exit status {done.returncode})"]
        raise NoAnswerError(f"onnxruntime cannot run it: {lines[-1][:300]}")


def main(folder: Path, count: int) -> int:
    """Runs the model in a folder on the feeds in it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    inputs, outputs = ((folder / name).read_text().split("\0") for name in ("inputs", "outputs"))
    try:
        session = onnxruntime.InferenceSession(
            (folder / "model.onnx").read_bytes(), options, providers=["CPUExecutionProvider"]
        )
        for number in range(count):
            with np.load(folder / f"feed{number}.npz") as stored:
                feed = {name: stored[f"arr_{place}"] for place, name in enumerate(inputs)}
            np.savez(folder / f"made{number}.npz", *session.run(outputs, feed))
    except Exception as error:  # noqa: BLE001 - its errors are of many kinds, and all end here
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0
