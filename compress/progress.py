"""Progress of long work."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """The receiver of progress reports."""

    def update(self, done: int, total: int, **metrics: float) -> None:
        """Report that `done` of `total` steps are done, with metrics."""

    def note(self, text: str) -> None:
        """Report one line of text for the user."""


class SilentProgress:
    """Progress that is not shown."""

    def update(self, done: int, total: int, **metrics: float) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""


SILENT: Progress = SilentProgress()
