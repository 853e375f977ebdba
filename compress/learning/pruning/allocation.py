"""Structured pruning, last of three questions: how many channels does each layer group keep?

The widths are chosen so that a cost (multiply-accumulates, time on the target, ...) comes down to a limit and as little
importance as possible is lost. A target computes channels in blocks, so time falls in steps (`ChannelBlocks`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from compress.learning.pruning.layer_groups import Widths
from compress.learning.pruning.prunable import PrunableNetwork
from compress.targets.base import ChannelBlocks

MAX_LEVELS = 32
"""A large layer group has about this many widths to choose from."""
EXCHANGE_ROUNDS = 4
"""Rounds of exchanges; they end sooner where a round gains less than a thousandth. On large networks one is enough."""
PAIRED_REDUCTIONS = 24
"""The cheapest reductions, of which two together may pay for widening another layer group."""
MAX_ATTEMPTS = 8
"""Exchanges whose cost is computed for each widening."""
CostFunction = Callable[[Widths], float]
AllocationMethod = Literal["balanced", "sensitivity", "global", "uniform"]
"""global: minimizes the sum of the importance that is removed. balanced: minimizes the sum over the layer groups of
(all importance / kept importance), so that no layer gets too narrow. sensitivity: minimizes the sum of the measured
divergences (`sensitivity`). uniform: keeps about the same share of every layer group."""
ImportanceLosses = Sequence[NDArray[np.float64]]
"""For each layer group the importance that is lost at every width, from 0 to all; falls to 0."""
_TINY = 1e-9
"""Loss that counts as none, and the least share of importance; chosen far below the shares of single channels."""


def importance_losses(prunable: PrunableNetwork, method: AllocationMethod) -> ImportanceLosses | None:
    """Return the losses that `balanced` or `global` minimizes; None for `uniform`."""
    if method == "uniform":
        return None
    kept = [np.concatenate([[0.0], np.cumsum(prunable.scores[group.members])]) for group in prunable.groups]
    if method == "global":
        return [importance[-1] - importance for importance in kept]
    return [1 / np.maximum(_as_share(importance), _TINY) - 1 for importance in kept]


def _as_share(importance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return importance as a share of its maximum; without any importance, all channels count the same."""
    share: NDArray[np.float64] = np.linspace(0, 1, len(importance))
    if importance[-1] > 0:
        share = importance / importance[-1]
    return share


@dataclass(frozen=True)
class SizeChange:
    """Another width of one layer group, and its effect while all other widths stay.

    Attributes:
        index: the index of the layer group.
        width: the other width.
        loss: the additional loss of importance; negative where the group gets wider.
        cost: the additional cost.
    """

    index: int
    width: int
    loss: float
    cost: float


@dataclass(frozen=True)
class WidthSearch:
    """The search for widths within a limit of the cost.

    Attributes:
        full: the widths with all channels.
        minimum: the smallest widths, which are used where the search finds no others; they must not cost more than the
            limit.
        cost: the cost of any widths.
        limit: the highest cost allowed.
        blocks: the target's blocks of channels; widths are multiples of `blocks.inputs`.
    """

    full: Widths
    minimum: Widths
    cost: CostFunction
    limit: float
    blocks: ChannelBlocks

    def run(self, losses: ImportanceLosses | None) -> Widths:
        """Return the widths that lose least; without losses about the same share of every layer group."""
        if losses is None:
            by_share = [np.linspace(1.0, 0.0, size + 1) for size in self.full]
            return self._fill(self._uniform(), by_share)
        widths = self._fill(self._greedy(losses), losses)
        for _ in range(EXCHANGE_ROUNDS):
            loss_before = _total_loss(losses, widths)
            widths = self._fill(self._exchange(widths, losses), losses)
            if _total_loss(losses, widths) > 0.999 * loss_before:
                break
        return widths

    def _uniform(self) -> Widths:
        """Return the largest share, the same for all groups and rounded down to a block, within the limit."""
        low = 0.0
        high = 1.0
        best = self.minimum
        for _ in range(20):
            share = (low + high) / 2
            widths = self._share_widths(share)
            if self.cost(widths) <= self.limit:
                low = share
                best = widths
            else:
                high = share
        return best

    def _share_widths(self, share: float) -> Widths:
        step = self.blocks.inputs
        return tuple(
            max(int(share * size) // step * step, smallest)
            for size, smallest in zip(self.full, self.minimum, strict=True)
        )

    def _greedy(self, losses: ImportanceLosses) -> Widths:
        """Repeat the reduction with the lowest price, which is loss per cost saved, until the limit is met.

        A reduction may go several levels down at once, since one level alone often saves nothing. Reductions wait in
        the order of their last known price, and are priced again when their turn comes.

        Source: Shen et al., Structural Pruning via Latency-Saliency Knapsack, NeurIPS 2022 (importance against latency
        in the hardware's steps); Minoux, 1978 (lazy evaluation).
        """
        widths = self.full
        cost = self.cost(widths)
        queue = [(0.0, index) for index in range(len(losses))]
        without_offer: list[int] = []
        while cost > self.limit and queue:
            _, index = heapq.heappop(queue)
            offer = self._best_reduction(index, widths, cost, losses[index])
            if offer is None:
                without_offer.append(index)
                continue
            price, width = offer
            if queue and price > queue[0][0]:
                heapq.heappush(queue, (price, index))
                continue
            widths = _with_width(widths, index, width)
            cost = self.cost(widths)
            queue += [(0.0, waiting) for waiting in (*without_offer, index)]
            heapq.heapify(queue)
            without_offer = []
        return widths if cost <= self.limit else self.minimum

    def _best_reduction(
        self, index: int, widths: Widths, cost: float, loss: NDArray[np.float64]
    ) -> tuple[float, int] | None:
        """Return the lowest price of a reduction of one group, and the width after it; None if none saves anything."""
        width = widths[index]
        narrower = [level for level in self._levels(index) if level < width]
        offers = []
        for level in narrower:
            if level != narrower[0] and not self._is_near(width, level):
                break
            saved = cost - self.cost(_with_width(widths, index, level))
            if saved > 0:
                offers.append((float(loss[level] - loss[width]) / saved, -level))
        if not offers:
            return None
        price, level = min(offers)
        return price, -level

    def _levels(self, index: int) -> list[int]:
        return levels(self.full[index], self.minimum[index], self.blocks)

    def _is_near(self, width: int, level: int) -> bool:
        """Whether a width is tried in one change: at most two blocks of output channels away."""
        return abs(width - level) <= 2 * self.blocks.outputs

    def _fill(self, widths: Widths, losses: ImportanceLosses) -> Widths:
        """Widen groups while that costs nothing or stays within the limit, the best ratio of gain to cost first."""
        step = self.blocks.inputs
        while True:
            cost = self.cost(widths)
            offers = []
            for index, loss in enumerate(losses):
                width = widths[index]
                wider = min(width // step * step + step, self.full[index])
                candidate = _with_width(widths, index, wider)
                candidate_cost = self.cost(candidate)
                if wider > width and candidate_cost <= self.limit:
                    added = candidate_cost - cost
                    gain = float(loss[width] - loss[wider])
                    offers.append((added > 0, -gain / max(added, 1e-12), candidate))
            if not offers:
                return widths
            widths = min(offers)[2]

    def _exchange(self, widths: Widths, losses: ImportanceLosses) -> Widths:
        """Widen groups, and narrow one or two others for each, where that loses less and stays within the limit.

        Small networks need it after the greedy search, whose last reduction may go far below the limit. The cost of
        several changes together is estimated from the cost of each alone, minus as much again, since one change may
        make the other cheaper; only exchanges that may stay within the limit are computed.
        """
        changes = self._changes(widths, losses)
        widenings = sorted((change for change in changes if change.loss < 0), key=lambda change: change.loss)
        if not widenings:
            return widths
        best_gain = -widenings[0].loss
        payments = _payments([change for change in changes if change.cost < 0 and change.loss < best_gain])
        untouched = set(range(len(widths)))
        cost = self.cost(widths)
        for widening in widenings:
            if widening.index not in untouched:
                continue
            payment = self._affordable(widening, payments, (widths, cost), untouched)
            if payment is not None:
                widths = _with_changes(widths, (widening, *payment))
                cost = self.cost(widths)
                untouched -= {change.index for change in (widening, *payment)}
        return widths

    def _affordable(
        self,
        widening: SizeChange,
        payments: list[tuple[SizeChange, ...]],
        current: tuple[Widths, float],
        untouched: set[int],
    ) -> tuple[SizeChange, ...] | None:
        """Return the reductions with the lowest loss that pay for a widening and lose less than it gains."""
        widths, cost = current
        attempts = 0
        for payment in payments:
            loss = sum(change.loss for change in payment)
            if widening.loss + loss >= -_TINY or attempts == MAX_ATTEMPTS:
                return None
            indices = {change.index for change in payment}
            saved = -sum(change.cost for change in payment)
            estimate = cost + widening.cost - saved - min(widening.cost, saved)
            if estimate > self.limit or widening.index in indices or not indices <= untouched:
                continue
            attempts += 1
            if self.cost(_with_changes(widths, (widening, *payment))) <= self.limit:
                return payment
        return None

    def _changes(self, widths: Widths, losses: ImportanceLosses) -> list[SizeChange]:
        """Return every other width of every group that is at most two blocks of output channels away."""
        cost = self.cost(widths)
        changes = []
        for index, (loss, width) in enumerate(zip(losses, widths, strict=True)):
            for level in self._levels(index):
                if level != width and self._is_near(width, level):
                    added = self.cost(_with_width(widths, index, level)) - cost
                    changes.append(SizeChange(index, level, float(loss[level] - loss[width]), added))
        return changes


def levels(size: int, smallest: int, blocks: ChannelBlocks) -> list[int]:
    """Return the widths that a layer group of some size may have, the largest first."""
    step = blocks.inputs
    while size / step > MAX_LEVELS and step < blocks.outputs:
        step *= 2
    multiples = (width for width in range(step, size, step) if width >= smallest)
    return sorted({size, smallest, *multiples}, reverse=True)


def _payments(reductions: list[SizeChange]) -> list[tuple[SizeChange, ...]]:
    """Return the reductions, and pairs of those with the lowest loss per cost, by their loss."""
    by_price = sorted(reductions, key=lambda change: -change.loss / change.cost)
    pairs = combinations(by_price[:PAIRED_REDUCTIONS], 2)
    payments = [*((change,) for change in by_price), *(pair for pair in pairs if pair[0].index != pair[1].index)]
    return sorted(payments, key=lambda payment: sum(change.loss for change in payment))


def _total_loss(losses: ImportanceLosses, widths: Widths) -> float:
    return sum(float(loss[width]) for loss, width in zip(losses, widths, strict=True))


def _with_width(widths: Widths, index: int, width: int) -> Widths:
    return (*widths[:index], width, *widths[index + 1 :])


def _with_changes(widths: Widths, changes: Sequence[SizeChange]) -> Widths:
    for change in changes:
        widths = _with_width(widths, change.index, change.width)
    return widths
