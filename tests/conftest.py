"""What all tests share: reproducible fuzzing without a clock, and projects to run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import tiny

ROOT = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile(
    "coralline", deadline=None, database=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("coralline")

Coralline = Callable[..., subprocess.CompletedProcess[str]]


def command(*arguments: object) -> list[str]:
    """The command line with the light stages of tests/tiny.py; warnings are errors there too."""
    return [sys.executable, "-W", "error", str(ROOT / "tests" / "tiny.py"), *map(str, arguments)]


def environment() -> dict[str, str]:
    """The environment for a subprocess, without a vendor's compiler that may be on PATH."""
    return {**os.environ, "PATH": "", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def coralline(tmp_path: Path) -> Coralline:
    """Runs the command line in tmp_path."""

    def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True} | options
        return subprocess.run(command(*arguments), check=False, **options)

    return run


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a project into tmp_path/project: `tiny.project`."""
    monkeypatch.setenv("PATH", "")
    return lambda *stages, **keys: tiny.project(tmp_path / "project", *stages, **keys)
