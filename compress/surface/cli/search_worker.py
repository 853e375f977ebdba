"""The program of the process that runs trials: `python -m compress.surface.cli.search_worker [SHARED STORE]`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback, if it is interrupted during the imports

from compress.core.progress import Progress, RunStep
from compress.pipeline.search.worker import serve
from compress.surface.cli.console import Console


class TrialConsole(Console):
    """The display of a trial: the stage that runs now. Stages that are complete are in the log only.

    Args:
        log: the log file.
        title: the name of the trial.
    """

    def __init__(self, log: Path, title: str) -> None:
        super().__init__(log)
        self._title = title

    def done(self, title: str, status: str, seconds: float | None, remark: str = "") -> None:
        """Write a line about completed work into the log."""
        taken = "" if seconds is None else f"{seconds:.1f} s"
        self.log(" ".join(part for part in (title, status, taken, remark) if part))

    @contextmanager
    def working(self, job: RunStep) -> Iterator[Progress]:
        """Show progress with the title of the trial."""
        with super().working(replace(job, title=f"{self._title}: {job.title}")) as progress:
            yield progress


@contextmanager
def display(log: Path, title: str) -> Iterator[TrialConsole]:
    """Open the display of a trial."""
    with TrialConsole(log, title) as console:
        yield console


if __name__ == "__main__":
    serve(display, *sys.argv[1:])
