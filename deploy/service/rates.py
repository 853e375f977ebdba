"""A limit for the requests of each client address: a token bucket."""

from __future__ import annotations

import collections
import ipaddress
import math
import time
from typing import Callable, Tuple

MAX_ADDRESSES = 4096
"""The number of addresses that are remembered. More can only be in use if each of them is rarely seen."""
BURST_S = 2.0
"""A client that was quiet may send the requests of this time at once."""


class RateLimit:
    """The requests that each address may still send.

    Args:
        per_second: requests per second; 0: no limit.
        clock: the time in seconds.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = max(per_second * BURST_S, 1.0)
        self._clock = clock
        self._buckets: collections.OrderedDict[str, Tuple[float, float]] = collections.OrderedDict()

    def wait_s(self, address: str) -> int:
        """Count a request; return 0 if it is allowed, otherwise after how many seconds the next one is.

        Args:
            address: the IP address of the client; empty: a Unix socket, which has no limit.
        """
        if not self._per_second or not address:
            return 0
        key = _network(address)
        now = self._clock()
        left, seen = self._buckets.pop(key, (self._burst, now))
        left = min(left + (now - seen) * self._per_second, self._burst)
        is_allowed = left >= 1
        self._buckets[key] = (left - 1 if is_allowed else left, now)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return 0 if is_allowed else math.ceil((1 - left) / self._per_second)


def _network(address: str) -> str:
    """Return what counts as one client: an IPv4 address, or the 64 bits that an IPv6 network has."""
    if ":" not in address:
        return address
    number = int(ipaddress.IPv6Address(address.partition("%")[0]))
    return "%x" % (number >> 64)
