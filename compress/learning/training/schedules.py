"""Learning rate schedules: an optional warmup from 0, then a decay."""

from __future__ import annotations

from functools import cache
from math import pi
from typing import Any, Literal

from compress.model.ir.tensorflow import keras

Name = Literal["cosine", "linear", "steps", "constant"]
DROPS = (0.5, 0.75)
"""Fractions of the training after which `steps` divides the learning rate by 10."""


def schedule(name: Name, highest: float, steps: int, warmup: int) -> Any:
    """Return a Keras learning rate schedule.

    Args:
        name: the decay.
        highest: the learning rate at the start, or after the warmup.
        steps: number of batches of the training.
        warmup: number of batches in which the learning rate rises from 0.
    """
    return _schedule()(name, highest, steps, warmup)


@cache
def _schedule() -> Any:
    """Return the class; it is created at the first call, because Keras is imported late."""
    library = keras()

    class Schedule(library.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc, name-defined]
        """Source of the cosine: Loshchilov and Hutter, SGDR, ICLR 2017, without restarts."""

        def __init__(self, name: Name, highest: float, steps: int, warmup: int) -> None:
            self.name = name
            self.highest = highest
            self.steps = steps
            self.warmup = warmup

        def __call__(self, step: Any) -> Any:
            ops = library.ops
            step = ops.cast(step, "float32")
            done = ops.clip((step - self.warmup) / max(self.steps - self.warmup, 1), 0.0, 1.0)
            factor = {
                "cosine": lambda: 0.5 * (1 + ops.cos(pi * done)),
                "linear": lambda: 1 - done,
                "steps": lambda: ops.power(0.1, sum(ops.cast(done >= drop, "float32") for drop in DROPS)),
                "constant": lambda: ops.ones_like(done),
            }[self.name]()
            return self.highest * ops.minimum(step / max(self.warmup, 1) if self.warmup else 1.0, 1.0) * factor

        def get_config(self) -> dict[str, Any]:
            return {"name": self.name, "highest": self.highest, "steps": self.steps, "warmup": self.warmup}

    return Schedule
