"""Fraction of one stage, from its reports.

Reports come from the thread that works, often, and only store values. Another thread reads them a few times a second
(`Tracker.reading`) to show them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from compress.core.progress import Phase

Listener = Callable[[Sequence[Phase], float | None], None]
"""Called with the open phases, from the outermost, when the last one begins (None) and ends (its seconds)."""


@dataclass(frozen=True)
class Reading:
    """The state of a stage at one moment.

    Attributes:
        phases: the open phases, from the outermost.
        done: number of steps of the innermost phase that are done.
        total: number of its steps; 0 if they are not known.
        fraction: the part of the stage that is done; None if it is not known.
        elapsed: seconds since the stage began.
        metrics: the last metrics of the innermost phase.
    """

    phases: tuple[Phase, ...]
    done: int
    total: int
    fraction: float | None
    elapsed: float
    metrics: Mapping[str, float]

    @property
    def phase_name(self) -> str:
        """The name of the innermost phase that has one; empty if none has."""
        return next((phase.name for phase in reversed(self.phases) if phase.name), "")


@dataclass(slots=True, eq=False)
class _Level:
    """The stage, or an open phase.

    Attributes:
        phase: the phase; without a name for the stage.
        plan: the announced phases inside, by name.
        finished: the names of the announced phases that are over.
        done: number of steps that are done.
        total: number of steps; 0 if they are not known.
        metrics: its last metrics.
    """

    phase: Phase
    plan: dict[str, Phase] = field(default_factory=dict)
    finished: frozenset[str] = frozenset()
    done: int = 0
    total: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def fraction(self, inside: tuple[_Level, float | None] | None) -> float | None:
        """Return the part that is done, with the open phase inside and the fraction of this phase that is done."""
        if not self.plan:
            return min(self.done / self.total, 1.0) if self.total else None
        done = sum(self.plan[name].weight for name in self.finished)
        if inside is not None and (name := inside[0].phase.name) in self.plan.keys() - self.finished:
            done += self.plan[name].weight * (inside[1] or 0.0)
        return done / (sum(phase.weight for phase in self.plan.values()) or 1.0)


class Tracker:
    """A `Progress` that computes what is shown of one stage.

    Args:
        note: receives notes.
        listener: is called when phases begin and end.
    """

    def __init__(self, note: Callable[[str], None], listener: Listener = lambda phases, seconds: None) -> None:
        self._note = note
        self._listener = listener
        self._began = time.monotonic()
        self._levels = [_Level(Phase(""))]
        self._largest = 0.0

    def plan(self, *phases: Phase) -> None:
        """Announce the phases of the innermost level."""
        level = self._levels[-1]
        level.finished = frozenset()
        level.plan = {phase.name: phase for phase in phases}

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Open a phase."""
        outer, level = self._levels[-1], _Level(phase)
        self._levels = [*self._levels, level]  # not changed in place: another thread reads it
        began, phases = time.monotonic(), tuple(open_level.phase for open_level in self._levels[1:])
        self._listener(phases, None)
        try:
            yield
        finally:
            self._levels = self._levels[: self._levels.index(level)]
        outer.finished |= outer.plan.keys() & {phase.name}
        self._listener(phases, time.monotonic() - began)

    def update(self, done: int, total: int, **metrics: float) -> None:
        """Store a report."""
        level = self._levels[-1]
        level.done, level.total, level.metrics = done, total, metrics

    def note(self, text: str) -> None:
        """Pass a line on."""
        self._note(text)

    def reading(self) -> Reading:
        """Return the present state; the fraction never falls."""
        levels = self._levels
        inside: tuple[_Level, float | None] | None = None
        for level in reversed(levels):
            inside = level, level.fraction(inside)
        assert inside is not None
        fraction = inside[1]
        if fraction is not None:
            self._largest = fraction = max(self._largest, min(fraction, 1.0))
        return Reading(
            phases=tuple(level.phase for level in levels[1:]),
            done=levels[-1].done,
            total=levels[-1].total,
            fraction=fraction,
            elapsed=time.monotonic() - self._began,
            metrics=levels[-1].metrics,
        )
