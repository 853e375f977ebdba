"""The wheel of the device side: its content, and its installation on old Pythons."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import golden
import pytest
from installation import built
from interpreters import executable, interpreters
from paths import ROOT

PACKAGES = ("coralline_pycoral", "deploy")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT / "packaging" / "deploy", tmp_path_factory.mktemp("wheel") / "dist")


def test_it_holds_the_device_side_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        sources = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
        assert names == {path.relative_to(ROOT).as_posix() for path in sources}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
        assert any(name.endswith("LICENSE") for name in archive.namelist())
    assert {"Name: coralline-deploy", "Requires-Python: >=3.7", "Requires-Dist: numpy>=1.16"} <= {*lines}
    assert [line for line in lines if line.startswith("Requires-Dist") and "extra" not in line] == [
        "Requires-Dist: numpy>=1.16"
    ]


def test_the_versions_are_one() -> None:
    both = [tomllib.loads((ROOT / part / "pyproject.toml").read_text()) for part in (".", "packaging/deploy")]
    assert both[0]["project"]["version"] == both[1]["project"]["version"]


def test_equal_sources_are_equal_bytes(wheel: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in (*PACKAGES, "packaging"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "LICENSE", copy)
    for path in copy.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (0, 0))
            path.chmod(0o700 if path.is_dir() else 0o600)
    again = built(copy / "packaging" / "deploy", tmp_path / "dist")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


@pytest.mark.parametrize("interpreter", interpreters())
def test_every_python_takes_it(interpreter: str, wheel: Path, tmp_path: Path) -> None:
    interpreter = executable(interpreter)
    if subprocess.run([interpreter, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip(f"{interpreter} has no pip")
    there = tmp_path / "site"
    options = ["--no-index", "--no-deps", "--disable-pip-version-check", "--no-warn-script-location"]
    pip = [interpreter, "-m", "pip", "install", *options, "--target", str(there), str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**kept, "PYTHONPATH": str(there), "HOME": "/nonexistent"}
    run: Any = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    check = "import deploy, deploy.contract.trust, coralline_pycoral; print(deploy.__file__); import compress"
    done = subprocess.run([interpreter, "-W", "error", "-c", check], **run)
    assert done.stdout.strip().startswith(str(there)), done.stderr
    assert "No module named 'compress'" in done.stderr
    if subprocess.run([interpreter, "-c", "import numpy"], capture_output=True, check=False).returncode == 0:
        (tmp_path / "tiny.coralline").write_bytes(golden.packed()[:-1])
        done = subprocess.run([interpreter, "-W", "error", "-m", "deploy", "verify", "tiny.coralline"], **run)
        assert done.returncode == 8, done.stderr
