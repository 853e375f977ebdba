"""Structured pruning, last of three questions: how many channels go, and where?

Channels that one layer makes are a set; within a set the least important go first. What remains to be chosen is how
many of each set stay, so that a cost (multiply-accumulates, time on the target, ...) comes down to a limit and as
little as possible is lost. Time comes in steps: a target computes blocks of channels at a time (`ChannelBlocks`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.errors import StageError
from compress.ir import channel_groups as structure
from compress.ir.channel_groups import Channels, Mask
from compress.ir.keras_graph import LayerOutput, Network
from compress.pruning import importance
from compress.pruning.cost import Costs, Counts, Sets
from compress.pruning.importance import ImportanceSamples, Method, Scores, made_by
from compress.targets.base import ChannelBlocks, Target

MIN_KEPT = 4
"""So many groups of channels stay in every layer, if it has as many."""
LEVELS = 32
"""A set has about so many sizes to choose from, if it is large."""
ROUNDS = 4
"""So often at most sets are exchanged, as long as a thousandth is gained: on large networks once."""
PAID_BY_TWO = 24
"""Of so many ways to narrow one set, two together may pay for widening another."""
TRIES = 8
"""So many exchanges are looked at for each way to widen a set."""
Cost = Callable[[Counts], float]
Allocation = Literal["balanced", "measured", "global", "uniform"]
"""How much goes where. global: the sum of the importance that is removed; balanced: the sum over the sets of what was
there over what is kept of it, so that no set becomes too narrow; measured: see `sensitivity`."""
_TINY = 1e-9
Lost = Sequence[NDArray[np.float64]]
"""What is lost of each set when so many groups stay: an array from none to all, falling to 0."""


@dataclass(frozen=True)
class SizeChange:
    """Another size of one set, and what it would change if all others stayed as they are.

    Attributes:
        index: of the set.
        size: how many of its groups stay then.
        lost: how much more is lost; less than 0 where the set gets wider.
        cost: how much more it costs.
    """

    index: int
    size: int
    lost: float
    cost: float


@dataclass(frozen=True)
class PruningPlan:
    """Which channels stay.

    Attributes:
        kept: by channel number.
        counts: how many groups of each set.
        layers: channels (before, after) of each layer that loses some.
        held: layers whose channels stay since it is not known what they do with them.
    """

    kept: Mask
    counts: Counts
    layers: Mapping[str, tuple[int, int]]
    held: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As a plain map, for the artifact's facts."""
        return {
            "layers": {name: {"before": a, "after": b} for name, (a, b) in self.layers.items()},
            "held": list(self.held),
        }


@dataclass(frozen=True)
class Cut:
    """A network before channels are removed: what moves together, what matters, and what it costs.

    Attributes:
        network: as it is.
        channels: of the network.
        sets: which groups are chosen among each other, the most important first.
        least: how many groups of each set stay at any rate.
        score: importance by channel number.
        importance: how it was found.
        costs: by how many groups of each set stay.
    """

    network: Network
    channels: Channels
    sets: Sets
    least: Counts
    score: Scores
    importance: Method
    costs: Costs


def prepare(network: Network, target: Target, method: Method, samples: ImportanceSamples | None) -> Cut:
    """Answers the first two questions.

    Args:
        network: as it is.
        target: what its costs are known for.
        method: how importance is found.
        samples: what it is measured on, where it is.

    Raises:
        StageError: nothing can be removed, or importance is no number.
    """
    channels = structure.follow(network)
    score = importance.scores(network, channels, method, samples)
    if method == "taylor" and not score.any():  # a network that is sure of every sample has no slope
        method = "batch_norm"
        score = importance.scores(network, channels, method, samples)
    if not np.isfinite(score).all():
        raise StageError("importance is not a number", todo="look at the model's weights and at data.preprocess")
    found, least = sets(network, channels, score)
    return Cut(network, channels, found, least, score, method, Costs(network, channels, found, target))


def sets(network: Network, channels: Channels, score: Scores) -> tuple[Sets, Counts]:
    """Groups that are chosen among each other: what one layer makes, tied layers together; and the least of each.

    The most important come first, but before all others the most important few of every layer that makes channels of
    the set: they are the fewest that may stay, so that no layer is left without channels.

    Raises:
        StageError: nothing can be removed.
    """
    merged: list[list[NDArray[np.int64]]] = []
    for layer in network.layers.values():
        if layer.calls and made_by(layer) is not None:
            row = np.unique(channels.group[channels.layouts[LayerOutput(layer.name)]])
            row = row[~channels.pinned[row]]
            tied = [rows for rows in merged if any(np.isin(row, other).any() for other in rows)]
            apart = [rows for rows in merged if not any(rows is other for other in tied)]
            merged = [*apart, [row, *(each for rows in tied for each in rows)]] if len(row) else merged
    if not merged:
        held = f"{', '.join(channels.held[:5])} cannot be followed" if channels.held else "every one reaches an output"
        raise StageError(f"no channel of this model can be removed: {held}", todo="remove `prune`")

    def ordered(members: NDArray[np.int64]) -> NDArray[np.int64]:
        return members[np.argsort(-score[members], kind="stable")]

    found, least = [], []
    for rows in merged:
        first = np.unique(np.concatenate([ordered(row)[:MIN_KEPT] for row in rows]))
        others = np.setdiff1d(np.concatenate(rows), first)
        found.append(np.concatenate([ordered(first), ordered(others)]))
        least.append(len(first))
    return found, tuple(least)


def losses(cut: Cut, allocation: Allocation) -> Lost | None:
    """By set what is lost, judged by importance; None for about the same share everywhere."""
    if allocation == "uniform":
        return None
    kept = [np.concatenate([[0.0], np.cumsum(cut.score[members])]) for members in cut.sets]
    if allocation == "global":
        return [each[-1] - each for each in kept]
    shares = [each / each[-1] if each[-1] > 0 else np.linspace(0, 1, len(each)) for each in kept]
    return [1 / np.maximum(each, _TINY) - 1 for each in shares]


def chosen(
    sizes: Counts, least: Counts, losses: Lost | None, cost: Cost, limit: float, blocks: ChannelBlocks
) -> Counts:
    """How many groups of each set stay.

    Args:
        sizes: of the sets.
        least: how many groups of each stay at any rate; they must not cost more than the limit.
        losses: by set what is lost; None: about the same share of every set stays.
        cost: what a choice costs.
        limit: the most that it may.
        blocks: the target's; the inputs' is the step of sizes.
    """
    if losses is None:
        counts = _uniform(sizes, least, cost, limit, blocks.inputs)
        return _grown(counts, [np.linspace(1.0, 0.0, size + 1) for size in sizes], cost, limit, blocks.inputs)
    counts = _grown(_cheapest(losses, least, cost, limit, blocks), losses, cost, limit, blocks.inputs)
    for _ in range(ROUNDS):
        before = _total(losses, counts)
        counts = _exchanged(counts, least, losses, cost, limit, blocks)
        counts = _grown(counts, losses, cost, limit, blocks.inputs)
        if _total(losses, counts) > 0.999 * before:
            break
    return counts


def levels(size: int, smallest: int, blocks: ChannelBlocks) -> list[int]:
    """The sizes that a set of so many groups may have, from the largest."""
    step = blocks.inputs
    while size / step > LEVELS and step < blocks.outputs:
        step *= 2
    return sorted({size, smallest, *range(step, size, step)} - set(range(smallest)), reverse=True)


def _cheapest(losses: Lost, least: Counts, cost: Cost, limit: float, blocks: ChannelBlocks) -> Counts:
    """Greedy: again and again the removal that loses the least for what it saves.

    A removal may go several levels down at once, since one level alone often saves nothing. Removals wait in order
    of their last known price and are priced anew when their turn comes.

    Source: Shen et al., Structural Pruning via Latency-Saliency Knapsack, NeurIPS 2022 (importance against latency
    in the hardware's steps); Minoux, 1978 (the lazy order).
    """
    sizes = [levels(len(each) - 1, fewest, blocks) for each, fewest in zip(losses, least, strict=True)]
    at = [0] * len(losses)

    def counts_with(index: int, level: int) -> Counts:
        return tuple(sizes[i][level if i == index else at[i]] for i in range(len(losses)))

    def priced(index: int, now: float) -> tuple[float, int] | None:
        """The best price of a removal from a set, and the level that it leads to."""
        best: tuple[float, int] | None = None
        before = losses[index][sizes[index][at[index]]]
        steps = range(at[index] + 1, len(sizes[index]))
        reach = [level for level in steps if _near(sizes[index], at[index], level, 2 * blocks.outputs)]
        for level in reach:
            saved = now - cost(counts_with(index, level))
            if saved > 0:
                price = (losses[index][sizes[index][level]] - before) / saved
                best = (price, level) if best is None or price < best[0] else best
        return best

    now = cost(counts_with(-1, 0))
    waiting = [(0.0, index) for index in range(len(losses))]
    idle: list[int] = []
    while now > limit and waiting:
        _, index = heapq.heappop(waiting)
        offer = priced(index, now)
        if offer is None:
            idle.append(index)
        elif waiting and offer[0] > waiting[0][0]:
            heapq.heappush(waiting, (offer[0], index))
        else:
            at[index] = offer[1]
            now = cost(counts_with(-1, 0))
            waiting += [(0.0, i) for i in (*idle, index)]
            heapq.heapify(waiting)
            idle = []
    return counts_with(-1, 0) if now <= limit else least


def _near(sizes: list[int], here: int, level: int, reach: int) -> bool:
    """Whether a level is at most so many groups down, or the next."""
    return level == here + 1 or sizes[here] - sizes[level] <= reach


def _uniform(sizes: Counts, least: Counts, cost: Cost, limit: float, step: int) -> Counts:
    """The largest share, the same for all sets and rounded down to the step, that costs at most `limit`."""
    low, high, best = 0.0, 1.0, least
    for _ in range(20):
        share = (low + high) / 2
        counts = tuple(max(int(share * size) // step * step, fewest) for size, fewest in zip(sizes, least, strict=True))
        if cost(counts) <= limit:
            low, best = share, counts
        else:
            high = share
    return best


def _grown(counts: Counts, losses: Lost, cost: Cost, limit: float, step: int) -> Counts:
    """Gives back what saves nothing, and what still fits: where the most is gained for what it costs."""
    while True:
        now, offers = cost(counts), []
        for index, each in enumerate(losses):
            more = min(counts[index] // step * step + step, len(each) - 1)
            larger = _with(counts, index, more)
            costs = cost(larger)
            if more > counts[index] and costs <= limit:
                gained = float(each[counts[index]] - each[more])
                offers.append((costs > now, -gained / max(costs - now, 1e-12), larger))
        if not offers:
            return counts
        counts = min(offers)[2]


def _exchanged(counts: Counts, least: Counts, losses: Lost, cost: Cost, limit: float, blocks: ChannelBlocks) -> Counts:
    """Widens sets, and narrows one or two others for each, where less is lost so and the limit is kept.

    The greedy search needs it on small networks: its last removal may go far below the limit, and a removal before
    that may have been the wrong one. What changes cost together is guessed from what each costs alone, with the
    benefit of the doubt since one may save as much again by the other; what the guess lets pass is looked at.
    """
    now, changes = cost(counts), _changes(counts, least, losses, cost, blocks)
    wider = sorted((each for each in changes if each.lost < 0), key=lambda each: each.lost)
    narrower = [each for each in changes if each.cost < 0 and wider and each.lost < -wider[0].lost]
    narrower.sort(key=lambda each: -each.lost / each.cost)
    twos = [(a, b) for a, b in combinations(narrower[:PAID_BY_TWO], 2) if a.index != b.index]
    ways = [(sum(each.lost for each in way), way) for way in (*((each,) for each in narrower), *twos)]
    ways.sort(key=lambda each: each[0])
    free = set(range(len(counts)))
    for widened in wider:
        tries = 0
        for lost, way in ways:
            if widened.lost + lost >= -_TINY or tries == TRIES or widened.index not in free:
                break
            touched, saved = {each.index for each in way}, -sum(each.cost for each in way)
            guess = now + widened.cost - saved - min(widened.cost, saved)
            if guess > limit or widened.index in touched or not touched <= free:
                continue
            changed, tries = counts, tries + 1
            for each in (widened, *way):
                changed = _with(changed, each.index, each.size)
            if cost(changed) <= limit:
                counts, now, free = changed, cost(changed), free - touched - {widened.index}
                break
    return counts


def _changes(counts: Counts, least: Counts, losses: Lost, cost: Cost, blocks: ChannelBlocks) -> list[SizeChange]:
    """Every other size of every set that is at most two blocks of outputs away."""
    now, found = cost(counts), []
    for index, (each, here) in enumerate(zip(losses, counts, strict=True)):
        for size in levels(len(each) - 1, least[index], blocks):
            if size != here and abs(size - here) <= 2 * blocks.outputs:
                lost = float(each[size] - each[here])
                found.append(SizeChange(index, size, lost, cost(_with(counts, index, size)) - now))
    return found


def _total(losses: Lost, counts: Counts) -> float:
    """What is lost of all sets together."""
    return sum(float(each[count]) for each, count in zip(losses, counts, strict=True))


def _with(counts: Counts, index: int, size: int) -> Counts:
    """The same with another size of one set."""
    return (*counts[:index], size, *counts[index + 1 :])


def plan(cut: Cut, counts: Counts) -> PruningPlan:
    """Keeps the given number of groups of every set, the most important ones."""
    kept = np.zeros(len(cut.channels.group), bool)
    for members, count in zip(cut.sets, counts, strict=True):
        kept[members[:count]] = True
    kept = cut.channels.tied(kept)
    layers = {}
    for layer in cut.network.layers.values():
        if layer.calls and made_by(layer) is not None:
            mask = kept[cut.channels.layouts[LayerOutput(layer.name)]]
            if not mask.all():
                layers[layer.name] = (len(mask), int(mask.sum()))
    return PruningPlan(kept, tuple(counts), layers, cut.channels.held)


def without(cut: Cut, decided: PruningPlan) -> Network:
    """The network with fewer channels."""
    return structure.remove(cut.network, cut.channels, decided.kept)
