"""runner.pyz: one file, the same bytes everywhere; and the device side, to the bit, on every Python of Coral hosts.

`tests/support/interpreters.py` says where the interpreters come from.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import golden
import pytest
from interpreters import executable, interpreters
from paths import ROOT

from compress.bundling import runner_pyz

IMPORTED = """\
import sys
from deploy.contract import bundle
assert bundle.__file__.startswith(sys.argv[1]), bundle.__file__
print(bundle.read(sys.argv[2]).labels == [u"caf\\u00e9", u"tea"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the runner, a bundle, and a package `deploy` that is not ours."""
    (tmp_path / "runner.pyz").write_bytes(runner_pyz.content())
    (tmp_path / "runner.pyz").chmod(0o755)
    (tmp_path / "tiny.coralline").write_bytes(golden.packed())
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent", **more}


def test_it_holds_the_device_side_and_nothing_else() -> None:
    with zipfile.ZipFile(io.BytesIO(runner_pyz.content())) as archive:
        assert archive.testzip() is None
        there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "deploy").rglob("*.py")}
        assert set(archive.namelist()) == {"__main__.py", *there}
        assert {"deploy/__init__.py", "deploy/__main__.py", "deploy/contract/bundle.py"} <= there
        for name in there:
            assert archive.read(name) == (ROOT / name).read_bytes()
    assert runner_pyz.content().startswith(b"#!/usr/bin/env python3\nPK")


def test_equal_sources_are_equal_bytes(tmp_path: Path) -> None:
    script = "from compress.bundling import runner_pyz; print(runner_pyz.digest())"
    copy = tmp_path / "copy"
    for name in ("compress", "deploy"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "deploy" / "__pycache__").mkdir()
    (copy / "deploy" / "notes.txt").write_text("not a part of it")
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=place,
            env=environment(PYTHONPATH=str(place), TZ=zone),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for place, zone in ((ROOT, "UTC"), (copy, "Asia/Tokyo"))
    }
    assert digests == {runner_pyz.digest()} == {hashlib.sha256(runner_pyz.content()).hexdigest()}


@pytest.mark.parametrize("interpreter", [*interpreters(), sys.executable])
def test_on_every_interpreter(interpreter: str, folder: Path) -> None:
    program = [executable(interpreter), "-W", "error", "runner.pyz"]
    options = {"cwd": folder, "env": environment(), "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*program, "--help"], **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "verify" in done.stdout
    (folder / "tiny.coralline").write_bytes(golden.packed()[:-1] + b"x")
    assert subprocess.run([*program, "verify", "tiny.coralline"], **options).returncode == 8
    if interpreter != sys.executable:  # without waitress
        done = subprocess.run([*program, "serve", "tiny.coralline"], **options)
        assert (done.returncode, "Traceback" in done.stderr) == (11, False), done.stderr


@pytest.mark.parametrize("interpreter", [*interpreters(), sys.executable])
def test_on_pythonpath_it_is_the_package(interpreter: str, folder: Path) -> None:
    command = [executable(interpreter), "-W", "error", "-c", IMPORTED, "runner.pyz", "tiny.coralline"]
    (folder / "elsewhere").mkdir()
    command[-2:] = [str(folder / name) for name in command[-2:]]
    path = environment(PYTHONPATH=str(folder / "runner.pyz"))
    done = subprocess.run(command, cwd=folder / "elsewhere", env=path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_it_runs_by_its_first_line(folder: Path) -> None:
    bin_ = folder / "bin"
    bin_.mkdir()
    (bin_ / "python3").symlink_to(sys.executable)
    done = subprocess.run(
        [str(folder / "runner.pyz"), "--help"],
        env=environment(PATH=f"{bin_}:/usr/bin:/bin"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout


# --- the package ------------------------------------------------------------------------


@pytest.mark.parametrize("interpreter", interpreters())
def test_equal_to_the_bit(interpreter: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [executable(interpreter), "-W", "error", str(Path(golden.__file__))],
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
