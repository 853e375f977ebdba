"""The time that the steps of one phase will still take, from the steps that are done.

The time until the second report is left out: the first step traces TensorFlow functions, and often takes a hundred
times as long as the others. The rate is that of the later half of the steps, so that it follows a change of speed, and
one slow step changes little.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_SECONDS = 2.0
"""Measured time below which no estimate is made ..."""
MIN_STEPS = 2
"""... and number of measured steps ..."""
MIN_SHARE = 0.02
"""... and share of all steps, ..."""
ENOUGH_SECONDS = 30.0
"""... unless this time was measured. Several of the first steps of a training trace functions of TensorFlow: two of
them alone would say hours for a training of minutes."""
MARKS = 64
"""Number of moments that are remembered over a whole phase."""


@dataclass(slots=True)
class StepTimes:
    """The times at which steps of one phase were done.

    Attributes:
        done: number of steps done.
        total: number of steps.
        time: the time of the last report, in seconds.
    """

    done: int = 0
    total: int = 0
    time: float = 0.0
    _marks: list[tuple[int, float]] = field(default_factory=list)
    _next: int = 0
    _is_first: bool = True

    def record(self, done: int, total: int, time: float) -> None:
        """Record a report. Fewer steps, or another total, begin a new series."""
        if done < self.done or total != self.total:
            self._marks, self._is_first = [], True
        self.done, self.total, self.time = done, total, time
        if self._is_first:
            self._is_first = False
        elif not self._marks or done >= self._next:
            self._marks.append((done, time))
            self._next = done + max(total // MARKS, 1)

    def left(self, now: float) -> float | None:
        """Return the seconds that the remaining steps will take; None as long as too little is measured."""
        marks, done, total, time = self._marks, self.done, self.total, self.time  # another thread may write
        if total and done >= total:
            return 0.0
        rate = _seconds_per_step(marks, done, time, MIN_SHARE * total)
        if rate is None:
            return None
        rest = total - done
        # The current step counts as done in part; one that takes longer than the others is still not done.
        return rate * rest - min(max(now - time, 0.0), rate)


def _seconds_per_step(marks: list[tuple[int, float]], done: int, time: float, min_steps: float) -> float | None:
    """Return the seconds of one step in the later half of the measured steps; None if too little is measured."""
    if not marks or (done - marks[0][0] < min_steps and time - marks[0][1] < ENOUGH_SECONDS):
        return None
    enough = [mark for mark in marks if done - mark[0] >= MIN_STEPS and time - mark[1] >= MIN_SECONDS]
    if not enough:
        return None
    half = (marks[0][0] + done) / 2
    steps, began = [mark for mark in enough if mark[0] <= half or mark is enough[0]][-1]
    return (time - began) / (done - steps)
