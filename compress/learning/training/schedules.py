"""The updates of the weights: learning rate schedules, and the batches of an update (gradient accumulation)."""

from __future__ import annotations

from functools import cache
from math import pi
from typing import Any, Literal

from compress.core.errors import StageError
from compress.model.ir.tensorflow import keras

Name = Literal["cosine", "linear", "steps", "constant"]
DROPS = (0.5, 0.75)
"""Fractions of the training after which `steps` divides the learning rate by 10."""


def schedule(name: Name, highest: float, steps: int, warmup: int) -> Any:
    """Return a Keras learning rate schedule over some batches; in the first ones (`warmup`) the rate rises from 0."""
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


LARGEST_REST = 0.1
"""Part of the batches of a training that may be left over."""


def batches_per_update(setting: int, total: int) -> int:
    """Return the number of batches in each update of a training with `total` batches, by `gradient_accumulation`.

    It is the number in the setting, unless too many batches would be left over, which change no weight. Then it is the
    number that leaves the fewest, at least half of the setting.

    Raises:
        StageError: the training has fewer batches than one update.
    """
    if total < setting:
        raise StageError(
            f"gradient_accumulation: {setting} batches make one update, but the whole training "
            f"has only {total} batches: no weight would change",
            allowed=f"up to {total}",
            hint="lower it, or train for more epochs",
        )
    if total % setting <= LARGEST_REST * total:
        return setting
    return min(range(setting, (setting + 1) // 2 - 1, -1), key=lambda count: total % count)


def accumulation_note(setting: int, total: int) -> str | None:
    """Return a line for the user if another number than that of the setting is used, or many batches are left over."""
    count = batches_per_update(setting, total)
    lowered = "" if count == setting else f"{count} batches instead of {setting} make an update, to leave over fewer"
    rest = total % count
    lost = f"the last {rest} of {total} batches change no weight" if rest > LARGEST_REST * total else ""
    text = "; ".join(filter(None, (lowered, lost)))
    return f"gradient_accumulation: {text}" if text else None
