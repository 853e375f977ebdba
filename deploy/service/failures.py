"""Unexpected exceptions of the service: counted, and logged without a flood."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from typing import Dict, List, Tuple

LOG_INTERVAL_S = 60.0
"""The shortest time between two log entries of one origin."""
Origin = Tuple[str, str, int]
"""The type of an exception, and the file and line that raised it."""


class FailureLog:
    """A counter and a log of unexpected exceptions. All threads of the service share one.

    Each origin is logged with its traceback once in `interval_s`. The entry also says how many exceptions
    of this origin were not logged since the entry before.

    Args:
        interval_s: the shortest time between two entries of one origin.

    Attributes:
        count: all exceptions, logged or not.
    """

    def __init__(self, interval_s: float = LOG_INTERVAL_S) -> None:
        self.count = 0
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._next: Dict[Origin, float] = {}
        self._skipped: Dict[Origin, int] = {}

    def add(self, error: BaseException) -> None:
        """Count an exception, and log it unless its origin was logged a short time ago."""
        origin = _origin(error)
        now = time.monotonic()
        with self._lock:
            self.count += 1
            if now < self._next.get(origin, now):
                self._skipped[origin] = self._skipped.get(origin, 0) + 1
                return
            self._next[origin] = now + self._interval_s
            skipped = self._skipped.pop(origin, 0)
        _log(error, skipped)


def _origin(error: BaseException) -> Origin:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__, "", 0
    return type(error).__name__, frames[-1].filename, int(frames[-1].lineno or 0)


def _log(error: BaseException, skipped: int) -> None:
    lines: List[str] = ["runner: unexpected error, please report it"]
    if skipped:
        lines[0] += " (%d more since the last report)" % skipped
    lines[0] += "\n"
    lines += traceback.format_exception(type(error), error, error.__traceback__)
    with contextlib.suppress(OSError, ValueError):  # standard error is closed, or its disk is full
        sys.stderr.write("".join(lines))
        sys.stderr.flush()
