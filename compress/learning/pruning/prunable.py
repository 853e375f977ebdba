"""A network that is ready for pruning, and the removal of channels from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from compress.core.errors import StageError
from compress.core.progress import SILENT, Progress
from compress.learning.pruning.cost import Costs, TrialConversion
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
from compress.targets.base import Target


@dataclass(frozen=True)
class PrunableNetwork:
    """A network with all that the choice of channels depends on.

    Attributes:
        network: the network with all channels.
        channels: its channels.
        groups: its layer groups.
        scores: the importance of its channels.
        importance: the method that the scores come from.
        costs: its costs, by the widths of the layer groups.
    """

    network: Network
    channels: ChannelGroups
    groups: tuple[LayerGroup, ...]
    scores: Scores
    importance: ImportanceMethod
    costs: Costs

    @property
    def full_widths(self) -> Widths:
        """The widths with all channels."""
        return self.costs.full_widths

    @property
    def minimum_widths(self) -> Widths:
        """The smallest widths."""
        return tuple(group.minimum for group in self.groups)

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
        return channel_groups.remove(self.network, self.channels, self.kept_channels(widths))

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
) -> PrunableNetwork:
    """Find the layer groups of a network, the importance of its channels, and its costs on a target.

    Where `taylor`, which needs samples, finds no channel that matters, `batch_norm` is used: the loss of a network that
    is certain of every sample has no slope.

    Raises:
        StageError: no channel can be removed, or importance is not a number.
    """
    channels = channel_groups.find_groups(network)
    scores = importance_scores(network, channels, method, samples, progress)
    if method == "taylor" and not scores.any():
        method = "batch_norm"
        scores = importance_scores(network, channels, method, samples)
    if not np.isfinite(scores).all():
        raise StageError(
            "the importance of some channels is NaN or infinite", hint="check the model's weights and data.preprocess"
        )
    groups = layer_groups(network, channels, scores)
    costs = Costs(network, channels, groups, target)
    return PrunableNetwork(network, channels, groups, scores, method, costs)


def substitution(requested: ImportanceMethod, used: ImportanceMethod) -> str:
    """Return the warning that another importance method is used."""
    return f"{requested} finds no channel that matters to the loss: {used} is used instead"
