"""Structured pruning, the other two questions: which channels matter least, and how many go?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import StageError
from compress.training import channels as structure
from compress.training.channels import MAKERS, Channels, Mask
from compress.training.network import Network, Tensor

STEP = 4
"""Channels are kept in multiples of this: the Edge TPU computes 4 input channels at once."""
MIN_KEPT = 4


@dataclass(frozen=True)
class PruningPlan:
    """Which channels stay.

    Attributes:
        kept: by channel number.
        macs_before: multiply-accumulates of the network as it was.
        macs_after: with the kept channels only.
        layers: channels (before, after) of each layer that loses some.
    """

    kept: Mask
    macs_before: int
    macs_after: int
    layers: Mapping[str, tuple[int, int]]

    def to_json(self) -> dict[str, Any]:
        """As a plain map, for the artifact's facts."""
        return {
            "macs_before": self.macs_before,
            "macs_after": self.macs_after,
            "layers": {name: {"before": a, "after": b} for name, (a, b) in self.layers.items()},
        }


def importance(network: Network, channels: Channels) -> NDArray[np.float64]:
    """How much each group of channels matters: L2 norm of the weights that make a channel.

    Where a batch norm follows, its scale over its deviation is multiplied in: the weights
    as they are after folding. Norms are divided by their layer's mean, so that layers can be
    compared, and averaged over the layers of a group. Indexed by channel number, equal in a group.

    Source: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017 (norms); Liu et al.,
    Network Slimming, ICCV 2017 (batch norm scales).
    """
    total = np.zeros(len(channels.group))
    count = np.zeros(len(channels.group))
    consumers = network.consumers()
    for layer in network.layers.values():
        if layer.kind in MAKERS:
            out = MAKERS[layer.kind][1]
            kernel = np.moveaxis(layer.weights[0].astype(np.float64), out, -1)
        elif layer.kind.startswith("Separable"):
            kernel = layer.weights[1].astype(np.float64)
        else:
            continue
        norm = np.sqrt((kernel**2).sum(axis=tuple(range(kernel.ndim - 1))))
        tensor = Tensor(layer.name)
        for name, _ in consumers.get(tensor, []):
            if network.layers[name].kind == "BatchNormalization":
                norm *= np.abs(_batch_norm_factor(network.layers[name]))
        groups = channels.group[channels.layouts[tensor]]
        np.add.at(total, groups, norm / max(float(norm.mean()), 1e-12))
        np.add.at(count, groups, 1)
    score: NDArray[np.float64] = (total / np.maximum(count, 1))[channels.group]
    return score


def _batch_norm_factor(layer: Any) -> NDArray[np.float64]:
    """Scale divided by the deviation; weights are [gamma], [beta], mean, variance."""
    gamma = layer.weights[0].astype(np.float64) if layer.config.get("scale", True) else np.float64(1)
    factor: NDArray[np.float64] = gamma / np.sqrt(layer.weights[-1].astype(np.float64) + layer.config["epsilon"])
    return factor


def plan(network: Network, keep_macs: float) -> tuple[Channels, PruningPlan]:
    """The largest uniform share of channels whose multiply-accumulates fit, least important first out.

    Args:
        network: what is to be pruned.
        keep_macs: largest share of the multiply-accumulates that may stay.

    Raises:
        StageError: nothing can be removed, or not enough.
    """
    channels = structure.follow(network)
    score = importance(network, channels)
    everything = np.ones(len(channels.group), bool)
    before = structure.macs(network, channels, everything)
    sets = _sets(network, channels)
    if not sets:
        raise StageError("no channel of this model can be removed: every one reaches an output", todo="remove `prune`")
    least = [min(MIN_KEPT, len(members)) for members in sets]

    def cost(counts: list[int]) -> int:
        return structure.macs(network, channels, _mask(sets, counts, score, channels))

    if cost(least) > keep_macs * before:
        reach = ceil(cost(least) / before * 1000) / 1000
        raise StageError(
            f"keep_macs {keep_macs:g} is out of reach with at least {MIN_KEPT} channels in every layer",
            todo=f"choose keep_macs >= {reach:g}",
        )
    counts = _grown(sets, _uniform(sets, least, cost, keep_macs * before), cost, keep_macs * before)
    best = _mask(sets, counts, score, channels)
    after = structure.macs(network, channels, best)
    layers = {}
    for layer in network.layers.values():
        if layer.kind in MAKERS or layer.kind.startswith("Separable"):
            mask = best[channels.layouts[Tensor(layer.name)]]
            if not mask.all():
                layers[layer.name] = (len(mask), int(mask.sum()))
    return channels, PruningPlan(best, before, after, layers)


def _sets(network: Network, channels: Channels) -> list[NDArray[np.int64]]:
    """Groups that are chosen among each other: those that one layer makes, tied layers together."""
    merged: list[set[int]] = []
    for layer in network.layers.values():
        if layer.kind in MAKERS or layer.kind.startswith("Separable"):
            row = np.unique(channels.group[channels.layouts[Tensor(layer.name)]])
            current = set(row[~channels.pinned[row]].tolist())
            apart = [other for other in merged if not other & current]
            for other in merged:
                if other & current:
                    current |= other
            merged = [*apart, current] if current else apart
    return [np.array(sorted(members), np.int64) for members in merged]


def _uniform(
    sets: list[NDArray[np.int64]], least: list[int], cost: Callable[[list[int]], int], limit: float
) -> list[int]:
    """The largest share, the same for all sets and rounded down to STEP, that costs at most `limit`."""
    low, high, best = 0.0, 1.0, least
    for _ in range(20):
        share = (low + high) / 2
        counts = [
            max(int(share * len(members)) // STEP * STEP, minimum) for members, minimum in zip(sets, least, strict=True)
        ]
        if cost(counts) <= limit:
            low, best = share, counts
        else:
            high = share
    return best


def _grown(
    sets: list[NDArray[np.int64]], counts: list[int], cost: Callable[[list[int]], int], limit: float
) -> list[int]:
    """What rounding down left unused: one STEP more wherever it still fits, the most cut sets first."""
    for index in sorted(range(len(sets)), key=lambda i: counts[i] / len(sets[i])):
        more = [*counts]
        more[index] = min(counts[index] + STEP, len(sets[index]))
        if cost(more) <= limit:
            counts = more
    return counts


def _mask(sets: list[NDArray[np.int64]], counts: list[int], score: NDArray[np.float64], channels: Channels) -> Mask:
    """Keeps the given number of groups of every set, the most important ones."""
    kept = np.zeros(len(channels.group), bool)
    for members, count in zip(sets, counts, strict=True):
        kept[members[np.argsort(-score[members], kind="stable")][:count]] = True
    return channels.tied(kept)


def prune(network: Network, keep_macs: float) -> tuple[Network, PruningPlan]:
    """The network with fewer channels, and what was decided.

    Raises:
        StageError: nothing can be removed, or not enough.
    """
    channels, decided = plan(network, keep_macs)
    return structure.remove(network, channels, decided.kept), decided
