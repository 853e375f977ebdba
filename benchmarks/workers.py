"""Training on several worker processes: `python benchmarks/workers.py [--workers 1 2 3] [--seeds 0 1 2]`.

The shipped network of the digits is trained on one process (`strategy: one`), and on 2 and 3 processes of this machine
(`strategy: multi_worker`), with the same settings: accuracies, milliseconds per step, and the step efficiency
t1 / (k * tk). Images of 8x8 pixels show the accuracy, and how much the exchange costs where a step has little to
compute; images of 64x64 pixels, with one seed and few steps, show steps that compute longer. Each process computes with
one thread. On a machine with two cores, a third process has no core of its own. Prints JSON, and writes
benchmarks/results/workers.json; sizes that are not measured again keep their results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import repository

import worker_processes

RESULTS = repository.RESULTS / "workers.json"
ORIGINAL = 8
"""Height and width of the digits."""
EPOCHS = {ORIGINAL: 12, 64: 3}
"""Epochs by the size of the images; for larger images only the time of the steps matters."""
BATCH = 240
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}


def trained(size: int, workers: int, seed: int) -> dict[str, Any]:
    """Train on some workers; return the float test accuracy, the loss, and the milliseconds per step of the chief."""
    resized = {"preprocess": [{"resize": {"size": [size, size]}}]} if size != ORIGINAL else {}
    pipeline = {
        "schema_version": 1,
        "name": "digits",
        "seed": seed,
        "target": "cpu",
        "model": {"builder": "digits_cnn"},
        "data": {"source": {"digits": {}}, **resized},
        "stages": [{"train": {"epochs": EPOCHS[size], "batch_size": BATCH}}],
        "execution": {"strategy": "multi_worker" if workers > 1 else "one", "profile": True},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.yaml"
        path.write_text(json.dumps(pipeline))
        ended = worker_processes.run(path, [worker_processes.MAIN] * workers, THREADS)
        if any(code for code, _ in ended):
            raise SystemExit("\n".join(message for _, message in ended))
        report = json.loads((Path(folder) / "runs" / "digits" / "report.json").read_text())
    facts = next(stage["facts"] for stage in report["stages"] if stage["id"] == "train")
    accuracy = report["models"]["result"]["measurements"]["accuracy"]["value"]
    times = facts["profile"]["trainings"][0]
    row = {"size": size, "workers": workers, "seed": seed, "accuracy": accuracy, "loss": facts["history"][-1]["loss"]}
    return {**row, "step_ms": times["step_ms"], "first_step_ms": times["first_step_ms"]}


def summary(rows: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return mean accuracy, median step and step efficiency by number of workers, for images of one size."""
    rows = [row for row in rows if row["size"] == size]
    counts = sorted({row["workers"] for row in rows})
    steps = {n: statistics.median(row["step_ms"] for row in rows if row["workers"] == n) for n in counts}
    return [
        {
            "size": size,
            "workers": count,
            "accuracy": round(statistics.mean(row["accuracy"] for row in rows if row["workers"] == count), 4),
            "step_ms": steps[count],
            "efficiency": round(steps[counts[0]] * counts[0] / (count * steps[count]), 3),
        }
        for count in counts
    ]


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sizes", type=int, nargs="+", default=[*EPOCHS], choices=[*EPOCHS])
    options = parser.parse_args()
    earlier = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    rows = [row for row in earlier if row["size"] not in options.sizes]
    for size in options.sizes:
        seeds = options.seeds if size == ORIGINAL else options.seeds[:1]
        rows += [trained(size, workers, seed) for seed in seeds for workers in options.workers]
    sizes = sorted({row["size"] for row in rows})
    result = {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[2], 1),
        "batch_size": BATCH,
        "runs": rows,
        "summary": [row for size in sizes for row in summary(rows, size)],
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
