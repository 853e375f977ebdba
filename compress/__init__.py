"""Coralline: prune, distil and quantize a trained model for the Coral Edge TPU, and measure the result.

The functions below are the public API; docs/api.md shows them at work. Everything else may change.
They print nothing and install no signal handlers. They are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.version import __version__

if TYPE_CHECKING:
    from compress.api import RunResult, check, estimate, legalize, load_model, run
    from compress.api_models import ModelResult, QuantizedModel, distill, load_data, prune, quantize, train
    from compress.data.dataset import Dataset

__all__ = [
    "Dataset",
    "ModelResult",
    "QuantizedModel",
    "RunResult",
    "__version__",
    "check",
    "distill",
    "estimate",
    "legalize",
    "load_data",
    "load_model",
    "prune",
    "quantize",
    "run",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'compress' has no attribute {name!r}")
    from compress import api, api_models
    from compress.data.dataset import Dataset

    if name == "Dataset":
        return Dataset
    return getattr(api if hasattr(api, name) else api_models, name)


def __dir__() -> list[str]:
    return __all__
