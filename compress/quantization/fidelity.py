"""Outputs of float and quantized models in one form, for the comparison that a task makes (`Task.fidelity`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from compress.tasks.base import Rows


def side_by_side(outputs: Any) -> Rows:
    """A Keras model's output, or its outputs, as rows."""
    parts = outputs if isinstance(outputs, list | tuple) else [outputs]
    return np.concatenate([np.asarray(part).reshape(len(part), -1) for part in parts], axis=1)
