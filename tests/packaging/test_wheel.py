"""The wheel of the whole project: equal sources give equal bytes, and what it says is true where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from installation import built, installed
from paths import ROOT

FOLDERS = ("compress", "coralline_pycoral", "deploy", "models", "calibration_data", "docs")
FILES = ("pyproject.toml", "README.md", "LICENSE", "pipeline.yaml")


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


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("installation"))


def output(programs: Path, folder: Path, *command: str) -> str:
    """Run a program of the environment in a folder elsewhere; return what it prints."""
    arguments = [str(programs / command[0]), *command[1:]]
    done = subprocess.run(arguments, cwd=folder, env={"PATH": ""}, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("program", ["coralline", "python -m compress"])
def test_help_names_its_program_and_a_page_that_exists(programs: Path, tmp_path: Path, program: str) -> None:
    text = output(programs, tmp_path, *program.split(), "--help")
    assert text.startswith(f"usage: {program} PIPELINE ")
    (page,) = re.findall(r"^manuals: (.+)$", text, re.MULTILINE)
    assert Path(page).read_text().startswith("# ")
    assert output(programs, tmp_path, *program.split(), "init", "--help").startswith(f"usage: {program} init ")


def test_a_hint_names_a_page_that_exists(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = output(programs, tmp_path, "coralline", "init", "empty")
    (page,) = re.findall(r"written by hand: (\S+\.md)", said)
    assert Path(page).is_absolute()
    assert Path(page).is_relative_to(programs.parent)
    assert Path(page).read_text().startswith("# Data")


def test_every_page_that_the_code_names_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "compress").rglob("*.py"))
    pages = {*re.findall(r"\bmanual\([\"']([^\"']+)[\"']\)", sources)}
    assert len(pages) >= 9
    assert [page for page in sorted(pages) if not (ROOT / "docs" / page).is_file()] == []


def test_extras_are_named_by_the_packages_to_install(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text((ROOT / "pipeline.yaml").read_text())
    said = output(programs, tmp_path, "coralline", "trust", "init", "r", "--keys", "k")
    assert "pip install 'cryptography>=48' 'tuf~=7.0'" in said
    said = output(programs, tmp_path, "coralline", "p.yaml", "--store", "s3://bucket/p")
    assert "pip install 's3fs>=2025.3'" in said
