"""The wheel of darwinn alone: everything that its modules import is in it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

from compress.core.errors import ModelError

PROGRAM = """
import pkgutil, sys
sys.path.insert(0, sys.argv[1])
import darwinn
for module in pkgutil.iter_modules(darwinn.__path__):
    __import__(f"darwinn.{module.name}")
from compress.core.errors import ModelError
from darwinn import compiled_file
try:
    compiled_file.parse(b"no model")
except ModelError as error:
    print(error.exit_code)
print(*(sys.modules[name].__file__ for name in ("compress", "darwinn", "deploy")), sep="\\n")
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("compress.")}))
"""


def test_its_modules_work_with_what_is_in_it(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    done = subprocess.run(
        [*command, str(ROOT / "packaging" / "darwinn")], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("coralline_darwinn-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(site)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    code, *files, rooms = done.stdout.splitlines()
    assert int(code) == ModelError.exit_code, done.stderr
    assert all(file.startswith(str(site)) for file in files)
    assert rooms.split() == ["core", "model"]


def test_the_versions_are_one() -> None:
    both = [tomllib.loads((ROOT / part / "pyproject.toml").read_text()) for part in (".", "packaging/darwinn")]
    assert both[0]["project"]["version"] == both[1]["project"]["version"]
