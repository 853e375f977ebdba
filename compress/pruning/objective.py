"""What pruning makes smaller: a cost of the channels that stay, and the limit that it must come down to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import ceil, floor, log10
from typing import Any, Literal

from compress.errors import StageError
from compress.ir.keras_graph import Network
from compress.pruning import allocation
from compress.pruning.allocation import Cut, Lost
from compress.pruning.cost import Counts, Draft

Name = Literal["macs", "parameters", "size", "compute", "latency", "cache"]
_UNITS = {"macs": "MACs", "parameters": "parameters", "compute": "ms", "latency": "ms"}
"""Others: bytes."""
_OF_EVERY_TARGET = ("macs", "parameters", "size")
_COUNTED = ("macs", "parameters")
"""Known by the layers alone; the others are predicted, of a file that is not made yet."""
LOOKS = 3
"""So often a choice is looked at in the file that it makes, and made again if that costs too much."""
Drafter = Callable[[Network], Draft]


@dataclass(frozen=True)
class Objective:
    """What is to become smaller, and how small.

    Attributes:
        name: of the cost.
        keep: the largest share of it that may stay, or None.
        at_most: the most that may stay, or None; for `cache` neither is given.
        host: where latency is predicted; None: the target's default host.
        clock: of the target; None: its first.
    """

    name: Name
    keep: float | None = None
    at_most: float | None = None
    host: str | None = None
    clock: str | None = None

    def cost(self, cut: Cut) -> Callable[[Counts], float]:
        """The cost of how many groups of each set stay.

        Raises:
            StageError: the target does not predict it.
        """
        costs = cut.costs
        if self.name not in (*_OF_EVERY_TARGET, *costs.target.cost.objectives):
            known = ", ".join((*_OF_EVERY_TARGET, *sorted(costs.target.cost.objectives)))
            raise StageError(f"{self.name} is not predicted for the target {costs.target.name}", allowed=known)
        if self.name == "cache":
            return self._cache(cut)
        return {
            "macs": costs.macs,
            "parameters": costs.parameters,
            "size": costs.size_bytes,
            "compute": lambda counts: costs.compute_ms(counts, self.clock),
            "latency": lambda counts: costs.latency_ms(counts, self.host, self.clock),
        }[self.name]

    def _cache(self, cut: Cut) -> Callable[[Counts], float]:
        """Memory for all parameters. A layer that is too large to be cached counts as all of the memory more; one
        that stays too large however much is removed does not count: it is streamed in any case."""
        costs, hopeless = cut.costs, cut.costs.never_cached(cut.least)
        memory = float(costs.target.cost.cache_bytes())

        def cost(counts: Counts) -> float:
            return costs.cached_bytes(counts, hopeless) + memory * len(costs.never_cached(counts) - hopeless)

        return cost

    def limit(self, cut: Cut, whole: float) -> float:
        """The most that the cost may be in the end; `whole` is what it was before the first step."""
        if self.name != "cache":
            return self.at_most if self.at_most is not None else (self.keep or 1.0) * whole
        return float(cut.costs.target.cost.cache_limit_bytes(cut.costs.network(cut.least)))

    def chosen(self, cut: Cut, losses: Lost | None, whole: float | None, steps: int) -> Counts:
        """How many groups of each set stay.

        Args:
            cut: the network as it is now.
            losses: by set what is lost with fewer; None: about the same share of every set stays.
            whole: the cost before the first step, None in the first.
            steps: in how many equal steps the limit is to be reached; one of them is made.

        Raises:
            StageError: the limit is out of reach; the nearest that is possible is named.
        """
        cost, sizes = self.cost(cut), cut.costs.everything
        now, nearest = cost(sizes), cost(cut.least)
        whole = now if whole is None else whole
        limit = self.limit(cut, whole)
        if now <= limit:
            return sizes
        if nearest > limit:
            raise self._out_of_reach(cut, nearest, whole)
        return allocation.chosen(
            sizes, cut.least, losses, cost, self._part(cut, whole, steps), cut.costs.target.cost.blocks
        )

    def _part(self, cut: Cut, whole: float | None, steps: int) -> float:
        """The most that the next of so many equal steps may leave."""
        now = self.cost(cut)(cut.costs.everything)
        limit = self.limit(cut, now if whole is None else whole)
        return limit if steps == 1 else max(now * (limit / now) ** (1 / steps), self.cost(cut)(cut.least))

    def settled(
        self, cut: Cut, losses: Lost | None, whole: float | None, steps: int, drafted: Drafter
    ) -> tuple[Cut, Counts]:
        """The same, looked at in the files that the smaller network becomes, and chosen again where they cost too much.

        Args:
            cut: see `chosen`.
            losses: see `chosen`.
            whole: see `chosen`.
            steps: see `chosen`.
            drafted: makes the files of a network.

        Returns:
            The network with costs that are those of the choice's files, and the choice. Its cost is above the limit
            where no choice came down to it in the end.

        Raises:
            StageError: the limit is out of reach.
        """
        counts, expected = self.chosen(cut, losses, whole, steps), cut
        if self.name in _COUNTED or counts == cut.costs.everything:
            return cut, counts
        whole = self.cost(cut)(cut.costs.everything) if whole is None else whole
        part = self._part(cut, whole, steps)
        for look in range(LOOKS):
            files = drafted(allocation.without(cut, allocation.plan(cut, counts)))
            expected = replace(cut, costs=expected.costs.anchored(counts, files))
            if self.cost(expected)(counts) <= part or look == LOOKS - 1:
                break
            try:
                counts = self.chosen(expected, losses, whole, steps)
            except StageError:  # looked at more closely, it is out of reach
                break
        return expected, counts

    def reached(self, cut: Cut, whole: float | None) -> str:
        """What to say where there is nothing to remove; "" where there is."""
        now = self.cost(cut)(cut.costs.everything)
        limit = self.limit(cut, now if whole is None else whole)
        if now > limit:
            return ""
        return f"{self.name} is {self.told(now)} already, and may be {self.told(limit)}: nothing to remove"

    def missed(self, cut: Cut, counts: Counts, whole: float) -> str:
        """What to say where a choice that seemed to reach the limit costs more in the file; "" where it does not."""
        now, limit = self.cost(cut)(counts), self.limit(cut, whole)
        told = f"{self.name} is {self.told(now)}, and was to be {self.told(limit)}: no choice of channels came nearer"
        return told if now > limit else ""

    def compared(self, cut: Cut, after: Cut, counts: Counts, whole: float | None) -> dict[str, Any]:
        """The cost before and after, and all other figures, as a plain map; `done`: whether no step more is needed."""
        both = {"before": (cut, cut.costs.everything), "after": (after, counts)}
        found = {name: self.cost(one)(each) for name, (one, each) in both.items()}
        return {
            "cost": found,
            "figures": {name: one.costs.to_json(each, self.host, self.clock) for name, (one, each) in both.items()},
            "done": found["after"] <= self.limit(cut, found["before"] if whole is None else whole),
        }

    def to_json(self) -> dict[str, Any]:
        """As a plain map, for the artifact's facts."""
        how = "counted" if self.name in _COUNTED else "predicted"
        return {**asdict(self), "unit": _UNITS.get(self.name, "bytes"), "how": how}

    def told(self, value: float) -> str:
        """A cost with its unit."""
        unit = _UNITS.get(self.name, "bytes")
        return f"{value:,.4g} ms" if unit == "ms" else f"{value:,.0f} {unit}"

    def _out_of_reach(self, cut: Cut, nearest: float, whole: float) -> StageError:
        """What to say when no choice of channels costs as little; `nearest` is the least that is possible."""
        if cut.least == cut.costs.everything:
            few = f"no layer has more than {allocation.MIN_KEPT} channels that could go"
            return StageError(f"{self.name}: nothing can be removed: {few}", todo="remove `prune`")
        if self.name == "cache":
            limit, todo = "cache", "use a smaller model: what remains is streamed at every inference"
        elif self.at_most is not None:
            limit, todo = f"at_most {self.at_most:g}", f"choose at_most >= {_rounded_up(nearest)}"
        else:
            limit, todo = f"keep {self.keep:g}", f"choose keep >= {_rounded_up(nearest / whole)}"
        if self.name != "cache" and float(_rounded_up(nearest / whole)) >= 1:
            todo = f"choose another objective: removing channels hardly lowers {self.name}"
        least = f"with at least {allocation.MIN_KEPT} channels in every layer, {self.told(nearest)} remain"
        return StageError(f"{self.name}: {limit} is out of reach: {least}, of {self.told(whole)} at first", todo=todo)


def _rounded_up(value: float) -> str:
    """Three digits that are not less."""
    unit = 10.0 ** (floor(log10(value)) - 2)
    return f"{ceil(value / unit * (1 - 1e-12)) * unit:.6g}"
