"""Layers and calls as Keras describes them in its files, for importers that make both of something else."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from compress.ir.keras_graph import Layer, LayerOutput

LAYERS, NUMPY, NN, MATH, IMAGE, CORE = (
    "keras.layers",
    *(f"keras.src.ops.{module}" for module in ("numpy", "nn", "math", "image", "core")),
)
"""Where Keras says its layers and operations come from, in the files that it writes."""
LONGEST_NAME = 60
MOST_IN_CONFIG = 200_000
"""Numbers of a constant that is no weight of a layer: Keras stores it as text."""


class NotImportedError(Exception):
    """An operator has no counterpart; the message says why, in a few words."""


NOT_MADE = (NotImportedError, ArithmeticError, LookupError, TypeError, ValueError)
"""What a rule ends with: files come from anywhere, and their numbers may be such as no rule expects."""


@runtime_checkable
class Computed(Protocol):
    """A placeholder for a tensor of the network among the arguments of a call."""

    @property
    def tensor(self) -> LayerOutput:
        """The tensor."""


def entry(module: str, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's or an operation's description."""
    registered = None if module == LAYERS else kind
    return {"module": module, "class_name": kind, "config": dict(config), "registered_name": registered}


def made(
    module: str, kind: str, config: Mapping[str, Any], given: Sequence[Any], weights: Sequence[NDArray[Any]] = ()
) -> Layer:
    """A layer that is called once, with these arguments; its name is in its settings."""
    call = {"args": [argument(each) for each in given], "kwargs": {}}
    return Layer(config["name"], kind, entry(module, kind, config), (call,), tuple(weights))


def argument(given: Any) -> Any:
    """An argument of a call as Keras writes it: tensors, lists, numbers, arrays, slices."""
    if isinstance(given, Computed):
        return given.tensor
    if isinstance(given, list):
        return [argument(each) for each in given]
    if isinstance(given, slice):
        parts = {"start": given.start, "stop": given.stop, "step": given.step}
        return {"class_name": "__slice__", "config": parts}
    if isinstance(given, np.ndarray):
        if given.size == 1 and given.ndim == 0:
            return given.item()
        if given.size > MOST_IN_CONFIG:
            raise NotImportedError(f"its constant has {given.size:,} numbers, more than {MOST_IN_CONFIG:,}")
        return {"class_name": "__numpy__", "config": {"value": given.tolist(), "dtype": str(given.dtype)}}
    return given


def free_name(wanted: str, taken: Collection[str]) -> str:
    """A name that Keras and TensorFlow take and that no layer has yet."""
    stem = re.sub(r"[^A-Za-z0-9]+", "_", wanted)[-LONGEST_NAME:].strip("_") or "layer"
    name, count = stem, 1
    while name in taken:
        name, count = f"{stem}_{count}", count + 1
    return name
