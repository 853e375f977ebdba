"""Quality of a Keras model on the validation split, which decides whether changed weights are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from compress.core.artifact import Facts
from compress.learning.context import Context
from compress.learning.training.phases import VALIDATION
from compress.model.ir.tensorflow import run
from compress.tasks import task_of
from compress.tasks.base import Quality

BATCH = 64
"""Samples that the model computes at once; chosen: the result does not depend on it."""


def comparison(before: Quality, after: Quality) -> Facts:
    """Return two results as plain values, with the names of `compress.results.training.ValidationChange`."""
    return {
        "metric": after.metric,
        "validation_before": before.to_json(),
        "validation_after": after.to_json(),
    }


def validation_quality(model: Any, context: Context) -> Quality:
    """Return the quality on the validation split, by the metric of the task.

    Raises:
        ModelError: the model does not fit the data, for a task that is evaluated by the loss.
    """
    task = task_of(context.data)
    with context.progress.phase(VALIDATION):
        return task.validation(model, context.data, context.specification, _outputs(model, context))


def _outputs(model: Any, context: Context) -> Iterator[tuple[slice, Any]]:
    """Yield the indices and the outputs of each batch of the validation split."""
    inputs = context.data.inputs("validation")
    for start in range(0, len(inputs), BATCH):
        batch = slice(start, start + BATCH)
        yield batch, run(model, np.asarray(inputs[batch]))
        context.progress.update(min(start + BATCH, len(inputs)), len(inputs))
