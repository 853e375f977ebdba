"""docs/hardware: the known problems are those of `doctor`, and the files, commands and hosts in the text exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from paths import ROOT
from ruamel.yaml import YAML

from compress.pipeline.stages.compile import Compile
from compress.surface.cli.main import build_parser
from compress.targets.edgetpu.constants import CONSTANTS
from deploy import __main__ as runner
from deploy.runner.problems import MANUAL, PROBLEMS

HOSTS = CONSTANTS.latency.hosts
PAGES = sorted((ROOT / MANUAL).glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def each_page() -> list[object]:
    return [pytest.param(page, id=page.stem) for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    return [content for kind, content in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_known_problems_are_those_of_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change, run `python docs/draw_known_problems.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import draw_known_problems

    drawn = draw_known_problems.pages()
    assert {page.stem for page in drawn} == {problem.page for problem in PROBLEMS.values()}
    for page in drawn:
        assert draw_known_problems.with_problems(page) == page.read_text(encoding="utf-8")
        titles = re.findall(r"^### (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(titles) == len(set(titles))  # otherwise a link to one of them is ambiguous


def test_every_fix_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import draw_known_problems

    open_fixes = {name for name, problem in PROBLEMS.items() if re.search(r"\{(fix|install|headers)\}", problem.hint)}
    assert set(draw_known_problems.FIXES) == open_fixes
    for page in draw_known_problems.pages():
        assert not re.search(r"\{[a-z]+\}", draw_known_problems.drawn(page.stem)), page.name


@pytest.mark.parametrize("page", each_page())
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([\w./]*)(?:#([\w-]+))?\)", text):
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"
    for path in re.findall(r"(?:packaging|docs)/[\w/.]*\w\.\w+|packaging/[\w/]*\w", text):
        assert (ROOT / path).exists(), path


def test_the_index_names_every_page() -> None:
    index = (ROOT / MANUAL / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"({page.name})" not in index] == ["index.md"]


@pytest.mark.parametrize("page", each_page())
def test_shell_lines(page: Path) -> None:
    for block in blocks(page, "sh"):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert done.returncode == 0, block + done.stderr
        assert "apt-key" not in block.replace("apt-key.gpg", "")  # Debian 13 has no such command


@pytest.mark.parametrize("page", each_page())
def test_commands_and_hosts_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = build_parser()[1]
    for command in re.findall(r"python -m compress ([a-z][\w-]*)(?![\w.-])", text):
        assert command in commands, command
    for command in re.findall(r"runner\.pyz`? ([a-z]+)\b", text):
        assert command in runner.COMMANDS, command
    assert set(re.findall(r"--host ([\w-]+)", text)) <= HOSTS.keys()


@pytest.mark.parametrize("page", each_page())
def test_settings_of_compile_exist(page: Path) -> None:
    for block in blocks(page, "yaml"):
        assert isinstance(YAML(typ="safe").load(block), dict)
    for text in re.findall(r"compile: (\{[^}]*\})", page.read_text(encoding="utf-8")):
        Compile(**YAML(typ="safe").load(text))


def test_the_table_of_hosts_and_their_measurements() -> None:
    text = (ROOT / "docs" / "compiling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` [^|]+\| (\d+)", text, re.MULTILINE)
    assert {name: int(count) for name, count in rows} == {name: host.measurements for name, host in HOSTS.items()}
