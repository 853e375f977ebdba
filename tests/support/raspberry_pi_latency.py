"""Published latencies of Raspberry Pi boards, and the constants of the hosts that are derived from them.

`benchmarks/latency.py --raspberry-pi` explains the derivations.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from paths import EDGETPU, ROOT
from published_latency import PRIOR_WEIGHT, network
from scipy.optimize import least_squares

from compress.targets.edgetpu import latency
from compress.targets.edgetpu.constants import CONSTANTS, HostConstants

MEASUREMENTS = ROOT / "benchmarks" / "raspberry_pi.csv"
TABLES = EDGETPU / "layer_tables.json"
HOSTS = CONSTANTS.latency.hosts
OUTPUT_MS_PER_MB = 32.0
"""Output time of an ARM host on USB 3.

From outputs of 4 to 262 kB on a Jetson Nano (github.com/iwatake2222/EdgeTPU_Analysis).
"""
FITTED = ("fixed_ms", "transfer_ms_per_mb", "compute_factor")
SCALED = ("fixed_ms", "transfer_ms_per_mb", "output_ms_per_mb")
LEAST_SPREAD = HOSTS["usb2"].spread
Measurement = Mapping[str, str]
Constants = dict[str, float]


def measurements(host: str) -> list[Measurement]:
    """The published measurements on one host."""
    return [row for row in csv.DictReader(MEASUREMENTS.read_text().splitlines()) if row["host"] == host]


def predicted(table: str, host: HostConstants, clock: str = "max") -> latency.LatencyPrediction:
    """The prediction for a network of the shared tables; an unstated clock is the maximum, as for the other hosts."""
    layers, sent = network(json.loads(TABLES.read_text())[table])
    clock = "std" if clock == "std" else "max"
    return latency.predict(layers, sent, replace(CONSTANTS.latency, hosts={"host": host}), "host", clock)


def fitted(rows: Sequence[Measurement]) -> Constants:
    """Return the constants of pi4-usb3 that fit the measurements best, with a weak prior at those of usb3."""
    start = {name: getattr(HOSTS["usb3"], name) for name in FITTED}
    zero = np.log(list(start.values()))

    def misses(point: Any) -> Any:
        host = with_constants({**_host(dict(zip(FITTED, np.exp(point), strict=True))), "spread": 0.0})
        log_errors = [math.log(predicted(row["table"], host, row["clock"]).total / float(row["ms"])) for row in rows]
        return np.concatenate([log_errors, PRIOR_WEIGHT * (point - zero)])

    return _host(dict(zip(FITTED, np.exp(least_squares(misses, zero).x).tolist(), strict=True)))


def with_constants(constants: Constants) -> HostConstants:
    """Return a host with the constants, which are all that a prediction of a network on the Edge TPU needs."""
    return replace(HOSTS["usb3"], **constants)


def _host(constants: Constants) -> Constants:
    return {**constants, "output_ms_per_mb": OUTPUT_MS_PER_MB, "overlap": 0, "spread": LEAST_SPREAD}


def transfer_ratios() -> list[float]:
    """Return the ratios Pi 5 / Pi 4 of the clock-independent time, for each network measured at both clocks on both."""
    boards = []
    for host in ("pi4-usb3", "pi5-usb3"):
        times: dict[str, dict[str, float]] = {}
        for row in measurements(host):
            times.setdefault(row["model"], {})[row["clock"]] = float(row["ms"])
        boards.append({model: 2 * both["max"] - both["std"] for model, both in times.items() if len(both) == 2})
    return [boards[1][model] / rest for model, rest in sorted(boards[0].items()) if model in boards[1]]


def scaled(host: Constants, ratios: Sequence[float]) -> Constants:
    """Return the constants of pi5-usb3, with the array of usb3. The interval includes the disagreement of `ratios`."""
    ratio = float(np.median(ratios))
    disagreement = max(abs(math.log(measured_ratio / ratio)) for measured_ratio in ratios)
    transfers = {name: host[name] * ratio for name in SCALED}
    array = {"compute_factor": HOSTS["usb3"].compute_factor}
    return {**host, **transfers, **array, "spread": math.hypot(LEAST_SPREAD, disagreement)}


def between() -> Constants:
    """Return the constants of pi5-pcie: the geometric means of x86 hosts and of the Dev Board."""
    x86, board = HOSTS["pcie"], HOSTS["devboard"]
    names = (*SCALED, "compute_factor")
    host: Constants = {name: math.sqrt(getattr(x86, name) * getattr(board, name)) for name in names}
    host.update(overlap=0, spread=LEAST_SPREAD)
    misses = [LEAST_SPREAD]
    for table in json.loads(TABLES.read_text()):
        total_ms = predicted(table, with_constants(host)).total
        misses += [abs(math.log(total_ms / predicted(table, other).total)) for other in (x86, board)]
    for row in measurements("cm4-pcie"):
        misses.append(abs(math.log(predicted(row["table"], with_constants(host)).total / float(row["ms"]))))
    return {**host, "spread": max(misses)}


def constants() -> dict[str, Constants]:
    """Return the constants of the three hosts."""
    pi4 = fitted([row for row in measurements("pi4-usb3") if row["table"]])
    return {"pi4-usb3": pi4, "pi5-usb3": scaled(pi4, transfer_ratios()), "pi5-pcie": between()}
