"""Redundancy of weights: zeros and repeated values."""

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
