"""The device side on every Python that Coral hosts have: imported, and equal to the bit.

Tried on the interpreters under ~/.pyenv/versions, or on those that CORALLINE_PYTHONS names
(paths with colons between them), where they have numpy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import golden
import pytest
from paths import ROOT

VERSIONS = ("3.7", "3.8", "3.9", "3.10", "3.12", "3.13")


def interpreters() -> list[str]:
    named = os.environ.get("CORALLINE_PYTHONS")
    if named:
        return named.split(":")
    installed = Path.home() / ".pyenv" / "versions"
    found = {version: sorted(installed.glob(f"{version}.*/bin/python")) for version in VERSIONS}
    return [str(paths[-1]) if paths else f"Python {version}" for version, paths in found.items()]


@pytest.mark.parametrize("interpreter", interpreters())
def test_equal_to_the_bit(interpreter: str, tmp_path: Path) -> None:
    if not os.access(interpreter, os.X_OK):
        pytest.skip(f"{interpreter} is not installed")
    if subprocess.run([interpreter, "-c", "import numpy"], capture_output=True, check=False).returncode:
        pytest.skip(f"{interpreter} has no numpy")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [interpreter, "-W", "error", str(Path(golden.__file__))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["found"] == golden.EXPECTED


def test_this_interpreter() -> None:
    assert golden.found() == golden.EXPECTED


def test_device_side_imports_nothing_else() -> None:
    check = (
        "import sys, deploy.contract.bundle, deploy.contract.preprocessing, deploy.contract.signature; "
        "found = set(sys.modules) & {'compress', 'cryptography', 'pydantic', 'tensorflow', 'ai_edge_litert'}; "
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
