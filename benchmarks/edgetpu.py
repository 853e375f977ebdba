"""What `check` predicts against real compiled models and the compiler's own reports: `python benchmarks/edgetpu.py`.

Needs the shared files (CORALLINE_SHARED, or ../shared beside the project). Prints a Markdown
table and every miss, and writes benchmarks/results/edgetpu.json.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import support

from compress.targets import load
from compress.targets.edgetpu import activation_memory, operator_parameters, parameter_memory
from compress.targets.edgetpu.check import check
from compress.targets.edgetpu.inspection import inspect
from compress.targets.edgetpu.placement import place
from compress.tflite import graph

ROOT = Path(__file__).resolve().parent.parent
EDGETPU = Path(os.environ.get("CORALLINE_SHARED", ROOT.parent / "shared")) / "edgetpu"
RESULTS = Path(__file__).parent / "results" / "edgetpu.json"
TARGET = load("edgetpu")
MIB = 1 << 20
VERSIONS = {"16.0": "16.0", "15.0": "15.0", "15.0 or 2.x": "2.1", "1.0": "1.0"}


def pair(row: dict[str, Any]) -> dict[str, Any]:
    """Prediction and truth for one model beside its compiled form."""
    folder = EDGETPU / "pairs" / row["name"]
    parsed, real = graph.read(folder / "model.tflite"), inspect(folder / "compiled.tflite")
    placed = [op.placement for op in place(parsed, TARGET).ops]
    target = TARGET.compiled_by(VERSIONS[row["behaves_like"]])
    mapped = [op for op, side in zip(parsed.operators, row["placement"], strict=True) if side == "tpu"]
    total = sum(operator_parameters.count(op, parsed, target).size_bytes for op in mapped)
    return {
        "name": row["name"],
        "misplaced": sum(a != b for a, b in zip(placed, row["placement"], strict=True)),
        "parameter_bytes": [total, real.cached_bytes + real.streamed_bytes],
        "narrow_bytes_per_tile": [
            activation_memory.bytes_per_tile(parsed, {op.index for op in mapped}),
            max(each.narrow_bytes_per_tile for each in real.executables),
        ],
    }


def stack(row: dict[str, Any]) -> list[parameter_memory.Parameters]:
    """The layers of one row of the sweep."""
    given, layers, conv = row["input"][-1], [], row["network"] == "conv"
    for outputs in [row["width"]] * row["layers"] + ([] if conv else [row["classes"]]):
        each = parameter_memory.up(given, 4) * (row["kernel"] ** 2 if conv else 1)
        places = row["input"][0] * row["input"][1] if conv else 1
        found = parameter_memory.convolution(outputs, each, 8 if conv else 0, places, one_position_in=not conv)
        layers.append(parameter_memory.never_cached(found, each, TARGET))
        given = outputs
    return layers


def reported(row: dict[str, Any]) -> bool:
    """Whether both numbers of the compiler's report are met, to the digits that it prints."""
    found = parameter_memory.split(stack(row), TARGET)
    numbers = ((found.report_on_chip_bytes, "report_on_chip_MiB"), (found.report_off_chip_bytes, "report_off_chip_MiB"))
    return all(abs(size / MIB - row[name]) <= (0.00501 if row[name] >= 1 else 0.00001) for size, name in numbers)


def left_out(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """How many are exact without a branch that only they, or only models of the same operators, reach."""
    graphs = {row["name"]: graph.read(EDGETPU / "pairs" / row["name"] / "model.tflite") for row in pairs}
    rows = {row["name"]: row for row in json.loads((EDGETPU / "pairs" / "index.json").read_text())}

    def reached(name: str) -> frozenset[support.Branch]:
        target, placed = TARGET.compiled_by(VERSIONS[rows[name]["behaves_like"]]), rows[name]["placement"]
        mapped = [op for op, side in zip(graphs[name].operators, placed, strict=True) if side == "tpu"]

        def work() -> list[Any]:
            return [operator_parameters.count(op, graphs[name], target) for op in mapped]

        return support.reached(work, (operator_parameters, parameter_memory))

    exact = [row["name"] for row in pairs if row["parameter_bytes"][0] == row["parameter_bytes"][1]]
    supports = {name: reached(name) for name in graphs}
    models = support.alone(supports, {name: name for name in graphs})
    kinds = {name: tuple(op.name for op in parsed.operators) for name, parsed in graphs.items()}
    families = support.alone(supports, kinds)
    return {
        "exact": len(exact),
        "exact_without_branches_of_their_own": sum(not models[name] for name in exact),
        "families": len(set(kinds.values())),
        "exact_without_branches_of_their_family": sum(not families[name] for name in exact),
        "branches_of_one_family": {name: lines for name, lines in families.items() if lines},
    }


def check_seconds() -> float:
    """Median time of a check of the model nearest to 4 MB, read included."""
    models = sorted((EDGETPU / "pairs").glob("*/model.tflite"), key=lambda path: abs(path.stat().st_size - 4_000_000))
    times = []
    for _ in range(7):
        started = time.perf_counter()
        check(graph.read(models[0]), TARGET)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    if not EDGETPU.exists():
        sys.exit(f"{EDGETPU} is not there; CORALLINE_SHARED names the folder of shared files")
    pairs = [pair(row) for row in json.loads((EDGETPU / "pairs" / "index.json").read_text())]
    sweep = json.loads((EDGETPU / "compiler_memory_sweep.json").read_text())
    missed = [row for row in sweep if not reported(row)]
    seconds = check_seconds()

    def within(name: str, share: float) -> int:
        return sum(abs(a - b) <= share * b for a, b in (row[name] for row in pairs))

    count, alone = len(pairs), left_out(pairs)
    rows = [
        (f"placement, {count} pairs", "all", sum(not row["misplaced"] for row in pairs)),
        ("parameter bytes exact", ">= 26", within("parameter_bytes", 0)),
        ("parameter bytes within 2%", ">= 28", within("parameter_bytes", 0.02)),
        (
            "parameter bytes exact, leaving out one pair / one family",
            "",
            f"{alone['exact_without_branches_of_their_own']} / {alone['exact_without_branches_of_their_family']}",
        ),
        (f"the report's two numbers, {len(sweep)} stacks", ">= 173", len(sweep) - len(missed)),
        (
            "narrow memory exact / within 25%",
            "",
            f"{within('narrow_bytes_per_tile', 0)} / {within('narrow_bytes_per_tile', 0.25)}",
        ),
        ("check of a 4 MB model", "<= 0.2 s", f"{seconds:.3f} s"),
    ]
    print("| figure | bound | measured |\n|---|---|---|")
    print("\n".join(f"| {a} | {b} | {c} |" for a, b, c in rows))
    for row in pairs:
        if row["misplaced"] or row["parameter_bytes"][0] != row["parameter_bytes"][1]:
            print(f"\nmissed: {row}")
    for row in missed:
        print(f"\nmissed: {row}")
    for name, lines in alone["branches_of_one_family"].items():
        print(f"\nonly {name}, or its family, reaches:", *lines, sep="\n  ")
    result = {"pairs": pairs, "left_out": alone, "sweep_missed": missed, "check_s": seconds}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
