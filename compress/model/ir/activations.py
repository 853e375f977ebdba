"""Activations that a ReLU can replace: their names in Keras, and recognition by values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import erf, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.passes.decompose import SELU_ALPHA, SELU_SCALE

Activation = Literal[
    "silu", "hard_silu", "gelu", "mish", "elu", "selu", "celu", "softplus", "tailed", "leaky_relu", "threshold", "prelu"
]

NAMED: Mapping[str, Activation] = {
    name: name for name in ("silu", "hard_silu", "gelu", "mish", "elu", "selu", "celu", "softplus", "leaky_relu")
}
"""Functions of Keras that a ReLU can replace, by Keras' name."""
Values = NDArray[np.float64]
POINTS = np.linspace(-12.0, 12.0, 241)
NEAR = 2e-3
"""Largest difference between two forms of one function; GELU and its tanh approximation differ by 5e-4."""


def _sigmoid(x: Values) -> Values:
    return np.asarray(1 / (1 + np.exp(-x)))


def _elu(x: Values) -> Values:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _softplus(x: Values) -> Values:
    return np.asarray(np.logaddexp(0, x))


FUNCTIONS: Mapping[Activation, Callable[[Values], Values]] = {
    "silu": lambda x: x * _sigmoid(x),
    "hard_silu": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "gelu": lambda x: x * np.array([0.5 * (1 + erf(element / sqrt(2))) for element in x]),
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "elu": _elu,
    "selu": lambda x: SELU_SCALE * np.where(x > 0, x, SELU_ALPHA * _elu(np.minimum(x, 0))),
    "softplus": _softplus,
}


def recognize(values: Values) -> Activation | None:
    """Return the activation that has these values at POINTS, or None.

    `tailed` is any other function that is near x for high x, bounded for low x, and negative between.
    """
    if not np.isfinite(values).all():
        return None
    for kind, function in FUNCTIONS.items():
        if np.abs(values - function(POINTS)).max() <= NEAR:
            return kind
    slope = float(values[0] / POINTS[0])
    leaky = np.where(POINTS > 0, POINTS, slope * POINTS)
    if 0 < abs(slope) < 1 and np.abs(values - leaky).max() <= NEAR:
        return "leaky_relu"
    far = POINTS >= 8
    near_x = np.abs(values[far] / POINTS[far] - 1).max() <= 0.02
    return "tailed" if near_x and -2 <= values.min() < -0.02 and abs(values[0] - values[10]) < 0.1 else None
