"""Batch norms measured anew: what stands in front of them has changed, and their means and variances have not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.ir.keras_graph import Layer, Network, Tensor, build
from compress.ir.layer_specs import spec_of
from compress.ir.tensorflow import keras

BATCH = 64


def settled(network: Network, before: Any, samples: NDArray[np.float32]) -> Network:
    """The network with its batch norms measured anew, if it answers more like the model before then; else as it is."""
    anew = remeasured(network, samples)
    if anew is network:
        return network
    as_it_was, then = (distance(build(each), before, samples) for each in (network, anew))
    return anew if then < as_it_was else network


def remeasured(network: Network, samples: NDArray[np.float32]) -> Network:
    """The network with the mean and variance of every batch norm as they are on samples, those in front of it too.

    Args:
        network: whose batch norms are called once each; the others keep what they have.
        samples: preprocessed training samples [n, ...], some dozens at least.
    """
    names = [layer.name for layer in network.layers.values() if _can_be_measured(layer)]
    if not names:
        return network
    drawn = [
        layer for layer in network.layers.values() if spec_of(layer).random_in_training and _keeps_shape(layer, network)
    ]
    moved = {Tensor(each.name, call): each.given(call)[0] for each in drawn for call in range(len(each.calls))}
    model = build(network.edited(dict.fromkeys((each.name for each in drawn), None), moved))
    norms = [model.get_layer(name) for name in names]
    parts = np.array_split(samples, -(-len(samples) // BATCH))
    for number, batch in enumerate(parts):
        for norm in norms:
            norm.momentum = number / (number + 1)  # so that all batches weigh the same
        model(batch, training=True)
    layers = {}
    for name, norm in zip(names, norms, strict=True):
        layer = network.layers[name]
        measured = tuple(np.asarray(weight) for weight in norm.get_weights()[-2:])
        layers[name] = replace(layer, weights=(*layer.weights[:-2], *measured))
    return network.edited(layers, {})


def _keeps_shape(layer: Layer, network: Network) -> bool:
    """Whether a layer can be left out; RandomCrop, for one, cannot."""
    calls = range(len(layer.calls))
    return all(network.shapes[layer.given(call)[0]] == network.shapes[Tensor(layer.name, call)] for call in calls)


def _can_be_measured(layer: Layer) -> bool:
    return spec_of(layer).is_batch_norm and len(layer.calls) == 1


def distance(model: Any, other: Any, samples: NDArray[np.float32]) -> float:
    """The mean squared difference of what two models answer."""
    flatten, total = keras().tree.flatten, 0.0
    for batch in np.array_split(samples, -(-len(samples) // BATCH)):
        pairs = zip(flatten(model(batch, training=False)), flatten(other(batch, training=False)), strict=True)
        total += len(batch) * sum(float(np.mean((np.asarray(a, np.float64) - np.asarray(b)) ** 2)) for a, b in pairs)
    return total / len(samples)
