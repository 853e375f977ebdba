"""The public API: functions that do what the commands and stages of the same names do, and return typed results.

They write nothing to stdout or stderr. Every error is a `compress.errors.CorallineError`.
"""

from compress.api.exports import ExportResult, export
from compress.api.files import check, estimate, legalize, load_model
from compress.api.models import ModelResult, QuantizedModel, distill, load_data, prune, quantize, train
from compress.api.pipelines import RunResult, run
from compress.data.dataset import Dataset

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
