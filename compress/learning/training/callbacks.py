"""Callbacks of a training: progress, and curves for TensorBoard."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from compress.core.errors import StageError
from compress.core.progress import Phase, Progress
from compress.learning.training.loss_scale import LossScale
from compress.model.ir.tensorflow import keras


def epochs_phase(epochs: int, cost: float, scale: LossScale) -> Phase:
    """Return the phase of a training; its name is that of the phase around it."""
    return Phase("", cost, rounds=epochs, references=scale.references, note=str(scale))


def reporting(library: Any, progress: Progress, steps: int, epochs: int, first: int = 0) -> Any:
    """Return a callback that reports the progress, and stops the training if the loss is not finite.

    Args:
        library: Keras 3 or tf-keras.
        progress: receives the progress.
        steps: number of steps in an epoch.
        epochs: number of epochs of the training.
        first: number of completed epochs.
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
