"""What a network loses when one set of channels gets smaller, measured: a curve for each set, nothing trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.ir.channel_groups import Channels
from compress.ir.keras_graph import LayerOutput, Network
from compress.pruning.allocation import Cut
from compress.pruning.importance import ImportanceSamples, gated, made_by
from compress.tasks.base import Head

SHARES = (0.875, 0.75, 0.5, 0.25, 0.0)
"""Shares of a set at which it is measured; the last one stands for the fewest groups that may stay."""
_BATCH = 64


@dataclass(frozen=True)
class SensitivityCurve:
    """What a set of channels means to the network.

    Attributes:
        layers: the layers that make these channels.
        kept: how many groups of the set stay at each point; all at the first.
        divergence: Kullback-Leibler divergence of the answers from those of the whole network, in nats.
        accuracy: share of right answers.
    """

    layers: tuple[str, ...]
    kept: tuple[int, ...]
    divergence: tuple[float, ...]
    accuracy: tuple[float, ...]

    def lost(self) -> NDArray[np.float64]:
        """The divergence for every number of groups from none to all: between the points, never less with fewer."""
        worst = np.maximum.accumulate(self.divergence)
        found: NDArray[np.float64] = np.interp(np.arange(self.kept[0] + 1), self.kept[::-1], worst[::-1])
        return found

    def to_json(self) -> dict[str, Any]:
        """As a plain map."""
        return {
            "layers": list(self.layers),
            "kept": list(self.kept),
            "divergence": [round(each, 6) for each in self.divergence],
            "accuracy": [round(each, 4) for each in self.accuracy],
        }


def curves(cut: Cut, samples: ImportanceSamples, tell: Callable[[int, int], None]) -> list[SensitivityCurve]:
    """The curve of every set.

    Args:
        cut: a classifier.
        samples: what is measured on.
        tell: told how many points of how many were measured.
    """
    import tensorflow

    network, channels, sets = cut.network, cut.channels, cut.sets
    inputs, labels, head = samples.inputs, samples.labels, samples.head
    model = tensorflow.function(gated(network, channels), reduce_retracing=True)

    def answers(kept: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Logarithms of probabilities, [n, classes]."""
        row = kept.astype(np.float32)[np.newaxis]
        made = [_scores(model, head, part, row) for part in np.array_split(inputs, max(-(-len(inputs) // _BATCH), 1))]
        return np.concatenate(made)

    whole = answers(np.ones(len(channels.group), bool))
    step = cut.costs.target.cost.blocks.inputs
    points = [_points(len(members), least, step) for members, least in zip(sets, cut.least, strict=True)]
    total, done, found = sum(map(len, points)), 0, []
    for members, kept in zip(sets, points, strict=True):
        divergence, accuracy = [0.0], [float((whole.argmax(axis=1) == labels).mean())]
        for count in kept:
            mask = np.ones(len(channels.group), bool)
            mask[members[count:]] = False
            changed = answers(channels.tied(mask))
            divergence.append(float((np.exp(whole) * (whole - changed)).sum(axis=1).mean()))
            accuracy.append(float((changed.argmax(axis=1) == labels).mean()))
            done += 1
            tell(done, total)
        layers = _makers(network, channels, members)
        found.append(SensitivityCurve(layers, (len(members), *kept), tuple(divergence), tuple(accuracy)))
    return found


def _scores(model: Any, head: Head, part: NDArray[np.float32], row: NDArray[np.float32]) -> NDArray[np.float64]:
    logits = np.asarray(head.logits(model([part, np.repeat(row, len(part), axis=0)], training=False)), np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    made: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return made


def _points(size: int, least: int, step: int) -> list[int]:
    """How many groups to keep: fewer and fewer, in the target's steps."""
    wanted = [max(round(share * size) // step * step, least) for share in SHARES]
    return sorted({count for count in wanted if count < size}, reverse=True)


def _makers(network: Network, channels: Channels, members: NDArray[np.int64]) -> tuple[str, ...]:
    own = set(members.tolist())
    return tuple(
        layer.name
        for layer in network.layers.values()
        if layer.calls
        and made_by(layer) is not None
        and own & set(channels.group[channels.layouts[LayerOutput(layer.name)]].tolist())
    )
