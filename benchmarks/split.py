"""Segments for several Edge TPUs: `python benchmarks/split.py [--networks FOLDER]`.

Every shared uncompiled model is split into 2, 3 and 4 segments on the host usb3. For each: whether the segments give
the outputs of the model bit for bit (the command refuses otherwise), the slowest segment against exhaustive search
over all cuts, and against segments of equal parameter bytes, as `edgetpu_compiler --num_segments` is documented.
Exhaustive search estimates every part of a model as a separate model, and is done for models of up to 130 operators.
FOLDER has the networks of benchmarks/split_networks.py, which run in 4 segments. All times are predicted. Writes
benchmarks/results/split.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import repository

from paths import EDGETPU, SHARED

from compress.core.errors import ModelError
from compress.model.tflite import graph
from compress.targets import load
from compress.targets.edgetpu.several import cuts, segments
from compress.targets.edgetpu.several.split import verify

RESULTS = repository.RESULTS / "split.json"
TARGET = load("edgetpu")
HOST = "usb3"
MOST_OPERATORS = 130
"""The largest model for exhaustive search: all its parts are estimated."""


def exhaustive(model: segments.SplitGraph, count: int) -> tuple[int, float] | None:
    """Return the lowest risk of all cuts, and for this risk the shortest time of the slowest segment in ms."""
    known: dict[tuple[int, int], segments.Segment | None] = {}
    best: tuple[int, float] | None = None
    for inner in combinations(model.network.positions[1:-1], count - 1):
        worst = (0, 0.0)
        for part in pairwise((0, *inner, model.network.operators)):
            if part not in known:
                known[part] = model.segment(*part)
            segment = known[part]
            if segment is None:
                break
            worst = (max(worst[0], segment.risk), max(worst[1], segment.latency_ms))
            if best is not None and worst >= best:
                break
        else:
            best = worst
    return best


def figures(model: segments.SplitGraph, count: int) -> dict[str, Any] | None:
    """Return the figures of a model in a number of segments; None if it cannot be cut into that number."""
    begin = time.perf_counter()
    best_cuts = cuts.best(model.network, count)
    seconds = time.perf_counter() - begin
    if best_cuts is None:
        return None
    parts = model.segments(best_cuts)
    equal = cuts.equal_bytes(model.network, count, model.parameter_bytes)
    others = model.segments(equal) if equal else []
    row: dict[str, Any] = {
        "segments": count,
        "cuts": list(best_cuts[1:-1]),
        "slowest_ms": max(part.latency_ms for part in parts),
        "streamed_bytes": sum(part.estimate.streamed_bytes for part in parts),
        "search_s": seconds,
        "equal_bytes_ms": max((part.latency_ms for part in others), default=None),
        "equal_bytes_streamed": sum(part.estimate.streamed_bytes for part in others),
    }
    row["gain"] = row["equal_bytes_ms"] / row["slowest_ms"] if others else None
    return row


def measured(path: Path, name: str, run: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the rows of one model."""
    try:
        model = segments.prepare(graph.read(path), TARGET, HOST, "max")
        full_segment = model.segment(0, model.network.operators)
    except ModelError as error:
        return [{"model": name, "refused": str(error)}]
    if full_segment is None:
        return [{"model": name, "refused": "the compiler refuses it"}]
    rows = []
    for count in (2, 3, 4):
        row = figures(model, count)
        if row is None:
            rows.append({"model": name, "segments": count, "refused": "too few operators for the Edge TPU"})
            continue
        row = {"model": name, "operators": model.network.operators, "whole_ms": full_segment.latency_ms, **row}
        row["times_of_one"] = full_segment.latency_ms / row["slowest_ms"]
        if count in run:
            verify(model.graph, [model.file(part) for part in model.segments((0, *row["cuts"], row["operators"]))])
            row["bit_equal"] = True
        if model.network.operators <= MOST_OPERATORS:
            best = exhaustive(model, count)
            row["exhaustive_ms"] = best[1] if best else None
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the table."""
    cut = [row for row in rows if "refused" not in row]
    oracle = [row["slowest_ms"] / row["exhaustive_ms"] for row in cut if row.get("exhaustive_ms")]
    gains = [row["gain"] for row in cut if row["gain"]]
    return {
        "cut": len(cut),
        "bit_equal": sum(row.get("bit_equal", False) for row in cut),
        "refused": len(rows) - len(cut),
        "against_exhaustive": len(oracle),
        "largest_excess": max(oracle, default=1.0) - 1,
        "gains_median_and_largest": [sorted(gains)[len(gains) // 2], max(gains)] if gains else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=Path, help="the folder of benchmarks/split_networks.py")
    options = parser.parse_args()
    paths = sorted(EDGETPU.glob("pairs/*/model.tflite")) + sorted((SHARED / "models").rglob("*.tflite"))
    result: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if paths:
        rows = []
        for path in paths:
            name = path.parent.name if path.name == "model.tflite" else path.stem
            rows += measured(path, name, (2, 3, 4))
        result["shared"] = {"summary": summary(rows), "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    if options.networks is not None:
        rows = []
        for path in sorted(options.networks.glob("*.tflite")):
            rows += measured(path, path.stem, (4,))
        result["networks"] = {"summary": summary(rows), "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: part["summary"] for name, part in result.items()}, indent=1))


if __name__ == "__main__":
    main()
