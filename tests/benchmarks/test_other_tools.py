"""benchmarks/other_tools.py as a program: environments that cannot be created, and its list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT, SHARED

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


def test_an_unknown_model(tmp_path: Path) -> None:
    done = ran("--models", "nets", "--work", str(tmp_path))
    assert done.returncode == 2
    assert "'nets' is not known; allowed: vww_96; " in done.stderr


def test_pip_fails(tmp_path: Path) -> None:
    """The message contains pip's error, and an unfinished environment is not used later."""
    code = (
        "import pathlib, sys, environments\n"
        "version = '.'.join(map(str, sys.version_info[:2]))\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "environments.REQUIREMENTS = folder\n"
        "(folder / 'tool.txt').write_text('no-such-package-of-coralline==1.0\\n')\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        environments.made(environments.Environment('tool', version), folder)\n"
        "    except environments.UnavailableError as error:\n"
        "        print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks" / "others"), "PIP_NO_INDEX": "1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("python failed: ERROR: ") and "no-such-package-of-coralline" in line for line in lines)
