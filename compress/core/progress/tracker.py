"""Fraction and time left of one stage, from its reports.

Reports come from the thread that works, often, and only store values. Another thread reads them a few times a second
(`Tracker.reading`) to show them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from compress.core.progress import Phase
from compress.core.progress.time_left import StepTimes

Clock = Callable[[], float]
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
        left: seconds until the stage ends; None as long as that cannot be estimated.
        left_of_phase: seconds until the innermost phase ends, likewise.
        metrics: the last metrics of the innermost phase.
    """

    phases: tuple[Phase, ...]
    done: int
    total: int
    fraction: float | None
    elapsed: float
    left: float | None
    left_of_phase: float | None
    metrics: Mapping[str, float]

    @property
    def phase_name(self) -> str:
        """The name of the innermost phase that has one; empty if none has."""
        return next((phase.name for phase in reversed(self.phases) if phase.name), "")


@dataclass(slots=True)
class _Level:
    """The stage, or an open phase.

    Attributes:
        phase: the phase; None for the stage.
        began: the time of its start.
        plan: the announced phases inside, by name.
        finished: by announced phase that is over, its seconds.
        steps: the steps that it reports itself.
        metrics: its last metrics.
    """

    phase: Phase | None
    began: float
    plan: dict[str, Phase] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    steps: StepTimes = field(default_factory=StepTimes)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def own_fraction(self) -> float | None:
        """Return the part that is done, without an open phase inside."""
        if self.plan:
            return sum(self.plan[name].weight for name in self.finished) / self._weight()
        return min(self.steps.done / self.steps.total, 1.0) if self.steps.total else None

    def fraction_with(self, inside: _Level, fraction: float | None) -> float | None:
        """Return the part that is done, with an open phase inside of which a fraction is done."""
        level_fraction = self.own_fraction()
        if level_fraction is None or not self._counts(inside):
            return level_fraction
        return level_fraction + self._planned(inside).weight / self._weight() * (fraction or 0.0)

    def left_with(self, inside: _Level | None, left: float | None, now: float) -> float | None:
        """Return the seconds that are left, with an open phase inside that takes `left` seconds more.

        The cost of later phases follows from their weights, and the seconds for each unit of weight so far; nothing is
        said of more work than was measured.
        """
        if not self.plan:
            return self.steps.left(now) if inside is None else None
        seconds, weight = sum(self.finished.values()), sum(self.plan[name].weight for name in self.finished)
        later = self._weight() - weight
        if inside is not None and self._counts(inside):
            current = self._planned(inside).weight
            spent = now - inside.began
            if left is None:
                if inside.steps.total or inside.plan or weight < current:  # it has no rate of its own yet
                    return None
                left = current * seconds / weight - spent
                if left < 0:  # it takes longer than its weight says
                    return None
            seconds, weight, later = seconds + spent + left, weight + current, later - current
        elif inside is not None and left is None:
            return None
        if later > weight:
            return None
        return (left or 0.0) + (later * seconds / weight if later > 0 else 0.0)

    def _weight(self) -> float:
        return sum(phase.weight for phase in self.plan.values()) or 1.0

    def _counts(self, inside: _Level) -> bool:
        return inside.phase is not None and inside.phase.name in self.plan and inside.phase.name not in self.finished

    def _planned(self, inside: _Level) -> Phase:
        assert inside.phase is not None
        return self.plan[inside.phase.name]


class Tracker:
    """A `Progress` that computes what is shown of one stage.

    Args:
        note: receives notes.
        listener: is called when phases begin and end.
        clock: the time in seconds.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        listener: Listener = lambda phases, seconds: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._note = note
        self._listener = listener
        self._clock = clock
        self._levels = [_Level(None, clock())]
        self._largest = 0.0

    def plan(self, *phases: Phase) -> None:
        """Announce the phases of the innermost level."""
        level = self._levels[-1]
        level.finished = {}
        level.plan = {phase.name: phase for phase in phases}

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Open a phase."""
        outer, level = self._levels[-1], _Level(phase, self._clock())
        self._levels = [*self._levels, level]  # not changed in place: another thread reads it
        phases = _phases(self._levels)
        self._listener(phases, None)
        try:
            yield
        finally:
            self._levels = self._levels[: self._levels.index(level)]
        seconds = self._clock() - level.began
        if phase.name in outer.plan:
            outer.finished = {**outer.finished, phase.name: seconds}
        self._listener(phases, seconds)

    def update(self, done: int, total: int, **metrics: float) -> None:
        """Store a report."""
        level = self._levels[-1]
        level.steps.record(done, total, self._clock())
        level.metrics = metrics

    def note(self, text: str) -> None:
        """Pass a line on."""
        self._note(text)

    def reading(self) -> Reading:
        """Return the present state; the fraction never falls."""
        levels, now = self._levels, self._clock()
        innermost = levels[-1]
        fraction = innermost.own_fraction()
        left = left_of_phase = innermost.left_with(None, None, now)
        for outer, inner in zip(levels[-2::-1], levels[:0:-1], strict=True):
            fraction = outer.fraction_with(inner, fraction)
            left = outer.left_with(inner, left, now)
        if fraction is not None:
            self._largest = fraction = max(self._largest, min(fraction, 1.0))
        return Reading(
            phases=_phases(levels),
            done=innermost.steps.done,
            total=innermost.steps.total,
            fraction=fraction,
            elapsed=now - levels[0].began,
            left=left,
            left_of_phase=left_of_phase,
            metrics=innermost.metrics,
        )


def _phases(levels: Sequence[_Level]) -> tuple[Phase, ...]:
    return tuple(level.phase for level in levels if level.phase is not None)
