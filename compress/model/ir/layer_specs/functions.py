"""Activation functions by Keras' names, and their properties."""

from __future__ import annotations

import math
from collections.abc import Mapping

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


def canonical_name(name: str) -> str:
    """Return the main name of a function in Keras."""
    return ALIASES.get(name, name)


def operation_name(function: str) -> str:
    """Return the class of the Keras operation that computes a function: `HardSilu` for `hard_silu`."""
    return "".join(part.capitalize() for part in function.split("_"))
