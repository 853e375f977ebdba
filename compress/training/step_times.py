"""The times of training steps, and a trace of some of them for TensorBoard's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from statistics import median
from typing import Any

from compress.ir.tensorflow import keras
from compress.profiling import Profile, TrainingTimes

BEFORE, TRACED = 4, 10
"""The first traced call, from 0, and the number of traced calls."""
READ = 50
"""Batches that are read alone, at most, in READ_S seconds."""
READ_S = 2.0


class TrainingTimer:
    """The measurement of a training; `close` ends the trace of one that fails.

    Args:
        profile: the profile of the stage.
        steps: number of steps in each call of the training function.
    """

    def __init__(self, profile: Profile, steps: int) -> None:
        self._profile, self._steps = profile, steps
        self._seconds: list[float] = []
        self._is_tracing = False

    def callback(self) -> Any:
        """Return the Keras callback that measures calls, and traces some if no earlier training of the stage did."""
        timer, seconds = self, self._seconds
        traces = not self._profile.has_trace

        class Times(keras().callbacks.Callback):  # type: ignore[misc]
            began = 0.0

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                del batch, logs
                if traces and len(seconds) == BEFORE:
                    timer._start_trace()
                self.began = time.monotonic()

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                del batch, logs
                seconds.append(time.monotonic() - self.began)
                if len(seconds) == BEFORE + TRACED:
                    timer.close()

            def on_train_end(self, logs: Any = None) -> None:
                del logs
                timer.close()

        return Times()

    def close(self) -> None:
        """End the trace: TensorFlow has one at a time, and the next training of the process may start another."""
        if self._is_tracing:
            self._is_tracing = False
            import tensorflow

            tensorflow.profiler.experimental.stop()

    def record(self, batches: Iterable[Any], shares: int) -> None:
        """Add the times of the training to the profile.

        Args:
            batches: the batches of the training, to measure how long reading them takes.
            shares: the number of elements of `batches` that are read for a step, one for each device.
        """
        if not self._seconds:
            return
        first, *later = (1000 * seconds for seconds in self._seconds)
        step = median(later or [first]) / self._steps
        first_step = first - (self._steps - 1) * step  # tracing belongs to the first step of the call
        steps = self._steps * len(self._seconds) - 1
        times = TrainingTimes(round(first_step, 2), round(step, 3), round(shares * _reading_ms(batches), 3), steps)
        self._profile.trainings.append(times)

    def _start_trace(self) -> None:
        import tensorflow

        tensorflow.profiler.experimental.start(str(self._profile.folder))
        self._is_tracing = self._profile.has_trace = True


def _reading_ms(batches: Iterable[Any]) -> float:
    seconds, start = [], time.monotonic()
    previous = start
    for _ in islice(batches, READ):
        now = time.monotonic()
        seconds.append(now - previous)
        previous = now
        if now - start > READ_S:
            break
    return 1000 * median(seconds) if seconds else 0.0
