"""The state of a deployment, and the rows that the command prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compress.surface.cli.main import main
from compress.surface.fleet import release


def answers(folder: Path) -> int:
    """Return the version of the current bundle in a folder, after its runner has verified the bundle."""
    done = subprocess.run(
        [sys.executable, "current/runner.pyz", "verify", "current/bundle.coralline", "--json"],
        cwd=folder,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content = (folder / "current" / "bundle.coralline").read_bytes()
    return int(release.bundle.Bundle(content).manifest["version"])


def left(folder: Path) -> set[str]:
    """Return the relative paths of files in a folder that a deployment must not leave behind."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in names if "incoming/" in name or "/.new" in name or "/.old" in name or name[:4] == ".new"}


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    device_rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["devices"]
    return device_rows


def failed(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(arguments) == 15
    return capsys.readouterr().err
