"""A child process for steps that can crash or hang: it reports each step to its parent as a line of JSON.

The child is the same interpreter with the same `deploy`, also if that is imported from `runner.pyz`. This module does
not import numpy, because `doctor` reports that numpy is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Optional

_CODE = "import importlib, sys; sys.path.insert(0, sys.argv[1]); importlib.import_module(sys.argv[2]).child()"
Report = Callable[..., None]


class ChildResult(NamedTuple):
    """The end of a child process.

    Attributes:
        reports: the maps that the child reported, in their order.
        stderr: the text that the child and its libraries printed.
        returncode: the exit code; negative: the signal that ended the child; None: it was killed after the timeout.
    """

    reports: List[Dict[str, Any]]
    stderr: str
    returncode: Optional[int]


def run(module: str, content: bytes, timeout_s: float) -> ChildResult:
    """Call `child` of a module in a child process, which gets the content on standard input."""
    location = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # a folder, or runner.pyz
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, location, module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    returncode: Optional[int] = None
    try:
        stdout, stderr = process.communicate(content, timeout=timeout_s)
        returncode = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
    finally:
        if process.poll() is None:  # Ctrl-C
            process.kill()
            process.wait()
    reports: List[Dict[str, Any]] = []
    for line in stdout.splitlines():
        try:
            report = json.loads(line.decode("utf-8", "replace"))
        except ValueError:  # a crash cut the line
            continue
        if isinstance(report, dict):
            reports.append(report)
    return ChildResult(reports, stderr.decode("utf-8", "replace"), returncode)


def reporter() -> Report:
    """Return the function with which the child reports; from then on, what libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(**row: Any) -> None:
        out.write(json.dumps(row) + "\n")
        out.flush()

    return report
