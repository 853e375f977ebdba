"""The figures of the main job: `make bench`, or `python benchmarks/main_job.py [--seeds N] [--repeats N]`.

Prints a Markdown table and writes benchmarks/results/main_job.json. Times are wall-clock times on this machine. Each
command runs in its own process, with Python's bytecode files kept as usual. The last row measures the machine itself,
so that results of different machines and times can be compared. No figure is checked against a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import repository

from paths import ROOT

RESULTS = repository.RESULTS / "main_job.json"
USUAL = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

CONVERSION = """
import json, sys, time
import numpy as np
from compress.model.ir.tensorflow import keras
library = keras(0)
model = library.applications.MobileNetV2(input_shape=(96, 96, 3), alpha=0.35, weights=None, classes=10)
from compress.learning.quantization import calibration, export
from compress.model.ir import keras_graph
from compress.model.ir.passes import fold
import tensorflow
samples = np.random.default_rng(0).random((100, 96, 96, 3), np.float32)
rounds = []
for _ in range(int(sys.argv[1])):
    start = time.perf_counter()
    canonical = fold.canonical(keras_graph.read(model))
    folded = time.perf_counter()
    plan = calibration.calibrate(canonical, samples)
    calibrated = time.perf_counter()
    content = export.convert(canonical, plan)
    done = time.perf_counter()
    export.convert_calibrated(model, samples)
    reference = time.perf_counter()
    rounds.append([folded - start, calibrated - folded, done - calibrated, reference - done])
print(json.dumps(rounds))
"""


def command(*arguments: str, expect: int = 0) -> tuple[float, str]:
    """Run `python -m compress`; return its wall time in seconds and its stdout."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "compress", *arguments], cwd=ROOT, env=USUAL, capture_output=True, text=True
    )
    seconds = time.perf_counter() - started
    if done.returncode != expect:
        sys.exit(f"compress {' '.join(arguments)} gave {done.returncode}:\n{done.stderr}")
    return seconds, done.stdout


def bare_import() -> float:
    """Return the seconds to start Python and import TensorFlow, without our code."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import tensorflow"], env=USUAL, capture_output=True, check=True)
    return time.perf_counter() - started


def pipeline_file(folder: Path, seed: int) -> Path:
    """Write the shipped pipeline with another seed and another name; return its path."""
    text = (ROOT / "pipeline.yaml").read_text()
    path = folder / f"seed{seed}.yaml"
    path.write_text(text.replace("seed: 0", f"seed: {seed}").replace("name: digits", f"name: digits-{seed}"))
    return path


def one_seed(folder: Path, seed: int) -> dict[str, Any]:
    """Run the pipeline with one seed and an empty store, and the same command again; return the figures."""
    path, out = pipeline_file(folder, seed), folder / f"out{seed}"
    cold, text = command(str(path), "--out", str(out), "--json")
    again, _ = command(str(path), "--out", str(out))
    record = json.loads(text)
    models, comparison = record["models"], record["comparison"]["measurements"]
    row = {
        "seed": seed,
        "cold_s": cold,
        "again_s": again,
        "float_accuracy": models["original"]["measurements"]["accuracy"]["value"],
        "int8_accuracy": models["result"]["measurements"]["accuracy"]["value"],
        "parameters": models["original"]["measurements"]["parameters"]["value"],
        **{name: comparison[name]["value"] for name in ("accuracy_drop", "agreement", "macs_ratio", "size_ratio")},
        "latency_ratio": comparison["latency_ratio"]["value"],
        "stages_s": {stage["id"]: stage["seconds"] for stage in record["stages"]},
    }
    print(f"seed {seed}: {row}", file=sys.stderr)
    return row


def conversion(rounds: int) -> dict[str, float]:
    """Return the seconds to quantize MobileNetV2 0.35 at 96x96: medians of all rounds, and the first conversion."""
    done = subprocess.run(
        [sys.executable, "-c", CONVERSION, str(rounds)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    names = ("fold_s", "calibrate_100_s", "convert_s", "converter_own_calibration_s")
    return {**dict(zip(names, medians, strict=True)), "first_convert_s": rows[0][2]}


def measure(seeds: int, repeats: int) -> dict[str, Any]:
    """Measure all figures."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = [one_seed(folder, seed) for seed in range(seeds)]
        shipped = str(ROOT / "pipeline.yaml")
        light = {
            "help_s": statistics.median(command("--help")[0] for _ in range(repeats)),
            "dry_run_s": statistics.median(
                command(shipped, "--dry-run", "--out", str(folder / "none"))[0] for _ in range(repeats)
            ),
            "import_tensorflow_s": statistics.median(bare_import() for _ in range(repeats)),
        }
    return {"cores": os.cpu_count(), "seeds": rows, **light, "conversion": conversion(5)}


def table(result: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    rows = result["seeds"]

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    def span(name: str) -> str:
        values = [row[name] for row in rows]
        return f"{mean(name):.3f} ({min(values):.3f} to {max(values):.3f})"

    times = result["conversion"]
    lines = [
        (
            "the main job, cold store",
            "<= 120 s",
            f"{mean('cold_s'):.0f} s (slowest {max(r['cold_s'] for r in rows):.0f} s)",
        ),
        ("parameters of the original", "<= 60,000", f"{rows[0]['parameters']:,}"),
        ("float test accuracy", ">= 0.98", span("float_accuracy")),
        ("int8 test accuracy", "", span("int8_accuracy")),
        (f"drop, mean of {len(rows)} seeds", "<= 0.010", span("accuracy_drop")),
        ("MACs, int8 / original", "<= 0.50", span("macs_ratio")),
        ("file size, int8 / float", "<= 0.30", span("size_ratio")),
        ("the same command again", "<= 1.5 s", f"{mean('again_s'):.2f} s"),
        ("--help", "<= 0.5 s", f"{result['help_s']:.2f} s"),
        ("--dry-run", "<= 0.5 s", f"{result['dry_run_s']:.2f} s"),
        (
            "MobileNetV2 0.35@96 to int8",
            "<= 2 s",
            f"{times['convert_s']:.2f} s (and {times['calibrate_100_s']:.2f} s to calibrate on 100 samples)",
        ),
        ("for scale: `import tensorflow` alone", "", f"{result['import_tensorflow_s']:.1f} s"),
    ]
    text = ["| figure | bound | measured |", "|---|---|---|"]
    return "\n".join(text + [f"| {a} | {b} | {c} |" for a, b, c in lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    result = measure(options.seeds, options.repeats)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
