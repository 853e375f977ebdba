"""How much of a network's weights says nothing new: zeros, and values that stand many times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.ir.keras_graph import Layer, Network
from compress.ir.layer_specs import spec_of

SPARSE = 0.3
"""Share of exact zeros from which a kernel counts as sparse; trained weights have next to none."""
MANY = 4
"""How often a value stands on average in a kernel that counts as clustered."""
MOST = 256
"""Distinct values that a clustered kernel has at most."""


@dataclass(frozen=True)
class Redundancy:
    """What is redundant in one kernel.

    Attributes:
        weights: how many there are.
        zeros: share of them that is exactly 0.
        distinct: how many different values there are, 0 included.
    """

    weights: int
    zeros: float
    distinct: int

    @property
    def sparse(self) -> bool:
        """Whether the zeros were made on purpose."""
        return self.zeros >= SPARSE

    @property
    def clustered(self) -> bool:
        """Whether the weights were made to share values."""
        return 1 < self.distinct <= MOST and self.distinct * MANY <= self.weights * (1 - self.zeros) + MANY


def kernel(layer: Layer) -> NDArray[np.float32] | None:
    """The kernel of a layer; of a separable one its pointwise part, which holds nearly all weights."""
    kernels = spec_of(layer).kernels
    return np.asarray(layer.weights[len(kernels) - 1]) if kernels and layer.weights else None


def of(values: NDArray[np.float32]) -> Redundancy:
    """What is redundant in a kernel."""
    return Redundancy(values.size, float((values == 0).mean()), len(np.unique(values)))


def by_layer(network: Network) -> dict[str, Redundancy]:
    """What is redundant in every kernel of a network."""
    kernels = {layer.name: kernel(layer) for layer, call in network.in_order() if call == 0}
    return {name: of(values) for name, values in kernels.items() if values is not None}


def zeros(found: Mapping[str, Redundancy]) -> float:
    """The share of zeros in all kernels together."""
    total = sum(each.weights for each in found.values())
    return sum(each.weights * each.zeros for each in found.values()) / max(total, 1)


def to_json(found: Mapping[str, Redundancy]) -> dict[str, Any]:
    """As plain values, shares rounded."""
    return {name: {**asdict(each), "zeros": round(each.zeros, 4)} for name, each in found.items()}


def empty(network: Network) -> list[str]:
    """Return the names of convolutions and dense layers whose kernel is all zeros."""
    found = [layer for layer in network.layers.values() if spec_of(layer).kernels]
    return [each.name for each in found if any(weight.ndim > 1 and not weight.any() for weight in each.weights)]
