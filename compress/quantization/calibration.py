"""Calibration: the float model's activations on real samples make a plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compress.quantization.plan import QuantizationPlan
from compress.quantization.ranges import select
from compress.quantization.statistics import Statistics, collect
from compress.training.network import Network


def calibrate(network: Network, samples: NDArray[np.float32], method: str = "minmax") -> QuantizationPlan:
    """A range for every point.

    Args:
        network: in canonical form (`training.folding.canonical`).
        samples: preprocessed calibration samples [n, ...].
        method: one of `ranges.METHODS`.

    Raises:
        StageError: an activation is NaN or infinite.
    """
    return planned(collect(network, samples), method)


def planned(found: Statistics, method: str) -> QuantizationPlan:
    """The same from what was seen already."""
    return QuantizationPlan(select(found, method), f"{method} of {found.samples} samples")
