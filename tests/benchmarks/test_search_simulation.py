"""The simulation of a search, on cases with known answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from search_simulation import OPERATIONS, Cost, Plan, Queue, fitted, simulate

DATABASE = {name: {"database": Cost(0.5)} for name in ("look", "ask", "tell")}
PROXY = {name: {"proxy": Cost(0.1)} for name in ("look", "ask", "tell")}
PLAN = Plan(DATABASE, workers=40, trials=20_000, trial_s=60.0, processors=1)


@pytest.mark.parametrize(("servers", "service_s", "expected_s"), [(1, 0.8, 0.8 / (1.25 - 1)), (2, 1.6, 6.4 / 9 / 0.25)])
def test_the_wait_in_a_queue_is_that_of_the_formula(servers: int, service_s: float, expected_s: float) -> None:
    """There is one arrival per second. M/M/1: rho / (mu - lambda). M/M/2: Erlang's C / (2 mu - lambda)."""
    random = np.random.default_rng(0)
    arrivals = np.cumsum(random.exponential(1.0, 200_000)).tolist()
    services = random.exponential(service_s, len(arrivals)).tolist()
    queue = Queue(servers)
    waits = [queue.serve(when, seconds)[0] - when for when, seconds in zip(arrivals, services, strict=True)]
    assert np.mean(waits) == pytest.approx(expected_s, rel=0.06)
    assert queue.utilization(arrivals[-1]) == pytest.approx(0.8, rel=0.02)


def expected_per_hour(workers: int, trial_s: float, visits: int, service_s: float) -> float:
    """Return the throughput of a closed network of one queue and trials by mean value analysis, exact here."""
    queued, per_s = 0.0, 0.0
    for present in range(1, workers + 1):
        response = visits * service_s * (1 + queued)
        per_s = present / (trial_s + response)
        queued = per_s * response
    return 3600 * per_s


@pytest.mark.parametrize("workers", [1, 20, 40, 200])
def test_trials_per_hour_are_those_of_mean_value_analysis(workers: int) -> None:
    results = simulate(replace(PLAN, workers=workers, trials=10_000))
    assert results["trials per hour"] == pytest.approx(expected_per_hour(workers, 60.0, 3, 0.5), rel=0.04)
    assert results["most used"] == "database"


def test_a_proxy_serves_one_call_at_a_time_and_more_proxies_more() -> None:
    plan = replace(PLAN, costs=PROXY, workers=200, connections=0, trial_s=10.0)
    one, four = (simulate(replace(plan, proxies=count)) for count in (1, 4))
    assert one["trials per hour"] == pytest.approx(3600 / 0.3, rel=0.03)
    assert four["trials per hour"] == pytest.approx(4 * 3600 / 0.3, rel=0.03)
    assert one["utilization"]["proxy"] > 0.97
    assert one["most used"] == "proxy"


def test_a_lost_trial_is_tried_again() -> None:
    results = simulate(replace(PLAN, lost_per_hour=6.0, processors=8))
    assert results["trials"] == 20_000
    hours = 20_000 * 60 / 3600  # total duration of the trials
    assert results["lost and tried again"] == pytest.approx(6.0 * hours, rel=0.15)


def test_workers_beyond_the_connections_do_nothing() -> None:
    plan = replace(PLAN, workers=300, processors=100, connections=10, trials=2000)
    results = simulate(plan)
    assert results["workers without a connection"] == 290
    assert results["trials per hour"] == pytest.approx(simulate(replace(plan, workers=10))["trials per hour"], rel=0.03)


def test_the_same_seed_gives_the_same_result() -> None:
    plan = replace(PLAN, trials=2000, lost_per_hour=1.0)
    assert simulate(plan) == simulate(plan)
    assert simulate(plan) != simulate(replace(plan, seed=1))


def test_the_choice_takes_powers_of_the_number_of_trials() -> None:
    plan = replace(PLAN, sampler=[(10, 0.1), (100, 1.0), (1000, 100.0)])
    assert plan.choice_s(5) == 0
    assert plan.choice_s(1000) == pytest.approx(100)
    assert plan.choice_s(30) == pytest.approx(0.3)
    assert plan.choice_s(10_000) == pytest.approx(10_000)


def test_costs_are_found_from_measured_ones() -> None:
    costs = {"worker CPU s": Cost(0.01, 1e-6, 0), "database CPU s": Cost(0.002, 0, 3e-5)}
    rows = [
        {
            "finished": finished,
            "running": running,
            **{name: {key: cost.at(finished, running) for key, cost in costs.items()} for name in OPERATIONS},
        }
        for finished, running in ((100, 10), (100, 1000), (1000, 100), (10_000, 100))
    ]
    fitted_costs = fitted(rows)
    for place, key in (("worker", "worker CPU s"), ("database", "database CPU s")):
        assert fitted_costs["ask"][place].at(50_000, 500) == pytest.approx(costs[key].at(50_000, 500), rel=1e-6)
    assert "proxy" not in fitted_costs["ask"]
