"""The report's sentences on trainings: their loss, selected samples, batch norm recalibration, and healing that was not
kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from compress.report.json_values import decode
from compress.report.record import RunRecord
from compress.report.wording import MAX_PROSE, shorten

MAX_LINES = 40


@dataclass(frozen=True)
class SelectionFacts:
    """The samples that were selected of all, by which method, and the time of the selection."""

    by: str
    samples: int
    of: int
    seconds: float


@dataclass(frozen=True)
class ValidationChange:
    """Whether a change of the model was kept, and its effect on the validation split; `reason`: it was not tried."""

    metric: str = ""
    validation_before: float | None = None
    validation_after: float | None = None
    kept: bool = False
    recalibrated: bool = False
    reason: str = ""

    def __str__(self) -> str:
        before, after = (
            "not finite" if value is None else f"{value:.4g}"
            for value in (self.validation_before, self.validation_after)
        )
        return f"validation {self.metric} from {before} to {after}"


@dataclass(frozen=True)
class LossFacts:
    """The name of a loss with its unit, and the loss of guessing."""

    name: str = ""
    guessing: float | None = None


@dataclass(frozen=True)
class EpochFacts:
    """The losses of one epoch."""

    loss: float | None = None
    val_loss: float | None = None


@dataclass(frozen=True)
class TrainingFacts:
    """The facts of a stage, or of one of its steps, about training and calibration."""

    loss: LossFacts | None = None
    history: tuple[EpochFacts, ...] = ()
    subset: SelectionFacts | None = None
    calibration: SelectionFacts | None = None
    healing: ValidationChange | None = None
    batch_norms: ValidationChange | None = None
    steps: tuple[TrainingFacts, ...] = ()


def lines(record: RunRecord) -> list[str]:
    """Return one sentence for each selection, recalibration, and healing that was not kept, stage by stage."""
    return [line for name, facts in _trainings(record) for line in _lines(name, facts)][:MAX_LINES]


def _trainings(record: RunRecord) -> Iterator[tuple[str, TrainingFacts]]:
    """Yield name and facts of every stage, and of every step of a stage with steps."""
    for stage in record.stages:
        facts = decode(TrainingFacts, stage.facts)
        name = shorten(stage.id)
        yield name, facts
        for index, step in enumerate(facts.steps, 1):
            yield f"{name}, step {index}", step


def _lines(name: str, facts: TrainingFacts) -> Iterator[str]:
    if facts.loss is not None and facts.history:
        yield f"{name}: {_loss(facts.loss, facts.history)}"
    if facts.subset is not None:
        yield f"{name}: {_selection(facts.subset, 'training')}"
    if facts.calibration is not None:
        yield f"{name}: {_selection(facts.calibration, 'calibration')}"
    if facts.healing is not None and not facts.healing.kept:
        yield f"{name}: the training is not kept, because it changed {facts.healing}"
    if facts.batch_norms is not None:
        yield f"{name}: {_recalibration(facts.batch_norms)}"


def _loss(loss: LossFacts, history: tuple[EpochFacts, ...]) -> str:
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


def _selection(facts: SelectionFacts, purpose: str) -> str:
    saved = f"{1 - facts.samples / facts.of:.0%}" if facts.of else "unknown"
    return (
        f"{facts.samples:,} of {facts.of:,} samples for {purpose} ({saved} fewer), selected by "
        f"{shorten(facts.by, 40)}; the selection took {facts.seconds:.1f} s"
    )


def _recalibration(change: ValidationChange) -> str:
    if change.recalibrated:
        return f"batch norms are recalibrated, which changed {change}"
    if change.reason:
        return f"batch norms are not recalibrated: {shorten(change.reason, MAX_PROSE)}"
    return f"batch norms are not recalibrated, because that changed {change}"
