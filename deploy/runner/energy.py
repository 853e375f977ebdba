"""Energy of a measurement, from the file of a power meter or from the counters of the processor (RAPL).

The file has one line for each reading: time in seconds since 1970, a comma, watts. A header line is skipped. The
program of the meter may write the file while the measurement runs::

    time,watts
    1732222000.10,3.41
    1732222000.20,3.44
"""

from __future__ import annotations

import time
from math import isfinite
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from deploy.contract.errors import ArgumentError
from deploy.runner import host
from deploy.runner.measurement import Measured, measured, missing

UNIT = "mJ"
MAX_GAP_S = 2.0
"""The longest time between two readings, and between the measurement and a reading before or after it."""


class EnergyMeter:
    """The energy from the creation of this object to `end`.

    Args:
        meter: the path of a meter's file, or None for RAPL.
    """

    def __init__(self, meter: Optional[str]) -> None:
        self._meter = meter
        self._counters = host.energy_counters()
        self._start = time.time()

    def end(self, inferences: int) -> Measured:
        """Return the energy per inference, including everything else that the meter or the counters measure.

        Raises:
            ArgumentError: the meter's file has a line without two numbers.
        """
        end = time.time()
        if self._meter is not None:
            return _from_meter(_readings(self._meter), self._start, end, inferences)
        return _from_counters(self._counters, host.energy_counters(), inferences)


def _from_counters(before: Dict[str, Any], after: Dict[str, Any], inferences: int) -> Measured:
    names = sorted(set(before) & set(after))
    if not names:
        return missing(UNIT, "no meter")
    used = sum((after[name]["uj"] - before[name]["uj"]) % max(before[name]["range_uj"], 1) for name in names)
    note = "RAPL counters of %s: all work of the processor, without the Edge TPU" % ", ".join(names)
    return measured(used / 1000 / inferences, UNIT, note)


def _readings(path: str) -> List[Tuple[float, float]]:
    rows: List[Tuple[float, float]] = []
    with open(path, encoding="utf-8", errors="replace") as stream:
        lines = stream.read().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            at, watts = (float(part) for part in line.split(",")[:2])
            if not (isfinite(at) and isfinite(watts)):
                raise ValueError
        except ValueError:
            if number == 1 or number == len(lines):  # the header; the line that the meter is writing
                continue
            what = "%s:%d: %r is not in the form time,watts" % (path, number, line[:80])
            raise ArgumentError(what, "write one reading per line")
        rows.append((at, watts))
    return sorted(rows)


def _from_meter(rows: List[Tuple[float, float]], start: float, end: float, inferences: int) -> Measured:
    near = [row for row in rows if start - MAX_GAP_S <= row[0] <= end + MAX_GAP_S]
    duration = end - start
    if len(near) < 2 or near[0][0] > start + MAX_GAP_S or near[-1][0] < end - MAX_GAP_S:
        return missing(UNIT, "the meter's file has no readings of these %.1f s" % duration)
    times, watts = np.array(near).T
    longest_gap = np.diff(times).max()
    if longest_gap > MAX_GAP_S:
        return missing(UNIT, "the meter's file has a gap of %.1f s" % longest_gap)
    at = np.concatenate([[start], times[(times > start) & (times < end)], [end]])
    power = np.interp(at, times, watts)
    joules = float((np.diff(at) * (power[1:] + power[:-1]) / 2).sum())
    note = "meter, %d readings over %.1f s, mean %.2f W, idle power included" % (len(near), duration, joules / duration)
    return measured(joules * 1000 / inferences, UNIT, note)
