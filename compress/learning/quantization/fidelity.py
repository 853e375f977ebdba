"""Outputs of float and quantized models in one form, for the comparison that a task makes (`Task.fidelity`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.progress import SILENT, Progress
from compress.model.tflite.interpreter import LoadedModel
from compress.tasks.base import Judge, Rows

BLOCK = 16
"""Samples between two reports of progress."""


@dataclass(frozen=True)
class FileAgreement:
    """Outputs of a float file and of its quantized file for the same samples.

    Attributes:
        expected: outputs of the float file [n, outputs].
        same: by sample how far both answer the same, from 0 to 1.
        snr_db: by sample the signal-to-noise ratio of the quantized file.
    """

    expected: Rows
    same: NDArray[np.float64]
    snr_db: NDArray[np.float64]

    @property
    def agreement(self) -> float:
        """The mean of `same`, rounded."""
        return round(float(self.same.mean()), 4)


def compared(
    float_file: Path, quantized_file: Path, samples: NDArray[np.float32], judge: Judge, progress: Progress = SILENT
) -> FileAgreement:
    """Run two .tflite files on the same samples."""
    rows = []
    for number, file in enumerate((float_file, quantized_file)):
        model, parts = LoadedModel(file, reproducible=True), []
        for start in range(0, len(samples), BLOCK):
            parts.append(model.scores(samples[start : start + BLOCK]))
            progress.update(number * len(samples) + min(start + BLOCK, len(samples)), 2 * len(samples))
        rows.append(np.concatenate(parts))
    expected, actual = rows
    return FileAgreement(expected, judge.same(expected, actual), judge.snr_db(expected, actual))


def flattened(outputs: Any) -> Rows:
    """Return the output of a Keras model, or its outputs one after the other, as rows."""
    parts = outputs if isinstance(outputs, list | tuple) else [outputs]
    return np.concatenate([np.asarray(part).reshape(len(part), -1) for part in parts], axis=1)
