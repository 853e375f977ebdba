"""Predicted latency against published ones: `python benchmarks/latency.py [--raspberry-pi] [--write]`.

Fits the constants of `compress/targets/edgetpu/edgetpu.toml` (table `latency`) to the rows of a CSV file whose
network has a table of layer shapes and is fully mapped. Reports the error of each prediction when no row of the same
network was used (leave one model out), and when no network of the same architecture was used. The interval of a row
comes from the errors of all other networks, so the interval is tested, too. On a host, every model has the same weight,
however often it was published. The published stacks of convolutions have the weight of four models together, and their
errors are reported separately.

The fit starts from values of other sources, and a weak prior keeps it near them (each within a factor of about two):
500 MHz, bus constants from stacks of dense and convolution layers, and a start time of half a millisecond. Needs the
shared files (CORALLINE_SHARED, or ../shared next to the project). Writes benchmarks/results/latency.json; `--write`
writes the constants into the target file.

`--raspberry-pi` does this for the hosts pi4-usb3, pi5-usb3 and pi5-pcie. Few measurements of these boards are published
(`raspberry_pi.csv`), so the other hosts' fit does not work for them:

- pi4-usb3: the fixed time, the time of the bus and the factor of the array are fitted to the networks whose layers are
  known. The factor is 2.0: the clock is not stated, and was probably that of libedgetpu1-std, half of the maximum. The
  time of outputs is that of another ARM host on USB 3, a Jetson Nano (outputs alone were measured there).
- pi5-usb3: no network with known layers was measured. Four YOLOv8 networks were measured on both, at both clocks.
  The array takes twice as long at half the clock. So the time of transfers and the CPU is twice the time at the maximum
  clock, minus the time at half the clock. The constants of the Pi 4 are multiplied by the median ratio of these times.
  The array's factor is that of usb3, because the clock is stated.
- pi5-pcie: no measurement was found. The constants are between those of x86 hosts and of the Dev Board; the interval
  contains the predictions for both, and the measurements on a Compute Module 4.

The interval of all three is at least that of `usb2`, whose hosts are Raspberry Pis and Jetsons too.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import repository

import numpy as np
import raspberry_pi_latency
from paths import EDGETPU
from published_latency import JUDGED, Row, fitted, judged, nested, predicted, rows, spread

from compress.targets import edgetpu
from compress.targets.edgetpu.constants import CONSTANTS

RESULTS = repository.RESULTS / "latency.json"


def write(constants: Mapping[str, Mapping[str, float]]) -> None:
    """Write constants into the target file, by host ("": those of all hosts); its other lines do not change."""
    path = Path(edgetpu.__file__).with_name("edgetpu.toml")
    text = path.read_text()
    for host, values in constants.items():
        begin = text.index(f"[latency.hosts.{host}]" if host else "\n[latency]\n")
        head, tail = text[:begin], text[begin:]
        for name, value in values.items():
            tail = re.sub(rf"^{name} = [^\s#]+", f"{name} = {value:.3g}", tail, count=1, flags=re.MULTILINE)
        text = head + tail
    path.write_text(text)


def raspberry_pis(*, is_written: bool) -> None:
    """Print a Markdown table of the predictions for Raspberry Pis, and write the constants of these hosts."""
    hosts = raspberry_pi_latency.constants()
    if is_written:
        write(hosts)
    print("| host | model | measured, ms | predicted, ms | interval, ms |")
    print("|---|---|---|---|---|")
    for host, source in (("pi4-usb3", "pi4-usb3"), ("pi5-pcie", "cm4-pcie")):
        constants = raspberry_pi_latency.with_constants(hosts[host])
        for row in raspberry_pi_latency.measurements(source):
            if row["table"]:
                expected = raspberry_pi_latency.predicted(row["table"], constants, row["clock"])
                name = host if host == source else f"{host} (measured on {source})"
                interval = f"{expected.low:.3g} to {expected.high:.3g}"
                print(f"| {name} | {row['model']} | {row['ms']} | {expected.total:.3g} | {interval} |")
    ratios = ", ".join(f"{ratio:.2f}" for ratio in raspberry_pi_latency.transfer_ratios())
    print(f"Pi 5 / Pi 4 without computation: {ratios}")
    print(json.dumps(hosts, indent=1))


def left_out(rows: Sequence[Row], group: Callable[[Row], str]) -> list[float]:
    """Predict each row with constants that were fitted without the rows of its group."""
    constants = {
        name: nested(fitted([row for row in rows if group(row) != name])) for name in {group(row) for row in rows}
    }
    return [predicted(row, constants[group(row)]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raspberry-pi", action="store_true", help="the hosts pi4-usb3, pi5-usb3 and pi5-pcie")
    parser.add_argument("--write", action="store_true", help="put the constants into the target file")
    options = parser.parse_args()
    if repository.is_missing(EDGETPU):
        return
    if options.raspberry_pi:
        raspberry_pis(is_written=options.write)
        return
    published = rows(EDGETPU / "latency.csv", EDGETPU / "layer_tables.json")
    predictions = left_out(published, by_model)
    figures, constants = judged(published, predictions, by_model), fitted(published)
    by_architecture = judged(published, left_out(published, by_family), by_family)
    misses = np.log(np.array(predictions) / [row.measured_ms for row in published]).tolist()
    spreads = {host: spread_of(published, misses, JUDGED) for host in JUDGED}
    spreads["usb2"] = max(spread_of(published, misses, ("usb2",)), spreads["usb3"])
    if options.write:
        write(by_host(constants, spreads))
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


def by_host(constants: Mapping[str, float], spreads: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the constants "NAME" and "NAME HOST", and the spread of each host, by host."""
    hosts: dict[str, dict[str, float]] = {}
    for name, value in {**constants, **{f"spread {host}": value for host, value in spreads.items()}}.items():
        word, _, host = name.partition(" ")
        hosts.setdefault(host, {})[word] = value
    return hosts


def by_model(row: Row) -> str:
    return "stack" if row.is_stack else row.model


def by_family(row: Row) -> str:
    return row.family


def spread_of(published: Sequence[Row], misses: Sequence[float], hosts: Sequence[str]) -> float:
    pairs = zip(published, misses, strict=True)
    return spread([miss for row, miss in pairs if row.host in hosts and not row.is_stack])


if __name__ == "__main__":
    main()
