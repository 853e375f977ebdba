"""The goals of a search: the quantities to improve, and the constraints on the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.core.errors import PipelineError, listing, nearest, shown
from compress.core.measurement import SIZES, Metric
from compress.pipeline.schema import Pipeline
from compress.pipeline.yaml_file import Document, DocumentNode
from compress.results.search import TrialRecord
from compress.targets.base import Target, hardware_costs
from compress.tasks import task_of

LATENCY = Metric("latency_ms", "Predicted latency", "ms", "latency_ratio")
STREAMED = Metric("streamed_bytes", "Streamed parameters", "bytes", "streamed_ratio")
ON_CPU = Metric("cpu_share", "Operators on the CPU", "fraction", "cpu_share_ratio")
PREDICTED = (LATENCY, STREAMED)
"""The quantities that only a target with hosts predicts."""
WHOLE = "mapped_whole"
CACHED = "fits_cache"
MISSING = 1.0
"""The excess of a constraint whose quantity is unknown."""


@dataclass(frozen=True)
class Limit:
    """A constraint on the result, or a limit of the budget.

    Attributes:
        name: its key in `search.constraints`, or in `budget`.
        metric: the quantity.
        bound: the largest value; the smallest for a quantity of which more is better.
        scale: the value that counts as an excess of 1.
    """

    name: str
    metric: Metric
    bound: float
    scale: float

    def excess(self, values: Mapping[str, float]) -> float:
        """Return how far values violate the constraint; at most 0 if not, MISSING if the quantity is unknown."""
        value = values.get(self.metric.name)
        if value is None:
            return MISSING
        difference = self.bound - value if self.metric.higher_is_better else value - self.bound
        return difference / self.scale

    def in_words(self) -> str:
        """Return the constraint as a phrase."""
        if self.name == WHOLE:
            return "all operators run on the accelerator"
        if self.name == CACHED:
            return "all parameters fit the cache"
        return f"{self.name} of at {'least' if self.metric.higher_is_better else 'most'} {self.bound:g}"


@dataclass(frozen=True)
class Goals:
    """The objectives and constraints of a search.

    Attributes:
        objectives: the quantities to improve.
        limits: the constraints.
        host: the host for which latency is predicted; "" without prediction.
        quality: the quantity that is measured after each stage: the first metric of the task.
    """

    objectives: tuple[Metric, ...]
    limits: tuple[Limit, ...]
    host: str
    quality: Metric

    @property
    def costs(self) -> tuple[Metric, ...]:
        """The objectives that are costs."""
        return tuple(metric for metric in self.objectives if is_cost(metric))

    def excess(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return how far values violate each constraint; an objective that is unknown is one, too."""
        unknown = {metric.name: MISSING for metric in self.objectives if metric.name not in values}
        return unknown | {limit.name: limit.excess(values) for limit in self.limits}


def is_cost(metric: Metric) -> bool:
    """Whether a quantity follows from the network, and not from the answers of the model."""
    return metric in (*SIZES, *PREDICTED, ON_CPU)


def losses(values: Mapping[str, float], objectives: Sequence[Metric]) -> tuple[float, ...]:
    """Return the values of objectives such that less is better."""
    return tuple(-values[m.name] if m.higher_is_better else values[m.name] for m in objectives)


def dominates(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether the first losses are nowhere worse than the second, and somewhere better."""
    return all(a <= b for a, b in zip(first, second, strict=True)) and tuple(first) != tuple(second)


def front(trials: Sequence[TrialRecord], objectives: Sequence[Metric]) -> list[TrialRecord]:
    """Return the feasible trials that no other one dominates, the best first objective first; equal ones once."""
    points: dict[tuple[float, ...], TrialRecord] = {}
    for trial in trials:
        if trial.is_feasible:
            points.setdefault(losses(trial.values, objectives), trial)
    nondominated: list[tuple[float, ...]] = []
    for point in sorted(points):  # a point that dominates another one comes first
        if not any(dominates(other, point) for other in nondominated):
            nondominated.append(point)
    return [points[point] for point in nondominated]


def read_goals(document: Document, pipeline: Pipeline) -> Goals:
    """Return the goals of a search.

    Raises:
        PipelineError: an objective or a constraint is unknown, or the target does not predict it.
    """
    search = pipeline.head.search
    assert search is not None
    node = document.root.child("search")
    predicted = PREDICTED if pipeline.target.cost.hosts else ()
    known = {metric.name: metric for metric in (*task_of(pipeline.data).metrics, *predicted, *SIZES)}
    quality = task_of(pipeline.data).metrics[0]
    if search.objectives:
        names = node.child("objectives")
        objectives = tuple(_metric(names, index, name, known, pipeline.target)
                           for index, name in enumerate(search.objectives))  # fmt: skip
        if len(set(objectives)) < len(objectives):
            raise names.error("an objective occurs twice", hint="remove one")
    else:
        objectives = (quality, LATENCY if LATENCY.name in known else known["size_bytes"])
    limits = tuple(_limit(node.child("constraints"), name, bound, known, pipeline.target)
                   for name, bound in search.constraints.items())  # fmt: skip
    hosts = pipeline.target.cost.hosts
    host = pipeline.target.cost.host(pipeline.head.measure.host) if hosts else ""
    return Goals(objectives, limits, host, quality)


def _metric(node: DocumentNode, key: int | str, name: str, known: Mapping[str, Metric], target: Target) -> Metric:
    if name in known:
        return known[name]
    if name in [metric.name for metric in PREDICTED]:
        raise node.error(f"{name} is not predicted for the target {target.name}", key, allowed=listing([*known]))
    raise node.error(f"unknown quantity {name!r}", key, allowed=listing([*known]), hint=nearest(name, known))


def _limit(node: DocumentNode, name: str, bound: bool | float, known: Mapping[str, Metric], target: Target) -> Limit:
    if name in (WHOLE, CACHED):
        if bound is not True:
            raise node.error(f"{shown(bound)} is not true", name, allowed="true, or no such key")
        if not target.cost.hosts:
            raise node.error(f"the target {target.name} has no cache and no operators elsewhere", name)
        if name == WHOLE:
            return Limit(name, ON_CPU, 0, 1)
        return Limit(name, STREAMED, 0, hardware_costs(target).cache_bytes())
    try:
        metric = _metric(node, name, name, known, target)
    except PipelineError as error:
        error.allowed = listing([WHOLE, CACHED, *known])
        raise
    if isinstance(bound, bool):
        raise node.error(f"{shown(bound)} is not a number", name)
    return Limit(name, metric, bound, max(abs(bound), 1e-9))
