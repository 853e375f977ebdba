"""docs/report.md: its commands can be parsed, and its statements about files, sections and limits are true."""

from __future__ import annotations

import re
import shlex

from paths import ROOT
from run_records import full

from compress.report import run_comparison, sections
from compress.report.node_data import NODE_DATA_FILE
from compress.report.record import RunRecord
from compress.surface.cli import data
from compress.surface.cli.main import build_parser

TEXT = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")


def test_the_commands_are_parsed() -> None:
    lines = re.findall(r"^python -m compress (.*)$", TEXT, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["compare", "check"]
    parser, _ = build_parser()
    for line in lines:
        assert parser.parse_args(shlex.split(line)).run


def test_the_files_and_numbers_are_those_of_the_code() -> None:
    listed = re.findall(r"^\| `([\w.]+)` \|", TEXT, re.MULTILINE)
    assert listed == ["report.html", "report.md", "report.json", NODE_DATA_FILE]
    assert data.MOST_RUNS == 6
    assert run_comparison.SIGNIFICANT == 0.05


def test_the_address_of_a_section_exists() -> None:
    idents = {section.ident for section in sections(RunRecord.from_json(full()), {})}
    assert set(re.findall(r"report\.html#([\w-]+)", TEXT)) <= idents
