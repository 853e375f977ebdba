"""The objective of pruning: a cost of the channels that stay, and the limit that it must come down to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import ceil, floor, log10
from typing import Any, Literal

from compress.core.errors import StageError
from compress.learning.pruning.allocation import CostFunction, ImportanceLosses, WidthSearch
from compress.learning.pruning.cost import Costs, TrialConversion
from compress.learning.pruning.layer_groups import MIN_WIDTH, Widths
from compress.learning.pruning.prunable import PrunableNetwork
from compress.results.pruning import CostChange
from compress.targets.base import CostModel, hardware_costs

ObjectiveName = Literal["macs", "parameters", "size", "compute", "latency", "cache"]
_UNITS = {"macs": "MACs", "parameters": "parameters", "compute": "ms", "latency": "ms"}
"""The unit of all others is bytes."""
_ON_ALL_TARGETS = ("macs", "parameters", "size")
_COUNTED = ("macs", "parameters")
"""Costs that follow from the layers; the others are predictions for a file that is not made yet."""
MAX_CONVERSIONS = 3
"""Trial conversions to verify one allocation; widths are searched again where their file costs too much."""
Converter = Callable[[Widths], TrialConversion]


def predicted_objectives(cost: CostModel) -> tuple[str, ...]:
    """Return the objectives that a target with this cost model can predict."""
    return (*_ON_ALL_TARGETS, *sorted(cost.objectives))


@dataclass(frozen=True)
class CostLimits:
    """The limits of one step.

    Attributes:
        initial: the cost before the first step.
        final: the limit after the last step.
        step: the limit after this step.
    """

    initial: float
    final: float
    step: float


@dataclass(frozen=True)
class Allocation:
    """Chosen widths.

    Attributes:
        widths: the widths.
        costs: costs that agree with the file that the widths become, where it was made.
    """

    widths: Widths
    costs: Costs


@dataclass(frozen=True)
class Objective:
    """The cost that is made smaller, and its limit.

    Attributes:
        name: the cost.
        keep: the limit as a share of the initial cost, or None.
        at_most: the limit as a value, or None; `cache` takes neither.
        host: where latency is predicted; None: the target's default host.
        clock: the clock of the target; None: its first.
    """

    name: ObjectiveName
    keep: float | None = None
    at_most: float | None = None
    host: str | None = None
    clock: str | None = None

    def cost_of(self, costs: Costs, minimum: Widths) -> CostFunction:
        """Return the cost of the objective as a function of the widths; `minimum` are the smallest widths.

        Raises:
            StageError: the target does not predict the objective.
        """
        known = predicted_objectives(costs.target.cost)
        if self.name not in known:
            raise StageError(
                f"{self.name} is not predicted for the target {costs.target.name}", allowed=", ".join(known)
            )
        functions: dict[str, CostFunction] = {
            "macs": costs.macs,
            "parameters": costs.parameters,
            "size": costs.size_bytes,
            "compute": lambda widths: costs.compute_ms(widths, self.clock),
            "latency": lambda widths: costs.latency_ms(widths, self.host, self.clock),
        }
        return _cache_cost(costs, minimum) if self.name == "cache" else functions[self.name]

    def limits(self, prunable: PrunableNetwork, initial: float | None = None, steps_left: int = 1) -> CostLimits:
        """Return the limits of the next step.

        Args:
            prunable: the network before the step.
            initial: the cost before the first step; None in the first.
            steps_left: the number of steps in which the cost goes down by equal ratios, this one included.

        Raises:
            StageError: the target does not predict the objective.
        """
        cost = self.cost_of(prunable.costs, prunable.minimum_widths)
        now = cost(prunable.full_widths)
        initial = now if initial is None else initial
        final = self._limit(prunable, initial)
        if steps_left == 1 or now <= final:
            return CostLimits(initial, final, final)
        step = now * (final / now) ** (1 / steps_left)
        return CostLimits(initial, final, max(step, cost(prunable.minimum_widths)))

    def _limit(self, prunable: PrunableNetwork, initial: float) -> float:
        if self.name == "cache":
            smallest = prunable.costs.on_target(prunable.minimum_widths)
            return float(hardware_costs(prunable.costs.target).cache_limit_bytes(smallest))
        if self.at_most is not None:
            return self.at_most
        return (self.keep or 1.0) * initial

    def allocate(self, prunable: PrunableNetwork, losses: ImportanceLosses | None, limits: CostLimits) -> Widths:
        """Return the widths for one step; all channels stay where the final limit is met already.

        `losses` is the importance that is lost by width; without it about the same share of every layer group stays.

        Raises:
            StageError: the final limit is out of reach; the nearest possible limit is named.
        """
        minimum = prunable.minimum_widths
        cost = self.cost_of(prunable.costs, minimum)
        if cost(prunable.full_widths) <= limits.final:
            return prunable.full_widths
        nearest = cost(minimum)
        if nearest > limits.final:
            raise self._out_of_reach(prunable, nearest, limits.initial)
        blocks = prunable.costs.target.cost.blocks
        return WidthSearch(prunable.full_widths, minimum, cost, limits.step, blocks).run(losses)

    def allocate_verified(
        self, prunable: PrunableNetwork, losses: ImportanceLosses | None, limits: CostLimits, convert: Converter
    ) -> Allocation:
        """Allocate widths as `allocate` does, and verify a predicted cost on the files that they become.

        The cost of the result is above the limit where no widths came down to it.

        Raises:
            StageError: the final limit is out of reach.
        """
        widths = self.allocate(prunable, losses, limits)
        if self.name in _COUNTED or widths == prunable.full_widths:
            return Allocation(widths, prunable.costs)
        for attempt in range(MAX_CONVERSIONS):
            calibrated = prunable.calibrated(widths, convert(widths))
            cost = self.cost_of(calibrated.costs, calibrated.minimum_widths)
            if cost(widths) <= limits.step or attempt == MAX_CONVERSIONS - 1:
                break
            try:
                widths = self.allocate(calibrated, losses, limits)
            except StageError:  # out of reach by the costs of the file
                break
        return Allocation(widths, calibrated.costs)

    def change(self, prunable: PrunableNetwork, allocation: Allocation) -> CostChange:
        """Return the costs before and after an allocation."""
        minimum = prunable.minimum_widths
        before = prunable.costs
        after = allocation.costs
        return CostChange(
            self.cost_of(before, minimum)(prunable.full_widths),
            self.cost_of(after, minimum)(allocation.widths),
            before.figures(prunable.full_widths, self.host, self.clock),
            after.figures(allocation.widths, self.host, self.clock),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the objective as a plain map, for the artifact's facts."""
        how = "counted" if self.name in _COUNTED else "predicted"
        return {**asdict(self), "unit": _UNITS.get(self.name, "bytes"), "how": how}

    def describe(self, cost: float) -> str:
        """Return a cost with its unit."""
        unit = _UNITS.get(self.name, "bytes")
        return f"{cost:,.4g} ms" if unit == "ms" else f"{cost:,.0f} {unit}"

    def _out_of_reach(self, prunable: PrunableNetwork, nearest: float, initial: float) -> StageError:
        """Return the error for a limit below `nearest`, the lowest cost that is possible."""
        if prunable.minimum_widths == prunable.full_widths:
            reason = f"no layer has more than {MIN_WIDTH} channels that could go"
            return StageError(f"{self.name}: nothing can be removed: {reason}", hint="remove `prune`")
        if self.name == "cache":
            limit = "cache"
            hint = "use a smaller model: what remains is streamed at every inference"
        elif self.at_most is not None:
            limit = f"at_most {self.at_most:g}"
            hint = f"choose at_most >= {_rounded_up(nearest)}"
        else:
            limit = f"keep {self.keep:g}"
            hint = f"choose keep >= {_rounded_up(nearest / initial)}"
        if self.name != "cache" and float(_rounded_up(nearest / initial)) >= 1:
            hint = f"choose another objective: removing channels hardly lowers {self.name}"
        least = f"with at least {MIN_WIDTH} channels in every layer, {self.describe(nearest)} remain"
        return StageError(
            f"{self.name}: {limit} cannot be reached: {least}, of {self.describe(initial)} now", hint=hint
        )


def _cache_cost(costs: Costs, minimum: Widths) -> CostFunction:
    """Return the memory that all parameters take in the target's cache, as a function of the widths.

    A layer that is too large to be cached costs as much as the whole memory in addition. A layer that is too large even
    at its smallest width does not count: it is streamed in any case.
    """
    never_cached = costs.never_cached(minimum)
    memory = float(hardware_costs(costs.target).cache_bytes())

    def cost(widths: Widths) -> float:
        too_large = costs.never_cached(widths) - never_cached
        return costs.cached_bytes(widths, never_cached) + memory * len(too_large)

    return cost


def _rounded_up(value: float) -> str:
    """Return a value rounded up to three digits."""
    unit = 10.0 ** (floor(log10(value)) - 2)
    return f"{ceil(value / unit * (1 - 1e-12)) * unit:.6g}"
