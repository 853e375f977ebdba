"""The times of training steps, and a trace of some of them for TensorBoard's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from compress.ir.tensorflow import keras
from compress.profiling import Profile, TrainingTimes

BEFORE, TRACED = 4, 10
"""The first traced step, from 0, and the number of traced steps."""
READ = 50
"""Batches that are read alone, at most, in READ_S seconds."""
READ_S = 2.0


class TrainingTimer:
    """The measurement of a training.

    Args:
        profile: the profile of the stage.
        steps: number of steps in each call of the training function.
    """

    def __init__(self, profile: Profile, steps: int) -> None:
        self._profile, self._steps = profile, steps
        self._seconds: list[float] = []

    def callback(self) -> Any:
        """Return the Keras callback that measures steps, and traces some of the first training of the stage."""
        seconds, steps, folder = self._seconds, self._steps, self._profile.folder
        traces = not self._profile.trainings

        class Times(keras().callbacks.Callback):  # type: ignore[misc]
            began = 0.0
            tracing = False

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                del batch, logs
                if traces and len(seconds) == BEFORE:
                    _start_trace(folder)
                    self.tracing = True
                self.began = time.monotonic()

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                del batch, logs
                seconds.append((time.monotonic() - self.began) / steps)
                if self.tracing and len(seconds) == BEFORE + TRACED:
                    self.on_train_end()

            def on_train_end(self, logs: Any = None) -> None:
                del logs
                if self.tracing:
                    self.tracing = False
                    _stop_trace()

        return Times()

    def record(self, batches: Iterable[Any]) -> None:
        """Add the times of the training to the profile.

        Args:
            batches: the batches of the training, to measure how long reading them takes.
        """
        if not self._seconds:
            return
        first, *later = (1000 * each for each in self._seconds)
        reading = _reading_ms(batches)
        times = TrainingTimes(round(first, 2), round(median(later or [first]), 3), round(reading, 3), len(later))
        self._profile.trainings.append(times)


def _reading_ms(batches: Iterable[Any]) -> float:
    seconds, start = [], time.monotonic()
    previous = start
    for _ in islice(batches, READ):
        now = time.monotonic()
        seconds.append(now - previous)
        previous = now
        if now - start > READ_S:
            break
    return 1000 * median(seconds)


def _start_trace(folder: Path) -> None:
    import tensorflow

    tensorflow.profiler.experimental.start(str(folder))


def _stop_trace() -> None:
    import tensorflow

    tensorflow.profiler.experimental.stop()
