"""The reference pages: each has a stub in the repository, and their examples are valid."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from paths import ROOT

from compress.pipeline.schema import load
from compress.pipeline.stage import Stage
from compress.pipeline.stages import STAGES
from compress.surface.cli import main
from compress.targets.edgetpu import rules
from compress.tasks import TASKS
from compress.tasks.base import Use

sys.path.insert(0, str(ROOT / "docs" / "site"))
import command_pages
import stage_pages
import write_reference

PAGES = write_reference.pages()
HEAD = "schema_version: 1\nname: example\nmodel: {builder: digits_cnn}\n"
DATA = "data: {source: {digits: {}}, preprocess: [{resize: {size: [32, 32]}}, {scale: {from: [0, 16]}}]}\n"


def test_every_page_has_a_stub() -> None:
    """After a change, run `python docs/site/write_reference.py`."""
    docs = ROOT / "docs"
    committed = {str(path.relative_to(docs).with_suffix("")) for path in (docs / "reference").rglob("*.md")}
    assert committed | {"operators"} == PAGES.keys()
    for name, text in PAGES.items():
        assert (docs / f"{name}.md").read_text() == write_reference.stub(name, text)


def test_every_rule_is_in_the_page_of_the_operators() -> None:
    for rule in rules.RULES:
        requirement, advice = rules.documentation(rule)
        assert f"### {rule.__name__}\n\n{requirement}\n\n{advice}\n" in PAGES["operators"]


@pytest.mark.parametrize("name", STAGES)
def test_the_example_of_a_stage_is_read(name: str, tmp_path: Path) -> None:
    example = stage_pages.EXAMPLES[name]
    assert f"```yaml\n{example}```" in PAGES[f"reference/stages/{name}"]
    (tmp_path / "p.yaml").write_text(HEAD + DATA + example)
    assert name in [step.stage.name for step in load(tmp_path / "p.yaml").steps]


@pytest.mark.parametrize("name", STAGES)
def test_every_setting_of_a_stage_is_in_its_page(name: str) -> None:
    page = PAGES[f"reference/stages/{name}"]
    text = page.replace("<br>", " ").replace("`", "")
    for field in STAGES[name].model_fields.values():
        assert " ".join((field.description or "?").split()).replace("|", "\\|").replace("`", "") in text
    assert [setting for setting in STAGES[name].model_fields if f"| `{setting}` |" not in page] == []


def test_stages_that_accept_other_kinds_say_so() -> None:
    differing = {name for name, stage in STAGES.items() if stage.accepted_kinds is not Stage.accepted_kinds}
    assert differing == stage_pages.INPUT_NOTES.keys()


def test_every_method_that_a_task_may_refuse_is_tried() -> None:
    assert stage_pages.probed() == {*get_args(Use)}
    assert write_reference.METHODS.keys() == {*get_args(Use)}


def test_every_refusal_is_in_the_pages() -> None:
    text = "".join(page for name, page in PAGES.items() if "/stages/" in name)
    for task in TASKS.values():
        for refusal in task.refused.values():
            assert refusal.what in text
            assert refusal.what in PAGES["reference/tasks"]


def test_every_command_has_its_options_and_a_manual() -> None:
    parser, names = main.build_parser()
    assert command_pages.MANUALS.keys() == {*names}
    page = PAGES["reference/commands"]
    for name, command in command_pages.subcommands(parser):
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        options: list[Any] = [option for action in command._actions for option in action.option_strings]
        assert [option for option in options if f"`{option}`" not in section] == ["-h", "--help"]


def test_every_exit_code_has_a_meaning() -> None:
    page = PAGES["reference/exit_codes"]
    shown = {int(line.split("|")[1]) for line in page.splitlines() if line[:3].strip("| ").isdigit()}
    assert shown == write_reference.MEANINGS.keys()
