"""The times of training steps, and a trace of some of them for TensorBoard's profiler."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import ceil
from statistics import median
from time import monotonic
from typing import Any

from compress.core.profiling import Profile, TrainingTimes
from compress.learning.training import batches as preparation
from compress.model.ir.tensorflow import keras

BEFORE, TRACED = 4, 10
"""The first traced call, from 0, and the number of traced calls."""
READ = 50
"""Batches that are read alone, or as many as there are threads that prepare them."""
READ_S = 2.0
"""Seconds after which no more batches are read."""


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
                self.began = monotonic()

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                del batch, logs
                seconds.append(monotonic() - self.began)
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
        step = median(later) / self._steps if later else None
        if step is not None:
            first -= (self._steps - 1) * step  # tracing belongs to the first step of the call
        times = TrainingTimes(
            first_step_ms=round(first, 2),
            step_ms=None if step is None else round(step, 3),
            input_ms=round(shares * _reading_ms(batches), 3),
            steps=self._steps * len(self._seconds) - 1,
            phase=self._profile.phase,
        )
        self._profile.trainings.append(times)

    def _start_trace(self) -> None:
        import tensorflow

        tensorflow.profiler.experimental.start(str(self._profile.folder))
        self._is_tracing = self._profile.has_trace = True


def _reading_ms(batches: Iterable[Any]) -> float:
    """Return the mean time of a batch, without the first batch of each thread: they wait for the start.

    The threads complete their batches together, so that most gaps between batches are short, and a few are long. The
    time is measured from one such burst to another.
    """
    threads = preparation.THREADS
    count, start, bursts = 0, monotonic(), []
    for count, _ in enumerate(islice(batches, threads * (1 + ceil(READ / threads))), 1):
        if count % threads == 0:
            bursts.append(monotonic())
            if bursts[-1] - start > READ_S:
                break
    if len(bursts) > 1:
        return 1000 * (bursts[-1] - bursts[0]) / (threads * (len(bursts) - 1))
    return 1000 * (monotonic() - start) / count if count else 0.0
