"""Commands that print the reference: stages, schema, operators."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from compress.surface.cli.output import write, write_json
from compress.surface.cli.parser import add_command

if TYPE_CHECKING:
    from compress.surface.cli.parser import Subparsers


def add_parsers(subparsers: Subparsers) -> None:
    """Add the commands."""
    parser = add_command(subparsers, "stages", "List every stage with its settings, defaults and meaning", stages)
    parser.add_json()
    add_command(subparsers, "schema", "Print the JSON schema of pipeline.yaml, for editors", schema)
    add_command(subparsers, "operators", "List what runs on the Edge TPU, and the rules of `check`", operators)


def stages(options: argparse.Namespace) -> int:
    """`python -m compress stages`."""
    from compress.surface.cli import manual

    if options.json:
        write_json(manual.stages_json())
    else:
        write(manual.stages().rstrip("\n"))
    return 0


def schema(options: argparse.Namespace) -> int:
    """`python -m compress schema`."""
    del options
    from compress.surface.cli import manual

    write_json(manual.schema())
    return 0


def operators(options: argparse.Namespace) -> int:
    """`python -m compress operators`."""
    del options
    from compress.surface.cli import manual

    write(manual.operators().rstrip("\n"))
    return 0
