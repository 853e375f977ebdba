"""Layer groups: layers that produce the same channels, so that all of them get narrower together.

Within a layer group the channels with the highest importance are kept. The number of channels that are kept is the
width of the group (`allocation`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.learning.pruning.importance import Scores, produces_channels
from compress.model.ir.channel_groups import ChannelGroups
from compress.model.ir.keras_graph import LayerOutput, Network

MIN_WIDTH = 4
"""Every layer keeps at least this many of its channel groups, if it has as many."""
Widths = tuple[int, ...]
"""For each layer group the number of channel groups that are kept."""
_Members = NDArray[np.int64]


@dataclass(frozen=True)
class LayerGroup:
    """Coupled layers and the channel groups that they produce.

    Attributes:
        layers: the names of the layers.
        members: the channel groups by number, the most important first.
        minimum: the smallest width. Every layer of the group keeps MIN_WIDTH of its channels at this width.
    """

    layers: tuple[str, ...]
    members: _Members
    minimum: int


def layer_groups(network: Network, channels: ChannelGroups, scores: Scores) -> tuple[LayerGroup, ...]:
    """Return the layer groups of a network that have channels to remove.

    Raises:
        StageError: no channel can be removed.
    """
    coupled: list[dict[str, _Members]] = []
    for layer in network.layers.values():
        if not layer.calls or not produces_channels(layer):
            continue
        members = np.unique(channels.group[channels.layouts[LayerOutput(layer.name)]])
        members = members[~channels.pinned[members]]
        if not len(members):
            continue
        merged = {layer.name: members}
        separate = []
        for rows in coupled:
            if any(np.isin(members, other).any() for other in rows.values()):
                merged |= rows
            else:
                separate.append(rows)
        coupled = [*separate, merged]
    if not coupled:
        names = ", ".join(channels.unsupported[:5])
        reason = f"{names} cannot be followed" if names else "every one reaches an output"
        raise StageError(f"no channel of this model can be removed: {reason}", hint="remove `prune`")
    return tuple(_ordered_group(rows, scores) for rows in coupled)


def _ordered_group(rows: dict[str, _Members], scores: Scores) -> LayerGroup:
    """Put the most important few channels of every layer before all others: they make up the smallest width."""
    required = np.unique(np.concatenate([_by_importance(members, scores)[:MIN_WIDTH] for members in rows.values()]))
    others = np.setdiff1d(np.concatenate(list(rows.values())), required)
    members = np.concatenate([_by_importance(required, scores), _by_importance(others, scores)])
    return LayerGroup(tuple(rows), members, len(required))


def _by_importance(members: _Members, scores: Scores) -> _Members:
    return members[np.argsort(-scores[members], kind="stable")]
