"""Progress of long work."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Where long work says how far it is."""

    def update(self, done: int, total: int, **metrics: float) -> None:
        """`done` of `total` steps are over; metrics are shown beside."""

    def note(self, text: str) -> None:
        """One line that the user should see."""


class SilentProgress:
    """Progress that is not shown."""

    def update(self, done: int, total: int, **metrics: float) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""


SILENT: Progress = SilentProgress()
