"""The output of a run: stage lines and progress on stderr, every message with its time in the log file.

What libraries and the helper processes of a run print goes into the log file: file descriptors 1 and 2 are redirected.
On a terminal one line shows the present state, and is overwritten. Elsewhere, and on terminals that cannot move the
cursor, there are plain lines at intervals. A thread writes both, so that the code that works only stores numbers.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Self

from compress.core import memory
from compress.core.files import explain
from compress.core.progress import Phase, Progress, RunStep
from compress.core.progress.tracker import Reading, Tracker
from compress.core.resources import __version__
from compress.surface.cli.output import discard
from deploy.contract import printable

REFRESH_S = 0.25
"""Time between two refreshes of the line on a terminal."""
APPEARS_S = 0.5
"""Time after which the line appears: short work does not flicker."""
STARTED_S = 2.0
"""Time after which a plain line says that a stage has started."""
PLAIN_INTERVAL_S = 10.0
"""Least time between two plain lines; a tenth of the time that the stage has taken so far, if that is more."""
LOGGED_S = 1.0
"""Seconds from which the end of a phase is in the log."""
LOG_INTERVAL_S = 60.0
"""Time between two lines of progress in the log."""
MEMORY_INTERVAL_S = 5.0
"""Time between two looks at the memory."""
MIN_ELAPSED_S = 4.0
"""Seconds of work before a time left is shown: the first estimates jump."""
MIN_SHARE = 0.1
"""Share of what was left at the start of the present phase that must be done before a time left is shown: several of
the first steps of a training trace TensorFlow functions. On three recorded stages (digits, 2026-11-27) the worst
estimate was 1.5, 3.9 and 1.7 times the truth; with a share of 0.05 1.8, 3.9 and 3.4 times."""
TOTAL = 10_000
"""Of a stage for rich, which counts in integers."""
SPEED_PERIOD_S = 3600.0
"""Period over which rich averages the speed of the last 1,000 changes. rich's default of 30 s is less than one step of
some stages."""
LARGE_BYTES = 4 << 20
"""Size of the log above which a new run removes its beginning ..."""
KEPT_BYTES = 1 << 20
"""... and the part that is kept."""
DUMB_TERMINALS = ("", "dumb", "unknown")


class Console:
    """A `compress.pipeline.execution.Monitor` on stderr. A closed pipe or a full disk does not end a run.

    If the process crashes, the stack of every thread appears on stderr.

    Args:
        log: the log file; lines are appended.

    Raises:
        StoreError: the log file cannot be written.
    """

    def __init__(self, log: Path) -> None:
        self._began = time.monotonic()
        self._stage = ""
        self._memory_noted: set[str] = set()
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            _shorten(log)
            self._log = log.open("ab", buffering=0)
        except OSError as error:
            raise explain(error, "the run's folder cannot be written") from error
        self._err = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        self._overwrites = self._err.isatty() and os.environ.get("TERM", "") not in DUMB_TERMINALS
        self._reports_crashes = not faulthandler.is_enabled()
        if self._reports_crashes:
            faulthandler.enable(self._err)
        self._append([f"===== {_stamp()}: coralline {__version__}, process {os.getpid()} ====="])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._reports_crashes:
            faulthandler.disable()
        self._log.close()
        with suppress(OSError):
            self._err.close()

    def log(self, text: str) -> None:
        """Write text to the log file only, with the time, the seconds since the run began, and the stage."""
        first, *others = text.rstrip().split("\n")
        stage = f"{self._stage}: " if self._stage and not first.startswith(f"{self._stage}:") else ""
        self._append([f"{_stamp()} {self.elapsed:8.1f} s  {stage}{first}", *(f"    {line}" for line in others)])

    def _append(self, lines: Sequence[str]) -> None:
        content = "".join(f"{printable.line(line)}\n" for line in lines)
        with suppress(OSError):
            self._log.write(content.encode("utf-8", "backslashreplace"))

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
        self._stage = job.title
        if job.number:
            self.log(f"stage {job.number} of {job.count}")
        display = _Display(self._err, job, self.show, self._overwrites)

        def note(text: str) -> None:
            display.note(text)
            self.log(text)

        next_log, next_memory = LOG_INTERVAL_S, MEMORY_INTERVAL_S

        def tick() -> None:
            nonlocal next_log, next_memory
            reading = tracker.reading()
            state = display.refresh(reading)
            if reading.elapsed >= next_log:
                next_log = reading.elapsed + LOG_INTERVAL_S
                self.log(state)
            if reading.elapsed >= next_memory:
                next_memory = reading.elapsed + MEMORY_INTERVAL_S
                if (shortage := self._memory_note(job)) is not None:
                    note(shortage)

        tracker = Tracker(note, self._phase_logged)
        with quiet(self._log.fileno()), display, _ticking(tick):
            yield tracker
        self._stage = ""

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    def _phase_logged(self, phases: Sequence[Phase], seconds: float | None) -> None:
        """Log the beginning of outer phases, and the end of those that took long."""
        name = next((phase.name for phase in reversed(phases) if phase.name), "")
        if seconds is None and phases[-1].note:
            self.log(f"{name}: {phases[-1].note}" if name else phases[-1].note)
        elif seconds is None and len(phases) == 1 and phases[-1].name:
            self.log(name)
        elif seconds is not None and seconds >= LOGGED_S and phases[-1].name:
            self.log(f"{name}: {seconds:.1f} s")

    def _memory_note(self, job: RunStep) -> str | None:
        """Return a note if memory is short; once for each stage."""
        usage = memory.memory()
        if usage is None or not usage.is_short or job.title in self._memory_noted:
            return None
        self._memory_noted.add(job.title)
        settings = memory.advice(job.memory_settings)
        return f"{job.title}: memory is short: {usage}; {settings}"


def _shorten(log: Path) -> None:
    """Remove the beginning of a large log."""
    if not log.exists() or log.stat().st_size <= LARGE_BYTES:
        return
    with log.open("rb") as stream:
        stream.seek(-KEPT_BYTES, os.SEEK_END)
        kept = stream.read().partition(b"\n")[2]
    partial = log.with_name(f"{log.name}.partial")
    partial.write_bytes(b"===== earlier lines are removed =====\n" + kept)
    partial.replace(log)


def _stamp() -> str:
    """Return the present time in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


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


@contextmanager
def without_messages() -> Iterator[None]:
    """Discard what C++ libraries print: TensorFlow's messages about missing GPUs."""
    with open(os.devnull, "wb") as null, quiet(null.fileno()):
        yield


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


@contextmanager
def _ticking(tick: Callable[[], None]) -> Iterator[None]:
    """Call a function in another thread, every REFRESH_S."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(REFRESH_S):
            tick()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class _Display:
    """The progress of one stage: one line on a terminal that is removed at the end, or plain lines.

    rich estimates the time left, and knows the width of the terminal and which colours the user wants (NO_COLOR).
    """

    def __init__(self, stream: IO[str], job: RunStep, show: Callable[[str], None], overwrites: bool) -> None:
        import rich.console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._job, self._show, self._overwrites = job, show, overwrites
        self._lock = threading.Lock()
        self._next = STARTED_S if job.number else PLAIN_INTERVAL_S
        self._phases: tuple[Phase, ...] = ()
        self._phase_began = 0
        self._rich = RichProgress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            console=rich.console.Console(file=stream),
            auto_refresh=False,
            speed_estimate_period=SPEED_PERIOD_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not overwrites,
        )
        self._task = self._rich.add_task("", total=TOTAL)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        with self._lock, suppress(OSError):
            self._rich.stop()

    def refresh(self, reading: Reading) -> str:
        """Show the present state, and return its text without the stage."""
        job = self._job
        position = f"[{job.number}/{job.count}] " if job.number else ""
        parts: list[str] = []
        with self._lock, suppress(OSError):
            parts = _parts(reading, self._time_left(reading))
            if self._overwrites and reading.elapsed >= APPEARS_S:
                text = printable.line("  ".join([f"{position}{job.title}", *parts]))
                self._rich.update(self._task, description=text)
                if not self._rich.live.is_started:
                    self._rich.start()
                    self._rich.console.show_cursor(True)  # a crash would leave it hidden
                self._rich.refresh()
            elif not self._overwrites and reading.elapsed >= self._next:
                is_start = self._next == STARTED_S
                self._show(f"{_stamp()[11:]} {position}{job.title}: {'started' if is_start else ', '.join(parts)}")
                interval = max(PLAIN_INTERVAL_S, reading.elapsed / 10)
                self._next = interval if is_start else reading.elapsed + interval
        return ", ".join(parts)

    def note(self, text: str) -> None:
        """Show a line that stays."""
        if not self._overwrites:
            self._show(text)
            return
        with self._lock, suppress(OSError):
            self._rich.console.print(printable.lines(text), markup=False, highlight=False, soft_wrap=True)

    def _time_left(self, reading: Reading) -> float | None:
        """Return the seconds until the stage ends, at the speed of the present phase; None if it is not known."""
        done = round((reading.fraction or 0.0) * TOTAL)
        phases = reading.phases[:2]  # with the outermost alone, the slow choice of channels would count in fine-tuning
        if phases != self._phases:
            self._phases, self._phase_began = phases, done
            self._rich.reset(self._task, completed=done)
        self._rich.update(self._task, completed=done)
        if reading.elapsed < MIN_ELAPSED_S or done - self._phase_began < MIN_SHARE * (TOTAL - self._phase_began):
            return None
        return self._rich.tasks[0].time_remaining


def _parts(reading: Reading, left: float | None) -> list[str]:
    """Return the texts of a line of progress."""
    references = reading.phases[-1].references if reading.phases else {}
    texts = [
        reading.phase_name,
        _steps(reading),
        "" if reading.fraction is None else f"{int(reading.fraction * 100)}%",
        str(timedelta(seconds=int(reading.elapsed))),
        "" if left is None else f"about {timedelta(seconds=int(left))} left",
    ]
    for name, value in reading.metrics.items():
        text = f"{name} {value:.3f}" if abs(value) < 1000 else f"{name} {value:.3g}"
        texts.append(f"{text} (guessing {references[name]:.2f})" if name in references else text)
    return [text for text in texts if text]


def _steps(reading: Reading) -> str:
    """Return the number of the step, or of the round: "epoch 3 of 40"."""
    if not reading.total:
        return ""
    phase = reading.phases[-1] if reading.phases else Phase("")
    if phase.rounds > 1:
        per_round = max(reading.total // phase.rounds, 1)
        current = min(max(reading.done - 1, 0) // per_round + 1, phase.rounds)
        return f"epoch {current:,} of {phase.rounds:,}"
    return f"{phase.unit} {min(max(reading.done, 1), reading.total):,} of {reading.total:,}"
