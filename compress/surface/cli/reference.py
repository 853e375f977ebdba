"""Commands that print the manuals: stages, schema, manual."""

from __future__ import annotations

import argparse
import runpy
from typing import TYPE_CHECKING

from compress.surface.cli.output import show, write, write_json
from compress.surface.cli.parser import add_command

if TYPE_CHECKING:
    from compress.surface.cli.parser import Subparsers


def add_parsers(subparsers: Subparsers) -> None:
    """Add the commands."""
    parser = add_command(subparsers, "stages", "List every stage with its settings, defaults and meaning", stages)
    parser.add_json()
    add_command(subparsers, "schema", "Print the JSON schema of pipeline.yaml, for editors", schema)
    parser = add_command(subparsers, "manual", "Print a page of the manuals as Markdown", manual_page)
    parser.add_argument("page", nargs="?", default="index", metavar="PAGE", help="such as reference/sources")


def stages(options: argparse.Namespace) -> int:
    """`python -m compress stages`."""
    from compress.surface.cli import manual

    show(manual.stages_json(), manual.stages(), as_json=options.json)
    return 0


def schema(options: argparse.Namespace) -> int:
    """`python -m compress schema`."""
    del options
    from compress.surface.cli import manual

    write_json(manual.schema())
    return 0


def manual_page(options: argparse.Namespace) -> int:
    """`python -m compress manual`."""
    from compress.core.errors import PipelineError
    from compress.core.resources import shipped

    docs = shipped("docs")
    texts = {str(path.relative_to(docs).with_suffix("")): path for path in sorted(docs.rglob("*.md"))}
    name = options.page.removeprefix("docs/").removesuffix(".md").rstrip("/")
    name = name if name in texts else f"{name}/index"
    if name not in texts:
        raise PipelineError(f"{options.page!r} is not a page of the manuals", allowed=", ".join(texts))
    generated = runpy.run_path(str(docs / "site" / "write_reference.py"))["pages"]()  # shipped beside the pages
    write((generated.get(name) or texts[name].read_text(encoding="utf-8")).rstrip("\n"))
    return 0
