"""Quality of a Keras model on the validation split, by which changes of its weights are kept or not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from compress.artifact import Facts
from compress.ir.tensorflow import keras
from compress.stage import Context

BATCH = 64


@dataclass(frozen=True)
class Quality:
    """A result on the validation split.

    Attributes:
        metric: accuracy (a fraction, higher is better), or loss (lower is better).
        value: NaN where the model's outputs are not finite.
    """

    metric: Literal["accuracy", "loss"]
    value: float

    def is_worse_than(self, other: Quality) -> bool:
        """Whether to prefer the other; NaN is worse than everything."""
        if math.isnan(self.value) or math.isnan(other.value):
            return math.isnan(self.value)
        return self.value < other.value if self.metric == "accuracy" else self.value > other.value

    def to_json(self) -> float | None:
        """The value, or None where it is not finite."""
        return round(self.value, 6) if math.isfinite(self.value) else None


def comparison(before: Quality, after: Quality) -> Facts:
    """Two results as plain values."""
    return {
        "metric": after.metric,
        "validation_before": before.to_json(),
        "validation_after": after.to_json(),
    }


def validation_quality(model: Any, context: Context) -> Quality:
    """Return the accuracy of a classifier, by its first output, or the loss of a detector, as in its training.

    Raises:
        ModelError: a detector does not fit the data.
    """
    if context.data.task == "classification":
        return Quality("accuracy", _accuracy(model, context))
    return Quality("loss", _detector_loss(model, context))


def _accuracy(model: Any, context: Context) -> float:
    labels = context.data.labels("validation")
    right = 0
    for places, outputs in _outputs(model, context):
        scores = np.asarray(keras().tree.flatten(outputs)[0])
        finite = np.isfinite(scores).all(axis=-1)
        right += int((finite & (scores.argmax(axis=-1) == labels[places])).sum())
    return right / len(labels)


def _detector_loss(model: Any, context: Context) -> float:
    from compress.training import detection
    from compress.training.loop import Batch

    loss = detection.loss(detection.head_of(model, context.data, context.detector))
    objects = detection.padded(context.data.objects("validation"))
    total = 0.0
    for places, outputs in _outputs(model, context):
        total += float(np.sum(np.asarray(loss.of(Batch(None, objects[places]), outputs), np.float64)))
    return total / len(objects)


def _outputs(model: Any, context: Context) -> Iterator[tuple[slice, Any]]:
    """Outputs for the validation split, batch by batch, and which samples they belong to."""
    inputs = context.data.inputs("validation")
    for start in range(0, len(inputs), BATCH):
        places = slice(start, start + BATCH)
        yield places, model(np.asarray(inputs[places]), training=False)
