"""The public API: functions that do what the commands and stages of the same names do, and return typed results.

They write nothing to stdout or stderr. Every error is a `compress.core.errors.CorallineError`.
"""

from compress.data.dataset import Dataset
from compress.learning.procedures import ModelResult, QuantizedModel
from compress.surface.api.exports import ExportResult, export
from compress.surface.api.files import check, estimate, legalize, load_model
from compress.surface.api.models import distill, load_data, prune, quantize, train
from compress.surface.api.pipelines import RunResult, run

__all__ = [
    "Dataset",
    "ExportResult",
    "ModelResult",
    "QuantizedModel",
    "RunResult",
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
