"""What `check` predicts against real compiled models and the compiler's own reports: `python benchmarks/edgetpu.py`.

Needs the shared files (CORALLINE_SHARED, or ../shared beside the project). Prints a Markdown
table and every miss, and writes benchmarks/results/edgetpu.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import repository

from compiler_evidence import TARGET, left_out, pair, reported
from paths import EDGETPU

from compress.targets.edgetpu.check import check
from compress.tflite import graph

RESULTS = repository.RESULTS / "edgetpu.json"


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
