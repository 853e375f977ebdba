"""The results of a training: losses, effects on validation, and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compress.core.profiling import TrainingTimes


@dataclass(frozen=True)
class ValidationChange:
    """The effect of a change of the model on the validation split.

    Attributes:
        metric: the metric of `validation_before` and `validation_after`, which are None if they are not finite.
        kept: whether the change was kept.
        reason: the reason why the change was not tried; empty if it was tried.
    """

    metric: str = ""
    validation_before: float | None = None
    validation_after: float | None = None
    kept: bool = False
    reason: str = ""

    def __str__(self) -> str:
        before, after = (
            "not finite" if value is None else f"{value:.4g}"
            for value in (self.validation_before, self.validation_after)
        )
        return f"validation {self.metric} from {before} to {after}"


@dataclass(frozen=True)
class TrainingLoss:
    """The name of a loss with its unit, and the loss of guessing: None if the loss of guessing is unknown."""

    name: str = ""
    guessing: float | None = None


@dataclass(frozen=True)
class EpochLosses:
    """The losses of one epoch. A loss is None if it is not finite."""

    loss: float | None = None
    val_loss: float | None = None


@dataclass(frozen=True)
class StageProfile:
    """The profile of a stage (`compress.core.profiling.Profile`).

    Attributes:
        phases: the seconds of each phase; a phase inside another has its name before its own.
        trainings: the times of each training, in order.
        trace: the folder of the trace for TensorBoard; None without one.
    """

    phases: Mapping[str, float] = field(default_factory=dict)
    trainings: tuple[TrainingTimes, ...] = ()
    trace: str | None = None


@dataclass(frozen=True)
class TrainingRecord:
    """The facts that a stage, or each step of a stage, reports about training.

    Attributes:
        healing: whether the training was kept.
        batch_norms: whether the recalibration of batch norms was kept.
        profile: the times of the stage, if the run was profiled.
    """

    loss: TrainingLoss | None = None
    history: tuple[EpochLosses, ...] = ()
    healing: ValidationChange | None = None
    batch_norms: ValidationChange | None = None
    steps: tuple[TrainingRecord, ...] = ()
    profile: StageProfile | None = None
