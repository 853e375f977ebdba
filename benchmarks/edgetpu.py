"""Predictions of `check` against real compiled models and the compiler's own reports: `python benchmarks/edgetpu.py`.

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Prints a Markdown table and every wrong
prediction, and writes benchmarks/results/edgetpu.json. `--write-fixture` writes the operator tables of these models and
the results of the compiler to tests/targets/edgetpu/compiled_models.json, so that tests need no shared files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import repository

import operator_tables
from compiler_evidence import TARGET, CompiledModel, real_models, reported
from paths import EDGETPU

from compress.model.tflite import graph
from compress.targets.edgetpu.check import check

RESULTS = repository.RESULTS / "edgetpu.json"


def check_seconds() -> float:
    """Return the median time in seconds to read and check the model whose size is nearest to 4 MB."""
    models = sorted((EDGETPU / "pairs").glob("*/model.tflite"), key=lambda path: abs(path.stat().st_size - 4_000_000))
    times = []
    for _ in range(7):
        started = time.perf_counter()
        check(graph.read(models[0]), TARGET)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def compared(model: CompiledModel) -> dict[str, Any]:
    """Return the predicted and the real values of one model, in this order."""
    return {
        "name": model.name,
        "misplaced": model.misplaced(),
        "parameter_bytes": [model.predicted_parameter_bytes(), model.parameter_bytes],
        "narrow_bytes_per_tile": [model.predicted_narrow_bytes(), model.narrow_bytes_per_tile],
    }


def within(rows: Sequence[Mapping[str, Any]], figure: str, share: float) -> int:
    """Return the number of models whose prediction differs from the real value by at most this share of it."""
    return sum(abs(ours - real) <= share * real for ours, real in (row[figure] for row in rows))


def record() -> None:
    """Write the operator tables of the shared models, and the compiler's memory reports, into the repository."""
    sources = {row["name"]: row for row in json.loads((EDGETPU / "pairs" / "index.json").read_text())}
    rows = []
    for model in real_models():
        origin = {key: sources[model.name][key] for key in ("source", "commit", "licence")}
        facts = {
            "name": model.name,
            "version": model.version,
            "runtime": model.runtime,
            "placement": model.placement,
            "parameter_bytes": model.parameter_bytes,
            "narrow_bytes_per_tile": model.narrow_bytes_per_tile,
        }
        rows.append(facts | origin | {"table": operator_tables.table_of(model.parsed)})
    sections = {"models": rows, "memory_reports": json.loads((EDGETPU / "compiler_memory_sweep.json").read_text())}
    parts = []
    for name, section in sections.items():
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in section)  # one model or report a line
        parts.append(f'"{name}": [\n{lines}\n]')
    operator_tables.FIXTURE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def table(result: Mapping[str, Any], stacks: int) -> list[tuple[str, str, object]]:
    """Return the rows of the printed table: figure, bound, measured value."""
    rows = result["pairs"]
    narrow = [within(rows, "narrow_bytes_per_tile", share) for share in (0, 0.25)]
    return [
        (f"placement, {len(rows)} pairs", "all", sum(not row["misplaced"] for row in rows)),
        ("parameter bytes exact", ">= 26", within(rows, "parameter_bytes", 0)),
        ("parameter bytes within 2%", ">= 28", within(rows, "parameter_bytes", 0.02)),
        (f"the report's two numbers, {stacks} stacks", ">= 173", stacks - len(result["sweep_missed"])),
        ("narrow memory exact / within 25%", "", f"{narrow[0]} / {narrow[1]}"),
        ("check of a 4 MB model", "<= 0.2 s", f"{result['check_s']:.3f} s"),
    ]


def show(result: Mapping[str, Any], stacks: int) -> None:
    print("| figure | bound | measured |\n|---|---|---|")
    for figure, bound, value in table(result, stacks):
        print(f"| {figure} | {bound} | {value} |")
    for row in result["pairs"]:
        predicted, real = row["parameter_bytes"]
        if row["misplaced"] or predicted != real:
            print(f"\nmissed: {row}")
    for row in result["sweep_missed"]:
        print(f"\nmissed: {row}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-fixture", action="store_true", help="only record the operator tables for the tests")
    options = parser.parse_args()
    if repository.is_missing(EDGETPU):
        return
    if options.write_fixture:
        record()
        return
    models = real_models()
    sweep = json.loads((EDGETPU / "compiler_memory_sweep.json").read_text())
    result = {
        "pairs": [compared(model) for model in models],
        "sweep_missed": [row for row in sweep if not reported(row)],
        "check_s": check_seconds(),
    }
    show(result, len(sweep))
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
