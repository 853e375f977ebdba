"""`assign`: which models share which Edge TPU, and in which order to compile them together.

Models that are compiled together keep their parameters in the cache together: each gets what those before it in the
command left, and streams the rest at every inference. Models that are compiled alone have the whole cache, but whoever
runs after another model sends its parameters again. For each Edge TPU the better of both is chosen, by the time that
requests wait and run (`queueing`).

Few models: every assignment and every order is tried. Many: each model, the busiest first, goes where it costs least,
then single models are moved and exchanged as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from math import inf
from typing import Any

from compress.errors import ModelError, PipelineError
from compress.targets.base import Target
from compress.targets.edgetpu import estimate
from compress.targets.edgetpu.several.queueing import Queue, wait_covariance
from compress.tflite.graph import Graph

SCHEMA_VERSION = 1
MOST_TRIED = 7
"""The most models for which every assignment is tried."""
MOST_ORDERED = 5
"""The most models of one Edge TPU for which every order of compilation is tried."""
MOST_MODELS = 64
_BUSY = 0.95
"""A larger utilization counts as too much: small errors of the prediction would make the queue grow without end."""
_CACHE = ("memory_bytes", "cache_bytes", "cache_bytes_beside_streaming", "plan_bytes")


@dataclass(frozen=True)
class Load:
    """A model and its requests.

    Attributes:
        name: the file.
        graph: the model, not compiled.
        rate_per_s: requests per second.
    """

    name: str
    graph: Graph
    rate_per_s: float


@dataclass(frozen=True)
class Service:
    """One inference of a model on an Edge TPU.

    Attributes:
        array_ms: the time in which the Edge TPU is in use.
        cpu_ms: the time of the operators on the CPU after it.
        on_chip_bytes: the cache that its parameters take.
        cached_bytes: its parameters in the cache.
        streamed_bytes: its parameters that are sent at every inference.
    """

    array_ms: float
    cpu_ms: float
    on_chip_bytes: int
    cached_bytes: int
    streamed_bytes: int


@dataclass(frozen=True)
class Shared:
    """The models of one Edge TPU.

    Attributes:
        models: the indices of the models; in the order of compilation if they are compiled together.
        together: whether they are compiled together.
        services: the service of each.
        reload_ms: for each, the time to send its parameters again after another model; 0 if compiled together.
        queue: the requests of all of them.
        rates: the requests per second of each.
    """

    models: tuple[int, ...]
    together: bool
    services: tuple[Service, ...]
    reload_ms: tuple[float, ...]
    queue: Queue
    rates: tuple[float, ...]

    @cached_property
    def value(self) -> tuple[float, float]:
        """The quantities to minimize: the utilization above the limit, then the time of all requests in one second."""
        excess = max(self.queue.utilization - _BUSY, 0.0)
        wait_ms = 0.0 if excess else self.queue.mean_wait_ms
        return excess, self.queue.rate_per_s * (wait_ms + self.queue.mean_service_ms)


def shared(
    models: tuple[int, ...], loads: Sequence[Load], services: Sequence[Service], reloads: Sequence[float]
) -> Shared:
    """Return the queue of models on one Edge TPU; `reloads` in ms, all 0 if they are compiled together."""
    rates = tuple(loads[index].rate_per_s for index in models)
    total = sum(rates)
    times: list[float] = []
    shares: list[float] = []
    for rate, service, reload_ms in zip(rates, services, reloads, strict=True):
        share = rate / total
        times += [service.array_ms, service.array_ms + reload_ms]
        shares += [share * share, share * (1 - share)]  # the request before is of the same model, or of another one
    own_shares = [rate / total for rate in rates]
    covariance = wait_covariance(total, own_shares, [service.array_ms for service in services], reloads)
    queue = Queue(total, tuple(times), tuple(shares), covariance)
    return Shared(models, not any(reloads), tuple(services), tuple(reloads), queue, rates)


@dataclass
class Predictions:
    """The predicted services of models, each computed once.

    Attributes:
        loads: the models.
        target: the Edge TPU.
        host: the host.
        clock: the clock.
    """

    loads: Sequence[Load]
    target: Target
    host: str
    clock: str
    _services: dict[tuple[int, int], Service] = field(default_factory=dict)
    _best: dict[frozenset[int], Shared] = field(default_factory=dict)

    def service(self, index: int, used_bytes: int) -> Service:
        """Return the service of a model if others have used a part of the cache."""
        key = (index, used_bytes)
        if key not in self._services:
            memory = self.target.tables["memory"]
            left = {name: max(memory[name] - used_bytes, 0) for name in _CACHE if name in memory}
            target = replace(self.target, tables={**self.target.tables, "memory": {**memory, **left}})
            predicted = estimate.estimate(self.loads[index].graph, target, self.host, self.clock)
            parameters = predicted.check.parameters
            cpu_ms = predicted.latency.parts["cpu_ms"]
            on_chip = parameters.report_on_chip_bytes if parameters else 0
            cached = parameters.cached_bytes if parameters else 0
            self._services[key] = Service(
                predicted.latency_ms - cpu_ms, cpu_ms, on_chip, cached, predicted.streamed_bytes
            )
        return self._services[key]

    def reload_ms(self, index: int) -> float:
        """Return the time to send the cached parameters of a model."""
        cost = self.target.cost
        sent = cost.of_operators([], self.service(index, 0).cached_bytes, 0).latency_ms(self.host, self.clock)
        return sent - cost.of_operators([], 0, 0).latency_ms(self.host, self.clock)

    def best(self, models: Sequence[int]) -> Shared:
        """Return the best use of one Edge TPU by some models."""
        key = frozenset(models)
        if key not in self._best:
            self._best[key] = min(self._uses(sorted(key)), key=lambda use: use.value)
        return self._best[key]

    def _uses(self, models: Sequence[int]) -> Iterator[Shared]:
        for order in self._orders(models):
            services = []
            used_bytes = 0
            for index in order:
                services.append(self.service(index, used_bytes))
                used_bytes += services[-1].on_chip_bytes
            yield shared(order, self.loads, services, [0.0] * len(order))
        if len(models) > 1:
            alone = [self.service(index, 0) for index in models]
            yield shared(tuple(models), self.loads, alone, [self.reload_ms(index) for index in models])

    def _orders(self, models: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield orders of compilation: one if the order does not matter, all of few models, otherwise likely ones."""
        alone = {index: self.service(index, 0) for index in models}
        needed_bytes = sum(service.on_chip_bytes for service in alone.values())
        if needed_bytes <= self.target.tables["memory"]["plan_bytes"] or len(models) == 1:
            yield tuple(models)
        elif len(models) <= MOST_ORDERED:
            yield from permutations(models)
        else:
            # Of what fits, the most requests for each byte first; or the smallest.
            yield tuple(sorted(models, key=lambda i: -self.loads[i].rate_per_s))
            yield tuple(sorted(models, key=lambda i: alone[i].on_chip_bytes))


@dataclass(frozen=True)
class TpuAssignment:
    """Models on Edge TPUs.

    Attributes:
        loads: the models.
        tpus: the number of Edge TPUs; some may have no model.
        groups: the Edge TPUs that have models.
        host: the host of the predictions.
        clock: the clock.
        method: how the assignment was found.
        compiler: the name of the compiler.
    """

    loads: tuple[Load, ...]
    tpus: int
    groups: tuple[Shared, ...]
    host: str
    clock: str
    method: str
    compiler: str

    @property
    def stable(self) -> bool:
        """Whether the Edge TPUs can serve all requests."""
        return all(group.value[0] == 0 for group in self.groups)

    def command(self, group: Shared) -> list[str]:
        """Return the commands that compile the models of one Edge TPU."""
        names = [self.loads[index].name for index in group.models]
        joined = [" ".join(names)] if group.together else names
        return [f"{self.compiler} -s {argument}" for argument in joined]

    def describe(self) -> str:
        """Return the assignment as text for a person."""
        lines = [f"{len(self.loads)} models on {self.tpus} Edge TPUs, {self.host}, clock {self.clock}; predicted"]
        for number, group in enumerate(self.groups):
            queue = group.queue
            how = "compiled together, in this order" if group.together else "compiled alone, parameters sent again"
            lines.append(
                f"Edge TPU {number}: utilization {queue.utilization:.0%}; {how}"
                if len(group.models) > 1
                else f"Edge TPU {number}: utilization {queue.utilization:.0%}"
            )
            lines.append(f"  waiting: {_waiting(queue)}")
            for index, service, reload_ms in zip(group.models, group.services, group.reload_ms, strict=True):
                again = f", {reload_ms:.3g} ms more after another model" if reload_ms else ""
                cpu = f", then {service.cpu_ms:.3g} ms on the CPU" if service.cpu_ms else ""
                lines.append(
                    f"  {self.loads[index].name}: {self.loads[index].rate_per_s:g}/s, {service.array_ms:.3g} ms{again}"
                    f"{cpu}; {service.cached_bytes:,} bytes cached, {service.streamed_bytes:,} streamed"
                )
            lines += [f"  {command}" for command in self.command(group)]
        lines.append(f"found by {self.method}")
        if not self.stable:
            lines.append(self.overload)
        return "\n".join(lines)

    @property
    def overload(self) -> str:
        """The advice if there are too many requests; "" otherwise."""
        if self.stable:
            return ""
        work = sum(group.queue.utilization for group in self.groups)
        return (
            f"too many requests: an Edge TPU would be busy for more than {_BUSY:.0%} of the time; use about "
            f"{int(work / _BUSY) + 1} Edge TPUs or fewer requests, or list a busy model twice with half of its requests"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the assignment as a plain map, schema 1."""
        return {
            "schema_version": SCHEMA_VERSION,
            "host": self.host,
            "clock": self.clock,
            "tpus": self.tpus,
            "stable": self.stable,
            "method": self.method,
            "groups": [self._group(group) for group in self.groups],
            "overload": self.overload,
        }

    def _group(self, group: Shared) -> dict[str, Any]:
        queue = group.queue
        limits = (queue.mean_wait_ms, queue.wait_ms())
        waits = [None if value == inf else value for value in limits]
        return {
            "utilization": queue.utilization,
            "mean_wait_ms": waits[0],
            "p95_wait_ms": waits[1],
            "compiled_together": group.together,
            "compile": self.command(group),
            "models": [
                {
                    "model": self.loads[index].name,
                    "requests_per_second": self.loads[index].rate_per_s,
                    "array_ms": service.array_ms,
                    "reload_ms": reload_ms,
                    "cpu_ms": service.cpu_ms,
                    "cached_bytes": service.cached_bytes,
                    "streamed_bytes": service.streamed_bytes,
                }
                for index, service, reload_ms in zip(group.models, group.services, group.reload_ms, strict=True)
            ],
        }


def assign(loads: Sequence[Load], target: Target, tpus: int, host: str, clock: str) -> TpuAssignment:
    """Assign models to Edge TPUs.

    Args:
        loads: the models with their requests.
        target: the Edge TPU.
        tpus: the number of Edge TPUs.
        host: the host that they are connected to.
        clock: their clock.

    Raises:
        PipelineError: the number of models or Edge TPUs, a rate, the host or the clock is invalid.
        ModelError: the compiler will refuse a model.
    """
    if not 1 <= len(loads) <= MOST_MODELS or not 1 <= tpus <= MOST_MODELS:
        raise PipelineError(f"{len(loads)} models and {tpus} Edge TPUs", allowed=f"1 to {MOST_MODELS} of both")
    wrong = next((load for load in loads if not 0 < load.rate_per_s <= 1e6), None)
    if wrong is not None:
        raise PipelineError(f"{wrong.name} has {wrong.rate_per_s:g} requests per second", allowed="more than 0")
    predictions = Predictions(loads, target, host, clock)
    for index, load in enumerate(loads):
        try:
            predictions.service(index, 0)
        except ModelError as error:
            raise ModelError(error.what, where=load.name, allowed=error.allowed, hint=error.hint) from error
    if len(loads) <= MOST_TRIED:
        groups = min(_partitions(range(len(loads)), tpus), key=lambda candidate: _value(candidate, predictions))
        method = "trying every assignment"
    else:
        groups = _improved(_greedy(predictions, tpus), predictions)
        method = "greedy assignment, then moving and exchanging models"
    assigned = tuple(predictions.best(group) for group in groups if group)
    return TpuAssignment(tuple(loads), tpus, assigned, host, clock, method, target.compiler_name)


def _waiting(queue: Queue) -> str:
    if queue.mean_wait_ms == inf:
        return "longer and longer: there are more requests than it can serve"
    return f"mean {queue.mean_wait_ms:.3g} ms, 95% below {queue.wait_ms():.3g} ms"


Groups = tuple[tuple[int, ...], ...]


def _value(groups: Groups, predictions: Predictions) -> tuple[float, float]:
    values = [predictions.best(group).value for group in groups if group]
    return sum(excess for excess, _ in values), sum(time_ms for _, time_ms in values)


def _partitions(models: Sequence[int], most: int) -> Iterator[Groups]:
    """Yield all partitions of models into at most so many groups."""
    if not models:
        yield ()
        return
    for groups in _partitions(models[:-1], most):
        for index, group in enumerate(groups):
            yield (*groups[:index], (*group, models[-1]), *groups[index + 1 :])
        if len(groups) < most:
            yield (*groups, (models[-1],))


def _greedy(predictions: Predictions, tpus: int) -> Groups:
    loads = predictions.loads
    busiest = sorted(range(len(loads)), key=lambda i: -loads[i].rate_per_s * predictions.service(i, 0).array_ms)
    groups: Groups = ((),) * tpus
    for model in busiest:
        choices = [_moved(groups, model, target) for target in range(tpus)]
        groups = min(choices, key=lambda candidate: _value(candidate, predictions))
    return groups


def _moved(groups: Groups, model: int, target: int) -> Groups:
    """Return groups with a model in another group."""
    kept = [tuple(member for member in group if member != model) for group in groups]
    kept[target] = (*kept[target], model)
    return tuple(kept)


def _improved(groups: Groups, predictions: Predictions) -> Groups:
    """Return groups that no move of one model, and no exchange of two, improves."""
    value = _value(groups, predictions)
    while True:
        best = min(_neighbours(groups), key=lambda candidate: _value(candidate, predictions), default=groups)
        best_value = _value(best, predictions)
        if best_value >= value:
            return groups
        groups, value = best, best_value


def _neighbours(groups: Groups) -> Iterator[Groups]:
    group_of = {model: index for index, group in enumerate(groups) for model in group}
    for model, index in group_of.items():
        yield from (_moved(groups, model, target) for target in range(len(groups)) if target != index)
        for other, target in group_of.items():
            if other > model and target != index:
                yield _moved(_moved(groups, model, target), other, index)
