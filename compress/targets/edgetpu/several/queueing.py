"""The waiting time for one Edge TPU: a queue with random arrivals, one server, and requests served in their order.

Arrivals are a Poisson process, and service times independent (M/G/1). The mean is the formula of Pollaczek and
Khinchine. The distribution is that of a geometric sum of residual service times (the same authors), computed on a grid
with the fast Fourier transform. Source: L. Kleinrock, Queueing Systems, volume 1 (1975), chapter 5.

Service times are not independent if a model sends its parameters again after another model: a request of a rare model
takes long, and so does the one after it. Squaring the recursion of the waiting times, W' = max(W + S - T, 0), gives the
mean with one more term: the covariance of a request's waiting and service time (`wait_covariance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

POINTS = 1 << 14
"""Points of the grid for the distribution."""
_HORIZON = 16
"""The end of the grid, as a multiple of the mean waiting time of the requests that wait."""
_STABLE = 0.999
"""With more load than this, the queue is considered to grow without end."""


@dataclass(frozen=True)
class Queue:
    """Requests that wait for one server.

    Attributes:
        rate_per_s: the requests per second, all together.
        times_ms: the possible service times.
        shares: the share of each service time; their sum is 1.
        covariance_ms2: of the waiting time and the service time of a request.
    """

    rate_per_s: float
    times_ms: Sequence[float]
    shares: Sequence[float]
    covariance_ms2: float = 0.0

    @cached_property
    def mean_service_ms(self) -> float:
        """The mean service time."""
        return float(np.dot(self.times_ms, self.shares))

    @cached_property
    def utilization(self) -> float:
        """The share of the time in which the server works; 1 and more: it cannot serve all requests."""
        return self.rate_per_s * self.mean_service_ms / 1000

    @cached_property
    def mean_wait_ms(self) -> float:
        """The mean waiting time before the service; infinite if the server cannot serve all requests."""
        if self.utilization > _STABLE:
            return inf
        return max(self._independent_ms + self.rate_per_s / 1000 * self.covariance_ms2 / (1 - self.utilization), 0.0)

    @cached_property
    def _independent_ms(self) -> float:
        """The mean waiting time if service times are independent."""
        second_moment = float(np.dot(np.square(self.times_ms), self.shares))
        return self.rate_per_s / 1000 * second_moment / (2 * (1 - self.utilization))

    def wait_ms(self, share: float = 0.95) -> float:
        """Return the waiting time that a share of the requests does not exceed."""
        load = self.utilization
        if load > _STABLE:
            return inf
        if load <= 1 - share:
            return 0.0
        horizon = _HORIZON * self._independent_ms / load + 2 * max(self.times_ms)
        step = horizon / POINTS
        residual = self._residual(step)
        # Twice the points, so that the end of the distribution does not return to its beginning.
        transform = np.fft.rfft(residual, 2 * POINTS)
        waits = np.fft.irfft((1 - load) / (1 - load * transform), 2 * POINTS)[:POINTS]
        below = np.cumsum(waits)
        independent_ms = float(np.searchsorted(below, share) * step)
        return independent_ms * self.mean_wait_ms / self._independent_ms

    def _residual(self, step: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return the distribution of the rest of a service time at a random moment, on a grid of this step."""
        edges = (np.arange(POINTS + 1) - 0.5).clip(0) * step
        below = np.zeros(POINTS + 1)
        for time_ms, share in zip(self.times_ms, self.shares, strict=True):
            below += share * np.minimum(edges, time_ms) / self.mean_service_ms
        result: np.ndarray[tuple[int], np.dtype[np.float64]] = np.diff(below)
        return result


def wait_covariance(
    rate_per_s: float, shares: Sequence[float], service_ms: Sequence[float], reload_ms: Sequence[float]
) -> float:
    """Return the covariance of waiting and service time if a class takes longer after a request of another class.

    Both depend on the class of the request before. The waiting time before that request is taken as independent of it.

    Args:
        rate_per_s: the requests per second of all classes.
        shares: the share of the requests of each class; their sum is 1.
        service_ms: the service time of each class.
        reload_ms: the time that each class takes in addition after another class.
    """
    rate = rate_per_s / 1000
    share = np.asarray(shares, np.float64)
    short = np.asarray(service_ms, np.float64)
    long = short + np.asarray(reload_ms, np.float64)
    mean_of_class = share * short + (1 - share) * long
    load = rate * float(share @ mean_of_class)
    if load > _STABLE:
        return 0.0
    # The transform of each class's service time at the arrival rate: the chance that nobody arrives meanwhile.
    silent = share * np.exp(-rate * short) + (1 - share) * np.exp(-rate * long)
    wait_after = mean_of_class + (1 - load) / rate * silent / float(share @ silent)
    reloads = share * np.asarray(reload_ms, np.float64)
    service_after = float(reloads.sum()) - reloads  # the part of the next service time that depends on the class
    mean = float(share @ wait_after)
    return float(share @ ((wait_after - mean) * (service_after - float(share @ service_after))))
