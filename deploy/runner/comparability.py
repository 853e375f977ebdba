"""Reasons why a measurement is not comparable with others: the condition, its effect, and what to do."""

from __future__ import annotations

import os
from typing import Any, Dict, List

import numpy as np

from deploy.contract.preprocessing import Array
from deploy.runner import host as machine
from deploy.runner.problems import SET_PERFORMANCE

BUSY = 0.5
"""The load average per core above which a host is busy."""
DRIFT = 1.10
"""The largest ratio between the medians of the last and the first third of a steady run."""
CLOCK_MOVED = 0.8
"""The smallest ratio between the lowest and the highest clock of a comparable run."""
THROTTLING = {1: "under-voltage", 2: "frequency capped", 4: "throttled", 8: "soft temperature limit"}
"""The Raspberry Pi's bits for its present state: see `host.throttled`."""
MEANING = {
    "usb_2": ("inputs and parameters take 3 to 10 times longer", "use a USB 3 port and its own cable"),
    "powersave": ("the processor runs below its frequency", SET_PERFORMANCE),
    "busy_host": ("other processes took part of the time", "stop other processes; list them with: top"),
    "throttled": ("the processor ran below its normal speed", "use a 5 V supply of 3 A or more, and cool the board"),
    "hot": ("hot processors are throttled", "cool the board, and measure again"),
    "clock_moved": ("the runs were measured at different clocks", SET_PERFORMANCE),
    "not_steady": ("the host was not in a steady state", "measure again, with --seconds 30"),
}
"""Effect and remedy of each kind."""
Facts = Dict[str, Any]


def doubts(result: Facts, after: Facts, times: Array) -> List[Dict[str, str]]:
    """Return all reasons against comparing a measurement with others.

    Args:
        result: the result of `benchmark.bench` so far: `model`, `host`, `trace`.
        after: `host.facts` after the measurement.
        times: the result of `benchmark.timed`.
    """
    reasons = _host_doubts(result["host"], result["model"]["device"] != "cpu")
    readings = [*result["trace"], after]
    throttling = _throttling(readings)
    if throttling:
        reasons["throttled"] = "the board reports: %s" % ", ".join(throttling)
    sensors = [sensor for row in readings for sensor in row["temperatures_c"].items()]
    name, celsius = max(sensors, key=lambda sensor: sensor[1], default=("", 0.0))
    if celsius >= machine.HOT_CPU_C:
        reasons["hot"] = "%s reached %.0f degrees" % (name, celsius)
    clocks = [row["clock_mhz"] for row in readings if row["clock_mhz"]]
    if clocks and min(clocks) < CLOCK_MOVED * max(clocks):
        reasons["clock_moved"] = "the processor's clock changed between %.0f and %.0f MHz" % (min(clocks), max(clocks))
    third = max(len(times) // 3, 1)
    runs = times[:, 3] - times[:, 0]
    drift = float(np.median(runs[-third:]) / np.median(runs[:third]))
    if len(times) >= 30 and not 1 / DRIFT <= drift <= DRIFT:
        reasons["not_steady"] = "the last third of the runs took %.2f times as long as the first" % drift
    rows = []
    for kind, what in reasons.items():
        why, hint = MEANING[kind]
        rows.append({"kind": kind, "what": what, "why": why, "hint": hint})
    return rows


def _host_doubts(host: Facts, on_tpu: bool) -> Dict[str, str]:
    """Return the doubts about the state of the host before the measurement: kind and message."""
    reasons = {}
    speeds = [tpu["speed_mbps"] for tpu in host["edge_tpus"] if tpu["speed_mbps"]]
    if on_tpu and speeds and min(speeds) < machine.USB3_MBPS:
        reasons["usb_2"] = "the Edge TPU is on USB 2 (%d Mbit/s)" % min(speeds)
    if "powersave" in (host["governor"] or ""):
        reasons["powersave"] = "the CPU governor is powersave"
    cores = host["cores"] or os.cpu_count() or 1
    if host["load"] is not None and host["load"] > BUSY * cores:
        reasons["busy_host"] = "the load average before the measurement was %.1f on %d cores" % (host["load"], cores)
    return reasons


def _throttling(readings: List[Facts]) -> List[str]:
    bits = 0
    for row in readings:
        bits |= row["throttled"] or 0
    return [name for bit, name in THROTTLING.items() if bits & bit]
