"""The training loop that all stages share: Keras' own `fit`, with our loss, progress and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

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


class Passes(Settings):
    """What every stage that trains can be told."""

    epochs: Annotated[int, Field(ge=1, le=10_000)]
    """Passes over the training split."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Samples in one step."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.003
    """Adam's learning rate at the start; it falls to 0 along a cosine."""
    augment: Augment = Augment()
    """Random changes of the training images."""


class TrainingSettings(Passes):
    """What stages that train with Keras 3 can be told."""

    warmup: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the steps in which the learning rate first rises from 0."""
    gradient_accumulation: Annotated[int, Field(ge=1, le=1024)] = 1
    """Batches whose gradients are averaged for one step of the weights."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keeps the moving average of the weights, with this share of the old one in each step (0.99 to 0.9999)."""
    early_stopping: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Ends after so many epochs without a better validation accuracy, and keeps the weights of the best epoch."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: rare classes count more in the loss, each class as much as any other."""


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


def distillation_loss(
    head: Head,
    teacher: Any,
    teacher_head: Head,
    temperature: float,
    weight: float,
    decoupled: tuple[float, float] | None = None,
) -> Loss:
    """`weight` parts of the teacher's softened scores, the rest cross entropy with the labels.

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015: soft targets at `temperature`, their
    gradient scaled by its square. With `decoupled`, the weights of what the teacher says of the right class and of
    what it says of the wrong ones among themselves: Zhao et al., Decoupled Knowledge Distillation, 2022.
    """
    library = keras()
    labelled = label_loss(head)

    def loss(inputs: Any, labels: Any, outputs: Any) -> Any:
        taught = library.ops.stop_gradient(teacher_head.logits(teacher(inputs, training=False)) / temperature)
        scores = head.logits(outputs) / temperature
        soft = _cross_entropy(taught, scores) if decoupled is None else _decoupled(taught, scores, labels, *decoupled)
        soft = soft * temperature**2
        return weight * soft + (1 - weight) * labelled(inputs, labels, outputs)

    return loss


def _cross_entropy(taught: Any, scores: Any) -> Any:
    ops = keras().ops
    return -ops.sum(ops.softmax(taught) * ops.log_softmax(scores), axis=-1)


def _decoupled(taught: Any, scores: Any, labels: Any, right: float, wrong: float) -> Any:
    """Cross entropy of right against wrong, and of the wrong classes among themselves; logits [batch, classes]."""
    ops = keras().ops
    of_right = ops.one_hot(ops.cast(ops.reshape(labels, (-1,)), "int32"), scores.shape[-1])
    pairs = []
    for logits in (taught, scores):
        others = ops.logsumexp(ops.where(of_right > 0, -1e9, logits), axis=-1)
        pairs.append(ops.stack([ops.sum(logits * of_right, axis=-1), others], axis=-1))
    among = [ops.where(of_right > 0, -1e9, logits) for logits in (taught, scores)]
    return right * _cross_entropy(*pairs) + wrong * _cross_entropy(*among)


def fit(model: Any, loss: Loss, settings: TrainingSettings, context: Context, callbacks: Sequence[Any] = ()) -> Facts:
    """Trains a model in place.

    Args:
        model: a Keras model.
        loss: what is made small.
        settings: how to train.
        context: data, seed, progress.
        callbacks: Keras callbacks of the caller's.

    Returns:
        `history`: one map for each epoch with loss, accuracy and their validation values; `best_epoch`, from 1, where
        early stopping chose it.

    Raises:
        StageError: the loss is no longer a number.
    """
    library = keras(context.seed)
    trainer = _trainer(library, model, _weighted(loss, settings, context.data))
    batches = batches_of(context, settings)
    trainer.compile(_optimizer(library, settings, len(batches)), metrics=["accuracy"], jit_compile=False)
    validation = (context.data.inputs("validation"), context.data.labels("validation"))
    more = [reporting(library, context.progress, len(batches), settings.epochs)]
    if settings.ema is not None:
        more.append(library.callbacks.SwapEMAWeights(swap_on_epoch=True))
    stopping = None
    if settings.early_stopping is not None:
        watched = {"monitor": "val_accuracy", "mode": "max", "restore_best_weights": True}
        stopping = library.callbacks.EarlyStopping(patience=settings.early_stopping, **watched)
        more.append(stopping)
    history = trainer.fit(
        batches,
        epochs=settings.epochs,
        validation_data=validation,
        shuffle=False,
        verbose=0,
        callbacks=[*more, *callbacks],
    ).history
    best = {} if stopping is None else {"best_epoch": stopping.best_epoch + 1}
    return {"history": rows(history), **best}


def _optimizer(library: Any, settings: TrainingSettings, batches: int) -> Any:
    """Adam, with a learning rate that may rise from 0 and then falls to 0 along a cosine."""
    steps = max(batches * settings.epochs // settings.gradient_accumulation, 1)
    rising = int(steps * settings.warmup)
    schedule = library.optimizers.schedules.CosineDecay(
        0.0 if rising else settings.learning_rate,
        steps - rising,
        warmup_target=settings.learning_rate if rising else None,
        warmup_steps=rising,
    )
    averaged = {} if settings.ema is None else {"use_ema": True, "ema_momentum": settings.ema}
    several = settings.gradient_accumulation if settings.gradient_accumulation > 1 else None
    return library.optimizers.Adam(schedule, gradient_accumulation_steps=several, **averaged)


def _weighted(loss: Loss, settings: TrainingSettings, data: Data) -> Loss:
    """The loss with the weight of each sample's class, where that is wanted; the mean weight is 1."""
    if settings.class_weights == "none":
        return loss
    counts = np.bincount(data.labels("train"), minlength=len(data.class_names))
    weights = (counts.sum() / (np.maximum(counts, 1) * np.count_nonzero(counts))).astype(np.float32)

    def weighted(inputs: Any, labels: Any, outputs: Any) -> Any:
        ops = keras().ops
        return loss(inputs, labels, outputs) * ops.take(weights, ops.cast(ops.reshape(labels, (-1,)), "int32"))

    return weighted


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


def batches_of(context: Context, settings: Passes) -> Any:
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
