"""Tools that fail, crash, write nonsense or never end are reported, and leave no processes behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import ROOT
from tool_runs import CANNOT, FAILED, MADE, Outcome, run

WRITE = "import json, pathlib; pathlib.Path({folder!r}, 'result.json').write_text({text!r})"


def outcome(folder: Path, code: str, timeout: float = 60) -> Outcome:
    return run([sys.executable, "-c", code], folder, timeout, dict(os.environ))


def writing(folder: Path, result: object) -> str:
    text = result if isinstance(result, str) else json.dumps(result)
    return WRITE.format(folder=str(folder), text=text)


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A process that has ended and is not yet collected does not run."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def waited(condition: object, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_file_that_was_made(tmp_path: Path) -> None:
    code = writing(tmp_path, {"status": MADE, "facts": {"epochs": 6}}) + "; x = bytearray(80_000_000)"
    result = outcome(tmp_path, code)
    assert (result.status, result.error, result.facts) == (MADE, "", {"epochs": 6})
    assert result.peak_memory_mb >= 80
    assert result.cpu_seconds > 0
    assert result.seconds > 0


@pytest.mark.parametrize("status", [CANNOT, FAILED])
def test_the_reason_of_a_tool(tmp_path: Path, status: str) -> None:
    result = outcome(tmp_path, writing(tmp_path, {"status": status, "error": "does not read ONNX"}))
    assert (result.status, result.error) == (status, "does not read ONNX")


def test_a_crash(tmp_path: Path) -> None:
    result = outcome(tmp_path, "import os, sys; print('converting', flush=True); os.abort()")
    assert result.status == FAILED
    assert result.error.startswith("was ended by signal 6 without a result: ")


def test_a_message_and_no_result(tmp_path: Path) -> None:
    result = outcome(tmp_path, "raise SystemExit('out of memory')")
    assert (result.status, result.error) == (FAILED, "ended with exit code 1 without a result: out of memory")


@pytest.mark.parametrize("text", ["", "{", "[]", '"made"', "{}"])
def test_an_unreadable_result(tmp_path: Path, text: str) -> None:
    result = outcome(tmp_path, writing(tmp_path, text))
    assert (result.status, result.error) == (FAILED, "ended with exit code 0 without a result: no output")


def test_an_unknown_status(tmp_path: Path) -> None:
    result = outcome(tmp_path, writing(tmp_path, {"status": "perfect"}))
    assert (result.status, result.error) == (FAILED, "the result has the status 'perfect'")


def test_a_result_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"status": MADE}))
    assert outcome(tmp_path, "pass").status == FAILED


def test_a_tool_that_never_ends_is_stopped_with_its_children(tmp_path: Path) -> None:
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'child').write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    result = outcome(tmp_path, code, timeout=5)
    assert (result.status, result.error) == (FAILED, "stopped after 5 s")
    child = int((tmp_path / "child").read_text())
    assert waited(lambda: not is_alive(child))


def test_an_interruption_stops_the_tool(tmp_path: Path) -> None:
    child = f"import os, pathlib, time; pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()));"
    code = (
        "import os, sys, pathlib, tool_runs\n"
        f"command = [sys.executable, '-c', {child + ' time.sleep(600)'!r}]\n"
        f"tool_runs.run(command, pathlib.Path({str(tmp_path)!r}), 600, dict(os.environ))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
    pid = tmp_path / "pid"
    assert waited(lambda: pid.exists() and pid.read_text())
    parent.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in parent.communicate(timeout=60)[1]
    assert waited(lambda: not is_alive(int(pid.read_text())))
