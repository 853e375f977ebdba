"""Coralline: prune, distil and quantize a trained model for the Coral Edge TPU, and measure the result.

The functions below are the public API; docs/api.md shows them at work. Everything else may change.
They print nothing and install no signal handlers. They are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.core.resources import __version__

if TYPE_CHECKING:
    from compress.surface.api import (
        Dataset,
        ExportResult,
        ModelResult,
        QuantizedModel,
        RunResult,
        check,
        distill,
        estimate,
        export,
        legalize,
        load_data,
        load_model,
        prune,
        quantize,
        run,
        train,
    )

__all__ = [
    "Dataset",
    "ExportResult",
    "ModelResult",
    "QuantizedModel",
    "RunResult",
    "__version__",
    "check",
    "distill",
    "estimate",
    "export",
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
    from compress.surface import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return __all__
