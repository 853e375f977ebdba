"""benchmarks/other_tools.py: its options, environments that cannot be created, tools that fail, and its tables.

Tools that fail, crash, write nonsense or never end are reported, and leave no processes behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tool_tables
from paths import ROOT, SHARED
from tool_runs import CANNOT, FAILED, MADE, Outcome, run

PROGRAM = [sys.executable, str(ROOT / "benchmarks" / "other_tools.py")]
shared = pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not there; CORALLINE_SHARED names it")
WITHOUT_PYENV = {**os.environ, "HOME": "/dev/null", "PATH": "/dev/null"}


def ran(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, env=environment, check=False)


@shared
def test_a_tool_without_an_environment_is_reported(tmp_path: Path) -> None:
    """On a machine without Python 3.12, the result has the reason, and the second run keeps it."""
    results = tmp_path / "results.json"
    options = ["--models", "mnist", "--tools", "onnx2tf", "--work", str(tmp_path), "--results", str(results)]
    done = ran(*options, environment=WITHOUT_PYENV)
    assert done.returncode == 0, done.stderr
    pair = json.loads(results.read_text())["pairs"]["mnist/onnx2tf"]
    reason = "its environment cannot be made: needs Python 3.12, which is not on this machine"
    assert (pair["status"], pair["error"]) == ("failed", reason)
    assert f"| onnx2tf | 2.6.9 | mnist | {reason} |" in done.stdout
    assert ran(*options, "--list", environment=WITHOUT_PYENV).stdout.split() == ["mnist", "onnx2tf", "finished"]


# --- runs of tools ---

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


# --- tables ---

TOOLS = ("coralline", "other")


def judgement(**changes: Any) -> dict[str, Any]:
    return {
        "size_bytes": 12_345,
        "full_integer": True,
        "mapped": 30,
        "operators": 31,
        "rejected": None,
        "remarks": [],
        "latency_ms": [1.234, 1.0, 2.0],
        "mean_sqnr_db": 31.26,
        **changes,
    }


def made_pair(**changes: Any) -> dict[str, Any]:
    return {"status": "made", "error": "", "cpu_seconds": 41.6, "cpu_ratio": 1.0, "judgement": judgement(**changes)}


def results(other: dict[str, Any] | None, **ours: Any) -> dict[str, Any]:
    pairs = {"net/coralline": made_pair(**ours)} | ({} if other is None else {"net/other": other})
    return {"subjects": {"net": {"what": "a net"}}, "pairs": pairs, "versions": {"other": "2.6"}}


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize(
    ("changes", "label", "cell"),
    [
        ({}, "net", "31.3 dB"),
        ({"agreement": 0.9876}, "net", "0.988, 31.3 dB"),
        ({"agreement": 0.9, "accuracy": 0.75, "float_accuracy": 0.8}, "net (float accuracy 0.800)", "0.750, 31.3 dB"),
        ({"ap50": 0.41, "float_ap50": 0.5}, "net (float AP50 0.500)", "0.410, 31.3 dB"),
        ({"error": "the outputs differ"}, "net", "not comparable"),
    ],
)
def test_quality(changes: dict[str, Any], label: str, cell: str) -> None:
    assert rows(tool_tables.quality_table(results(None, **changes), TOOLS)) == [[label, cell, ""]]


def test_tools_without_a_file() -> None:
    for status in ("cannot", "failed"):
        tool_results = results({"status": status, "error": "does not read ONNX"})
        assert rows(tool_tables.quality_table(tool_results, TOOLS))[0][2] == status
        assert rows(tool_tables.cost_table(tool_results, TOOLS))[0][2] == status


def test_cost() -> None:
    tool_results = results(made_pair(rejected="FULLY_CONNECTED has scales per channel", full_integer=False))
    expected = ["net", "30 of 31; 12 kB; 42 s", "rejected, not full integer; 12 kB; 42 s"]
    assert rows(tool_tables.cost_table(tool_results, TOOLS)) == [expected]


def test_latency() -> None:
    other = made_pair(rejected="an INT16 tensor") | {"cpu_ratio": 1.5}
    assert rows(tool_tables.latency_table(results(other), TOOLS)) == [["net", "1.23 ms; 1.00", "rejected; 1.50"]]


def test_what_a_tool_cannot_do_has_its_version_and_reason() -> None:
    tool_results = results({"status": "failed", "error": "RuntimeError:\n a | b " + "x" * 500})
    table = tool_tables.cannot_table(tool_results, TOOLS, [("third", "1.0", "writes ONNX files")])
    first, second = rows(table)
    assert first[:3] == ["other", "2.6", "net"]
    assert first[3].startswith("RuntimeError: a / b xxx")
    assert len(first[3]) == tool_tables.LONGEST
    assert second == ["third", "1.0", "all", "writes ONNX files"]


def test_models_with_the_same_reason_are_one_row() -> None:
    refused = {"status": "cannot", "error": "does not read ONNX"}
    tool_results = results(refused)
    tool_results["subjects"]["second"] = {"what": "another"}
    tool_results["pairs"]["second/other"] = refused
    assert rows(tool_tables.cannot_table(tool_results, TOOLS, []))[0][2] == "net, second"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rejected": "an INT16 tensor"}, "the Edge TPU compiler rejects the file: an INT16 tensor"),
        ({"remarks": ["FULLY_CONNECTED: scales per channel"]}, "FULLY_CONNECTED: scales per channel"),
    ],
)
def test_faults_of_a_file_are_listed(changes: dict[str, Any], reason: str) -> None:
    table = tool_tables.cannot_table(results(made_pair(**changes)), TOOLS, [])
    assert rows(table)[0][2:] == ["net", reason]
