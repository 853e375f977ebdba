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


def ran(*command: object, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    arguments = list(map(str, command))
    return subprocess.run(arguments, cwd=cwd, env=environment(**more), capture_output=True, text=True, check=False)


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
        ran(sys.executable, "-c", script, cwd=place, PYTHONPATH=str(place), TZ=zone).stdout.strip()
        for place, zone in ((ROOT, "UTC"), (copy, "Asia/Tokyo"))
    }
    assert digests == {runner_pyz.digest()} == {hashlib.sha256(runner_pyz.content()).hexdigest()}


@pytest.mark.parametrize("interpreter", [*interpreters(), sys.executable])
def test_on_every_interpreter(interpreter: str, folder: Path) -> None:
    program = [executable(interpreter), "-W", "error", "runner.pyz"]
    done = ran(*program, "--help", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "verify" in done.stdout
    (folder / "tiny.coralline").write_bytes(golden.packed()[:-1] + b"x")
    assert ran(*program, "verify", "tiny.coralline", cwd=folder).returncode == 8
    if interpreter != sys.executable:  # without waitress
        done = ran(*program, "serve", "tiny.coralline", cwd=folder)
        assert (done.returncode, "Traceback" in done.stderr) == (11, False), done.stderr


@pytest.mark.parametrize("interpreter", [*interpreters(), sys.executable])
def test_on_pythonpath_it_is_the_package(interpreter: str, folder: Path) -> None:
    command = [executable(interpreter), "-W", "error", "-c", IMPORTED]
    pyz = folder / "runner.pyz"
    (folder / "elsewhere").mkdir()
    done = ran(*command, pyz, folder / "tiny.coralline", cwd=folder / "elsewhere", PYTHONPATH=str(pyz))
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_it_runs_by_its_first_line(folder: Path) -> None:
    bin_ = folder / "bin"
    bin_.mkdir()
    (bin_ / "python3").symlink_to(sys.executable)
    done = ran(folder / "runner.pyz", "--help", cwd=folder, PATH=f"{bin_}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout


# --- the package ------------------------------------------------------------------------


@pytest.mark.parametrize("interpreter", interpreters())
def test_equal_to_the_bit(interpreter: str, tmp_path: Path) -> None:
    done = ran(executable(interpreter), "-W", "error", golden.__file__, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["found"] == golden.EXPECTED


def test_this_interpreter() -> None:
    assert golden.found() == golden.EXPECTED
