"""Quality of a Keras model on the validation split, by which changes of its weights are kept or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from compress.artifact import Facts
from compress.stage import Context
from compress.tasks import task_of
from compress.tasks.base import Quality

BATCH = 64


def comparison(before: Quality, after: Quality) -> Facts:
    """Two results as plain values."""
    return {
        "metric": after.metric,
        "validation_before": before.to_json(),
        "validation_after": after.to_json(),
    }


def validation_quality(model: Any, context: Context) -> Quality:
    """Return the quality on the validation split, by the measure of the task.

    Raises:
        ModelError: a model whose loss is the measure does not fit the data.
    """
    task = task_of(context.data)
    return task.validation(model, context.data, context.detector, _outputs(model, context))


def _outputs(model: Any, context: Context) -> Iterator[tuple[slice, Any]]:
    """Outputs for the validation split, batch by batch, and which samples they belong to."""
    inputs = context.data.inputs("validation")
    for start in range(0, len(inputs), BATCH):
        places = slice(start, start + BATCH)
        yield places, model(np.asarray(inputs[places]), training=False)
