"""Zeros and clusters of weights, detected from their values, which quantization-aware training must keep.

Sparse weights have many exact zeros, clustered ones few distinct values. Folding a batch norm
scales each output channel, so the distinct values of a clustered kernel are then counted in
each channel. In both cases equal weights stay equal, and zeros stay zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.keras_graph import Layer, Network
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.weight_sparsity import MANY, MOST, SPARSE


@dataclass(frozen=True)
class Pattern:
    """The zeros and clusters of one kernel.

    Attributes:
        codes: shaped like the kernel; weights of one code stay equal, those of code 0 stay 0.
        zeros: share of the weights that stay 0.
        clusters: distinct values other than 0 in an output channel, at most; 0 without clusters.
    """

    codes: NDArray[np.int32]
    zeros: float
    clusters: int


def find(network: Network) -> dict[str, Pattern]:
    """Return the patterns of the kernels that training starts from, by layer; layers without a pattern are left out."""
    patterns = {layer.name: _pattern(layer) for layer in network.layers.values() if spec_of(layer).kernel is not None}
    return {name: pattern for name, pattern in patterns.items() if pattern is not None}


def _pattern(layer: Layer) -> Pattern | None:
    kernel = layer.weights[0]
    zero = kernel == 0
    sparse = bool(zero.mean() >= SPARSE) and not zero.all()
    groups, clusters = _clusters(layer, zero)
    if groups is None and not sparse:
        return None
    if groups is None:
        groups = np.arange(kernel.size).reshape(kernel.shape)
    codes = np.where(zero & sparse, -1, groups)
    codes = np.unique(codes, return_inverse=True)[1].reshape(kernel.shape)
    return Pattern((codes + (not sparse)).astype(np.int32), float(zero.mean()) if sparse else 0.0, clusters)


def _clusters(layer: Layer, zero: NDArray[np.bool_]) -> tuple[NDArray[np.int64] | None, int]:
    """Return the number of each weight's cluster, and the count of clusters; (None, 0) without any."""
    kernel = layer.weights[0]
    channels = _channels(layer)
    value_indices = np.unique(kernel, return_inverse=True)[1].reshape(kernel.shape)
    counts = [len(np.unique(kernel[(channels == channel) & ~zero])) for channel in range(channels.max() + 1)]
    distinct = len(np.unique(kernel[~zero]))
    if 1 < distinct <= MOST and MANY * distinct <= kernel.size:
        return value_indices, max(counts)
    if not 0 < max(counts) <= MOST or MANY * sum(counts) > kernel.size:
        return None, 0
    pairs = np.stack([channels.ravel(), value_indices.ravel()])
    return np.unique(pairs, axis=1, return_inverse=True)[1].reshape(kernel.shape), max(counts)


def _channels(layer: Layer) -> NDArray[np.int64]:
    """Return the output channel of each weight."""
    shape = layer.weights[0].shape
    axes = spec_of(layer).kernels[0]
    return np.broadcast_to(np.arange(axes.outputs(shape)).reshape(axes.output_shape(shape)), shape)
