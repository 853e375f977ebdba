"""A command for several Edge TPUs: split."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.errors import PipelineError
from compress.surface.cli.output import write, write_json
from compress.surface.cli.parser import add_command

if TYPE_CHECKING:
    from compress.surface.cli.parser import Subparsers


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    summary = "Split a model into segments for several Edge TPUs, and compare them with copies of the whole model"
    parser = add_command(subparsers, "split", summary, split)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a full-integer .tflite file, not compiled")
    parser.add_argument("--tpus", type=int, required=True, metavar="N", help="the number of Edge TPUs, 2 to 16")
    parser.add_argument("--host", help="as of `estimate` (default: usb3)")
    parser.add_argument("--clock", help="clock of the Edge TPUs: max (default), or std, which is half of it")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for the segments, which must not exist (default: NAME_N_segments)",
    )
    parser.add_argument(
        "--compare", action="store_true", help="compare with segments of equal parameter bytes, as the compiler makes"
    )
    parser.add_json()


def split(options: argparse.Namespace) -> int:
    """`python -m compress split`."""
    from compress import targets
    from compress.core.files import explain, publish_folder
    from compress.model.tflite import graph
    from compress.targets.edgetpu.several import split as splitting

    out = options.out or Path(f"{options.model.stem}_{options.tpus}_segments")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PipelineError(
            f"{out} exists", allowed="a new or empty folder", hint="remove it, or choose another with -o"
        )
    edgetpu = targets.load("edgetpu")
    host, clock = edgetpu.cost.host(options.host), edgetpu.cost.clock(options.clock)
    result = splitting.split(graph.read(options.model), edgetpu, options.tpus, host, clock, compare=options.compare)
    try:
        publish_folder(out, result.all_files())
    except OSError as error:
        raise explain(error, "the segments cannot be written") from error
    if options.json:
        write_json({**result.to_json(), "folder": str(out)})
    else:
        write(result.describe())
        write(f"written to {out}; run them with: python3 runner.pyz pipeline {out}")
    return 0
