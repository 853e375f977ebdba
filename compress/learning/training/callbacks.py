"""Observation of a training: its loss in words, progress, curves for TensorBoard, and the times of steps."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.core.profiling import Profile, TrainingTimes
from compress.core.progress import Phase, Progress
from compress.learning.training import batches as preparation
from compress.model.ir.tensorflow import keras


@dataclass(frozen=True)
class LossScale:
    """A loss in words, and values to compare it with.

    Attributes:
        name: the loss with its unit, for people; empty if it is not known.
        references: the loss of guessing, and other values that training shows, by name. A guess is the best output that
            does not depend on the input: for a classifier, the frequencies of the classes.
    """

    name: str = ""
    references: Mapping[str, float] = field(default_factory=dict)

    def with_accuracy(self, labels: NDArray[Any]) -> LossScale:
        """Return it with the accuracy of the answer that is right most often; labels are class indices [n]."""
        most = int(np.unique(labels, return_counts=True)[1].max(initial=0))
        return replace(self, references={**self.references, "accuracy": round(most / max(len(labels), 1), 6)})

    def __str__(self) -> str:
        name = f"the loss is the {self.name}" if self.name else ""
        guesses = ", ".join(f"{name} {value:.3g}" for name, value in self.references.items())
        return "; ".join(part for part in (name, f"guessing gives {guesses}" if guesses else "") if part)


def epochs_phase(epochs: int, cost: float, scale: LossScale) -> Phase:
    """Return the phase of a training; its name is that of the phase around it."""
    return Phase("", cost, rounds=epochs, references=scale.references, note=str(scale))


def reporting(library: Any, progress: Progress, steps: int, epochs: int, first: int = 0) -> Any:
    """Return a callback that reports the progress, and ends the training if the loss is not finite.

    `library` is Keras 3 or tf-keras, `steps` the number of steps in an epoch, and `first` the number of completed
    epochs.
    """

    class Report(library.callbacks.Callback):  # type: ignore[misc]
        before = done = first * steps
        validation: dict[str, float]

        def on_train_begin(self, logs: Any = None) -> None:
            self.validation = {}
            progress.update(self.done, steps * epochs)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.before = epoch * steps

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.done = self.before + batch + 1
            logs = logs or {}
            names = [*(name for name in logs if name == "loss"), *(name for name in logs if name != "loss")]
            shown = {name: float(logs[name]) for name in names}
            if not np.isfinite(shown.get("loss", 0.0)):
                raise StageError(
                    f"training diverged: the loss is {shown['loss']} in epoch {(self.done - 1) // steps + 1}",
                    hint="lower learning_rate, and check the range of the data",
                )
            progress.update(self.done, steps * epochs, **shown, **self.validation)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            name = next((name for name in ("val_accuracy", "val_loss") if name in (logs or {})), None)
            self.validation = {} if name is None else {name: float(logs[name])}

    return Report()


def tensorboard(folder: Path, first: int) -> Any:
    """Return a callback that writes the metrics of every epoch as TensorBoard scalars; TensorBoard is not needed.

    A training that starts at epoch 0 removes the curves of an earlier one.

    Source: the scalar plugin's data format, tensorboard/plugins/scalar/metadata.py: version 0, an empty mode.
    """
    import tensorflow

    plugin = tensorflow.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
    scalar = tensorflow.compat.v1.SummaryMetadata(plugin_data=plugin)

    class Curves(keras().callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            if not first:
                shutil.rmtree(folder, ignore_errors=True)
            self.writer = tensorflow.summary.create_file_writer(str(folder))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with self.writer.as_default():
                for name, value in (logs or {}).items():
                    tensorflow.summary.write(name, np.float32(value), step=epoch + 1, metadata=scalar)
            self.writer.flush()

        def on_train_end(self, logs: Any = None) -> None:
            self.writer.close()

    return Curves()


BEFORE, TRACED = 4, 10
"""The first traced step, from 0, and the number of traced steps."""
READ = 50
"""Batches that are read alone, or as many as there are threads that prepare them."""
READ_S = 2.0
"""Seconds after which no more batches are read."""


class TrainingTimer:
    """The measurement of a training; `close` ends the trace of one that fails.

    Args:
        profile: the profile of the stage.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._seconds: list[float] = []
        self._is_tracing = False

    def callback(self) -> Any:
        """Return the Keras callback that measures steps, and traces some if no earlier training of the stage did."""
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

    def record(self, batches: Iterable[Any]) -> None:
        """Add the times of the training to the profile; reading the batches again shows how long that takes."""
        if not self._seconds:
            return
        first, *later = (1000 * seconds for seconds in self._seconds)
        times = TrainingTimes(
            first_step_ms=round(first, 2),
            step_ms=round(median(later), 3) if later else None,
            input_ms=round(_reading_ms(batches), 3),
            steps=len(later),
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
