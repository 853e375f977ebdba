"""Sensitivity: what a model loses when one of its layer groups gets narrower, without training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from compress.learning.pruning.importance import ImportanceSamples, gated_model
from compress.learning.pruning.prunable import PrunableNetwork
from compress.model.ir.channel_groups import Mask
from compress.model.ir.tensorflow import split_inputs
from compress.results.pruning import SensitivityCurve

SHARES = (0.875, 0.75, 0.5, 0.25, 0.0)
"""Shares of a layer group at which it is measured; the last one stands for its smallest width."""
_BATCH = 64
"""Samples that are run at once; chosen: the result does not depend on it."""
Logits = NDArray[np.float32]


def sensitivity_curves(
    prunable: PrunableNetwork, samples: ImportanceSamples, report: Callable[[int, int], None]
) -> list[SensitivityCurve]:
    """Return the curve of every layer group.

    After each width `report` is called with the number of widths that are measured, and with the number of all widths.
    """
    step = prunable.costs.target.cost.blocks.inputs
    widths = []
    for group in prunable.groups:
        size = len(group.members)
        rounded = {max(round(share * size) // step * step, group.minimum) for share in SHARES}
        widths.append(sorted((width for width in rounded if width < size), reverse=True))
    total = sum(map(len, widths))
    predictor = _MaskedPredictor(prunable, samples)
    reference = predictor.logits(np.ones(len(prunable.channels.group), bool))
    done = 0
    curves = []
    for group, narrower in zip(prunable.groups, widths, strict=True):
        divergence = [0.0]
        accuracy = _accuracy(reference, samples)
        for width in narrower:
            kept = np.ones(len(prunable.channels.group), bool)
            kept[group.members[width:]] = False
            predicted = predictor.logits(prunable.channels.with_coupled(kept))
            divergence.append(_divergence(reference, predicted, samples))
            accuracy += _accuracy(predicted, samples)
            done += 1
            report(done, total)
        kept_widths = (len(group.members), *narrower)
        curves.append(SensitivityCurve(group.layers, kept_widths, tuple(divergence), tuple(accuracy)))
    return curves


def losses_by_width(curve: SensitivityCurve) -> NDArray[np.float64]:
    """Return the divergence at every width from 0: interpolated, and never lower at a smaller width."""
    divergence = np.maximum.accumulate(curve.divergence)
    losses: NDArray[np.float64] = np.interp(np.arange(curve.kept[0] + 1), curve.kept[::-1], divergence[::-1])
    return losses


class _MaskedPredictor:
    """A model whose channels can be switched off."""

    def __init__(self, prunable: PrunableNetwork, samples: ImportanceSamples) -> None:
        import tensorflow

        model = gated_model(prunable.network, prunable.channels)
        self._model = tensorflow.function(model, reduce_retracing=True)
        self._inputs = model.inputs[:-1]
        self._samples = samples

    def logits(self, kept: Mask) -> Logits:
        """Return the outputs with some channels, in the form of `Head.logits`: [n, ...]."""
        inputs = self._samples.inputs
        gates = kept.astype(np.float32)[np.newaxis]
        parts = []
        for batch in np.array_split(inputs, max(-(-len(inputs) // _BATCH), 1)):
            tensors = [*split_inputs(self._inputs, batch), np.repeat(gates, len(batch), axis=0)]
            parts.append(np.asarray(self._samples.head.logits(self._model(tensors, training=False)), np.float32))
        return np.concatenate(parts)


def _divergence(expected: Logits, actual: Logits, samples: ImportanceSamples) -> float:
    """Return the mean distance of the outputs."""
    parts = []
    for start in range(0, len(expected), _BATCH):
        part = slice(start, start + _BATCH)
        parts.append(np.asarray(samples.head.divergence(expected[part], actual[part]), np.float64))
    return float(np.concatenate(parts).mean())


def _accuracy(predicted: Logits, samples: ImportanceSamples) -> list[float]:
    """Return the accuracy of one width; nothing if the samples have no classes."""
    if not samples.has_classes:
        return []
    return [float((predicted.argmax(axis=1) == samples.labels).mean())]
