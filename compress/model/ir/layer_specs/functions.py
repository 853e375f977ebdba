"""Activation functions by Keras' names, their properties, and the recognition of those that a ReLU can replace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ALIASES: Mapping[str, str] = {"swish": "silu", "hard_swish": "hard_silu"}
"""Second names that Keras accepts for a function."""
ELEMENTWISE = frozenset(
    {
        *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "tanh", "sigmoid"),
        *("log_sigmoid", "hard_sigmoid", "hard_silu", "hard_tanh", "softplus", "softsign", "exponential"),
        *("hard_shrink", "soft_shrink", "tanh_shrink", "sparse_plus", "sparse_sigmoid", "squareplus", "threshold"),
    }
)
"""Functions that compute each output value from the input value at the same index alone."""
ACROSS_CHANNELS = frozenset({"softmax", "log_softmax", "sparsemax"})
"""Functions that compute each output value from all values of the last axis."""
FUSED = frozenset({"relu", "relu6"})
"""Functions that TFLite computes as part of the operator before."""
SINGLE_OPERATOR = FUSED | {"linear", "sigmoid", "tanh", "softmax", "hard_sigmoid", "hard_tanh"}
"""Functions that cost nothing or one operator without weights in a TFLite file."""
PRESCRIBED_RANGES: Mapping[str, tuple[float, float]] = {
    "softmax": (0.0, 255 / 256),
    "sigmoid": (0.0, 255 / 256),
    "tanh": (-1.0, 127 / 128),
}
"""Output ranges that TFLite prescribes (scale 1/256 or 1/128).

Source: TensorFlow Lite 8-bit quantization specification.
"""
SATURATION: Mapping[str, tuple[float, float]] = {
    "relu": (0.0, math.inf),
    "relu6": (0.0, math.inf),
    "sigmoid": (-6.25, 6.25),
    "tanh": (-3.5, 3.5),
    "silu": (-8.5, math.inf),
    "gelu": (-3.3, math.inf),
}
"""Limits of the input beyond which the output changes by less than 1/512, half a step of an 8-bit sigmoid.

Functions that are replaced by several layers before quantization are left out.
"""
SELU_SCALE = 1.0507009873554805
"""Source: Klambauer et al., Self-Normalizing Neural Networks, 2017, as is that of SELU_ALPHA."""
SELU_ALPHA = 1.6732632423543772
"""The factor of the exponential."""


def canonical_name(name: str) -> str:
    """Return the main name of a function in Keras."""
    return ALIASES.get(name, name)


def operation_name(function: str) -> str:
    """Return the class of the Keras operation that computes a function: `HardSilu` for `hard_silu`."""
    return "".join(part.capitalize() for part in function.split("_"))


Activation = Literal[
    "silu", "hard_silu", "gelu", "mish", "elu", "selu", "celu", "softplus", "tailed", "leaky_relu", "threshold", "prelu"
]
NAMED: Mapping[str, Activation] = {
    name: name for name in ("silu", "hard_silu", "gelu", "mish", "elu", "selu", "celu", "softplus", "leaky_relu")
}
"""Functions of Keras that a ReLU can replace, by Keras' name."""
Values = NDArray[np.float64]
POINTS = np.linspace(-12.0, 12.0, 241)
"""The inputs at which `recognize` compares functions."""
NEAR = 2e-3
"""Largest difference between two forms of one function; GELU and its tanh approximation differ by 5e-4."""


def _elu(x: Values) -> Values:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _softplus(x: Values) -> Values:
    return np.asarray(np.logaddexp(0, x))


FUNCTIONS: Mapping[Activation, Callable[[Values], Values]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "hard_silu": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "gelu": lambda x: x * np.array([0.5 * (1 + math.erf(element / math.sqrt(2))) for element in x]),
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
