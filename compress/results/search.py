"""The record of a search: all that its page and search.json show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from compress.core.measurement import Measurement, Metric
from compress.results.encoding import encode

SCHEMA_VERSION = 1
TrialStatus = Literal["complete", "stopped", "failed", "repeated", "interrupted", "running"]
SearchStatus = Literal["complete", "interrupted"]
COUNTED: tuple[TrialStatus, ...] = ("complete", "stopped", "failed", "running")
"""Trials that count for the number of trials, and whose settings need not be tried again. A repeated one has the
settings of an earlier one, and costs nothing."""


@dataclass(frozen=True)
class TrialRecord:
    """A trial. Trials are numbered from 0.

    Attributes:
        status: "complete": measured to its end; "stopped": it had no chance, see `reason`; "failed": a stage failed.
        values: the quantities of its result that are known: quality on the validation split, costs.
        stages: the quality after each stage on the validation split.
        original: the quality of the model before it is compressed, on the validation split.
        predicted: the costs that were predicted before the training; empty if they were not.
        expected: the quantities that a stopped trial would probably have had, as far as they are known.
        excess: how far each constraint is violated; at most 0 where it is met.
        reason: why it was stopped, or failed, or why its latency is unknown.
    """

    number: int
    status: TrialStatus
    settings: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)
    original: float | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    expected: Mapping[str, float] = field(default_factory=dict)
    excess: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0

    @property
    def is_feasible(self) -> bool:
        """Whether it is complete and meets all constraints."""
        return self.status == "complete" and all(value <= 0 for value in self.excess.values())


@dataclass(frozen=True)
class FrontPoint:
    """A trial that no other one beats in everything, or in everything within the budget, after a complete run.

    Attributes:
        folder: the folder of its run, with the report, from the folder of the search.
        bundle: its bundle there; empty if the pipeline has no stage `package`.
        model: its .tflite file there.
        test: its quality on the test split, which was not used for any choice.
        is_dominated: whether another trial, which exceeds the budget, beats it in everything.
    """

    number: int
    folder: str
    bundle: str = ""
    model: str = ""
    test: Measurement | None = None
    verdict: str = ""
    is_dominated: bool = False


@dataclass(frozen=True)
class SearchRecord:
    """A search.

    Attributes:
        status: "complete", or "interrupted" while trials are missing.
        objectives: the quantities to improve; the first one is that of the recommendation.
        constraints: the constraints, one sentence each.
        host: the host for which latency is predicted; empty without prediction.
        sampler: Optuna's sampler, which chose the trials.
        settings: what was varied: the choices or the range in words, by the name of the setting.
        front: the trials that no other one beats in everything, the best first objective first; if all of them
            exceed the budget, also those that no other one within the budget beats.
        recommended: the number of the recommended trial; None if there is none.
        reason: the reason for the recommendation, or for the lack of one; `hint` says what to do then.
        seconds: the time of all trials.
        finished: the time at which the record was made, ISO 8601.
    """

    name: str
    status: SearchStatus
    objectives: tuple[Metric, ...]
    constraints: tuple[str, ...]
    host: str
    sampler: str
    settings: Mapping[str, str]
    trials: tuple[TrialRecord, ...]
    front: tuple[FrontPoint, ...]
    recommended: int | None
    reason: str
    hint: str
    notes: tuple[str, ...]
    seconds: float
    finished: str
    coralline: str

    def trial(self, number: int) -> TrialRecord:
        """Return the trial with a number."""
        return next(trial for trial in self.trials if trial.number == number)

    def to_json(self) -> dict[str, Any]:
        """Return the content of search.json."""
        return {"schema_version": SCHEMA_VERSION, **encode(self)}
