"""Energy of a stretch of time: from a meter's file, or from the processor's own counters (RAPL).

A meter's file has one line for each reading: time in seconds since 1970, a comma, watts. A first line of
words is skipped. The meter's program may write it while the measurement runs::

    time,watts
    1732222000.10,3.41
    1732222000.20,3.44

Runs on Python 3.7 with numpy alone.
"""

from __future__ import annotations

import time
from math import isfinite
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from deploy import host
from deploy.contract.errors import ArgumentError
from deploy.measurement import Measured, measured, missing

UNIT = "mJ"
LONGEST_GAP_S = 2.0
"""Between readings, or from them to an end of the stretch; with less, the energy between is not known."""


class Stretch:
    """The energy from its making to `end`.

    Args:
        meter: path of a meter's file, or None.
    """

    def __init__(self, meter: Optional[str]) -> None:
        self._meter = meter
        self._counters = host.energy_counters()
        self._began = time.time()

    def end(self, inferences: int) -> Measured:
        """Energy of one inference, everything that the meter or the counters see included.

        Raises:
            ArgumentError: the meter's file is not of numbers.
            OSError: it cannot be read.
        """
        ended = time.time()
        if self._meter is not None:
            return _from_meter(_readings(self._meter), self._began, ended, inferences)
        return _from_counters(self._counters, host.energy_counters(), inferences)


def _from_counters(before: Dict[str, Any], after: Dict[str, Any], inferences: int) -> Measured:
    names = sorted(set(before) & set(after))
    if not names:
        return missing(UNIT, "no meter")
    used = sum((after[name]["uj"] - before[name]["uj"]) % max(before[name]["range_uj"], 1) for name in names)
    note = "RAPL counters of %s: the host's processor with everything it does, no Edge TPU" % ", ".join(names)
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
            if number == 1 or number == len(lines):  # a head; a line that is being written
                continue
            raise ArgumentError("%s:%d: %r is not time,watts" % (path, number, line[:80]), "write one reading a line")
        rows.append((at, watts))
    return sorted(rows)


def _from_meter(rows: List[Tuple[float, float]], began: float, ended: float, inferences: int) -> Measured:
    inside = [row for row in rows if began - LONGEST_GAP_S <= row[0] <= ended + LONGEST_GAP_S]
    times, watts = np.array([row[0] for row in inside]), np.array([row[1] for row in inside])
    if len(inside) < 2 or times[0] > began + LONGEST_GAP_S or times[-1] < ended - LONGEST_GAP_S:
        return missing(UNIT, "the meter's file has no readings of these %.1f s" % (ended - began))
    if np.diff(times).max() > LONGEST_GAP_S:
        return missing(UNIT, "the meter's file has a gap of %.1f s" % np.diff(times).max())
    at = np.concatenate([[began], times[(times > began) & (times < ended)], [ended]])
    power = np.interp(at, times, watts)
    joules = float((np.diff(at) * (power[1:] + power[:-1]) / 2).sum())
    note = "meter, %d readings over %.1f s, mean %.2f W, idle power included" % (
        len(inside),
        ended - began,
        joules / (ended - began),
    )
    return measured(joules * 1000 / inferences, UNIT, note)
