"""Coralline: `python -m compress pipeline.yaml`, as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from exchange import MODEL, Job, run_worker

ROOT = Path(__file__).resolve().parents[2]
OTHERS = 8
"""Samples of the validation and of the test split, if only calibration samples are given: the pipeline needs both.
They are calibration samples, and the comparison with the float model in the report uses them."""
USABLE = (0, 7)
"""Exit codes of a complete run; 7: the verdict is "not usable", which the measurements show."""


def samples(job: Job) -> dict[str, Any]:
    """Return the arrays of the pipeline: x, part, and y if the samples have labels."""
    if job.variant == "qat":
        parts = ("train", "validation")
        xs = [job.array(f"{part}_x") for part in parts]
        ys = [job.array(f"{part}_y") for part in parts]
        xs, ys = [*xs, xs[-1][:OTHERS]], [*ys, ys[-1][:OTHERS]]
    else:
        calibration = job.channels_last(job.array("calibration"))
        xs = [calibration, calibration[:OTHERS], calibration[-OTHERS:]]
        ys = []
        if job.about["labelled"]:
            labels = job.array("calibration_y")
            ys = [labels, labels[:OTHERS], labels[-OTHERS:]]
    names = ("train", "validation", "test")
    part = np.concatenate([[name] * len(x) for name, x in zip(names, xs, strict=True)])
    return {"x": np.concatenate(xs), "part": part} | ({"y": np.concatenate(ys)} if ys else {})


def pipeline(job: Job) -> dict[str, Any]:
    """Return the pipeline file; JSON is YAML."""
    about = job.about
    source: dict[str, Any] = {"file": str(job.folder / "data.npz"), "split": "part", "y": None}
    data: dict[str, Any] = {"source": {"npz": source}, "task": "outputs"}
    if about["labelled"]:
        source |= {"y": "y", "classes": [str(number) for number in range(about["classes"])]}
        del data["task"]
    if about["layout"] == "series":
        data["preprocess"] = [{"squeeze": {}}]
    model: dict[str, Any] = {"file": str(job.model)}
    if about["detector"]:
        model["detector"] = about["detector"]
        data["task"] = "unlabelled_detection"
    quantize = {"method": "qat"} if job.variant == "qat" else {}
    return {
        "schema_version": 1,
        "name": about["name"],
        "seed": 0,
        "target": "edgetpu",
        "model": model,
        "data": data,
        "stages": [{"quantize": quantize}, {"compile": {}}],
        "measure": {"latency": {"runs": 5}},
    }


def work(job: Job) -> dict[str, Any]:
    """Run the pipeline."""
    np.savez(job.folder / "data.npz", **samples(job))
    path = job.folder / "pipeline.yaml"
    path.write_text(json.dumps(pipeline(job), indent=1))
    command = [sys.executable, "-m", "compress", str(path), "--out", str(job.folder / "runs"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=job.folder, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode not in USABLE:
        raise RuntimeError(f"exit code {done.returncode}")
    report = json.loads(done.stdout)
    shutil.copyfile(job.folder / "runs" / job.about["name"] / MODEL, job.folder / MODEL)
    stage = next(entry for entry in report["stages"] if entry["stage"] == "quantize")
    kept = ("method", "kept", "ranges", "tried", "separated_gates", "rewritten")
    return {"facts": {name: stage["facts"][name] for name in kept if name in stage["facts"]}}


if __name__ == "__main__":
    run_worker(work)
