"""What onnxruntime makes of a model's inputs, found out in a process of its own.

onnxruntime is C++, and a file that comes from anywhere may crash it, or keep it busy for ever:
then it is that process that ends. This file is also what runs there, as a script.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONGEST_S = 600


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
        command = [sys.executable, "-P", "-W", "ignore", __file__, name, str(len(feeds))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise NoAnswerError(f"onnxruntime was not done after {LONGEST_S} s") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"it crashed (exit status {done.returncode})"]
            raise NoAnswerError(f"onnxruntime cannot run it: {lines[-1][:300]}")
        made = []
        for number in range(len(feeds)):
            with np.load(folder / f"made{number}.npz") as stored:
                made.append([stored[f"arr_{place}"] for place in range(len(outputs))])
        return made


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


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
