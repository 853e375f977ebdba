"""The output of a run: stage lines and progress on stderr, the output of libraries in a log file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self

from compress.cli.output import discard
from compress.files import explain
from compress.progress import Progress

PLAIN_INTERVAL_S = 15.0
"""Time between two lines of progress if stderr is not a terminal."""


class Console:
    """A `compress.pipeline.runner.Monitor` on stderr. A closed pipe or a full disk does not end a run.

    Args:
        log: the log file; lines are appended.

    Raises:
        StoreError: the log file cannot be written.
    """

    def __init__(self, log: Path) -> None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = log.open("ab", buffering=0)
        except OSError as error:
            raise explain(error, "the run's folder cannot be written") from error
        self._err = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        self._terminal = self._err.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._log.close()
        self._err.close()

    def log(self, text: str) -> None:
        """Write text to the log file only."""
        with suppress(OSError):
            self._log.write((text.rstrip() + "\n").encode("utf-8", "backslashreplace"))

    def line(self, text: str) -> None:
        """Write a line to stderr and to the log."""
        try:
            print(text, file=self._err)
        except OSError:
            discard(self._err)
        self.log(text)

    def done(self, title: str, status: str, seconds: float | None, remark: str = "") -> None:
        """Write a line about completed work."""
        taken = "" if seconds is None else f"{seconds:7.1f} s" if status == "done" else f"({seconds:.1f} s)"
        self.line(f"{title:<20} {status:<8} {taken:>9}  {remark}".rstrip())

    @contextmanager
    def working(self, title: str) -> Iterator[Progress]:
        """Show progress; all other output goes to the log."""
        with quiet(self._log.fileno()), _bar(self, title) if self._terminal else _lines(self, title) as progress:
            yield progress

    @property
    def stream(self) -> IO[str]:
        """The terminal, also while all other output goes to the log."""
        return self._err


@contextmanager
def quiet(log: int) -> Iterator[None]:
    """Redirect file descriptors 1 and 2 to an open file, because C++ libraries write to them directly."""
    saved = os.dup(1), os.dup(2)
    _flush()
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        yield
    finally:
        _flush()
        for number, handle in enumerate(saved, 1):
            os.dup2(handle, number)
            os.close(handle)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def _shown(metrics: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.3f}" for name, value in metrics.items())


class _Lines:
    """Progress as lines of text."""

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self.title = title
        self.last_line = time.monotonic()

    def update(self, done: int, total: int, **metrics: float) -> None:
        if time.monotonic() - self.last_line >= PLAIN_INTERVAL_S:
            self.last_line = time.monotonic()
            self.console.line(f"{self.title}: {done / max(total, 1):.0%} {_shown(metrics)}".rstrip())

    def note(self, text: str) -> None:
        self.console.line(text)


@contextmanager
def _lines(console: Console, title: str) -> Iterator[Progress]:
    yield _Lines(console, title)


class _Bar:
    """Progress as a bar, which is removed at the end."""

    def __init__(self, console: Console, display: Any, title: str) -> None:
        self.console, self.display = console, display
        self.task = display.add_task(title, total=None, shown="")

    def update(self, done: int, total: int, **metrics: float) -> None:
        self.display.update(self.task, completed=done, total=total, shown=_shown(metrics))

    def note(self, text: str) -> None:
        self.display.console.print(text, markup=False, highlight=False)
        self.console.log(text)


@contextmanager
def _bar(console: Console, title: str) -> Iterator[Progress]:
    import rich.console
    from rich import progress

    columns = (
        progress.TextColumn("{task.description:<20}", markup=False),
        progress.BarColumn(bar_width=30),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[shown]}", markup=False),
    )
    terminal = rich.console.Console(file=console.stream)
    display = progress.Progress(
        *columns, console=terminal, transient=True, redirect_stdout=False, redirect_stderr=False
    )
    with display:
        yield _Bar(console, display, title)
