"""Commands that convert a model for an application: frigate."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from compress.surface.cli.output import write, write_json
from compress.surface.cli.parser import add_command

if TYPE_CHECKING:
    from compress.surface.cli.parser import Subparsers


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(subparsers, "frigate", "Write a detector for Frigate's edgetpu detector", frigate)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a .tflite file, compiled or not, or a bundle")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FOLDER", help="folder for the files")
    labels = "the names of the classes: text, .csv, .yaml or .pbtxt; a bundle contains its own"
    parser.add_argument("--labels", type=Path, metavar="FILE", help=labels)
    types = "how Frigate reads the outputs (default: the fastest that the model has)"
    parser.add_argument("--model-type", choices=("ssd", "yolo-generic"), help=types)
    parser.add_json()


def frigate(options: argparse.Namespace) -> int:
    """`python -m compress frigate`."""
    from compress.bundling import frigate

    result = frigate.export(options.model, options.out, options.labels, options.model_type)
    if options.json:
        write_json(result.to_json())
    else:
        write(frigate.describe(result))
    return 0
