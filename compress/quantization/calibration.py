"""Calibration: the float model's activations on real samples make a plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compress.quantization.plan import QuantizationPlan
from compress.quantization.ranges import select
from compress.quantization.statistics import collect
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
    return QuantizationPlan(select(collect(network, samples), method), f"{method} of {len(samples)} samples")
