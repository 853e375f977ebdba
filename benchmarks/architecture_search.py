"""Architecture search against hand-made networks: `python benchmarks/architecture_search.py [--seeds N] [--show]`.

Groceries (43 classes, photos of 48x48) at a limit of LIMIT_MS, predicted for USB 3. The limit binds: the builders of
models/ only keep it with few blocks, and then at the largest width (in steps of 0.125, up to 4) within the limit.

Ours: the largest network (LARGEST) is the builder that is best among the hand-made networks on validation (mean of the
seeds), at about 1.5 times the width. It is trained on the labels, `search_architecture` finds a sub-network, and
`distill` trains it further with the largest network as its teacher.

Hand-made: each builder of HAND_MADE is trained on the labels with the first seed, for as many epochs as the largest
network; the FINALISTS best ones on validation also with the other seeds. The best one of these (mean of the seeds) is
also trained for LONG times as many epochs, and, from the end of each of these two trainings, once more for as many
epochs with the same teacher as ours. All have the same augmentation, batch size, schedule and learning rates.

Ours, long: `train` and `distill` have LONG times as many epochs; `search_architecture` has the same number.

All networks are then quantized (PTQ). Test accuracy of the float network and of the int8 file; nothing is chosen on
test. CPU seconds are those of the whole run, quantization and reports included; those of ours include the training of
the largest network.

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Prints a table, and writes
benchmarks/results/architecture_search.json after each run. The folder --work keeps the runs; the next run continues
from there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import repository

import numpy as np
from paths import ROOT, SHARED
from quantization import commit
from search import pipeline

RESULTS = repository.RESULTS / "architecture_search.json"
WORK = ROOT / "runs" / "architecture_search_benchmark"
LIMIT_MS = 0.667
HOST = "usb3"
EPOCHS = 40
LONG = 4
FINALISTS = 2
LARGEST: tuple[str, Mapping[str, Any]] = ("mobilenet_v1", {"blocks": 3, "width": 2.0})
SEARCH = {
    "latency_ms": LIMIT_MS,
    "widths": [0.25, 0.375, 0.5, 0.625, 0.75, 0.875],
    "epochs": 20,
    "candidates": 200,
    "population": 40,
}
FUSED: Mapping[str, Any] = {"expansion": 4, "last": 128}
HAND_MADE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mobilenet_v1, 2 blocks": ("mobilenet_v1", {"blocks": 2}),
    "mobilenet_v1, 3 blocks": ("mobilenet_v1", {"blocks": 3}),
    "mobilenet_v1, 4 blocks": ("mobilenet_v1", {"blocks": 4}),
    "mobilenet_v1, 5 blocks": ("mobilenet_v1", {"blocks": 5}),
    "fused_bottleneck, 3 blocks": (
        "fused_bottleneck",
        {**FUSED, "channels": [16, 32, 64], "blocks": [1, 1, 1], "strides": [2, 2, 2], "fused": 3},
    ),
    "fused_bottleneck, 3 blocks on larger maps": (
        "fused_bottleneck",
        {**FUSED, "channels": [16, 32, 64], "blocks": [1, 1, 1], "strides": [1, 2, 2], "fused": 3},
    ),
    "fused_bottleneck, 2 blocks": (
        "fused_bottleneck",
        {**FUSED, "channels": [32, 64], "blocks": [1, 1], "strides": [2, 2], "fused": 2},
    ),
    "fused_bottleneck, 2 blocks on larger maps": (
        "fused_bottleneck",
        {**FUSED, "channels": [32, 64], "blocks": [1, 1], "strides": [1, 2], "fused": 1},
    ),
    "mobilenet_v2, 1 stage": ("mobilenet_v2", {"stages": 1, "last": 256}),
    "efficientnet_lite": ("efficientnet_lite", {}),
}
TRAIN = {
    "batch_size": 32,
    "warmup": 0.05,
    "augment": {"flip": True, "shift": 0.12, "zoom": 0.2},
}
FIRST = {"epochs": EPOCHS, "learning_rate": 0.004, **TRAIN}
FURTHER = {"learning_rate": 0.002, **TRAIN}
QUANTIZE = {"quantize": {"ranges": "minmax", "held_out_samples": 64}}


def content(name: str, seed: int, builder: str, arguments: Mapping[str, Any], stages: list[Any]) -> dict[str, Any]:
    """Return the pipeline of a run: data as in benchmarks/search.py."""
    plain = pipeline(name, seed, EPOCHS, 1, {})
    del plain["search"]
    return {**plain, "model": {"builder": builder, "arguments": dict(arguments)}, "stages": stages}


@cache
def widest(hand_made: str) -> float | None:
    """Return the largest width of a hand-made network within the limit; None if the smallest is over it."""
    builder, arguments = HAND_MADE[hand_made]
    fitting = [
        width for width in np.arange(1, 33) / 8 if latency_ms(builder, {**arguments, "width": width}) <= LIMIT_MS
    ]
    return float(max(fitting)) if fitting else None


def latency_ms(builder: str, arguments: Mapping[str, Any]) -> float:
    """Return the latency that is predicted from the layers of a network."""
    from compress.ir import channel_groups, keras_graph
    from compress.pruning.cost import Costs
    from compress.targets import load

    specification = spec_from_file_location(builder, ROOT / "models" / f"{builder}.py")
    assert specification is not None
    assert specification.loader is not None
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    network = keras_graph.read(module.build((48, 48, 3), 43, **arguments))
    return Costs(network, channel_groups.find_groups(network), (), load("edgetpu")).latency_ms((), HOST)


def measured(work: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a run; run it if its figures are not in the folder.

    `python -m compress` continues an interrupted run; the CPU seconds of all attempts are added.
    """
    name = run["name"]
    path = work / f"{name}.json"
    if path.exists():
        row: dict[str, Any] = json.loads(path.read_text())
        return row
    _show(name)
    file, attempts = work / f"{name}.yaml", work / f"{name}.seconds"
    file.write_text(json.dumps(run, indent=1))  # JSON is YAML
    before = os.times()
    command = [sys.executable, "-m", "compress", str(file), "--out", str(work / "runs")]
    code = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, check=False).returncode
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    with attempts.open("a") as stream:
        stream.write(f"{spent:.1f}\n")
    if code:
        raise SystemExit(f"{name}: exit code {code}; see {work / 'runs' / name / 'run.log'}")
    report = json.loads((work / "runs" / name / "report.json").read_text())
    row = {
        "commit": commit(),
        **figures(report),
        "float_test": float_accuracy(file, work / "runs" / name / "model.keras"),
        "cpu_seconds": round(sum(map(float, attempts.read_text().split()))),
    }
    path.write_text(json.dumps(row, indent=1))
    return row


def figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a report: the last Keras model on validation, and the int8 file on test."""
    layered = [stage for stage in report["stages"] if stage["kind"] == "keras model" and stage["measurements"]]
    result = report["models"]["result"]["measurements"]
    row = {
        "validation": layered[-1]["measurements"]["accuracy"]["value"],
        "test": result["accuracy"]["value"],
        "macs": result["macs"]["value"],
        "parameters": result["parameters"]["value"],
        "latency_ms": report["latency"]["value"],
    }
    assert report["latency"]["host"] == HOST
    searched = [stage["facts"] for stage in report["stages"] if stage["stage"] == "search_architecture"]
    if searched:
        names = ("evaluated", "largest", "chosen", "layers", "blocks")
        row["search"] = {name: searched[0][name] for name in names}
    return row


def float_accuracy(pipeline_file: Path, model_file: Path) -> float:
    """Return the accuracy of a Keras model on the test split."""
    from compress import load_data
    from compress.importers.keras import keras_file
    from compress.ir.tensorflow import run

    data = load_data(pipeline_file)
    model = keras_file.load(model_file, trust=False)
    inputs = data.inputs("test")
    rows = np.concatenate([np.asarray(run(model, inputs[start : start + 256])) for start in range(0, len(inputs), 256)])
    return round(float((rows.argmax(axis=1) == data.labels("test")).mean()), 5)


def epochs(training: str) -> int:
    """Return the epochs of `train` and `distill`; `training`: "", "long", "distilled" or "long, distilled"."""
    return EPOCHS * (LONG if "long" in training else 1)


def run_name(network: str, training: str, seed: int) -> str:
    """Return the name of a run."""
    return "".join(letter if letter.isalnum() else "_" for letter in f"{network}_{training}_{seed}")


def largest(work: Path, seed: int, training: str = "") -> dict[str, Any]:
    """Train the largest network, which is also the teacher; `training`: "" or "long"."""
    stage = {"train": {**FIRST, "epochs": epochs(training)}}
    return measured(work, content(run_name("largest", training, seed), seed, *LARGEST, [stage]))


def ours(work: Path, seed: int, training: str = "") -> dict[str, Any]:
    """Return the figures of the network that is found and trained further; `training`: "" or "long"."""
    teacher = largest(work, seed, training)
    stages = [
        {"train": {**FIRST, "epochs": epochs(training)}},  # from the store: the same as for `largest`
        {"search_architecture": {**SEARCH, **FURTHER}},
        {"distill": {**FURTHER, "epochs": epochs(training)}},
        QUANTIZE,
    ]
    row = measured(work, content(run_name("ours", training, seed), seed, *LARGEST, stages))
    return {
        **row,
        "cpu_seconds": row["cpu_seconds"] + teacher["cpu_seconds"],
        "largest_test": teacher["float_test"],
    }


def hand_made(work: Path, seed: int, name: str, training: str = "") -> dict[str, Any]:
    """Return the figures of a hand-made network; `training`: "", "long", "distilled" or "long, distilled"."""
    builder, arguments = HAND_MADE[name]
    stages: list[Any] = [{"train": {**FIRST, "epochs": epochs(training)}}]
    if "distilled" in training:
        of_teacher = "long" if "long" in training else ""
        largest(work, seed, of_teacher)
        teacher = str((work / "runs" / run_name("largest", of_teacher, seed) / "model.keras").resolve())
        stages.append({"distill": {**FURTHER, "epochs": epochs(training), "teachers": [teacher]}})
    width = widest(name)
    assert width is not None
    run = run_name(name, training, seed)
    row = measured(work, content(run, seed, builder, {**arguments, "width": width}, [*stages, QUANTIZE]))
    return {**row, "width": width}


def compare(work: Path, seeds: int, results: dict[str, Any]) -> None:
    """Run all networks, and write the results after each run."""
    rows: dict[str, dict[str, Any]] = results.setdefault("networks", {})
    names = [name for name in HAND_MADE if widest(name) is not None]
    results["over_the_limit"] = [name for name in HAND_MADE if name not in names]

    def add(row: str, seed: int, figures: dict[str, Any]) -> None:
        rows.setdefault(row, {})[str(seed)] = figures
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")

    for seed in range(seeds):
        add("ours", seed, ours(work, seed))
    for name in names:
        add(name, 0, hand_made(work, 0, name))
    finalists = sorted(names, key=lambda name: -mean(rows[name], "validation"))[:FINALISTS]
    for seed in range(1, seeds):
        for name in finalists:
            add(name, seed, hand_made(work, seed, name))
    best = max(finalists, key=lambda name: mean(rows[name], "validation"))
    results["best_hand_made"] = best
    for seed in range(seeds):
        for training in ("long", "distilled", "long, distilled"):
            add(f"{best}, {training}", seed, hand_made(work, seed, best, training))
        add("ours, long", seed, ours(work, seed, "long"))


def mean(row: Mapping[str, Mapping[str, Any]], figure: str) -> float:
    """Return the mean of a figure over the seeds."""
    return statistics.mean(float(run[figure]) for run in row.values())


def table(results: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    seeds = sorted({seed for row in results["networks"].values() for seed in row})
    header = [
        "network",
        "width",
        "predicted ms",
        *(f"int8 test, seed {seed}" for seed in seeds),
        "mean, float",
        "mean, int8",
    ]
    lines = [f"| {' | '.join([*header, 'CPU s'])} |", "|---" * (len(header) + 1) + "|"]
    for name, row in results["networks"].items():
        width = next(iter(row.values())).get("width", "")
        latency = max(run["latency_ms"] for run in row.values())
        tests = [f"{row[seed]['test']:.4f}" if seed in row else "" for seed in seeds]
        means = [f"{mean(row, figure):.4f}" for figure in ("float_test", "test")]
        lines.append(
            f"| {' | '.join([name, str(width), f'{latency:.4f}', *tests, *means])} | {mean(row, 'cpu_seconds'):.0f} |"
        )
    return "\n".join(lines)


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Run the comparison, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=WORK, help=f"the folder of the runs; by default {WORK}")
    parser.add_argument("--show", action="store_true", help="print the table of the last results")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.show:
        options.work.mkdir(parents=True, exist_ok=True)
        if not (options.work / "groceries").exists():
            script = ROOT / "calibration_data" / "groceries" / "prepare.py"
            source = SHARED / "data" / "grocery96.tar"
            subprocess.run([sys.executable, str(script), str(source), str(options.work / "groceries")], check=True)
        results = {"limit_ms": LIMIT_MS, "epochs": EPOCHS}
        compare(options.work, options.seeds, results)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
