"""Learning rates over the steps of a training: rising from 0 first if asked for, then falling."""

from __future__ import annotations

from functools import cache
from math import pi
from typing import Any, Literal

from compress.ir.tensorflow import keras

Name = Literal["cosine", "linear", "steps", "constant"]
DROPS = (0.5, 0.75)
"""Parts of the training after which `steps` goes down to a tenth."""


def schedule(name: Name, highest: float, steps: int, rising: int) -> Any:
    """A Keras learning rate schedule.

    Args:
        name: how it falls.
        highest: the learning rate at the start, or after rising.
        steps: batches of the whole training.
        rising: the first of them, in which it rises from 0.
    """
    return _schedule()(name, highest, steps, rising)


@cache
def _schedule() -> Any:
    """The class; made when first asked, since Keras is imported late."""
    library = keras()

    class Schedule(library.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc, name-defined]
        """Source of the cosine: Loshchilov and Hutter, SGDR, ICLR 2017, without restarts."""

        def __init__(self, name: Name, highest: float, steps: int, rising: int) -> None:
            self.name, self.highest, self.steps, self.rising = name, highest, steps, rising

        def __call__(self, step: Any) -> Any:
            ops = library.ops
            step = ops.cast(step, "float32")
            done = ops.clip((step - self.rising) / max(self.steps - self.rising, 1), 0.0, 1.0)
            factor = {
                "cosine": lambda: 0.5 * (1 + ops.cos(pi * done)),
                "linear": lambda: 1 - done,
                "steps": lambda: ops.power(0.1, sum(ops.cast(done >= drop, "float32") for drop in DROPS)),
                "constant": lambda: ops.ones_like(done),
            }[self.name]()
            return self.highest * ops.minimum(step / max(self.rising, 1) if self.rising else 1.0, 1.0) * factor

        def get_config(self) -> dict[str, Any]:
            return {"name": self.name, "highest": self.highest, "steps": self.steps, "rising": self.rising}

    return Schedule
