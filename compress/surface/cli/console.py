"""The output of a run: stage lines and progress on stderr, the output of libraries in a log file.

On a terminal one line shows the present state, and is overwritten. Elsewhere, and on terminals that cannot move the
cursor, there are plain lines at intervals. A thread writes both, so that the code that works only stores numbers.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol, Self

from compress.core import memory
from compress.core.progress import Phase, Progress, RunStep
from compress.core.progress.tracker import Reading, Tracker
from compress.surface.cli import progress_line
from compress.surface.cli.output import discard
from compress.surface.cli.run_log import RunLog
from deploy.contract import printable

REFRESH_S = 0.25
"""Time between two refreshes of the line on a terminal."""
APPEARS_S = 0.5
"""Time after which the line appears: short work does not flicker."""
STARTED_S = 2.0
"""Time after which a plain line says that a stage has started."""
PLAIN_INTERVALS_S = ((60.0, 10.0), (600.0, 30.0), (float("inf"), 60.0))
"""Time between two plain lines, by the time that the stage has taken so far."""
LOGGED_S = 1.0
"""Seconds from which the end of a phase is in the log."""
LOG_INTERVAL_S = 60.0
"""Time between two lines of progress in the log."""
MEMORY_INTERVAL_S = 5.0
"""Time between two looks at the memory."""
DUMB_TERMINALS = ("", "dumb", "unknown")


class Console:
    """A `compress.pipeline.runner.Monitor` on stderr. A closed pipe or a full disk does not end a run.

    Args:
        log: the log file; lines are appended.

    Raises:
        StoreError: the log file cannot be written.
    """

    def __init__(self, log: Path) -> None:
        self._err = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        try:
            self._log = RunLog(log, self._err.fileno())
        except BaseException:
            self._err.close()
            raise
        self._overwrites = self._err.isatty() and os.environ.get("TERM", "") not in DUMB_TERMINALS
        self._memory_noted: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._log.close()
        with suppress(OSError):
            self._err.close()

    def log(self, text: str) -> None:
        """Write text to the log file only."""
        self._log.write(text)

    def line(self, text: str) -> None:
        """Write a line to stderr and to the log."""
        self.show(text)
        self.log(text)

    def show(self, text: str) -> None:
        """Write a line to stderr only."""
        try:
            print(printable.lines(text), file=self._err)
        except OSError:
            discard(self._err)

    def done(self, title: str, status: str, seconds: float | None, remark: str = "") -> None:
        """Write a line about completed work."""
        taken = "" if seconds is None else f"{seconds:7.1f} s" if status == "done" else f"({seconds:.1f} s)"
        self.line(f"{title:<20} {status:<8} {taken:>9}  {remark}".rstrip())

    @contextmanager
    def working(self, job: RunStep) -> Iterator[Progress]:
        """Show progress; all other output goes to the log."""
        self._log.stage = job.title
        if job.number:
            self.log(f"stage {job.number} of {job.count}")
        display: _Display = _Line(self._err) if self._overwrites else _Lines(self.show, job)

        def note(text: str) -> None:
            display.note(text)
            self.log(text)

        tracker = Tracker(note, self._phase_logged)
        with quiet(self._log.fileno()), display, _Ticker(self, job, tracker, display, note):
            yield tracker
        self._log.stage = ""

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self._log.elapsed

    def _phase_logged(self, phases: Sequence[Phase], seconds: float | None) -> None:
        """Log the beginning of outer phases, and the end of those that took long."""
        name = next((phase.name for phase in reversed(phases) if phase.name), "")
        if seconds is None and phases[-1].note:
            self.log(f"{name}: {phases[-1].note}" if name else phases[-1].note)
        elif seconds is None and len(phases) == 1 and phases[-1].name:
            self.log(name)
        elif seconds is not None and seconds >= LOGGED_S and phases[-1].name:
            self.log(f"{name}: {seconds:.1f} s")

    def memory_note(self, job: RunStep) -> str | None:
        """Return a note if memory is short; once for each stage."""
        usage = memory.memory()
        if usage is None or not usage.is_short or job.title in self._memory_noted:
            return None
        self._memory_noted.add(job.title)
        settings = memory.advice(job.memory_settings)
        return f"{job.title}: memory is short: {usage}; {settings}"


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


class _Ticker:
    """A thread that shows the progress of one stage while it runs, and looks at the memory."""

    def __init__(
        self, console: Console, job: RunStep, tracker: Tracker, display: _Display, note: Callable[[str], None]
    ) -> None:
        self._console, self._job, self._tracker, self._display, self._note = console, job, tracker, display, note
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._next_memory = MEMORY_INTERVAL_S
        self._next_log = LOG_INTERVAL_S

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(REFRESH_S):
            reading = self._tracker.reading()
            self._display.refresh(self._job, reading, self._console.elapsed)
            if reading.elapsed >= self._next_log:
                self._next_log = reading.elapsed + LOG_INTERVAL_S
                self._console.log(progress_line.state(self._job, reading))
            if reading.elapsed >= self._next_memory:
                self._next_memory = reading.elapsed + MEMORY_INTERVAL_S
                if (text_of_memory := self._console.memory_note(self._job)) is not None:
                    self._note(text_of_memory)


class _Display(Protocol):
    """The way in which progress is shown."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> None: ...

    def refresh(self, job: RunStep, reading: Reading, run_elapsed: float) -> None:
        """Show the present state."""

    def note(self, text: str) -> None:
        """Show a line that stays."""


class _Lines:
    """Progress as lines of text."""

    def __init__(self, show: Callable[[str], None], job: RunStep) -> None:
        self._show, self._job = show, job
        self._next = STARTED_S if job.number else PLAIN_INTERVALS_S[0][1]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def refresh(self, job: RunStep, reading: Reading, run_elapsed: float) -> None:
        if reading.elapsed < self._next:
            return
        if self._next == STARTED_S:
            self._show(f"{_clock()} [{job.number}/{job.count}] {job.title}: started")
            self._next = PLAIN_INTERVALS_S[0][1]
            return
        interval = next(seconds for limit, seconds in PLAIN_INTERVALS_S if reading.elapsed < limit)
        self._next = reading.elapsed + interval
        self._show(f"{_clock()} {progress_line.plain(job, reading)}")

    def note(self, text: str) -> None:
        self._show(text)


def _clock() -> str:
    """Return the time of day in UTC."""
    from compress.surface.cli.log_writer import stamp

    return stamp().partition("T")[2]


class _Line:
    """Progress as one line of a terminal, which is removed at the end.

    rich knows the width of the terminal, and which colours it has and the user wants (NO_COLOR).
    """

    def __init__(self, stream: IO[str]) -> None:
        import rich.console
        from rich.live import Live

        self._console = rich.console.Console(file=stream)
        self._text: Any = ""
        self._live = Live(
            get_renderable=lambda: self._text,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        with self._lock, suppress(OSError):
            self._text = ""
            self._live.stop()

    def refresh(self, job: RunStep, reading: Reading, run_elapsed: float) -> None:
        if reading.elapsed < APPEARS_S:
            return
        with self._lock, suppress(OSError):
            self._text = _styled(job, reading, run_elapsed, self._console)
            if not self._live.is_started:
                self._live.start()
            self._live.refresh()

    def note(self, text: str) -> None:
        with self._lock, suppress(OSError):
            self._console.print(printable.lines(text), markup=False, highlight=False, soft_wrap=True)


def _styled(job: RunStep, reading: Reading, run_elapsed: float, console: Any) -> Any:
    """Return the line for a terminal, with a bar where there is space for it."""
    from rich.text import Text

    width = console.width - 1
    texts = progress_line.fitted(progress_line.parts(job, reading, run_elapsed), width)
    text = printable.line(progress_line.SEPARATOR.join(texts))
    line = Text(text, no_wrap=True, overflow="crop", end="")
    if reading.fraction is None or width - len(text) < progress_line.BAR + len(progress_line.SEPARATOR):
        return line
    full, empty = ("━", "─") if console.encoding.startswith("utf") else ("#", ".")
    filled, rest = progress_line.bar(reading.fraction, progress_line.BAR, filled=full, empty=empty)
    return Text.assemble((filled, "green"), (rest, "dim"), progress_line.SEPARATOR, line, no_wrap=True, end="")
