"""Where the time of a stage goes: the seconds of its phases, and the times of the steps of its training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compress.core.progress import Phase, Progress


@dataclass(frozen=True)
class TrainingTimes:
    """The times of a training, in milliseconds.

    Attributes:
        first_step_ms: the first step, in which TensorFlow traces the training function.
        step_ms: the median of the later steps; None if there are none.
        input_ms: the mean time in which a batch is read and augmented, measured without training.
        steps: number of later steps.
        phase: the phase that the training is in, with the names of the phases around it.
    """

    first_step_ms: float
    step_ms: float | None
    input_ms: float
    steps: int
    phase: str = ""

    @property
    def total_ms(self) -> float:
        """The time of all steps."""
        return self.first_step_ms + self.steps * (self.step_ms or 0.0)


@dataclass
class Profile:
    """The profile of a stage while it runs.

    Attributes:
        folder: the folder for the trace of some training steps, which TensorBoard's profiler opens.
        phases: seconds by phase; the phases inside another have its name before theirs.
        trainings: the times of each training, in order.
        has_trace: whether some steps were traced.
        open_phases: the names of the phases that are open, the outer ones first.
    """

    folder: Path
    phases: dict[str, float] = field(default_factory=dict)
    trainings: list[TrainingTimes] = field(default_factory=list)
    has_trace: bool = False
    open_phases: list[str] = field(default_factory=list)

    @property
    def phase(self) -> str:
        """The open phase, with the names of the phases around it."""
        return ", ".join(filter(None, self.open_phases))

    def watching(self, progress: Progress) -> Progress:
        """Return a progress receiver that also records the phases."""
        return _Watched(self, progress)

    def to_json(self) -> dict[str, Any]:
        """Return the facts of the stage (`compress.results.training.StageProfile`)."""
        phases = {name: round(seconds, 3) for name, seconds in self.phases.items()}
        trainings = [asdict(times) for times in self.trainings]
        trace = str(self.folder) if self.has_trace else None
        return {"phases": phases, "trainings": trainings, "trace": trace}


class _Watched:
    """Progress that passes everything on, and adds up the seconds of the phases."""

    def __init__(self, profile: Profile, progress: Progress) -> None:
        self._profile, self._progress = profile, progress
        self.plan, self.update, self.note = progress.plan, progress.update, progress.note

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Open a phase, and record its seconds."""
        self._profile.open_phases.append(phase.name)
        name = self._profile.phase
        began = time.monotonic()
        try:
            with self._progress.phase(phase):
                yield
        finally:
            self._profile.open_phases.pop()
            if phase.name:  # the time of one without a name is that of the phase around it
                self._profile.phases[name] = self._profile.phases.get(name, 0.0) + (time.monotonic() - began)
