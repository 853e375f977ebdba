"""The argument parser: errors are exceptions, and a misspelt option gets a suggestion."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from compress.core.errors import PipelineError, nearest
from compress.surface.cli.output import write

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction["Parser"]  # the only name that argparse has for it

PROGRAM = "coralline" if Path(sys.argv[0]).name == "coralline" else "python -m compress"
"""The command that this program was started with."""
SEE_HELP = "see --help"


class Parser(argparse.ArgumentParser):
    """An argument parser whose help is written like results, and whose errors are `PipelineError`.

    Attributes:
        option_names: the names of all options, such as "--json".
    """

    def __init__(self, **settings: Any) -> None:
        self.option_names: list[str] = []
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add an argument, and remember its name for suggestions."""
        self.option_names += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **settings)

    def add_out(self) -> None:
        """Add the option `--out` of commands that run a pipeline."""
        self.add_argument(
            "--out", type=Path, default=Path("runs"), metavar="DIR", help="folder for the results (default: runs)"
        )

    def add_store(self) -> None:
        """Add the option `--store` of commands that take results from the store."""
        summary = "share results with other machines through a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
        self.add_argument("--store", metavar="ADDRESS", help=summary)

    def add_json(self) -> None:
        """Add the option `--json`."""
        self.add_argument("--json", action="store_true", help="print the results as JSON")

    def error(self, message: str) -> NoReturn:
        """Raise the error.

        Raises:
            PipelineError: always.
        """
        raise PipelineError(message, hint=SEE_HELP)

    def _print_message(self, message: str, file: Any = None) -> None:
        write(message.rstrip("\n"))


def add_command(
    subparsers: Subparsers, name: str, summary: str, run: Callable[[argparse.Namespace], int], **settings: Any
) -> Parser:
    """Add a command.

    Args:
        subparsers: the commands of the program.
        name: the word on the command line.
        summary: one line: in the list of commands, and at the top of the command's own help.
        run: executes the command and returns its exit code.
        **settings: more settings of the parser.
    """
    parser = subparsers.add_parser(name, help=summary, description=f"{summary}.", **settings)
    parser.set_defaults(run=run, parser=parser)
    return parser


def refuse_unknown(unknown: Sequence[str], parser: Parser) -> None:
    """Refuse arguments that a command does not have."""
    if not unknown:
        return
    options = (word.partition("=")[0] for word in unknown if word.startswith("--"))
    suggestions = [nearest(option, parser.option_names) for option in options]
    hint = next(filter(None, suggestions), SEE_HELP)
    raise PipelineError(f"unrecognized arguments: {' '.join(unknown)}", hint=hint)
