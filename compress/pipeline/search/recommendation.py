"""The trials that get a complete run, and the one that is recommended for the budget, with the reason.

Only the validation split decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.core.errors import listing
from compress.core.measurement import SIZES, Metric
from compress.pipeline.schema import Budget, Pipeline
from compress.pipeline.search.goals import LATENCY, Goals, Limit, front, is_cost, losses
from compress.pipeline.yaml_file import Document
from compress.report.wording import noun, number
from compress.results.search import TrialRecord
from compress.tasks import task_of

COSTS = {metric.name: metric for metric in (*SIZES, LATENCY)}


@dataclass(frozen=True)
class Recommendation:
    """The trial to use.

    Attributes:
        number: its number; None if there is none.
        reason: the reason for it, or for the lack of one.
        hint: what to do if there is none.
    """

    number: int | None
    reason: str
    hint: str = ""


def to_complete(
    trials: Sequence[TrialRecord], goals: Goals, budget: Mapping[str, float], task: Metric
) -> list[TrialRecord]:
    """Return the trials that get a complete run: the front, and what can be recommended for the budget.

    A budget may limit a quantity that is not an objective. If the whole front exceeds it, the result also has the front
    of the trials within the budget.

    Args:
        trials: all trials.
        goals: the objectives and constraints of the search.
        budget: the limits of the pipeline file by name.
        task: the first metric of the task, which the budget can limit.
    """
    limits = budget_limits(trials, budget, task)
    on_front = front(trials, goals.objectives)
    if any(_meets(trial, limits) for trial in on_front):
        return on_front
    return [*on_front, *front([trial for trial in trials if _meets(trial, limits)], goals.objectives)]


def recommend(
    completed: Sequence[TrialRecord],
    trials: Sequence[TrialRecord],
    goals: Goals,
    budget: Mapping[str, float],
    task: Metric,
) -> Recommendation:
    """Return the recommended trial.

    Args:
        completed: the trials of `to_complete` whose complete run did not fail.
        trials: all trials: the best original among them is what a drop is measured from.
        goals: the objectives and constraints of the search.
        budget: the limits of the pipeline file by name.
        task: the first metric of the task, which the budget can limit.
    """
    if not completed:
        return _none_feasible(trials, goals)
    limits = budget_limits(trials, budget, task)
    meeting = [trial for trial in completed if _meets(trial, limits)]
    words = " and ".join(_in_words(limit, budget) for limit in limits)
    if not meeting:
        return _none_within(trials, limits, words)
    is_on_front = meeting[0] in front(trials, goals.objectives)
    place = " on the front" if is_on_front else ""
    verb = "meets" if len(meeting) == 1 else "meet"
    within = f" that {verb} the budget ({words})" if words else ""
    within += "" if is_on_front else "; all trials on the front exceed it"
    if len(meeting) == 1:
        return Recommendation(meeting[0].number, f"it is the only trial{place}{within}")
    return _best(meeting, goals, limits, f"of the {len(meeting)} trials{place}{within}")


def _best(meeting: Sequence[TrialRecord], goals: Goals, limits: Sequence[Limit], which: str) -> Recommendation:
    """Return the best of several trials within the budget.

    Args:
        meeting: the trials, the best first objective first.
        goals: the objectives and constraints of the search.
        limits: those of the budget.
        which: the words for these trials.
    """
    first = goals.objectives[0]
    limits_cost = any(is_cost(limit.metric) and limit.bound > 0 for limit in (*limits, *goals.limits))
    if limits_cost or len(goals.objectives) == 1:
        return Recommendation(meeting[0].number, f"it has the best {_named(first, meeting[0])} {which}")
    cheapest = next((metric for metric in goals.costs), None)
    if limits and cheapest is not None:
        chosen = min(meeting, key=lambda trial: trial.values[cheapest.name])
        return Recommendation(chosen.number, f"it has the best {_named(cheapest, chosen)} {which}")
    chosen = _balanced(meeting, goals.objectives)
    condition = "" if limits else "without a budget, "
    nearest_to = "that is nearest to the best value of every objective"
    return Recommendation(chosen.number, f"{condition}it is the one {which} {nearest_to}")


def _meets(trial: TrialRecord, limits: Sequence[Limit]) -> bool:
    return all(limit.excess(trial.values) <= 0 for limit in limits)


def _none_within(trials: Sequence[TrialRecord], limits: Sequence[Limit], words: str) -> Recommendation:
    """Return why no complete run is within the budget: the runs failed, or the nearest trial."""
    feasible = [trial for trial in trials if trial.is_feasible]
    if any(_meets(trial, limits) for trial in feasible):
        return Recommendation(None, f"the complete runs of all trials that meet the budget ({words}) failed")
    nearest = min(feasible, key=lambda trial: max(limit.excess(trial.values) for limit in limits))
    reason = f"no trial meets the budget ({words}); trial {nearest.number} is the nearest"
    return Recommendation(None, reason, "allow more, or widen the ranges")


def _none_feasible(trials: Sequence[TrialRecord], goals: Goals) -> Recommendation:
    """Return why no trial meets all constraints: all failed, or the nearest one with what it violates."""
    complete = [trial for trial in trials if trial.status == "complete"]
    failed = [trial for trial in trials if trial.status == "failed"]
    if not complete and failed:
        reason = f"no trial is complete, and {len(failed)} failed, the last one: {failed[-1].reason}"
        return Recommendation(None, reason, "failed trials are not tried again: begin with another name or --out")
    if not complete:
        stopped = [trial for trial in trials if trial.status == "stopped"]
        reason = (
            f"no trial is complete; the last one was stopped: {stopped[-1].reason}" if stopped else "no trial ended"
        )
        return Recommendation(None, reason, "allow more, or widen the ranges")
    nearest = min(complete, key=lambda trial: max(trial.excess.values(), default=0.0))
    unknown = [metric.name for metric in goals.objectives if metric.name not in nearest.values]
    violated = [name for name, excess in nearest.excess.items() if excess > 0 and name not in unknown]
    parts = [f"violates {listing(violated)}"] if violated else []
    parts += [f"has no {listing(unknown)}"] if unknown else []
    reason = (
        f"no complete trial meets all constraints; trial {nearest.number} is the nearest, and {' and '.join(parts)}"
    )
    reason += f": {nearest.reason}" if unknown and nearest.reason else ""
    return Recommendation(None, reason, "allow more, or widen the ranges" if violated else "")


def judged_budget(document: Document, pipeline: Pipeline, judge: str) -> dict[str, float]:
    """Return the limits of a pipeline file's budget.

    Args:
        document: the file.
        pipeline: its pipeline.
        judge: the name of what judges by the budget, for the message.

    Raises:
        PipelineError: a limit can be judged by the test split or on this machine only.
    """
    budget: dict[str, float] = pipeline.head.budget.model_dump(exclude_none=True)
    known = limitable(pipeline)
    for name in budget:
        if name == LATENCY.name and name not in known:
            what = f"latency_ms is not predicted for the target {pipeline.target.name}"
            raise document.root.error(what, "budget", name, allowed=listing(known))
        if name not in known:
            raise document.root.error(f"{judge} cannot judge {name}", "budget", name, allowed=listing(known))
    return budget


def limitable(pipeline: Pipeline) -> list[str]:
    """Return the keys of a budget that the validation split and predicted costs can be judged by."""
    known = [task_of(pipeline.data).metrics[0].change, *COSTS]
    predicted = [name for name in known if name != LATENCY.name or pipeline.target.cost.hosts]
    return [name for name in predicted if name in Budget.model_fields]


def _named(metric: Metric, trial: TrialRecord) -> str:
    return f"{noun(metric.label)}, {number(trial.values[metric.name], metric.unit)},"


def budget_limits(trials: Sequence[TrialRecord], budget: Mapping[str, float], task: Metric) -> list[Limit]:
    """Return the limits of a budget; a drop is one of the task's metric, from the best original of the search.

    If the quality of every original is unknown, no value meets the limit of a drop.
    """
    limits = []
    for name, bound in budget.items():
        if name in COSTS:
            limits.append(Limit(name, COSTS[name], bound, bound))
        elif name == task.change:
            originals = [trial.original for trial in trials if trial.original is not None]
            best = (max if task.higher_is_better else min)(originals, default=None)
            if best is None:
                limits.append(Limit(name, task, math.inf if task.higher_is_better else -math.inf, 1.0))
            else:
                worst = best - bound
                if not task.higher_is_better:  # an increase is a fraction of the original's value, unless that is 0
                    worst = best * (1 + bound) if best else bound
                limits.append(Limit(name, task, worst, max(abs(best), 1e-9)))
    return limits


def _in_words(limit: Limit, budget: Mapping[str, float]) -> str:
    bound = f"{limit.name} of at most {budget[limit.name]:g}"
    if is_cost(limit.metric):
        return bound
    if math.isinf(limit.bound):
        return f"{bound}, and the {limit.metric.name} of the original is unknown"
    return f"{bound} from the best original of the search, so {limit.metric.name} of {limit.bound:.4g}"


def _balanced(trials: Sequence[TrialRecord], objectives: Sequence[Metric]) -> TrialRecord:
    """Return the trial nearest to the best value of every objective, where each is scaled to its range on the front.

    The range of a cost counts as its lowest value at least: latencies of 0.66 and 0.67 ms are hardly different,
    whatever else is on the front.
    """
    points = [losses(trial.values, objectives) for trial in trials]
    lowest = [min(column) for column in zip(*points, strict=True)]
    ranges = [max(column) - low for column, low in zip(zip(*points, strict=True), lowest, strict=True)]
    least = [low if is_cost(metric) else 0.0 for metric, low in zip(objectives, lowest, strict=True)]
    spans = [max(value_range, at_least) or 1.0 for value_range, at_least in zip(ranges, least, strict=True)]

    def distance(index: int) -> float:
        scaled = [(value - low) / span for value, low, span in zip(points[index], lowest, spans, strict=True)]
        return math.hypot(*scaled)

    return trials[min(range(len(trials)), key=distance)]
