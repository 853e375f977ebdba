"""The search for the best cuts of a network into segments, one for each Edge TPU.

A network is a sequence of operators in execution order. A segment is a contiguous part of it. The objective, in this
order: as little risk as possible that parameters are streamed, a short slowest segment, few bytes between the segments.

The first is decided by greedy segments, because a part of a segment needs no more memory than the segment. The other
two are found by bisection of the latency and dynamic programming over the positions of cuts. It visits only segments
whose operators alone are not longer than the allowed latency, so that few latencies are predicted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import sqrt
from typing import Protocol

FITS, UNCERTAIN, STREAMS = range(3)
"""Whether the parameters of a segment fit: surely, as predicted, or not."""
TOLERANCE = 1.001
"""The largest ratio of the slowest segment's latency to that of the best cuts."""
_BISECTIONS = 12
"""12 halvings find the limit to 1/4,096 of the interval, below the error of the prediction."""
_SLACK = 1 + 1e-9
"""The same latency, computed in another order, differs by rounding."""
_WIDER = 1.5
"""The factor of the allowed latency after a search without cuts; chosen: the search is precise whatever it is."""
_LIMITS = 24
"""1.5 to the power of 24 is 17,000: more than the ratio of the whole model's latency to that of one operator."""
_MOST_MS = 1e9
"""No network takes 11 days: a search that comes here has no cuts."""


class SegmentCost(Protocol):
    """The predicted cost of one segment."""

    @property
    def latency_ms(self) -> float:
        """The latency, with the transfers of the tensors that enter and leave the segment."""

    @property
    def risk(self) -> int:
        """FITS, UNCERTAIN or STREAMS."""


Cost = Callable[[int, int], SegmentCost | None]
"""The cost of the operators from a position up to another, not included; None if they cannot be a segment."""
Cuts = tuple[int, ...]
"""The positions of the cuts, with 0 and the number of operators at the ends."""


@dataclass
class OperatorSequence:
    """The network of a search. Costs are computed once.

    Attributes:
        positions: the allowed positions of cuts in increasing order, with 0 and the number of operators at the ends.
        operator_ms: the time of each operator that no segment can avoid.
        at_least: a lower bound of the latency of a segment that is found faster than its cost.
        crossing_bytes: the bytes of the tensors that cross each position.
        predict: the cost of a segment.
    """

    positions: Sequence[int]
    operator_ms: Sequence[float]
    crossing_bytes: Sequence[int]
    predict: Cost
    at_least: Callable[[int, int], float] = lambda start, stop: 0.0
    _costs: dict[tuple[int, int], SegmentCost | None] = field(default_factory=dict)
    _bounds: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sums = [0.0, *accumulate(self.operator_ms)]

    def cost(self, start: int, stop: int) -> SegmentCost | None:
        """Return the cost of a segment, or None."""
        key = (start, stop)
        if key not in self._costs:
            self._costs[key] = self.predict(start, stop)
        return self._costs[key]

    def operators_ms(self, start: int, stop: int) -> float:
        """Return the time of the operators of a segment alone, which is less than its latency."""
        return self._sums[stop] - self._sums[start]

    def is_longer(self, start: int, stop: int, limit_ms: float) -> bool:
        """Return whether a segment certainly takes longer than a limit, if this is known without its cost."""
        if self.operators_ms(start, stop) > limit_ms:
            return True
        key = (start, stop)
        if key not in self._costs and key not in self._bounds:
            self._bounds[key] = self.at_least(start, stop)
        return self._bounds.get(key, 0.0) > limit_ms

    @property
    def operators(self) -> int:
        """The number of operators."""
        return self.positions[-1]


def costs_of(network: OperatorSequence, cuts: Cuts) -> list[SegmentCost]:
    """Return the costs of the segments; empty if one of them cannot be a segment."""
    costs = [network.cost(start, stop) for start, stop in pairwise(cuts)]
    return [cost for cost in costs if cost is not None] if None not in costs else []


def best(network: OperatorSequence, count: int) -> Cuts | None:
    """Return the best cuts into a number of segments; None if no cuts are possible."""
    risk = next(level for level in (FITS, UNCERTAIN, STREAMS) if _reaches_end(network, count, level, float("inf")))
    for level in range(risk, STREAMS + 1):
        cuts = _fastest(network, count, level)
        if cuts is not None:
            return cuts
    return None


def equal_bytes(network: OperatorSequence, count: int, parameter_bytes: Sequence[int]) -> Cuts | None:
    """Return the cuts into segments with about equal parameters, as `edgetpu_compiler --num_segments` is documented.

    Each cut is where the parameters before it are nearest to its share. Segments without an operator for the Edge TPU
    are avoided. Source: coral.ai/docs/edgetpu/pipeline.
    """
    sums = [0, *accumulate(parameter_bytes)]
    cuts = [0]
    for index in range(1, count):
        share = sums[-1] * index / count
        later = [position for position in network.positions[1:-1] if position > cuts[-1]]
        nearest = sorted(later, key=lambda position: (abs(sums[position] - share), position))
        usable = (position for position in nearest if network.cost(cuts[-1], position) is not None)
        position = next(usable, None)
        if position is None:
            return None
        cuts.append(position)
    with_ends = (*cuts, network.operators)
    return with_ends if costs_of(network, with_ends) else None


def _reach(network: OperatorSequence, start: int, risk: int, limit_ms: float) -> int:
    """Return the last position up to which a segment from `start` has at most this risk and latency."""
    positions = network.positions
    low = bisect_right(positions, start) - 1
    high = len(positions) - 1
    while low < high:
        middle = (low + high + 1) // 2
        cost = network.cost(start, positions[middle])
        # What cannot be a segment is too short for one.
        allowed = cost is None or (cost.risk <= risk and cost.latency_ms <= limit_ms)
        low, high = (middle, high) if allowed else (low, middle - 1)
    return positions[low]


def _reaches_end(network: OperatorSequence, count: int, risk: int, limit_ms: float) -> bool:
    if risk == STREAMS and limit_ms == float("inf"):
        return True
    position = 0
    for _ in range(count):
        position = _reach(network, position, risk, limit_ms)
    return position == network.operators


def _fastest(network: OperatorSequence, count: int, risk: int) -> Cuts | None:
    """Return cuts with the shortest slowest segment, up to TOLERANCE, and with the fewest bytes that cross of these."""
    low = network.operators_ms(0, network.operators) / count
    limit_ms = _greedy_limit(network, count, risk)
    cuts = None
    for _ in range(_LIMITS):
        cuts = _least_crossing(network, count, risk, limit_ms)
        if cuts is not None:
            break
        low = limit_ms
        limit_ms *= _WIDER
    while cuts is not None:
        high = max(cost.latency_ms for cost in costs_of(network, cuts))
        if high <= low * TOLERANCE:
            return _least_crossing(network, count, risk, high)
        middle = min((low + high) / 2, high / sqrt(TOLERANCE))
        closer = _least_crossing(network, count, risk, middle)
        low = middle if closer is None else low
        cuts = closer or cuts
    return None


def _greedy_limit(network: OperatorSequence, count: int, risk: int) -> float:
    """Return a latency that greedy segments do not exceed: close to the best one, as most costs grow with a segment."""
    high = max(network.operators_ms(0, network.operators) / count, 1e-3)
    while not _reaches_end(network, count, risk, high) and high < _MOST_MS:
        high *= 2
    low = high / 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _reaches_end(network, count, risk, middle) else (middle, high)
    return high


def _least_crossing(network: OperatorSequence, count: int, risk: int, limit_ms: float) -> Cuts | None:
    """Return the cuts with the fewest bytes that cross, of all whose segments have at most this risk and latency."""
    usable = _usable(network, count, risk, limit_ms)
    reached: list[tuple[int, Cuts]] = [(0, (0,))]
    for stops in usable:
        following: list[tuple[int, Cuts]] = []
        for stop in stops:
            # Sorted by the bytes before `stop`: the first allowed segment up to it is the best.
            before = next((row for row in reached if _allowed(network, row[1][-1], stop, risk, limit_ms)), None)
            if before is not None:
                following.append((before[0] + network.crossing_bytes[stop], (*before[1], stop)))
        reached = sorted(following)
    return reached[0][1] if reached else None


def _usable(network: OperatorSequence, count: int, risk: int, limit_ms: float) -> list[list[int]]:
    """Return for each segment the positions where it may end, because allowed segments lead from there to the end."""
    end = network.operators
    usable = [[end]]
    for remaining in range(1, count):
        longest_ms = remaining * limit_ms * _SLACK
        possible = [stop for stop in network.positions[1:-1] if network.operators_ms(stop, end) <= longest_ms]
        following = usable[0]
        usable.insert(0, [s for s in possible if any(_allowed(network, s, t, risk, limit_ms) for t in following)])
    return usable


def _allowed(network: OperatorSequence, start: int, stop: int, risk: int, limit_ms: float) -> bool:
    if start >= stop or network.is_longer(start, stop, limit_ms * _SLACK):
        return False
    cost = network.cost(start, stop)
    return cost is not None and cost.risk <= risk and cost.latency_ms <= limit_ms * _SLACK
