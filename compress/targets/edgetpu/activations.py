"""The number of operators that an activation function becomes on the Edge TPU.

Counted in legalized files; `tests/architecture/test_layer_specs.py` counts them again.
"""

from __future__ import annotations

from collections.abc import Mapping

OPERATORS: Mapping[str, int] = {
    **dict.fromkeys(("linear", "relu", "relu6"), 0),
    **dict.fromkeys(("sigmoid", "tanh", "softmax", "hard_sigmoid", "leaky_relu"), 1),
    "silu": 2,
    "hard_silu": 3,
    "gelu": 6,
    "softsign": 7,
    **dict.fromkeys(("elu", "selu", "celu", "mish", "softplus", "exponential"), 25),
}
"""Operators by Keras' name of the function, in addition to the operator before it; a hard sigmoid is a factor behind a
fused ReLU6. A function whose curve is fitted (`rewrites.function_fitting`) takes 25."""
CHEAP = frozenset({*(name for name, count in OPERATORS.items() if count <= 1), "hard_tanh"} - {"leaky_relu"})
"""Functions of at most one operator without parameters of its own; a leaky ReLU has slopes."""


def operators(function: str) -> int:
    """Return the number of operators; one for a function that is not listed."""
    return OPERATORS.get(function, 1)
