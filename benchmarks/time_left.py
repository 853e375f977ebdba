"""The error of the time left that a run shows: `python benchmarks/time_left.py [PIPELINE ...] [--keep FILE]`.

Runs the pipelines (by default pipeline.yaml; `recipes.py --dry-run --work FOLDER` prepares others), records what each
stage reports, and computes from the reports what was shown in every second. For stages of at least `LEAST_S` seconds,
it prints the share of the time without an estimate, and the factor between the estimate and the time that the stage
really took from then on: the median, and the worst one with at least `NEARLY_DONE_S` seconds left. `--keep` writes the
reports to a file, and `--replay` reads them again, so that two versions of the estimate can be compared on the same
runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import repository  # noqa: F401

from paths import ROOT

from compress.core.progress import Phase, RunStep
from compress.core.progress.tracker import Tracker
from compress.pipeline import runner, schema
from compress.surface.cli.progress_line import MIN_ELAPSED_S

LEAST_S = 10.0
NEARLY_DONE_S = 5.0

Event = tuple[float, str, Any]
"""The second of the stage, the method of Progress, and its arguments."""


@dataclass
class Recorder:
    """Progress that stores what is reported."""

    began: float = field(default_factory=time.monotonic)
    events: list[Event] = field(default_factory=list)

    def _store(self, method: str, arguments: Any) -> None:
        self.events.append((time.monotonic() - self.began, method, arguments))

    def plan(self, *phases: Phase) -> None:
        """Store the phases."""
        self._store("plan", [asdict(phase) for phase in phases])

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Store when a phase begins and ends."""
        self._store("begin", asdict(phase))
        yield
        self._store("end", None)

    def update(self, done: int, total: int, **metrics: float) -> None:
        """Store the number of steps."""
        self._store("update", [done, total])

    def note(self, text: str) -> None:
        """Store nothing."""


@dataclass
class Recording:
    """A monitor that stores the reports of every stage by its title."""

    stages: dict[str, list[Event]] = field(default_factory=dict)

    @contextmanager
    def working(self, job: RunStep) -> Iterator[Recorder]:
        """Record the reports of a stage or probe."""
        recorder = Recorder()
        yield recorder
        recorder._store("done", None)
        self.stages[job.title] = recorder.events

    def done(self, title: str, status: str, seconds: float | None, remark: str = "") -> None:
        """Show nothing."""

    def log(self, text: str) -> None:
        """Show nothing."""


def shown(events: Sequence[Event]) -> list[tuple[float, float | None]]:
    """Return the seconds that a stage took from each moment on, and those that were shown then."""
    now, end = 0.0, events[-1][0]
    tracker = Tracker(lambda text: None, clock=lambda: now)
    open_phases: list[Any] = []
    readings: list[tuple[float, float | None]] = []
    second = MIN_ELAPSED_S
    for moment, method, arguments in events:
        while second < moment:
            now = second
            readings.append((end - now, tracker.reading().left))
            second += 1
        now = moment
        if method == "plan":
            tracker.plan(*(Phase(**phase) for phase in arguments))
        elif method == "begin":
            open_phases.append(tracker.phase(Phase(**arguments)))
            open_phases[-1].__enter__()
        elif method == "end":
            open_phases.pop().__exit__(None, None, None)
        elif method == "update":
            tracker.update(*arguments)
    return readings


def row(title: str, events: Sequence[Event]) -> str | None:
    """Return a row of the table; None for a stage that is short."""
    if events[-1][0] < LEAST_S:
        return None
    readings = [(left, estimate) for left, estimate in shown(events) if left >= NEARLY_DONE_S]
    factors = [max(estimate, 1.0) / left for left, estimate in readings if estimate is not None]
    unknown = 1 - len(factors) / len(readings)
    if not factors:
        return f"| {title} | {events[-1][0]:.0f} | {unknown:.0%} | | |"
    errors = [max(factor, 1 / factor) for factor in factors]
    worst = max(factors, key=lambda factor: max(factor, 1 / factor))
    return f"| {title} | {events[-1][0]:.0f} | {unknown:.0%} | {statistics.median(errors):.2f} | {worst:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pipelines", nargs="*", type=Path, default=[ROOT / "pipeline.yaml"])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--replay", type=Path)
    options = parser.parse_args()
    stages: dict[str, list[Event]] = json.loads(options.replay.read_text()) if options.replay else {}
    for path in () if options.replay else options.pipelines:
        monitor = Recording()
        with tempfile.TemporaryDirectory() as folder:
            runner.run(schema.load(path), Path(folder), monitor)
        stages |= {f"{path.stem}: {title}": events for title, events in monitor.stages.items()}
    if options.keep:
        options.keep.write_text(json.dumps(stages))
    print("| stage | seconds | without an estimate | median factor | worst estimate / truth |")
    print("|---|---|---|---|---|")
    rows = [row(title, events) for title, events in stages.items()]
    print("\n".join(line for line in rows if line))


if __name__ == "__main__":
    main()
