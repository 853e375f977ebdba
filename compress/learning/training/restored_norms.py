"""Statistics for batch norms that were restored (`compress.model.ir.passes.fold`).

Mean 0 and variance 1 are right for inference. But in training a batch norm uses the statistics of the batch: the first
step would destroy what the layers have learnt. So each batch norm gets the statistics of the training samples, with
gamma and beta that keep its function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from compress.data.rows import rows as rows_of
from compress.learning.context import Context
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import Network
from compress.model.ir.passes.fold import with_statistics
from compress.model.ir.tensorflow import run

SAMPLES = 512
"""Number of training samples for the statistics."""
BATCH = 32


def with_measured_statistics(network: Network, norms: Sequence[str], context: Context) -> Network:
    """Return a network whose batch norms have the statistics of training samples, and compute the same as before.

    Args:
        network: a network with one input.
        norms: batch norms with an offset and a factor, called once.
        context: data and seed.
    """
    names = [name for name in norms if network.layers[name].config.get("scale", True)]
    if not names:
        return network
    read = [network.layers[name].inputs()[0] for name in names]
    model = keras_graph.build(keras_graph.subnetwork(network, read))
    inputs = context.data.inputs("train")
    order = np.random.default_rng(context.seed).permutation(len(inputs))[:SAMPLES]
    sums = [np.zeros((2, network.shapes[tensor][-1] or 0)) for tensor in read]
    counts = [0] * len(read)
    for indices in np.array_split(order, -(-len(order) // BATCH)):
        for number, values in enumerate(_as_list(run(model, rows_of(inputs, indices)))):
            array = np.asarray(values, np.float64).reshape(-1, sums[number].shape[1])
            sums[number] += [array.sum(axis=0), (array**2).sum(axis=0)]
            counts[number] += len(array)
    layers = dict(network.layers)
    for name, (total, squares), count in zip(names, sums, counts, strict=True):
        mean = total / count
        layers[name] = with_statistics(layers[name], mean, np.maximum(squares / count - mean**2, 0))
    return replace(network, layers=layers)


def _as_list(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]
