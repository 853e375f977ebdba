"""What makes a measurement not comparable with others: what was found, why it matters, and what to do.

Runs on Python 3.7 with numpy alone.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List

import numpy as np

from deploy import host as machine
from deploy.contract.preprocessing import Array

BUSY = 0.5
"""Load for each core from which a host counts as busy."""
DRIFT = 1.10
"""The last third's median over the first third's from which a run counts as not steady."""
HOT_C = 80.0
"""Where the boards that Coral hosts are made of begin to slow down."""
CLOCK_MOVED = 0.8
THROTTLING = {1: "under-voltage", 2: "frequency capped", 4: "throttled", 8: "soft temperature limit"}
"""The Raspberry Pi's bits for what is so now: see `machine.throttled`."""
_PERFORMANCE = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
MEANING = {
    "usb_2": ("inputs and parameters take 3 to 10 times longer", "use a USB 3 port and its own cable"),
    "powersave": ("the processor runs below its frequency", _PERFORMANCE),
    "busy_host": ("other processes took part of the time", "stop what else runs; see it with: top"),
    "throttled": ("it ran slower than it can", "use a 5 V supply of 3 A or more, and cool the board"),
    "hot": ("hosts slow down when they are hot", "cool the board, and measure again"),
    "clock_moved": ("runs at different clocks are not one number", _PERFORMANCE),
    "not_steady": ("the host was not in a steady state", "measure again, with --seconds 30"),
}
"""By kind: why it matters, and what to do."""
Facts = Dict[str, Any]


def doubts(result: Facts, after: Facts, times: Array) -> List[Dict[str, str]]:
    """All doubts about a measurement.

    Args:
        result: what `benchmark.bench` found so far: `model`, `host`, `trace`.
        after: `machine.facts` after it.
        times: from `benchmark.timed`.
    """
    found = _of_host(result["host"], result["model"]["device"] != "cpu")
    found.update(_of_heat([*result["trace"], after]))
    third = max(len(times) // 3, 1)
    whole = times[:, 3] - times[:, 0]
    drift = float(np.median(whole[-third:]) / np.median(whole[:third]))
    if len(times) >= 30 and not 1 / DRIFT <= drift <= DRIFT:
        found["not_steady"] = "the last third took %.2f times as long as the first" % drift
    meant = {kind: dict(zip(("why", "todo"), MEANING[kind])) for kind in found}
    return [{"kind": kind, "what": what, **meant[kind]} for kind, what in found.items()]


def _of_host(host: Facts, on_tpu: bool) -> Dict[str, str]:
    """What was so before: kind and words."""
    found = {}
    speeds = [each["speed_mbps"] for each in host["edge_tpus"] if each["speed_mbps"]]
    if on_tpu and speeds and min(speeds) < machine.USB3_MBPS:
        found["usb_2"] = "the Edge TPU is on USB 2 (%d Mbit/s)" % min(speeds)
    if "powersave" in (host["governor"] or ""):
        found["powersave"] = "the CPU governor is powersave"
    cores = host["cores"] or os.cpu_count() or 1
    if host["load"] is not None and host["load"] > BUSY * cores:
        found["busy_host"] = "the load before was %.1f on %d cores" % (host["load"], cores)
    return found


def _of_heat(seen: List[Facts]) -> Dict[str, str]:
    """What was seen during a run: kind and words."""
    found, bits = {}, 0
    for row in seen:
        bits |= row["throttled"] or 0
    words = [name for bit, name in THROTTLING.items() if bits & bit]
    if words:
        found["throttled"] = "the board says: %s" % ", ".join(words)
    celsius, name = max(
        [(value, name) for row in seen for name, value in row["temperatures_c"].items()], default=(0, "")
    )
    if celsius >= HOT_C:
        found["hot"] = "%s reached %.0f degrees" % (name, celsius)
    clocks = [row["clock_mhz"] for row in seen if row["clock_mhz"]]
    if clocks and min(clocks) < CLOCK_MOVED * max(clocks):
        found["clock_moved"] = "the processor's clock moved between %.0f and %.0f MHz" % (min(clocks), max(clocks))
    return found
