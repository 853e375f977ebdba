"""Layers and calls in the form of Keras files, for importers that build them from other formats."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.keras_graph import Layer, LayerOutput

LAYERS, NUMPY, NN, MATH, IMAGE, CORE = (
    "keras.layers",
    *(f"keras.src.ops.{module}" for module in ("numpy", "nn", "math", "image", "core")),
)
"""Modules of layers and operations, as Keras files name them."""
LONGEST_NAME = 60
"""Converted graphs name a layer by the path of its nested scopes; its end tells layers apart."""
MOST_IN_CONFIG = 200_000
"""Largest size of a constant that is not a weight: Keras stores it as text."""


class NotImportedError(Exception):
    """An operator or a function has no counterpart in Keras; the message gives the reason in a few words."""


NOT_MADE = (NotImportedError, ArithmeticError, IndexError, ValueError)
"""Exceptions of a rule: an untrusted file may hold values that no rule expects."""


@runtime_checkable
class Computed(Protocol):
    """A placeholder for a tensor of the network among the arguments of a call."""

    @property
    def tensor(self) -> LayerOutput:
        """The tensor."""


def entry(module: str, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a layer or an operation."""
    registered = None if module == LAYERS else kind
    return {"module": module, "class_name": kind, "config": dict(config), "registered_name": registered}


def layer_called_once(
    module: str, kind: str, config: Mapping[str, Any], arguments: Sequence[Any], weights: Sequence[NDArray[Any]] = ()
) -> Layer:
    """Return a layer that is called once, with these arguments; `config` has its name."""
    call = {"args": [argument(value) for value in arguments], "kwargs": {}}
    return Layer(config["name"], kind, entry(module, kind, config), (call,), tuple(weights))


def argument(value: Any) -> Any:
    """Return an argument of a call in the form of Keras files: a tensor, list, number, array or slice."""
    if isinstance(value, Computed):
        return value.tensor
    if isinstance(value, list):
        return [argument(element) for element in value]
    if isinstance(value, slice):
        parts = {"start": value.start, "stop": value.stop, "step": value.step}
        return {"class_name": "__slice__", "config": parts}
    if isinstance(value, np.ndarray):
        if value.size == 1 and value.ndim == 0:
            return value.item()
        if value.size > MOST_IN_CONFIG:
            raise NotImportedError(f"its constant has {value.size:,} values, more than {MOST_IN_CONFIG:,}")
        return {"class_name": "__numpy__", "config": {"value": value.tolist(), "dtype": str(value.dtype)}}
    return value


def free_name(proposal: str, taken: Collection[str]) -> str:
    """Return a name that is valid in Keras and TensorFlow and not yet taken."""
    stem = re.sub(r"[^A-Za-z0-9]+", "_", proposal)[-LONGEST_NAME:].strip("_") or "layer"
    if stem not in taken:
        return stem
    # A hostile file repeats a name thousands of times: the number is searched by doubling and halving.
    low, high = 0, 1
    while f"{stem}_{high}" in taken:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if f"{stem}_{middle}" in taken else (low, middle)
    return f"{stem}_{high}"
