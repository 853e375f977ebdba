"""`init`: write a first pipeline file for a data set, and check it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.errors import PipelineError
from compress.surface.cli.models import add_range
from compress.surface.cli.output import write, write_json
from compress.surface.cli.parser import PROGRAM, add_command

if TYPE_CHECKING:
    from compress.surface.cli.parser import Subparsers

DEFAULT = Path("pipeline.yaml")


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    summary = "Look at data, and at a trained model, and write a first pipeline file"
    parser = add_command(subparsers, "init", summary, init)
    parser.add_argument("data", type=Path, metavar="DATA", help="a folder or file of samples")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a trained model of any format, also quantized")
    parser.add_argument("--label", metavar="COLUMN", help="the column with the labels, of a table with several")
    parser.add_argument("--learn", action="store_true", help="let the device learn new classes from a few photos")
    add_range(parser)
    parser.add_argument("-o", "--out", type=Path, default=DEFAULT, metavar="FILE", help=f"the new file ({DEFAULT})")
    parser.add_argument("--trust", action="store_true", help="allow the model to run code that it contains")
    parser.add_json()


def init(options: argparse.Namespace) -> int:
    """Write the pipeline file, and list its steps as `--dry-run` does.

    Raises:
        PipelineError: the file exists already, or its name is not that of a YAML file.
        DataError: the data is not recognized.
        ModelError: the model cannot be read.
    """
    from compress.core.files import explain, write_atomically
    from compress.pipeline.runner import preview
    from compress.pipeline.schema import load
    from compress.pipeline.starter import starter
    from compress.surface.api.exports import run_name
    from compress.surface.cli.console import quiet

    out: Path = options.out
    if out.suffix not in (".yaml", ".yml"):
        raise PipelineError(f"OUT is {out.name}", where="-o", allowed="a name that ends in .yaml")
    if out.exists():
        raise PipelineError("the file exists already", where=str(out), hint="choose another name with -o, or delete it")
    data = options.data if options.data.suffix else options.data.resolve()
    name = run_name(data if out.name == DEFAULT.name else out)
    with open(os.devnull, "wb") as null, quiet(null.fileno()):  # TensorFlow's messages about missing GPUs
        first = starter(
            options.data,
            options.model,
            out.parent,
            name,
            label=options.label,
            learns=options.learn,
            chosen_range=options.range,
            trust=options.trust,
        )
    try:
        write_atomically(out, first.text.encode())
    except OSError as error:
        raise explain(error, "the pipeline file cannot be written", out.parent) from error
    steps = [(step.id, status) for step, status in preview(load(out), Path("runs"))]
    if options.json:
        facts = {"schema_version": 1, "out": str(out), "messages": list(first.messages)}
        write_json({**facts, "steps": [{"id": step, "status": status} for step, status in steps]})
        return 0
    for line in first.messages:
        write(line)
    write(f"written: {out}")
    for step, status in steps:
        write(f"{step:<20} {status}")
    write(f"next: {PROGRAM} {out}")
    return 0
