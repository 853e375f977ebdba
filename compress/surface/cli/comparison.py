"""`compare`: the differences between runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.errors import PipelineError
from compress.surface.cli.output import write, write_json
from compress.surface.cli.parser import add_command

if TYPE_CHECKING:
    from compress.surface.cli.parser import Subparsers

MOST_RUNS = 6


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(subparsers, "compare", "Compare two or more runs with the first one", compare)
    help_text = "the folder of a run (runs/NAME), or a report.json"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=help_text)
    parser.add_json()


def compare(options: argparse.Namespace) -> int:
    """`python -m compress compare`."""
    from compress.report import run_comparison
    from compress.results.run import read_record

    if not 2 <= len(options.runs) <= MOST_RUNS:
        raise PipelineError(f"compare: {len(options.runs)} runs", allowed=f"2 to {MOST_RUNS} runs")
    records = [read_record(path) for path in options.runs]
    comparison = run_comparison.compare(records, [str(path) for path in options.runs])
    if options.json:
        write_json(comparison.to_json())
    else:
        write(comparison.text().rstrip("\n"))
    return 0
