"""CONTRIBUTING.md, SECURITY.md, docs/architecture.md: their recipes work, their files and commands exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from paths import ROOT

from compress.model.tflite import graph

PAGES = ("CONTRIBUTING.md", "SECURITY.md", "docs/architecture.md", "docs/glossary.md")
MAKEFILE = (ROOT / "Makefile").read_text()
WRITTEN = ("build/", "dist/", "runs/")
"""Folders that commands write."""
RECIPES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", (ROOT / PAGES[0]).read_text(), re.DOTALL))
"""Files of the recipes by path."""


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., str]:
    """Copy the packages with the files of all recipes registered; return a function that runs a command in the copy."""
    for name in ("compress", "deploy", "models", "calibration_data"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path, content in RECIPES.items():
        (tmp_path / path).write_text(content)
    registrations = {
        "compress/pipeline/stages/__init__.py": ("strip_metadata", "StripMetadata", "STAGES"),
        "compress/data/sources/__init__.py": ("stripes", "Stripes", "SOURCES"),
    }
    for path, (module, name, table) in registrations.items():
        package = path.removesuffix("/__init__.py").replace("/", ".")
        with (tmp_path / path).open("a") as stream:
            stream.write(f'\nfrom {package}.{module} import {name}\n{table}["{module}"] = {name}\n')

    def run(*arguments: object) -> str:
        command = [sys.executable, "-W", "error", "-m", "compress", *map(str, arguments)]
        environment = tiny.environment() | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_recipes_of_a_stage_and_a_data_source(copy: Callable[..., str], tmp_path: Path) -> None:
    assert set(RECIPES) == {"compress/pipeline/stages/strip_metadata.py", "compress/data/sources/stripes.py"}
    model = graph.parse(tiny.classifier((8, 8, 1), classes=2, seed=2))  # it recognizes both patterns
    (tmp_path / "m.tflite").write_bytes(graph.serialize(model))
    (tmp_path / "p.yaml").write_text(
        "schema_version: 1\nname: recipe\nmodel: {file: m.tflite}\ntarget: cpu\n"
        "data: {source: {stripes: {count: 80}}}\nstages: [strip_metadata]\nmeasure: {latency: {runs: 1}}\n"
    )
    assert "strip_metadata" in copy("stages")
    assert "horizontal" in copy("data", "p.yaml")
    copy("p.yaml")
    assert '"removed_entries"' in (tmp_path / "runs" / "recipe" / "report.json").read_text()


def recipe_pages() -> list[object]:
    return [pytest.param((ROOT / page).read_text(), id=page) for page in PAGES]


@pytest.mark.parametrize("text", recipe_pages())
def test_files_and_commands_that_are_named_exist(text: str) -> None:
    paths = re.findall(r"`([\w.]+(?:/[\w.]+)+)`", text) + re.findall(r"\]\(([\w./]+)\)", text)
    missing = [path for path in paths if not (ROOT / path).exists() and not (ROOT / "docs" / path).exists()]
    assert [path for path in missing if not path.startswith(("../", *WRITTEN))] == []
    targets = re.findall(r"`make (\w+)`", text)
    assert [target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)] == []


def test_the_picture_of_the_packages_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change, run `python docs/draw_architecture.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import draw_architecture

    assert draw_architecture.PAGE.read_text() == draw_architecture.page()
    edges = draw_architecture.graph()
    assert {"core", "deploy.contract", "learning"} <= draw_architecture.reachable(edges, "pipeline")
    assert [node for node in edges if node in draw_architecture.reachable(edges, node)] == []


def test_the_forge_runs_what_the_local_ci_runs() -> None:
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"- run: (.*)", workflow) == commands


def test_hooks_are_local_and_use_the_tools_of_make_check() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (\S+)", hooks) == ["local"]
    for tool in re.findall(r"entry: \.venv/bin/(\S+)", hooks):
        assert f"$(BIN)/{tool}" in MAKEFILE
