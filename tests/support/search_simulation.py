"""A simulation of a search with many workers, event by event.

Workers look at the trials, ask for one, run it, renew its lease and report its result. Each operation takes CPU time of
the worker, of its proxy (if there is one) and of the database; these times grow with the number of finished and of
running trials. Each place is a queue in the order of arrival:

- a proxy runs Python code of one thread at a time, and serves `threads` calls at the same time
- the database has a number of processors, and a maximum of connections; without proxies each worker has one
- worker processes die at a rate; their trials run again when the lease has expired and another worker looks

Simplifications: an operation of several calls is one visit; the time in the network, and waiting for the disk and for
row locks, are not included; service times are exponentially distributed; renewals of one moment arrive together.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

OPERATIONS = ("join", "look", "ask", "renew", "tell")
PLACES = ("worker", "proxy", "database")
RENEW_S = 10.0
LEASE_S = 50.0
"""Seconds that a renewal may wait. The lease is RENEW_S plus this time."""
EXPIRY_S = 80.0
"""Seconds until the trial of a dead worker is taken over: lease and second look."""
RESTART_S = 60.0
"""Seconds until a new worker replaces a dead one."""
RESOLUTION_S = 2.5e-4
"""CPU seconds that cannot be distinguished from 0."""
BLOCK = 4096
"""The number of random numbers that are drawn at once."""


@dataclass(frozen=True)
class Cost:
    """CPU seconds of an operation in one place.

    Attributes:
        constant: without trials.
        finished: for each finished trial.
        running: for each running trial.
    """

    constant: float = 0.0
    finished: float = 0.0
    running: float = 0.0

    def at(self, finished: int, running: int) -> float:
        """Return the seconds for these numbers of finished and running trials."""
        return self.constant + self.finished * finished + self.running * running


Costs = Mapping[str, Mapping[str, Cost]]
"""Costs by operation and place."""


@dataclass(frozen=True)
class Plan:
    """The settings of a simulation.

    Attributes:
        costs: the costs of the operations.
        workers: the number of worker processes.
        trials: the number of results to reach.
        trial_s: the mean seconds of a trial; they are gamma distributed with a standard deviation of half of it.
        proxies: the number of proxies; 0: workers use the database directly.
        threads: the calls that a proxy serves at the same time (Optuna: 10).
        processors: the number of processors of the database.
        connections: the largest number of connections of the database.
        sampler: CPU seconds of a choice as points (trials, seconds), with a power law between two points.
        lost_per_hour: the rate at which a worker process dies.
        days: the simulation ends after so many days, with fewer results.
        seed: the seed.
    """

    costs: Costs
    workers: int
    trials: int
    trial_s: float = 600.0
    proxies: int = 0
    threads: int = 10
    processors: int = 4
    connections: int = 200
    sampler: Sequence[tuple[float, float]] = ()
    lost_per_hour: float = 0.0
    days: float = 3650.0
    seed: int = 0

    def choice_s(self, finished: int) -> float:
        """Return the CPU seconds of the sampler: a power law between the points, the last one also beyond them."""
        if not self.sampler or finished < self.sampler[0][0]:
            return 0.0
        points = np.log(np.array(self.sampler))
        place = int(np.clip(np.searchsorted(points[:, 0], np.log(finished)) - 1, 0, len(points) - 2))
        (x, y), (next_x, next_y) = points[place], points[place + 1]
        return float(np.exp(y + (next_y - y) / (next_x - x) * (np.log(finished) - x)))


class Queue:
    """A number of servers and one queue in the order of arrival.

    Args:
        servers: the number of servers.
    """

    def __init__(self, servers: int) -> None:
        self._free = [0.0] * servers
        self._servers = servers
        self.busy_s = 0.0

    def serve(self, now: float, seconds: float) -> tuple[float, float]:
        """Return when the service of a customer begins and ends. Calls must be in the order of arrival."""
        begin = max(now, self._free[0])
        heapq.heapreplace(self._free, begin + seconds)
        self.busy_s += seconds
        return begin, begin + seconds

    def delay(self, now: float) -> float:
        """Return how many seconds a customer who arrives now waits."""
        return max(0.0, self._free[0] - now)

    def utilization(self, duration_s: float) -> float:
        """Return the share of the servers' time that was used."""
        return self.busy_s / (self._servers * duration_s) if duration_s else 0.0


@dataclass
class Proxy:
    """A proxy: a queue for its processor, and a queue for its threads.

    Attributes:
        processor: the queue for its Python code.
        free: the number of free threads.
        waiting: the calls that wait for a thread.
    """

    processor: Queue
    free: int
    waiting: deque[Callable[[float], None]] = field(default_factory=deque)


class Simulation:
    """The simulation of a search.

    Args:
        plan: the settings.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.finished, self.running, self.lost = 0, 0, 0
        self.database = Queue(plan.processors)
        self.proxies = [Proxy(Queue(1), plan.threads) for _ in range(plan.proxies)]
        self.active = plan.workers if plan.proxies else min(plan.workers, plan.connections)
        self.waits: dict[str, list[float]] = {name: [] for name in OPERATIONS}
        self.spent = dict.fromkeys(("running trials", "choosing", "own work", "waiting", "dead"), 0.0)
        self.now = 0.0
        self._random = np.random.default_rng(plan.seed)
        self._drawn: dict[str, list[float]] = {"service": [], "trial": [], "death": []}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._again = 0
        self._begun = 0

    def run(self) -> None:
        """Simulate until the results are complete or the days are over."""
        for worker in range(self.active):
            self._at(worker * 0.1, self._begin(worker))
        step = max(1.0, 100.0 / self.plan.workers)
        self._at(step, lambda now: self._renew(now, step))
        end = self.plan.days * 86_400
        while self._events and self.finished < self.plan.trials and self.now < end:
            self.now, _, event = heapq.heappop(self._events)
            event(self.now)

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    def _draw(self, kind: str) -> float:
        """Return a random number with mean 1: for a service, a trial, or the time until a death."""
        drawn = self._drawn[kind]
        if not drawn:
            numbers = self._random.gamma(4, 0.25, BLOCK) if kind == "trial" else self._random.exponential(1, BLOCK)
            drawn += numbers.tolist()
        return drawn.pop()

    def _begin(self, worker: int) -> Callable[[float], None]:
        return lambda now: self._operate("join", worker, now, lambda then: self._look(worker, then))

    def _look(self, worker: int, now: float) -> None:
        self._operate("look", worker, now, lambda then: self._ask(worker, then))

    def _ask(self, worker: int, now: float) -> None:
        if self._again:
            self._again -= 1
        elif self._begun >= self.plan.trials:
            self._at(now + RENEW_S, lambda then: self._look(worker, then))  # other workers may die
            return
        else:
            self._begun += 1
        choice = self.plan.choice_s(self.finished)
        self.spent["choosing"] += choice
        self.running += 1  # it is known to others before its values are chosen
        self._at(
            now + choice, lambda then: self._operate("ask", worker, then, lambda last: self._perform(worker, last))
        )

    def _perform(self, worker: int, now: float) -> None:
        duration = self.plan.trial_s * self._draw("trial")
        rate = self.plan.lost_per_hour / 3600
        life = self._draw("death") / rate if rate else float("inf")
        if life < duration:
            self.lost += 1
            self.spent["dead"] += life + RESTART_S
            self._at(now + life + EXPIRY_S, self._taken_over)
            self._at(now + life + RESTART_S, self._begin(worker))
            return
        self._at(now + duration, lambda then: self._complete(worker, then, duration))

    def _complete(self, worker: int, now: float, duration: float) -> None:
        self.spent["running trials"] += duration
        self._operate("tell", worker, now, lambda then: self._told(worker, then))

    def _taken_over(self, now: float) -> None:
        del now
        self.running -= 1
        self._again += 1

    def _told(self, worker: int, now: float) -> None:
        self.finished += 1
        self.running -= 1
        self._look(worker, now)

    def _operate(self, name: str, worker: int, now: float, then: Callable[[float], None]) -> None:
        """Spend the worker's own time, then visit its proxy and the database."""
        duration = self._service(name, "worker")
        self.spent["own work"] += duration
        self._at(now + duration, lambda arrival: self._arrive(name, worker, arrival, then))

    def _arrive(self, name: str, worker: int, arrival: float, then: Callable[[float], None]) -> None:
        if not self.proxies:
            self._finish(name, arrival, 0.0, arrival, then)
            return
        proxy = self.proxies[worker % len(self.proxies)]

        def begin(now: float) -> None:
            service = self._service(name, "proxy")
            _, end = proxy.processor.serve(now, service)

            def done(last: float) -> None:
                if proxy.waiting:
                    proxy.waiting.popleft()(last)
                else:
                    proxy.free += 1
                then(last)

            self._at(end, lambda later: self._finish(name, arrival, service, later, done))

        if proxy.free:
            proxy.free -= 1
            begin(arrival)
        else:
            proxy.waiting.append(begin)

    def _finish(self, name: str, arrival: float, used: float, now: float, then: Callable[[float], None]) -> None:
        """Visit the database, and record the waiting time since the arrival: the time without service."""
        service = self._service(name, "database")
        _, end = self.database.serve(now, service)
        wait = max(0.0, end - arrival - used - service)
        self.waits[name].append(wait)
        self.spent["waiting"] += end - arrival
        self._at(end, then)

    def _service(self, name: str, place: str) -> float:
        cost = self.plan.costs.get(name, {}).get(place)
        return cost.at(self.finished, self.running) * self._draw("service") if cost else 0.0

    def _renew(self, now: float, step: float) -> None:
        """Serve the renewals of a moment, which arrive together. A worker renews again RENEW_S after the answer."""
        costs = self.plan.costs.get("renew", {})
        at_proxy, at_database = (costs.get(place, Cost()).at(self.finished, self.running) for place in PLACES[1:])
        delays = [proxy.processor.delay(now) for proxy in self.proxies] or [0.0]
        delay = sum(delays) / len(delays) + self.database.delay(now)
        count = self.running * step / (RENEW_S + delay)
        for proxy in self.proxies:
            proxy.processor.serve(now, count * at_proxy / len(self.proxies))
        for _ in range(self.plan.processors):
            self.database.serve(now, count * at_database / self.plan.processors)
        self.waits["renew"].append(delay)
        self._at(now + step, lambda then: self._renew(then, step))

    def results(self) -> dict[str, Any]:
        """Return the results of the simulation."""
        plan, hours = self.plan, self.now / 3600
        present = max(1e-9, self.active * self.now)
        queues = {"database": self.database.utilization(self.now)}
        if self.proxies:
            queues["proxy"] = max(proxy.processor.utilization(self.now) for proxy in self.proxies)
        running = self.spent["running trials"] / present
        return {
            "workers": plan.workers,
            "workers without a connection": plan.workers - self.active,
            "proxies": plan.proxies,
            "processors of the database": plan.processors,
            "trials": self.finished,
            "lost and tried again": self.lost,
            "days": round(hours / 24, 2),
            "trials per hour": round(self.finished / hours) if hours else 0,
            "utilization": {
                "workers, running trials": round(running, 4),
                **{
                    f"workers, {name}": round(self.spent[name] / present, 4) for name in ("choosing", "waiting", "dead")
                },
                **{name: round(value, 4) for name, value in queues.items()},
            },
            "wait, s": {
                name: {"p50": _quantile(waits, 0.5), "p99": _quantile(waits, 0.99)}
                for name, waits in self.waits.items()
                if waits
            },
            "renewals later than the lease": round(float(np.mean(np.array(self.waits["renew"] or [0]) > LEASE_S)), 4),
            "choice at the end, s": round(plan.choice_s(self.finished), 1),
            "most used": max(queues, key=lambda name: queues[name]),
        }


def _quantile(values: Sequence[float], part: float) -> float:
    return round(float(np.quantile(np.array(values), part)), 4)


def simulate(plan: Plan) -> dict[str, Any]:
    """Simulate a plan, and return the results."""
    simulation = Simulation(plan)
    simulation.run()
    return simulation.results()


def fitted(rows: Sequence[Mapping[str, Any]]) -> Costs:
    """Return costs from measured ones, by non-negative least squares of relative errors."""
    design = np.array([[1.0, row["finished"], row["running"]] for row in rows])
    costs: dict[str, dict[str, Cost]] = {}
    for name in OPERATIONS:
        costs[name] = {}
        for place in PLACES:
            key = f"{place} CPU s"
            if key in rows[0][name]:
                seconds = np.array([row[name][key] for row in rows])
                known = seconds >= 0  # the CPU time of a process is lost when it ends
                seconds = np.maximum(seconds[known], RESOLUTION_S)
                costs[name][place] = Cost(*_non_negative(design[known] / seconds[:, None], np.ones(len(seconds))))
    return costs


def _non_negative(design: Any, values: Any) -> list[float]:
    """Return the best coefficients that are not negative, by trying all subsets of the columns."""
    best, error = [0.0] * design.shape[1], float("inf")
    for subset in range(1, 2 ** design.shape[1]):
        columns = [place for place in range(design.shape[1]) if subset >> place & 1]
        coefficients = np.linalg.lstsq(design[:, columns], values, rcond=None)[0]
        squares = float(((design[:, columns] @ coefficients - values) ** 2).sum())
        if (coefficients >= 0).all() and squares < error:
            error = squares
            best = [0.0] * design.shape[1]
            for place, value in zip(columns, coefficients, strict=True):
                best[place] = float(value)
    return best
