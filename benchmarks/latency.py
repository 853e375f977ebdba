"""Predicted latency against published ones: `python benchmarks/latency.py [--csv FILE] [--tables FILE] [--write]`.

Fits the constants of `compress/targets/edgetpu/edgetpu.toml` (table `latency`) to the rows of a CSV file whose
network has a table of layer shapes and is fully mapped. Reports the error of each prediction when no row of the same
network was used (leave one model out), and when no network of the same architecture was used. The interval of a row
comes from the errors of all other networks, so the interval is tested, too. On a host, every model has the same weight,
however often it was published. The published stacks of convolutions have the weight of four models together, and their
errors are reported separately.

The fit starts from values of other sources, and a weak prior keeps it near them (each within a factor of about two):
500 MHz, bus constants from stacks of dense and convolution layers, and a start time of half a millisecond. The default
files are the shared ones (CORALLINE_SHARED, or ../shared next to the project). Writes benchmarks/results/latency.json;
`--write` writes the constants into the target file.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import repository

import numpy as np
from paths import EDGETPU
from published_latency import JUDGED, Row, fitted, judged, left_out, predicted, rows, spread

from compress.targets import edgetpu
from compress.targets.edgetpu.constants import CONSTANTS

RESULTS = repository.RESULTS / "latency.json"


def write(constants: Mapping[str, float], spreads: Mapping[str, float]) -> None:
    """Write the constants into the target file; its other lines do not change."""
    path = Path(edgetpu.__file__).with_name("edgetpu.toml")
    head, tail = path.read_text().split("\n[latency]\n")
    values = {**constants, **{f"spread {host}": value for host, value in spreads.items()}}
    for name, value in values.items():
        word, _, host = name.partition(" ")
        begin = tail.index(f"[latency.hosts.{host}]") if host else 0
        changed = re.sub(rf"^{word} = [^\s#]+", f"{word} = {value:.3g}", tail[begin:], count=1, flags=re.MULTILINE)
        tail = tail[:begin] + changed
    path.write_text(f"{head}\n[latency]\n{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=EDGETPU / "latency.csv")
    parser.add_argument("--tables", type=Path, default=EDGETPU / "layer_tables.json")
    parser.add_argument("--write", action="store_true", help="put the constants into the target file")
    options = parser.parse_args()
    if repository.is_missing(options.csv) or repository.is_missing(options.tables):
        return
    published = rows(options.csv, options.tables)
    predictions = left_out(published, by_model)
    figures, constants = judged(published, predictions, by_model), fitted(published)
    by_architecture = judged(published, left_out(published, by_family), by_family)
    misses = np.log(np.array(predictions) / [row.measured_ms for row in published]).tolist()
    spreads = {host: spread_of(published, misses, JUDGED) for host in JUDGED}
    spreads["usb2"] = max(spread_of(published, misses, ("usb2",)), spreads["usb3"])
    if options.write:
        write(constants, spreads)
    print("| model | host | measured, ms | without its model | | as shipped | |")
    print("|---|---|---|---|---|---|---|")
    for row, value in sorted(zip(published, predictions, strict=True), key=lambda pair: (pair[0].host, pair[0].model)):
        now = predicted(row, CONSTANTS.latency)
        cells = [row.model, row.host + (" std" if row.clock == "std" else ""), f"{row.measured_ms:g}", f"{value:.3g}"]
        cells += [f"{value / row.measured_ms - 1:+.1%}", f"{now:.3g}", f"{now / row.measured_ms - 1:+.1%}"]
        print(f"| {' | '.join(cells)} |")
    result: dict[str, Any] = {"leave_one_model_out": figures, "leave_one_architecture_out": by_architecture}
    print(json.dumps(result, indent=1))
    print(json.dumps({"constants": constants, "spread": spreads}, indent=1))
    residuals = [
        {"model": row.model, "host": row.host, "clock": row.clock}
        | {"measured_ms": row.measured_ms, "predicted_ms": value}
        for row, value in zip(published, predictions, strict=True)
    ]
    result |= {"constants": constants, "spread": spreads, "residuals": residuals}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def by_model(row: Row) -> str:
    return "stack" if row.is_stack else row.model


def by_family(row: Row) -> str:
    return row.family


def spread_of(published: Sequence[Row], misses: Sequence[float], hosts: Sequence[str]) -> float:
    pairs = zip(published, misses, strict=True)
    return spread([miss for row, miss in pairs if row.host in hosts and not row.is_stack])


if __name__ == "__main__":
    main()
