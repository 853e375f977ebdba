"""The trained networks of the comparison, built with the library that is passed: Keras 3, or tf-keras for tfmot."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NETWORKS = ROOT / "benchmarks" / "quantization_networks.py"
CONV_1D = ROOT / "models" / "conv_1d.py"
GESTURES = {"filters": (32, 48, 64), "kernel": 5}
"""The arguments of models/gestures.yaml."""


def loaded(path: Path) -> ModuleType:
    """Return a Python file as a module; its folder is not searched for other modules."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def build(network: str, keras: Any, input_shape: list[int], classes: int) -> Any:
    """Return an untrained network.

    Args:
        network: "conv_1d" of models/, or the name of a function in benchmarks/quantization_networks.py.
        keras: the library to build it with.
        input_shape: without the batch.
        classes: the number of classes.
    """
    if network != "conv_1d":
        return getattr(loaded(NETWORKS), network)(keras, tuple(input_shape), classes)
    sys.modules.setdefault("keras", keras)  # the builder imports it by this name
    builder = loaded(CONV_1D)
    builder.keras = keras  # type: ignore[attr-defined]
    return builder.build(tuple(input_shape), classes, **GESTURES)
