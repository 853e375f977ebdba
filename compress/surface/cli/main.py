"""The command line: dispatch, signals and exit codes.

`python -m compress pipeline.yaml` is short for `python -m compress run pipeline.yaml`.
Results go to stdout, everything else to stderr. Each group of commands is a module of this package.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from compress.core.errors import EXIT_INTERRUPTED, CorallineError, PipelineError, ResultError, listing, nearest
from compress.core.resources import __version__, manual
from compress.surface.cli import (
    data,
    devices,
    export,
    models,
    output,
    reference,
    run,
    search,
    trust,
)
from compress.surface.cli.parser import PROGRAM, Parser, refuse_unknown

INTERRUPTED = "interrupted; run the same command to continue"
GROUPS = (run, search, export, models, data, devices, trust, reference)
EXIT_CODES = """exit codes:
  0 done   1 internal error   2 pipeline file or arguments   3 data   4 model   5 a stage failed
  6 disk or permission   7 over budget, or not usable   8 metadata cannot be signed
  9 check: some operators stay on the CPU; verify-compiled: undecided
  10 check: the compiler will reject the model; verify-compiled: another model; relink: refused
  14 doctor: errors were found
  15 a device was not reached, or was not changed   130 interrupted   141 stdout was closed
"""

_signals: list[int] = []
"""The signals received so far."""


class _ShowVersion(argparse.Action):
    """`--version`."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> None:
        """Print the version and exit."""
        output.write(f"coralline {__version__}")
        parser.exit()


def build_parser() -> tuple[Parser, list[str]]:
    """Return the parser of all commands, and the commands' names."""
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} PIPELINE {run.USAGE}\n       {PROGRAM} COMMAND ...",
        description="Prune, distil and quantize a trained model for the Coral Edge TPU, and measure the result.",
        epilog=f"{EXIT_CODES}\nmanuals: {manual('index.md')}",
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND [OPTION ...]", prog=PROGRAM)
    for group in GROUPS:
        group.add_parsers(subparsers)
    return parser, list(subparsers.choices)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    output.complete_streams()
    _signals.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    as_json = "--json" in arguments
    try:
        return _execute(arguments)
    except CorallineError as error:
        if _signals:  # imports of C extensions turn an interruption into an error of their own
            return _fail(INTERRUPTED, EXIT_INTERRUPTED, as_json=as_json)
        already_printed = isinstance(error, ResultError)
        return _fail(str(error), error.exit_code, as_json=as_json and not already_printed, facts=error.facts)
    except OSError as error:  # what a command does not explain better
        from compress.core.files import explain

        failure = explain(error, "a file cannot be read or written")
        return _fail(str(failure), failure.exit_code, as_json=as_json)
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, EXIT_INTERRUPTED, as_json=as_json)


def _execute(arguments: Sequence[str]) -> int:
    parser, commands = build_parser()
    options, unknown = parser.parse_known_args(with_command(arguments, commands))
    refuse_unknown(unknown, options.parser)
    code: int = options.run(options)
    return code


def with_command(arguments: Sequence[str], commands: Sequence[str]) -> list[str]:
    """Return the arguments with the command `run` in front if they begin with a pipeline file or an option of `run`.

    Raises:
        PipelineError: the first argument is neither a command nor like the path of a file.
    """
    first = arguments[0] if arguments else ""
    if first in (*commands, "-h", "--help", "--version"):
        return list(arguments)
    is_like_a_path = "." in first or os.sep in first or Path(first).exists()
    if first and not is_like_a_path and not first.startswith("-"):
        allowed = f"a pipeline file, {listing(commands)}"
        raise PipelineError(f"unknown command {first!r}", allowed=allowed, hint=nearest(first, commands))
    return ["run", *arguments]


def _interrupt(number: int, frame: Any) -> NoReturn:
    _signals.append(number)
    raise KeyboardInterrupt


def _fail(message: str, exit_code: int, *, as_json: bool, facts: Mapping[str, Any] | None = None) -> int:
    output.note(f"coralline: {message}")
    if as_json:
        error = {"message": message, "exit_code": exit_code}
        with suppress(CorallineError):
            output.write_json({"schema_version": 1, "status": "failed", "error": error, **(facts or {})})
    return exit_code
