"""Run other programs that may fail, crash or never end; used by benchmarks/other_tools.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULT, LOG = "result.json", "log.txt"
MADE, CANNOT, FAILED = "made", "cannot", "failed"
STATUSES = (MADE, CANNOT, FAILED)
POLL_SECONDS = 0.1
LONGEST = 400
"""Characters of a log that a message quotes."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        status: "made", "cannot" (not supported by the tool) or "failed".
        error: the reason why there is no file; empty if there is one.
        seconds: wall-clock time, including the start of Python and all imports.
        cpu_seconds: CPU time of all threads and child processes.
        peak_memory_mb: the maximum resident set of the process or of one of its child processes.
        facts: further values that the tool reports.
    """

    status: str
    error: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_mb: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(command: Sequence[str], folder: Path, timeout: float, environment: Mapping[str, str]) -> Outcome:
    """Run a program that writes result.json into a folder; its output goes to log.txt there.

    The program and its child processes are killed after `timeout` seconds, or if this process is interrupted.
    """
    (folder / RESULT).unlink(missing_ok=True)
    started = time.monotonic()
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        timed_out, usage = _waited(process, started + timeout)
    cost = {
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_memory_mb": round(usage.ru_maxrss / 1024),
    }
    if timed_out:
        return Outcome(FAILED, f"stopped after {timeout:.0f} s", **cost)
    return _outcome(folder, process.returncode, cost)


def _waited(process: subprocess.Popen[bytes], deadline: float) -> tuple[bool, Any]:
    """Wait for a process; return whether it had to be killed, and its resource usage."""
    timed_out = False
    try:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                timed_out = True
                os.killpg(process.pid, signal.SIGKILL)
                _, status, usage = os.wait4(process.pid, 0)
                break
            time.sleep(POLL_SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return timed_out, usage


def _outcome(folder: Path, code: int, cost: Mapping[str, Any]) -> Outcome:
    try:
        written = json.loads((folder / RESULT).read_text())
        status = written["status"]
    except (OSError, ValueError, TypeError, KeyError):
        end = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return Outcome(FAILED, f"{end} without a result: {last_line(folder / LOG)}", **cost)
    if status not in STATUSES:
        return Outcome(FAILED, f"the result has the status {status!r}", **cost)
    return Outcome(status, str(written.get("error", "")), facts=written.get("facts", {}), **cost)


def last_line(path: Path) -> str:
    """Return the last line of a log that is not empty."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "no output")[-LONGEST:]
