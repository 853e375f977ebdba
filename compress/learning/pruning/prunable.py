"""A network that is ready for pruning, and the removal of channels from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from compress.core.errors import StageError
from compress.core.progress import SILENT, Progress
from compress.learning.pruning.cost import Costs, TrialConversion
from compress.learning.pruning.factorization import Factorization, Rank
from compress.learning.pruning.importance import (
    ImportanceMethod,
    ImportanceSamples,
    Scores,
    importance_scores,
    produces_channels,
)
from compress.learning.pruning.layer_groups import LayerGroup, Widths, layer_groups
from compress.model.ir import channel_groups
from compress.model.ir.channel_groups import ChannelGroups, Mask
from compress.model.ir.keras_graph import LayerOutput, Network
from compress.model.ir.passes.factorize import Side
from compress.targets.base import Target


@dataclass(frozen=True)
class PrunableNetwork:
    """A network with all that the choice of channels depends on.

    Attributes:
        factorization: the network with all channels, and the ranks that may be reduced.
        channels: the channels of the network with all its ranks.
        groups: its layer groups; a rank is one too.
        scores: the importance of its channels.
        importance: the method that the scores come from.
        costs: its costs, by the widths of the layer groups.
    """

    factorization: Factorization
    channels: ChannelGroups
    groups: tuple[LayerGroup, ...]
    scores: Scores
    importance: ImportanceMethod
    costs: Costs

    @property
    def network(self) -> Network:
        """The network with all channels, and all layers whole."""
        return self.factorization.network

    @property
    def full_widths(self) -> Widths:
        """The widths with all channels."""
        return self.costs.full_widths

    @property
    def minimum_widths(self) -> Widths:
        """The smallest widths."""
        return tuple(group.minimum for group in self.groups)

    @property
    def largest_ranks(self) -> Mapping[int, int]:
        """For each layer group that is a rank, by its index, the largest rank that has fewer weights."""
        limits = {rank.factor: rank.largest for rank in self.factorization.ranks}
        names = [group.layers[0] for group in self.groups]
        return {index: limits[name] for index, name in enumerate(names) if name in limits}

    def with_whole_layers(self) -> PrunableNetwork:
        """Return the same network, but no rank may be reduced."""
        groups = list(self.groups)
        for index in self.largest_ranks:
            groups[index] = replace(groups[index], minimum=len(groups[index].members))
        return replace(self, groups=tuple(groups))

    def cheapest_widths(self, cost: Callable[[Widths], float]) -> Widths:
        """Return the smallest widths, with those layers whole that cost more in factors of the lowest rank."""
        starts = (self.minimum_widths, self.with_whole_layers().minimum_widths)
        return min((self._with_cheaper_ranks(widths, cost) for widths in dict.fromkeys(starts)), key=cost)

    def _with_cheaper_ranks(self, widths: Widths, cost: Callable[[Widths], float]) -> Widths:
        """Return widths in which every rank, one after the other, is the lowest or the full one: the cheaper one."""
        for index in self.largest_ranks:
            ranks = dict.fromkeys((widths[index], self.groups[index].minimum, self.full_widths[index]))
            widths = min(((*widths[:index], rank, *widths[index + 1 :]) for rank in ranks), key=cost)
        return widths

    def calibrated(self, widths: Widths, conversion: TrialConversion) -> PrunableNetwork:
        """Return the same network with costs that agree with the files at some widths."""
        return replace(self, costs=self.costs.calibrated(widths, conversion))

    def kept_channels(self, widths: Widths) -> Mask:
        """Return the channels that stay at some widths: the most important ones of each layer group."""
        kept = np.zeros(len(self.channels.group), bool)
        for group, width in zip(self.groups, widths, strict=True):
            kept[group.members[:width]] = True
        return self.channels.with_coupled(kept)

    def pruned(self, widths: Widths) -> Network:
        """Return the network with these widths."""
        form = self.factorization.form(self.reduced_ranks(widths))
        return channel_groups.remove(form, self.channels, self.kept_channels(widths))

    def reduced_ranks(self, widths: Widths) -> list[Rank]:
        """Return the ranks that are lower at some widths."""
        return [self.factorization.ranks[index] for index in sorted(self.costs.reduced_ranks(widths))]

    def factorized_layers(self, widths: Widths) -> Mapping[str, Mapping[Side, tuple[int, int]]]:
        """Return the ranks (of the whole layer, at some widths) by side of each layer that is in factors there."""
        by_factor = {group.layers[0]: width for group, width in zip(self.groups, widths, strict=True)}
        layers: dict[str, dict[Side, tuple[int, int]]] = {}
        for rank in self.reduced_ranks(widths):
            layers.setdefault(rank.layer, {})[rank.side] = rank.projection.rank, by_factor[rank.factor]
        return layers

    def pruned_layers(self, widths: Widths) -> Mapping[str, tuple[int, int]]:
        """Return the numbers of channels (before, after) of each layer that has fewer at some widths."""
        kept = self.kept_channels(widths)
        layers = {}
        for layer in self.network.layers.values():
            if layer.calls and produces_channels(layer):
                mask = kept[self.channels.layouts[LayerOutput(layer.name)]]
                if not mask.all():
                    layers[layer.name] = (len(mask), int(mask.sum()))
        return layers


def prepare(
    network: Network,
    target: Target,
    method: ImportanceMethod,
    samples: ImportanceSamples | None,
    progress: Progress = SILENT,
    factorization: Factorization | None = None,
) -> PrunableNetwork:
    """Find the layer groups of a network, the importance of its channels, and its costs.

    Where `taylor` finds no channel that matters, `batch_norm` is used: the loss of a network that is certain of every
    sample has no slope.

    Args:
        network: the network.
        target: the target that costs are predicted for.
        method: how importance is measured.
        samples: the samples that `taylor` needs.
        progress: receives the number of samples that are done.
        factorization: the network with the ranks that may be reduced; None: no layer is factorized.

    Raises:
        StageError: no channel can be removed, or importance is not a number.
    """
    factorization = factorization or Factorization(network)
    expanded = factorization.expanded
    channels = channel_groups.find_groups(expanded)
    scores = importance_scores(expanded, channels, method, samples, progress)
    if method == "taylor" and not scores.any():
        method = "batch_norm"
        scores = importance_scores(expanded, channels, method, samples)
    if method != "taylor":
        scores = _with_energies(scores, channels, factorization)
    if not np.isfinite(scores).all():
        raise StageError(
            "the importance of some channels is NaN or infinite", hint="check the model's weights and data.preprocess"
        )
    groups = layer_groups(expanded, channels, scores)
    costs = Costs(factorization, channels, groups, target)
    return PrunableNetwork(factorization, channels, groups, scores, method, costs)


def _with_energies(scores: Scores, channels: ChannelGroups, factorization: Factorization) -> Scores:
    """Return scores by weights with those of ranks by what they add to the outputs: their weights are normalized."""
    scores = scores.copy()
    for rank in factorization.ranks:
        size = np.sqrt(rank.energy)
        scores[channels.layouts[LayerOutput(rank.factor)]] = size / max(float(size.mean()), 1e-12)
    return scores


def substitution(requested: ImportanceMethod, used: ImportanceMethod) -> str:
    """Return the warning that another importance method is used."""
    return f"{requested} finds no channel that matters to the loss: {used} is used instead"
