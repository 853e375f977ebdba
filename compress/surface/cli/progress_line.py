"""One line of progress, as text: for a terminal of any width, and for a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from compress.core.progress import Phase, RunStep
from compress.core.progress.tracker import Reading

SEPARATOR = "  "
BAR = 20
"""Width of the bar."""
MIN_ELAPSED_S = 4.0
"""Seconds of work before a time left is shown: the first estimates jump."""


class LinePart(NamedTuple):
    """A part of the line; parts with a higher `rank` are left out first where the line is too long."""

    rank: int
    text: str


def parts(job: RunStep, reading: Reading, run_elapsed: float) -> list[LinePart]:
    """Return the parts of the line in order.

    Args:
        job: the stage.
        reading: its state.
        run_elapsed: seconds since the run began.
    """
    line_parts = [LinePart(5, f"[{job.number}/{job.count}]" if job.number else ""), LinePart(0, job.title)]
    line_parts.append(LinePart(3, reading.phase_name))
    line_parts.append(LinePart(4, steps(reading)))
    if reading.fraction is not None:
        line_parts.append(LinePart(1, percent(reading.fraction)))
    line_parts.append(LinePart(6, clock(reading.elapsed)))
    line_parts.append(LinePart(2, left(reading)))
    references = reading.phases[-1].references if reading.phases else {}
    line_parts += [LinePart(7, metric(name, value, references)) for name, value in reading.metrics.items()]
    if job.number > 1:
        line_parts.append(LinePart(8, f"run {clock(run_elapsed)}"))
    return [part for part in line_parts if part.text]


def fitted(line_parts: Sequence[LinePart], width: int) -> list[str]:
    """Return the texts that fit into a width; the first of them is cut if even it does not fit."""
    kept = list(line_parts)
    while len(kept) > 1 and len(SEPARATOR.join(part.text for part in kept)) > width:
        last = max(range(len(kept)), key=lambda index: (kept[index].rank, index))
        del kept[last]
    texts = [part.text for part in kept]
    if texts and len(texts[0]) > width:
        texts[0] = texts[0][: max(width - 1, 0)] + "…"[: min(width, 1)]
    return texts


def steps(reading: Reading) -> str:
    """Return the number of the step, and of the round: "epoch 3 of 40"."""
    if not reading.total:
        return ""
    phase = reading.phases[-1] if reading.phases else Phase("")
    if phase.rounds:
        per_round = max(reading.total // phase.rounds, 1)
        current = min(max(reading.done - 1, 0) // per_round + 1, phase.rounds)
        if phase.rounds > 1:
            return f"{phase.round_unit} {current:,} of {phase.rounds:,}"
    return f"{phase.unit} {min(max(reading.done, 1), reading.total):,} of {reading.total:,}"


def percent(fraction: float) -> str:
    """Return a percentage that is 100% only at the end."""
    return f"{int(fraction * 100)}%" if fraction < 1 else "100%"


def clock(seconds: float) -> str:
    """Return a time as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def left(reading: Reading) -> str:
    """Return the time left of the stage; of the phase where that of the stage is not known yet."""
    if reading.elapsed < MIN_ELAPSED_S:
        return ""
    if reading.left is not None:
        return f"{about(reading.left)} left"
    if reading.left_of_phase is not None and reading.phases:
        return f"{about(reading.left_of_phase)} left of {reading.phase_name or 'this phase'}"
    return "" if reading.fraction is None else "estimating the time left"


def about(seconds: float) -> str:
    """Return a time in round numbers, because it is an estimate."""
    if seconds < 10:
        return "a few seconds"
    if seconds < 57.5:
        return f"about {round(seconds / 5) * 5} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"about {minutes} min"
    if minutes < 48 * 60:
        minutes = round(minutes / 5) * 5
        hours, rest = divmod(minutes, 60)
        return f"about {hours} h {rest} min" if rest and hours < 10 else f"about {round(minutes / 60)} h"
    return f"about {round(minutes / 1440)} days"


def metric(name: str, value: float, references: Mapping[str, float]) -> str:
    """Return a metric, with the value to compare it with where there is one."""
    text = f"{name} {value:.3f}" if abs(value) < 1000 else f"{name} {value:.3g}"
    return f"{text} (guessing {references[name]:.2f})" if name in references else text


def bar(fraction: float | None, width: int, *, filled: str, empty: str) -> tuple[str, str]:
    """Return the full and the empty part of a bar."""
    count = int((fraction or 0.0) * width)
    return filled * count, empty * (width - count)


def state(job: RunStep, reading: Reading) -> str:
    """Return the parts after the title, for a line of the log."""
    return ", ".join(part.text for part in parts(job, reading, 0.0) if part.rank not in (0, 5, 8))


def plain(job: RunStep, reading: Reading) -> str:
    """Return the line without a limit of its width, for a file: `[2/7] train: epoch 3 of 40, 8%, …`."""
    position = f"[{job.number}/{job.count}] " if job.number else ""
    return f"{position}{job.title}: {state(job, reading)}"
