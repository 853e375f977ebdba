"""The lines about each training, and the section on the time that stages and steps took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compress.core.profiling import TrainingTimes
from compress.report.blocks import Block, Section, Text, table
from compress.report.wording import MAX_NAME, MAX_PROSE, seconds, shorten
from compress.results.encoding import decode
from compress.results.run import RunRecord, StageRecord
from compress.results.training import (
    EpochLosses,
    StageProfile,
    TrainingLoss,
    TrainingRecord,
    ValidationChange,
)

MAX_LINES = 40  # chosen; report.json has all facts


def lines(record: RunRecord) -> list[str]:
    """Return one sentence for each training, recalibration, and healing that was not kept, stage by stage."""
    return [line for name, facts in _trainings(record) for line in _lines(name, facts)][:MAX_LINES]


def _trainings(record: RunRecord) -> Iterator[tuple[str, TrainingRecord]]:
    """Yield name and facts of every stage, and of every step of a stage with steps."""
    for stage in record.stages:
        facts = decode(TrainingRecord, stage.facts)
        name = shorten(stage.id)
        yield name, facts
        for index, step in enumerate(facts.steps, 1):
            yield f"{name}, step {index}", step


def _lines(name: str, facts: TrainingRecord) -> Iterator[str]:
    if facts.loss is not None and facts.history:
        yield f"{name}: {_loss(facts.loss, facts.history)}"
    if facts.healing is not None and not facts.healing.kept:
        yield f"{name}: the training is not kept, because it changed {facts.healing}"
    if facts.batch_norms is not None:
        yield f"{name}: {_recalibration(facts.batch_norms)}"


def _loss(loss: TrainingLoss, history: tuple[EpochLosses, ...]) -> str:
    """Return the losses of the first and the last epoch, next to that of guessing."""
    first, last = history[0], history[-1]
    what = f"the loss ({shorten(loss.name, MAX_PROSE)})" if loss.name else "the loss"
    epochs = "1 epoch" if len(history) == 1 else f"{len(history):,} epochs"
    change = (
        _value(last.loss)
        if len(history) == 1
        else f"{_value(first.loss)} in the first and {_value(last.loss)} in the last"
    )
    text = f"{epochs}; {what} was {change}"
    if last.val_loss is not None:
        text += f", and {_value(last.val_loss)} on the validation split"
    return text if loss.guessing is None else f"{text}; guessing gives {_value(loss.guessing)}"


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _recalibration(change: ValidationChange) -> str:
    if change.kept:
        return f"batch norms are recalibrated, which changed {change}"
    if change.reason:
        return f"batch norms are not recalibrated: {shorten(change.reason, MAX_PROSE)}"
    return f"batch norms are not recalibrated, because that changed {change}"


MAX_PHASES = 8
"""The most phases of a stage that are listed."""
LEAST_SHARE = 0.02
"""The smallest share of the run that a listed phase has."""
WAITING = 0.5
"""The share of a step that reading a batch may take before the training waits for data."""
SHORT_STEP_MS = 5.0
"""The step time below which calls cost as much as computation."""
TRACING = 0.3
"""The share of a training that the first step may take."""


def time_use(record: RunRecord) -> Sequence[Section]:
    """Return the section; none if the run was not profiled."""
    profiles = [(stage, decode(TrainingRecord, stage.facts).profile) for stage in record.stages]
    known = [(stage, profile) for stage, profile in profiles if profile is not None]
    if not known:
        return ()
    total = sum(stage.seconds or 0.0 for stage in record.stages) or 1.0
    rows = [row for stage, profile in known for row in _phase_rows(stage, profile, total)]
    steps = [row for stage, profile in known for row in _step_rows(stage, profile)]
    blocks: list[Block] = [
        *table(
            ("Stage", "Phase", "Time (measured)", "Share of the run"),
            rows,
            "A phase contains the phases whose names begin with its name.",
        ),
        *table(
            ("Stage", "Phase", "Steps", "First step", "Later steps", "Reading a batch"),
            steps,
            "The first step contains the tracing of the training function. Later steps: the median. Reading: the mean, "
            "measured alone.",
        ),
        *(Text(text) for stage, profile in known for text in _advice(stage, profile)),
    ]
    return (Section("Where the time went", blocks),)


def _phase_rows(stage: StageRecord, profile: StageProfile, total: float) -> Iterator[tuple[str, ...]]:
    name = shorten(stage.id)
    yield name, "all", seconds(stage.seconds), f"{(stage.seconds or 0.0) / total:.0%}"
    phases = sorted(profile.phases.items(), key=lambda phase: -phase[1])
    for phase, taken in phases[:MAX_PHASES]:
        if taken >= LEAST_SHARE * total:
            yield name, _last_parts(phase), seconds(taken), f"{taken / total:.0%}"


def _step_rows(stage: StageRecord, profile: StageProfile) -> Iterator[tuple[str, ...]]:
    for times in profile.trainings:
        later = "not measured" if times.step_ms is None else f"{times.step_ms:,.3g} ms"
        yield (
            shorten(stage.id),
            _last_parts(times.phase) or "all",
            f"{times.steps + 1:,}",
            seconds(times.first_step_ms / 1000),
            later,
            f"{times.input_ms:,.3g} ms",
        )


def _last_parts(phase: str) -> str:
    """Return the name of a phase; of a long one the last parts, in which names differ."""
    parts = phase.split(", ")
    names = [phase, *(", ".join(["…", *parts[first:]]) for first in range(1, len(parts)))]
    return next((name for name in names if len(name) <= MAX_NAME), shorten(names[-1]))


def _advice(stage: StageRecord, profile: StageProfile) -> Iterator[str]:
    """Yield what would make a stage faster: its longest training, because trial trainings are short."""
    name = shorten(stage.id)
    for times in sorted(profile.trainings, key=lambda times: -times.total_ms)[:1]:
        training = f"{name} ({_last_parts(times.phase)})" if times.phase else name
        if times.step_ms is not None:
            yield from (f"{training}: {text}" for text in _training_advice(times, times.step_ms))
    if profile.trace is not None:
        yield f"{name}: TensorBoard, with the package tensorboard-plugin-profile, opens the trace in {profile.trace}."


def _training_advice(times: TrainingTimes, step_ms: float) -> Iterator[str]:
    if times.input_ms > WAITING * step_ms:
        yield (
            f"reading a batch takes {times.input_ms / step_ms:.0%} of the time of a step, so the training may wait for "
            "data. Use fewer augmentations, smaller images in the data set, or more CPU cores."
        )
    elif step_ms < SHORT_STEP_MS:
        yield f"a step takes {step_ms:.2g} ms. A larger batch_size uses the machine better."
    if times.first_step_ms > TRACING * times.total_ms:
        yield (
            "the first step, in which TensorFlow traces the training function, takes "
            f"{times.first_step_ms / times.total_ms:.0%} of the training. Fewer and longer trainings spend less on it."
        )
