"""The training loop that all stages share: Keras' own `fit`, with our loss, progress and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from compress.errors import ModelError, StageError
from compress.stage import Context, Data, Facts, Progress, Settings
from compress.training.tensorflow import keras

Loss = Callable[[Any, Any, Any], Any]
"""(inputs, labels, the model's outputs) -> loss of each sample, all tensors with a batch axis."""


class Augment(Settings):
    """Random changes of the training images. Fractions are of the image's side."""

    shift: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest shift along each side, as a fraction of it."""
    rotate: Annotated[float, Field(ge=0, le=180)] = 0.0
    """Largest rotation, in degrees."""
    zoom: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest change of size, as a fraction."""
    flip: bool = False
    """Whether images may be mirrored left to right."""


class TrainingSettings(Settings):
    """What every stage that trains can be told."""

    epochs: Annotated[int, Field(ge=1, le=10_000)]
    """Passes over the training split."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Samples in one step."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.003
    """Adam's learning rate at the start; it falls to 0 along a cosine."""
    augment: Augment = Augment()
    """Random changes of the training images."""


@dataclass(frozen=True)
class Head:
    """What a classifier's output means."""

    softmax: bool

    def logits(self, outputs: Any) -> Any:
        """Outputs as logits (up to a constant, where they are probabilities)."""
        library = keras()
        if self.softmax:
            return library.ops.log(library.ops.clip(outputs, 1e-7, 1.0))
        return outputs


def head_of(model: Any, data: Data) -> Head:
    """Finds out what a model's output is, and that model and data fit together.

    Raises:
        ModelError: several inputs or outputs, or shapes that differ from the data's.
    """
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        raise ModelError(
            f"the model has {len(model.inputs)} inputs and {len(model.outputs)} outputs", allowed="one of each, so far"
        )
    wanted, given = tuple(model.inputs[0].shape[1:]), data.input_shape
    if len(wanted) != len(given) or any(w not in (None, g) for w, g in zip(wanted, given, strict=True)):
        raise ModelError(
            f"the model takes {list(wanted)}, but data.preprocess gives {list(given)}",
            todo="add or change a resize step in data.preprocess, or choose another model",
        )
    shape = tuple(model.outputs[0].shape[1:])
    if shape != (len(data.class_names),):
        raise ModelError(
            f"the model's output has the shape {list(shape)}, but the data has {len(data.class_names)} classes",
            todo="check data.source and the model's last layer",
        )
    last = model.outputs[0]._keras_history.operation
    activation = getattr(getattr(last, "activation", None), "__name__", "")
    return Head(softmax=activation == "softmax" or type(last).__name__ == "Softmax")


def label_loss(head: Head) -> Loss:
    """Cross entropy with the labels."""
    library = keras()

    def loss(inputs: Any, labels: Any, outputs: Any) -> Any:
        del inputs
        return library.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=not head.softmax)

    return loss


def distillation_loss(head: Head, teacher: Any, teacher_head: Head, temperature: float, weight: float) -> Loss:
    """`weight` parts of the teacher's softened scores, the rest cross entropy with the labels.

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015: soft targets at
    `temperature`, their gradient scaled by its square.
    """
    library = keras()
    labelled = label_loss(head)

    def loss(inputs: Any, labels: Any, outputs: Any) -> Any:
        target = library.ops.softmax(teacher_head.logits(teacher(inputs, training=False)) / temperature)
        scores = library.ops.log_softmax(head.logits(outputs) / temperature)
        soft = -library.ops.sum(library.ops.stop_gradient(target) * scores, axis=-1) * temperature**2
        return weight * soft + (1 - weight) * labelled(inputs, labels, outputs)

    return loss


def fit(model: Any, loss: Loss, settings: TrainingSettings, context: Context, callbacks: Sequence[Any] = ()) -> Facts:
    """Trains a model in place.

    Args:
        model: a Keras model.
        loss: what is made small.
        settings: how to train.
        context: data, seed, progress.
        callbacks: Keras callbacks of the caller's.

    Returns:
        `history`: one map for each epoch with loss, accuracy and their validation values.

    Raises:
        StageError: the loss is no longer a number.
    """
    library = keras(context.seed)
    trainer = _trainer(library, model, loss)
    batches = batches_of(context, settings)
    steps = len(batches) * settings.epochs
    schedule = library.optimizers.schedules.CosineDecay(settings.learning_rate, steps)
    trainer.compile(library.optimizers.Adam(schedule), metrics=["accuracy"], jit_compile=False)
    validation = (context.data.inputs("validation"), context.data.labels("validation"))
    callback = reporting(library, context.progress, len(batches), settings.epochs)
    history = trainer.fit(
        batches,
        epochs=settings.epochs,
        validation_data=validation,
        shuffle=False,
        verbose=0,
        callbacks=[callback, *callbacks],
    ).history
    return {"history": rows(history)}


def rows(history: dict[str, list[Any]]) -> list[dict[str, float | None]]:
    """Keras' history as one map for each epoch."""
    return [{name: _plain(values[epoch]) for name, values in history.items()} for epoch in range(len(history["loss"]))]


def _plain(value: Any) -> float | None:
    """A number for JSON; None where it is none."""
    return round(float(value), 6) if np.isfinite(value) else None


def _trainer(library: Any, model: Any, loss: Loss) -> Any:
    """A model around the model, whose loss also sees the inputs."""

    class Trainer(library.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def call(self, x: Any, training: bool = False) -> Any:
            return self.inner(x, training=training)

        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
        ) -> Any:
            del sample_weight, training
            return library.ops.mean(loss(x, y, y_pred)) + sum(self.losses)

    return Trainer()


def batches_of(context: Context, settings: TrainingSettings) -> Any:
    """The training split, shuffled anew in every epoch, augmented and batched."""
    import tensorflow

    x, y = context.data.inputs("train"), context.data.labels("train")
    batches = tensorflow.data.Dataset.from_tensor_slices((x, y))
    batches = batches.shuffle(len(x), seed=context.seed).batch(settings.batch_size)
    change = _augmentation(settings.augment, context.seed)
    if change is not None:
        batches = batches.map(lambda image, label: (change(image), label))
    return batches.prefetch(tensorflow.data.AUTOTUNE)


def _augmentation(augment: Augment, seed: int) -> Callable[[Any], Any] | None:
    layers = keras().layers
    made = []
    if augment.flip:
        made.append(layers.RandomFlip("horizontal", seed=seed))
    if augment.shift:
        made.append(layers.RandomTranslation(augment.shift, augment.shift, fill_mode="nearest", seed=seed))
    if augment.rotate:
        made.append(layers.RandomRotation(augment.rotate / 360, fill_mode="nearest", seed=seed))
    if augment.zoom:
        made.append(layers.RandomZoom((-augment.zoom, augment.zoom), fill_mode="nearest", seed=seed))
    if not made:
        return None

    def change(images: Any) -> Any:
        for layer in made:
            images = layer(images, training=True)
        return images

    return change


def reporting(library: Any, progress: Progress, steps: int, epochs: int) -> Any:
    """A callback of Keras 3 or tf-keras that tells the progress, and stops when the loss is no longer a number."""

    class Report(library.callbacks.Callback):  # type: ignore[misc]
        done = 0
        validation: dict[str, float]

        def on_train_begin(self, logs: Any = None) -> None:
            self.validation = {}

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.done += 1
            shown = {name: float(logs[name]) for name in ("loss", "accuracy") if name in (logs or {})}
            if not np.isfinite(shown.get("loss", 0.0)):
                raise StageError(
                    f"training diverged: the loss is {shown['loss']} in epoch {(self.done - 1) // steps + 1}",
                    todo="choose a smaller learning_rate, and look at the data's range",
                )
            progress.update(self.done, steps * epochs, **shown, **self.validation)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.validation = {name: float(logs[name]) for name in ("val_accuracy",) if name in (logs or {})}

    return Report()
