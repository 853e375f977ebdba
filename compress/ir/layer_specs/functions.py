"""Activation functions by Keras' names, and their properties."""

from __future__ import annotations

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


def canonical_name(name: str) -> str:
    """Return the main name of a function in Keras."""
    return ALIASES.get(name, name)


def operation_name(function: str) -> str:
    """Return the class of the Keras operation that computes a function: `HardSilu` for `hard_silu`."""
    return "".join(part.capitalize() for part in function.split("_"))
