"""The wheel of the whole project: equal sources give equal bytes, and nothing else is in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

FOLDERS = ("compress", "coralline_pycoral", "deploy", "models", "calibration_data")
FILES = ("pyproject.toml", "README.md", "LICENSE", "pipeline.yaml")


def built(root: Path, to: Path) -> Path:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(to), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=to.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = to.glob("*.whl")
    return wheel


def copy(to: Path) -> Path:
    for name in FOLDERS:
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, to)
    return to


def test_equal_sources_are_equal_bytes(tmp_path: Path) -> None:
    """Times, permissions and cache files do not matter."""
    first, second = copy(tmp_path / "first"), copy(tmp_path / "second")
    for path in second.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (0, 0))
            path.chmod(0o700 if path.is_dir() else 0o600)
    for folder in ("models", "compress"):
        (second / folder / "__pycache__").mkdir()
        (second / folder / "__pycache__" / "cached.pyc").write_bytes(b"x")
    wheels = [built(root, tmp_path / f"dist-{root.name}") for root in (first, second)]
    assert wheels[0].name == wheels[1].name
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as archive:
        tops = {name.split("/", 1)[0] for name in archive.namelist()}
        assert {top for top in tops if not top.endswith(".dist-info")} == {"compress", "coralline_pycoral", "deploy"}
        assert {name.rsplit(".", 1)[-1] for name in archive.namelist()} & {"pyc", "yaml"} == {"yaml"}
