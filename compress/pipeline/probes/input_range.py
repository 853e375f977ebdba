"""The range of a quantized input, compared with the samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.data.alternatives import alternatives
from deploy.contract.tensors import TensorDescription

LOOKED_AT = 64
"""Number of samples whose values are compared with the range."""


def input_range(tensor: TensorDescription, samples: NDArray[np.float32]) -> Facts | None:
    """Return how samples fill the range of a quantized input; None for an input without a scale.

    Args:
        tensor: the input.
        samples: preprocessed samples [n, ...].

    Returns:
        `low` and `high` of the input; `sample_low` and `sample_high`; `outside`: the share of values that the input
        cannot hold; `used`: the share of its range that the samples fill; `alternative`: a preprocessing that fits
        better, with `description` and `advice`, or None.
    """
    if tensor.scale is None:
        return None
    integers = np.iinfo(tensor.dtype)
    low, high = ((limit - tensor.zero_point) * tensor.scale for limit in (integers.min, integers.max))
    looked = np.asarray(samples[:LOOKED_AT])
    fitting = [alternative for alternative in alternatives(looked) if _fits(alternative(looked), low, high)]
    best = next(iter(fitting), None)
    return {
        "low": low,
        "high": high,
        "sample_low": float(looked.min()),
        "sample_high": float(looked.max()),
        "outside": _outside(looked, low, high),
        "used": float(np.ptp(looked)) / (high - low),
        "alternative": {"description": best.description, "advice": best.advice} if best else None,
    }


def _outside(samples: NDArray[np.float32], low: float, high: float) -> float:
    step = (high - low) / 255
    return float(((samples < low - step) | (samples > high + step)).mean())


def _fits(samples: NDArray[np.float32], low: float, high: float) -> bool:
    """Return whether samples are inside of the range, and fill a quarter of it or more."""
    return _outside(samples, low, high) == 0 and float(np.ptp(samples)) > 0.25 * (high - low)
