"""What pruning makes smaller: a cost of the channels that stay, and the limit that it must come down to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from compress.errors import StageError
from compress.training import pruning
from compress.training.cost import Costs, Counts
from compress.training.pruning import Lost

Name = Literal["macs", "parameters", "size", "compute", "latency", "cache"]
_UNITS = {"macs": "MACs", "parameters": "parameters", "compute": "ms", "latency": "ms"}
"""Others: bytes."""


@dataclass(frozen=True)
class Objective:
    """What is to become smaller, and how small.

    Attributes:
        name: of the cost.
        keep: the largest share of it that may stay, or None.
        at_most: the most that may stay, or None; for `cache` neither is given.
        host: where latency is predicted.
        clock: of the Edge TPU.
    """

    name: Name
    keep: float | None = None
    at_most: float | None = None
    host: str = "usb3"
    clock: str = "max"

    def cost(self, costs: Costs) -> Callable[[Counts], float]:
        """The cost of how many groups of each set stay.

        Raises:
            StageError: it is one of the accelerator's, and the target has none.
        """
        if self.name in ("compute", "latency", "cache") and not costs.target.accelerated:
            name = costs.target.name
            raise StageError(f"{self.name} is predicted for the Edge TPU, and the target is {name}", todo="use macs")
        if self.name == "cache":
            return self._cache(costs)
        return {
            "macs": costs.macs,
            "parameters": costs.parameters,
            "size": costs.size_bytes,
            "compute": lambda counts: costs.compute_ms(counts, self.clock),
            "latency": lambda counts: costs.latency_ms(counts, self.host, self.clock),
        }[self.name]

    def _cache(self, costs: Costs) -> Callable[[Counts], float]:
        """Memory for all parameters. A layer that is too large to be cached counts as all of the memory more; one
        that stays too large however much is removed does not count: it is streamed in any case."""
        hopeless = costs.never_cached(pruning.least(costs.sets))
        memory = float(costs.target.tables["memory"]["plan_bytes"])

        def cost(counts: Counts) -> float:
            return costs.cached_bytes(counts, hopeless) + memory * len(costs.never_cached(counts) - hopeless)

        return cost

    def chosen(self, costs: Costs, losses: Lost | None, whole: float | None, steps: int) -> Counts:
        """How many groups of each set stay.

        Args:
            costs: of the network as it is now.
            losses: by set what is lost with fewer; None: the same share of every set stays.
            whole: the cost before the first step, None in the first.
            steps: in how many equal steps the limit is to be reached; one of them is made.

        Raises:
            StageError: the limit is out of reach; the nearest that is possible is named.
        """
        cost = self.cost(costs)
        now = cost(costs.everything)
        whole = now if whole is None else whole
        limit = self.limit(costs, whole)
        if now <= limit:
            return costs.everything
        try:
            return pruning.chosen(costs.sets, losses, cost, now * (limit / now) ** (1 / steps))
        except pruning.OutOfReachError as error:
            raise self.out_of_reach(error.nearest, whole) from error

    def reached(self, costs: Costs, whole: float | None) -> str:
        """What to say where there is nothing to remove; "" where there is."""
        now = self.cost(costs)(costs.everything)
        limit = self.limit(costs, now if whole is None else whole)
        return f"{self.name} is {self.told(now)} already, and may be {self.told(limit)}: nothing to remove" * (
            now <= limit
        )

    def limit(self, costs: Costs, whole: float) -> float:
        """The most that the cost may be in the end; `whole` is what it was before."""
        if self.name == "cache":
            return float(costs.target.tables["memory"]["plan_bytes"])
        return self.at_most or (self.keep or 1.0) * whole

    def compared(self, costs: Costs, counts: Counts) -> dict[str, Any]:
        """The cost before and after, and all other figures, as a plain map."""
        cost = self.cost(costs)
        both = {"before": costs.everything, "after": counts}
        return {
            "cost": {name: cost(each) for name, each in both.items()},
            "figures": {name: costs.to_json(each, self.host, self.clock) for name, each in both.items()},
        }

    def to_json(self) -> dict[str, Any]:
        """As a plain map, for the artifact's facts."""
        return {**asdict(self), "unit": _UNITS.get(self.name, "bytes")}

    def told(self, value: float) -> str:
        """A cost with its unit."""
        unit = _UNITS.get(self.name, "bytes")
        return f"{value:,.4g} ms" if unit == "ms" else f"{value:,.0f} {unit}"

    def out_of_reach(self, nearest: float, whole: float) -> StageError:
        """What to say when no choice of channels is small enough.

        Args:
            nearest: the least that is possible.
            whole: the cost of the network as it is.
        """
        if self.name == "cache":
            limit, todo = "cache", "use a smaller model: what remains is streamed at every inference"
        elif self.at_most is not None:
            limit, todo = f"at_most {self.at_most:g}", f"choose at_most >= {_rounded_up(nearest):g}"
        else:
            limit, todo = f"keep {self.keep:g}", f"choose keep >= {_rounded_up(nearest / whole):g}"
        least = f"with at least {pruning.MIN_KEPT} channels in every layer, {self.told(nearest)} remain"
        return StageError(f"{self.name}: {limit} is out of reach: {least}, of {self.told(whole)} now", todo=todo)


def _rounded_up(value: float) -> float:
    """Three digits that are not less."""
    digits = f"{value * 1.0005:.3g}"
    return max(float(digits), value) if float(digits) < value else float(digits)
