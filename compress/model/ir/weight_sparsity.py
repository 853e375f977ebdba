"""Redundancy of weights: zeros and repeated values.

Sparse weights have many exact zeros, clustered ones few distinct values. Folding a batch norm scales each output
channel, so the distinct values of a clustered kernel are then counted in each channel. In both cases equal weights stay
equal, and zeros stay zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.keras_graph import Layer, Network
from compress.model.ir.layer_specs import spec_of

SPARSE = 0.3
"""Share of exact zeros from which a kernel counts as sparse; ordinary trained weights have almost none."""
MANY = 4
"""Average number of repetitions of a value in a kernel that counts as clustered."""
MOST = 256
"""Largest number of distinct values in a clustered kernel."""


@dataclass(frozen=True)
class Redundancy:
    """The redundancy of one kernel.

    Attributes:
        zeros: the share of weights that are exactly 0.
        distinct: the number of different values, 0 included.
    """

    weights: int
    zeros: float
    distinct: int

    @property
    def sparse(self) -> bool:
        """Whether the share of zeros is so high that it comes from sparsification."""
        return self.zeros >= SPARSE

    @property
    def clustered(self) -> bool:
        """Whether values repeat so often that they must come from clustering."""
        return 1 < self.distinct <= MOST and self.distinct * MANY <= self.weights * (1 - self.zeros) + MANY


def kernel(layer: Layer) -> NDArray[np.float32] | None:
    """Return the kernel of a layer; of a separable convolution the pointwise one, which has nearly all weights."""
    kernels = spec_of(layer).kernels
    return np.asarray(layer.weights[len(kernels) - 1]) if kernels and layer.weights else None


def of(values: NDArray[np.float32]) -> Redundancy:
    """Return the redundancy of a kernel."""
    return Redundancy(values.size, float((values == 0).mean()), len(np.unique(values)))


def by_layer(network: Network) -> dict[str, Redundancy]:
    """Return the redundancy of every kernel of a network."""
    kernels = {layer.name: kernel(layer) for layer, call in network.in_order() if call == 0}
    return {name: of(values) for name, values in kernels.items() if values is not None}


def zeros(kernels: Mapping[str, Redundancy]) -> float:
    """Return the share of zeros in all kernels together."""
    total = sum(kernel.weights for kernel in kernels.values())
    return sum(kernel.weights * kernel.zeros for kernel in kernels.values()) / max(total, 1)


def to_json(kernels: Mapping[str, Redundancy]) -> dict[str, Any]:
    """Return the redundancies as plain values, with rounded shares."""
    return {name: {**asdict(kernel), "zeros": round(kernel.zeros, 4)} for name, kernel in kernels.items()}


def empty(network: Network) -> list[str]:
    """Return the names of convolutions and dense layers whose kernel is all zeros."""
    layers = [layer for layer in network.layers.values() if spec_of(layer).kernels]
    return [layer.name for layer in layers if any(weight.ndim > 1 and not weight.any() for weight in layer.weights)]


# --- what training keeps ----------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """The zeros and clusters of one kernel, which quantization-aware training must keep.

    Attributes:
        codes: shaped like the kernel; weights with the same code stay equal, and weights with code 0 stay 0.
        zeros: share of the weights that stay 0.
        clusters: distinct values other than 0 in an output channel, at most; 0 without clusters.
    """

    codes: NDArray[np.int32]
    zeros: float
    clusters: int


def patterns(network: Network) -> dict[str, Pattern]:
    """Return the patterns of the kernels that training starts from, by layer; layers without a pattern are left out."""
    by_name = {layer.name: _pattern(layer) for layer in network.layers.values() if spec_of(layer).kernel is not None}
    return {name: pattern for name, pattern in by_name.items() if pattern is not None}


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
    channels = output_channels(layer)
    value_indices = np.unique(kernel, return_inverse=True)[1].reshape(kernel.shape)
    counts = [len(np.unique(kernel[(channels == channel) & ~zero])) for channel in range(channels.max() + 1)]
    distinct = len(np.unique(kernel[~zero]))
    if 1 < distinct <= MOST and MANY * distinct <= kernel.size:
        return value_indices, max(counts)
    if not 0 < max(counts) <= MOST or MANY * sum(counts) > kernel.size:
        return None, 0
    pairs = np.stack([channels.ravel(), value_indices.ravel()])
    return np.unique(pairs, axis=1, return_inverse=True)[1].reshape(kernel.shape), max(counts)


def output_channels(layer: Layer) -> NDArray[np.int64]:
    """Return the output channel of each weight."""
    shape = layer.weights[0].shape
    axes = spec_of(layer).kernels[0]
    return np.broadcast_to(np.arange(axes.outputs(shape)).reshape(axes.output_shape(shape)), shape)
