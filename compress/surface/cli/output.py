"""Results on stdout, notes on stderr."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from deploy.contract import printable


def write(text: str) -> None:
    """Print results on stdout; control characters, as in a label from outside, become escape sequences.

    A reader that has closed the pipe is not an error.

    Raises:
        StoreError: stdout is a file, and the disk is full.
    """
    try:
        print(printable.lines(text), flush=True)
    except OSError as error:
        from compress.core.files import explain

        discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise explain(error, "the results cannot be written to stdout") from error


def show(value: Any, text: str, *, as_json: bool) -> None:
    """Print results on stdout, as JSON or as text."""
    write_json(value) if as_json else write(text.rstrip("\n"))


def write_json(value: Any) -> None:
    """Print plain values as JSON on stdout.

    Raises:
        StoreError: stdout is a file, and the disk is full.
    """
    write(json.dumps(value, indent=1))


def write_file(path: Path, content: str | bytes, what: str) -> None:
    """Write a file that the user asked for; `what` begins the message if it cannot be written."""
    from compress.core.files import explain
    from deploy.contract.durable_files import write_atomically

    try:
        write_atomically(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise explain(error, what) from error


def note(text: str) -> None:
    """Print a note on stderr. A closed or full stderr is not an error."""
    with suppress(OSError):
        print(printable.lines(text), file=sys.stderr)


def discard(stream: IO[str]) -> None:
    """Redirect a stream that accepts no more text to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def complete_streams() -> None:
    """Open the standard streams that were closed; otherwise the next files to be opened would get their numbers."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
