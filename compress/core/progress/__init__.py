"""Progress of long work: what a stage reports while it runs.

A stage has phases, such as "importance" or "fine-tuning", and a phase has steps. Phases may have phases of their own:
the code that trains does not know whether it is all of a stage or a part of it. `tracker` computes fraction and time
left from these reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class RunStep:
    """A stage or a probe of a run, for the display.

    Attributes:
        title: its name.
        number: its number among the stages, from 1; 0 for work that is not one of them.
        count: the number of stages.
        memory_settings: the settings that lower its memory, for people.
    """

    title: str
    number: int = 0
    count: int = 0
    memory_settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Phase:
    """A part of a stage, or of another phase.

    Attributes:
        name: its name.
        weight: its expected cost relative to the other phases of the same plan.
        unit: the name of one step, in the singular.
        rounds: the number of epochs that the steps belong to; 0 for steps without epochs.
        references: values to compare metrics with, by metric, for example the loss of guessing.
        note: one line about it for the log.
    """

    name: str
    weight: float = 1.0
    unit: str = "step"
    rounds: int = 0
    references: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


class Progress(Protocol):
    """The receiver of progress reports."""

    def plan(self, *phases: Phase) -> None:
        """Announce the phases of the stage, or of the phase that is open.

        Without a plan, the steps of `update` are all of the work.
        """

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Open a phase; reports inside are about it. One that was not announced does not count for the fraction."""

    def update(self, done: int, total: int, **metrics: float) -> None:
        """Report that `done` of `total` steps are done, with metrics. It may be called very often."""

    def note(self, text: str) -> None:
        """Report one line of text for the user."""


class SilentProgress:
    """Progress that is not shown."""

    def plan(self, *phases: Phase) -> None:
        """Show nothing."""

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Show nothing."""
        return nullcontext()

    def update(self, done: int, total: int, **metrics: float) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""


SILENT: Progress = SilentProgress()
