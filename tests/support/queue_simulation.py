"""A simulation of requests of several models that wait for one Edge TPU, event by event."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def waits_ms(
    rates_per_s: Sequence[float],
    service_ms: Sequence[float],
    reload_ms: Sequence[float],
    requests: int = 200_000,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Return the waiting time of each request in ms: Poisson arrivals, served in order, without the first tenth.

    Args:
        rates_per_s: requests per second of each model.
        service_ms: the time of one inference of each model.
        reload_ms: the additional time of each model after a request of another model.
        requests: the number of simulated requests.
        seed: the seed of the random numbers.
    """
    random = np.random.default_rng(seed)
    total = sum(rates_per_s)
    gaps = random.exponential(1000 / total, requests)
    models = random.choice(len(rates_per_s), requests, p=np.array(rates_per_s) / total)
    services = np.array(service_ms, np.float64)[models]
    services[1:] += np.where(models[1:] != models[:-1], np.array(reload_ms)[models[1:]], 0.0)
    waits = np.empty(requests)
    wait = 0.0
    for index in range(requests):
        waits[index] = wait
        if index + 1 < requests:
            wait = max(wait + services[index] - gaps[index + 1], 0.0)
    return waits[requests // 10 :]
