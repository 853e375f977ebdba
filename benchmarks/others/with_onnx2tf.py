"""onnx2tf: full-integer quantization by its own backend (`flatbuffer_direct`), which needs no TensorFlow.

Weights are quantized per channel by default, and per tensor in the variant "per tensor". The default also leaves the
float file, which ai-edge-quantizer reads.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from exchange import FLOAT, MODEL, Job, run_worker


def with_one_sample(job: Job) -> Path:
    """Return the model with a batch of 1: the option -b leaves operators that it cannot quantize."""
    import onnx

    model = onnx.load(job.model)
    for tensor in (*model.graph.input, *model.graph.output):
        batch = tensor.type.tensor_type.shape.dim[0]
        if not batch.dim_value:
            batch.dim_value = 1
    path = job.folder / "model.onnx"
    onnx.save(model, path)
    return path


def work(job: Job) -> dict[str, Any]:
    """Convert the model by the command, as its manual describes it."""
    job.refuse_unless("onnx")
    samples = job.folder / "calibration.npy"
    np.save(samples, job.channels_last(job.array("calibration")))
    out = job.folder / "out"
    command = ["onnx2tf", "-i", str(with_one_sample(job)), "-o", str(out)]
    command += ["-tb", "flatbuffer_direct", "-osd", "-oiqt", "-iqd", "int8", "-oqd", "int8"]
    command += ["-qt", "per-tensor"] if job.variant == "per tensor" else []
    command += ["-cind", job.about["input_name"], str(samples), "[[[[0.0]]]]", "[[[[1.0]]]]"]  # mean and deviation
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    for name, pattern in ((FLOAT, "*_float32.tflite"), (MODEL, "*_full_integer_quant.tflite")):
        found = next(iter(sorted(out.glob(pattern))), None)
        if found is not None:
            shutil.copyfile(found, job.folder / name)
    if not (job.folder / MODEL).exists():
        raise RuntimeError(f"no full-integer file (exit code {done.returncode}): {cause(done.stdout)}")
    return {"facts": {"exit_code": done.returncode, "error": cause(done.stdout) if done.returncode else ""}}


def cause(output: str) -> str:
    """Return the first exception in the output, which is the cause of the others."""
    found = re.search(r"^\S*Error: .+$", output, re.MULTILINE)
    return found.group().rpartition("quantization.")[2] if found else "no error in its output"


if __name__ == "__main__":
    run_worker(work)
