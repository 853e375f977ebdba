"""The early end of hopeless trials.

Optuna's pruners compare one value of running trials; a search for a trade-off has several. So the rules are ours. A
trial ends

1. before its training, if a cost that is predicted for its architecture exceeds a limit by more than SLACK, or
2. after a stage, if its quality there, with the largest gain that any complete trial with the same stages had from this
   stage to its end, is below a limit, or is beaten in every objective by a complete trial.

The second rule needs LEAST_SEEN such trials. The first one holds only as long as predictions of this search agree with
the final costs within SLACK.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.pipeline.search.goals import Goals, dominates, is_cost, losses
from compress.results.search import TrialRecord

SLACK = 0.05
"""The fraction by which a predicted cost may differ from the final one."""
LEAST_SEEN = 5
"""Complete trials with the same stages, from which the gain after a stage is known."""


@dataclass(frozen=True)
class TrialProgress:
    """The state of a running trial, as far as it is known.

    Attributes:
        stage: the id of the stage that is complete.
        order: the ids of all its stages.
        quality: the quality after the stage on the validation split; None if it was not measured.
        costs: the predicted costs of the final architecture; empty as long as it is not known.
    """

    stage: str
    order: tuple[str, ...]
    quality: float | None
    costs: Mapping[str, float]


def reason_to_stop(state: TrialProgress, goals: Goals, trials: Sequence[TrialRecord]) -> str:
    """Return the reason why a trial is hopeless; "" if it goes on."""
    costs = state.costs if _is_reliable(trials) else {}
    for limit in goals.limits:
        if is_cost(limit.metric) and limit.metric.name in costs:
            value = costs[limit.metric.name]
            if value > limit.bound * (1 + SLACK):
                return f"{limit.metric.name} is predicted to be {value:.4g}, and the limit is {limit.bound:g}"
    return _hopeless_quality(state, costs, goals, trials)


def expected(trial: TrialRecord, goals: Goals, trials: Sequence[TrialRecord]) -> dict[str, float]:
    """Return the result that a stopped trial would probably have had, as far as it is known.

    Its predicted costs, and its last quality with the mean gain of the complete trials with the same stages so far.
    """
    result = dict(trial.predicted)
    if trial.stages:
        stage, quality = list(trial.stages.items())[-1]
        begun = tuple(trial.stages)
        alike = [
            candidate
            for candidate in trials
            if candidate.status == "complete" and tuple(candidate.stages)[: len(begun)] == begun
        ]
        gains = _gains(goals.quality.name, stage, alike)
        result[goals.quality.name] = quality + (statistics.mean(gains) if gains else 0.0)
    return result


def _gains(quality: str, stage: str, trials: Sequence[TrialRecord]) -> list[float]:
    """Return the changes of the quality from the end of a stage to the result."""
    return [
        trial.values[quality] - trial.stages[stage]
        for trial in trials
        if stage in trial.stages and quality in trial.values
    ]


def _is_reliable(trials: Sequence[TrialRecord]) -> bool:
    """Whether predictions agree with the final costs of all complete trials."""
    for trial in trials:
        for name, predicted in trial.predicted.items() if trial.status == "complete" else ():
            final = trial.values.get(name)
            if final is not None and abs(predicted - final) > SLACK * max(final, predicted):
                return False
    return True


def _hopeless_quality(
    state: TrialProgress, costs: Mapping[str, float], goals: Goals, trials: Sequence[TrialRecord]
) -> str:
    metric = goals.quality
    if state.quality is None:
        return ""
    seen = [trial for trial in trials if trial.status == "complete" and tuple(trial.stages) == state.order]
    sign = 1 if metric.higher_is_better else -1
    gains = [sign * gain for gain in _gains(metric.name, state.stage, seen)]
    if len(gains) < LEAST_SEEN:
        return ""
    best = state.quality + sign * max(0.0, *gains)
    possible = {metric.name: best}
    start = f"{metric.name} is {state.quality:.4g} after {state.stage}, and {best:.4g} with the largest gain so far"
    for limit in goals.limits:
        if limit.metric == metric and limit.excess(possible) > 0:
            return f"{start}; the limit is {limit.bound:g}"
    if any(name not in costs for name in (cost.name for cost in goals.costs)):
        return ""
    if {*goals.objectives} - {*goals.costs, metric}:  # another quality is not known before the end
        return ""
    possible |= {cost.name: costs[cost.name] * (1 - SLACK) for cost in goals.costs}
    point = losses(possible, goals.objectives)
    for trial in seen:
        if trial.is_feasible and dominates(losses(trial.values, goals.objectives), point):
            return f"{start}; trial {trial.number} is better in every objective"
    return ""
