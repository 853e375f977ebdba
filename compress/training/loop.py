"""The training loop that all stages share: Keras' own `fit`, with our loss, progress and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.artifact import Facts
from compress.data.rows import rows as rows_of
from compress.data.types import Data, Split
from compress.errors import ModelError, StageError
from compress.ir import mixed_precision as precision
from compress.ir.layer_specs import ACTIVATION, spec_of_live
from compress.ir.tensorflow import keras
from compress.stage import Context, Unfit
from compress.training import callbacks as monitoring
from compress.training import schedules, subset_selection
from compress.training.batches import Passes, batches, held_out
from compress.training.bn_recalibration import recalibrate_batch_norms
from compress.training.checkpoint import Checkpoint
from compress.training.subset import Part, Subset


@dataclass(frozen=True)
class Batch:
    """What a loss sees beside the model's outputs: tensors with a batch axis.

    Attributes:
        inputs: the samples as the model was given them, augmented.
        labels: int64 [n]; for detection, objects as `detecting.padded` makes them.
        taught: what the loss brought along for each of these samples; None where it brought nothing.
    """

    inputs: Any
    labels: Any
    taught: Any = None


@dataclass(frozen=True)
class Loss:
    """What training makes small.

    Attributes:
        of: (batch, the model's outputs) -> loss of each sample [n].
        taught: values that batches carry, one row for each sample of train and validation, so that they are not
            computed again in every step; they know nothing of augmentation.
    """

    of: Callable[[Batch, Any], Any]
    taught: Mapping[Split, NDArray[np.float32]] = field(default_factory=dict)


class TrainingSettings(Passes):
    """The settings of stages that train with Keras 3."""

    schedule: schedules.Name = "cosine"
    """How the learning rate falls. cosine: to 0 along a cosine. linear: to 0 along a line. steps: to a tenth after half
    of the training, and again after three quarters. constant: it does not fall."""
    warmup: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Fraction of the steps in which the learning rate first rises from 0."""
    gradient_accumulation: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of batches whose gradients are averaged for one update of the weights."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights with this decay (0.99 to 0.9999)."""
    early_stopping: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Stop after this number of epochs without a better validation accuracy (for detectors: validation loss), and
    restore the weights of the best epoch."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weight the loss so that each class counts the same, however rare it is."""
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    """mixed_bfloat16, mixed_float16: compute in 16 bits where the result does not suffer, which is faster on hardware
    made for it. The weights and the resulting model are float32."""
    subset: Subset | None = None
    """Train on a part of the training split; by default on all of it."""
    tensorboard: bool = False
    """Write losses and accuracies for TensorBoard to runs/NAME/tensorboard."""

    def unfit_for_objects(self) -> Unfit | None:
        """The setting that does not go with data for detection, or None."""
        if self.class_weights != "none":
            what = "class_weights: a detector's loss counts each object alone, whatever its class"
            return Unfit(what, "class_weights: none")
        if self.subset is not None:
            return Unfit("subset: samples are chosen by their classes, and here they have objects", "all samples")
        if self.augment.rotate:
            what = "augment.rotate: a box around a turned object is not the turned box"
            return Unfit(what, "augment.shift, zoom and flip, which move boxes along")
        return None


Output = Literal["logits", "softmax", "sigmoid"]
LOOKED_AT = 16
"""Samples that outputs are looked at on, where what makes them does not say what they are."""


@dataclass(frozen=True)
class ClassificationHead:
    """What a classifier's output means.

    Attributes:
        scores: logits (of a softmax), or probabilities: together (softmax), or of each class by itself (sigmoid).
    """

    scores: Output

    def logits(self, outputs: Any) -> Any:
        """Outputs as logits (up to a constant, where they are probabilities that sum to 1)."""
        ops = keras().ops
        if self.scores == "softmax":
            return ops.log(ops.clip(outputs, 1e-7, 1.0))
        if self.scores == "sigmoid":
            likely = ops.clip(outputs, 1e-7, 1 - 1e-7)
            return ops.log(likely) - ops.log(1 - likely)
        return outputs


def head_of(model: Any, data: Data) -> ClassificationHead:
    """Finds out what a classifier's output is, and that model and data fit together.

    Raises:
        ModelError: several inputs or outputs, or shapes that differ from the data's.
    """
    refuse_misfit(model, data, 1)
    shape = tuple(model.outputs[0].shape[1:])
    if shape != (len(data.class_names),):
        raise ModelError(
            f"the model's output has the shape {list(shape)}, but the data has {len(data.class_names)} classes",
            todo="check data.source and the model's last layer",
        )
    return ClassificationHead(_made_as(model.outputs[0]) or _seen_as(model, data))


def _made_as(tensor: Any) -> Output | None:
    """What the numbers of a Keras tensor are, by what made them: a layer, its activation, or a model's own output.

    None where that is an operation that does not say.
    """
    operation, call, place = tensor._keras_history
    if isinstance(operation, keras().Model):
        return _made_as(operation.outputs[place])
    activation = getattr(operation, "activation", None)
    activation = getattr(activation, "activation", activation)  # a layer may be another one's activation
    kind = type(operation).__name__
    name = kind if activation is None else getattr(activation, "__name__", type(activation).__name__)
    if name.lower() == "softmax":
        return "softmax"
    if name.lower() == "sigmoid":
        return "sigmoid"
    spec = spec_of_live(operation)
    if spec.keeps_values or (spec == ACTIVATION and name == "linear"):
        return _made_as(operation._inbound_nodes[call].input_tensors[0])
    return "logits" if getattr(operation, "weights", None) else None


def _seen_as(model: Any, data: Data) -> Output:
    """What a model's outputs are, by their values: probabilities sum to 1, whatever mixed them."""
    found = np.asarray(model(data.inputs("train")[:LOOKED_AT], training=False), np.float64)
    sums = (found > -1e-6).all() and (abs(found.sum(axis=1) - 1) < 1e-3).all()
    return "softmax" if sums else "logits"


def refuse_misfit(model: Any, data: Data, outputs: int) -> None:
    """Nothing, if a model has one input, of the data's shape, and so many outputs.

    Raises:
        ModelError: it has not.
    """
    if len(model.inputs) != 1 or len(model.outputs) != outputs:
        raise ModelError(
            f"the model has {len(model.inputs)} inputs and {len(model.outputs)} outputs",
            allowed="one of each, so far" if outputs == 1 else "one input, and the outputs boxes and scores",
        )
    wanted, given = tuple(model.inputs[0].shape[1:]), data.input_shape
    if len(wanted) != len(given) or any(w not in (None, g) for w, g in zip(wanted, given, strict=True)):
        raise ModelError(
            f"the model takes {list(wanted)}, but data.preprocess gives {list(given)}",
            todo="add or change a resize step in data.preprocess, or choose another model",
        )


def chosen_inputs(data: Data, count: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """So many samples of the training split, chosen at random, with their labels; in the order that they have there."""
    inputs, labels = data.inputs("train"), data.labels("train")
    order = np.sort(np.random.default_rng(seed).permutation(len(inputs))[:count])
    return rows_of(inputs, order), labels[order]


def own_loss(model: Any, context: Context) -> Loss:
    """What the data alone makes of a model: cross entropy with the labels, or a detector's loss of boxes and scores.

    Raises:
        ModelError: the model does not fit the data.
    """
    if context.data.task == "classification":
        return label_loss(head_of(model, context.data))
    from compress.training import detection

    return detection.loss(detection.head_of(model, context.data, context.detector))


def label_loss(head: ClassificationHead) -> Loss:
    """Cross entropy with the labels; of probabilities of each class by itself the sum over the classes."""
    library = keras()

    def loss(batch: Batch, outputs: Any) -> Any:
        if head.scores == "sigmoid":
            wanted = library.ops.one_hot(library.ops.cast(batch.labels, "int32"), outputs.shape[-1], dtype="float32")
            logits = head.logits(outputs)
            return library.ops.sum(library.ops.softplus(logits) - wanted * logits, axis=-1)
        logits = head.scores == "logits"
        return library.losses.sparse_categorical_crossentropy(batch.labels, outputs, from_logits=logits)

    return Loss(loss)


def fit(model: Any, loss: Loss, settings: TrainingSettings, context: Context, callbacks: Sequence[Any] = ()) -> Facts:
    """Train a model in place, then recalibrate its batch norms.

    Args:
        model: a Keras model. Of several outputs the first is the classifier's, the others are for the loss alone;
            a detector has two.
        loss: what is made small.
        settings: how to train.
        context: data, seed, progress.
        callbacks: Keras callbacks of the caller's.

    Returns:
        `history`: one map for each epoch with loss, accuracy (of classifiers) and their validation values;
        `best_epoch`, from 1, where early stopping chose it; `subset`, where a part is trained on: how many samples,
        and what choosing them took; `batch_norms`, where there are any: whether recalibration is kept.

    Raises:
        StageError: the loss is no longer a number.
    """
    loss, context, told = _narrowed(model, loss, settings, context)
    library = keras(context.seed)
    worker = precision.lowered(model, settings.precision)
    trainer = _trainer(library, worker, _weighted(loss, settings, context.data))
    targets = {split: _targets(context.data, loss, split) for split in ("train", "validation")}
    steps = settings.batches_per_epoch(len(targets["train"]["labels"]))
    optimizer = _optimizer(library, settings, steps)
    classifies = context.data.task == "classification"
    trainer.compile(optimizer, metrics=["accuracy"] if classifies else None, jit_compile=False)
    stopping = _stopping(library, settings, "val_accuracy" if classifies else "val_loss")
    kept = _kept(trainer, optimizer, stopping, context)
    first = kept.read() if kept else 0
    if first:
        context.progress.note(f"goes on after epoch {first} of {settings.epochs}")
    asked = [
        monitoring.reporting(library, context.progress, steps, settings.epochs, first),
        library.callbacks.SwapEMAWeights(swap_on_epoch=True) if settings.ema is not None else None,
        stopping,
        *callbacks,
        monitoring.tensorboard(context.logs, first) if settings.tensorboard and context.logs else None,
        kept.callback() if kept else None,
    ]
    history = trainer.fit(
        batches(context.data.inputs("train"), targets["train"], settings, context.seed, first, context.data.task),
        epochs=settings.epochs,
        initial_epoch=first,
        steps_per_epoch=steps,
        validation_data=held_out(context.data.inputs("validation"), targets["validation"]),
        shuffle=False,
        verbose=0,
        callbacks=[each for each in asked if each is not None],
    ).history
    if worker is not model:
        model.set_weights(worker.get_weights())
    best = {} if stopping is None else {"best_epoch": stopping.best_epoch + 1}
    earlier = [_plain_row(row) for row in kept.rows[:first]] if kept else []
    return {"history": [*earlier, *rows(history)], **best, **told, **recalibrate_batch_norms(model, context)}


def _narrowed(model: Any, loss: Loss, settings: TrainingSettings, context: Context) -> tuple[Loss, Context, Facts]:
    """Loss and context with the part of the training split that is trained on, and what is to be said of it."""
    if settings.subset is None:
        return loss, context, {}
    head = head_of(keras().Model(model.inputs[0], model.outputs[0]), context.data)
    apart, part = replace(context, unfinished=None, logs=None), settings.subset
    brief = TrainingSettings(
        epochs=part.epochs,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        augment=settings.augment,
    )

    def trained(number: int) -> Any:
        proxy = subset_selection.fresh(model, context.seed + 1 + number)
        fit(proxy, label_loss(head), brief, replace(apart, seed=context.seed + 1 + number))
        return proxy

    indices, told = subset_selection.chosen(part, head, model, trained, context)
    taught = {split: values[indices] if split == "train" else values for split, values in loss.taught.items()}
    return replace(loss, taught=taught), replace(context, data=Part(context.data, indices)), told


def _stopping(library: Any, settings: TrainingSettings, watched: str) -> Any:
    """The callback of early stopping, or None."""
    if settings.early_stopping is None:
        return None
    better = "max" if watched.endswith("accuracy") else "min"
    return library.callbacks.EarlyStopping(
        watched, patience=settings.early_stopping, mode=better, restore_best_weights=True
    )


def _kept(trainer: Any, optimizer: Any, stopping: Any, context: Context) -> Checkpoint | None:
    """Where the training is kept between epochs; None where nothing may stay."""
    if context.unfinished is None:
        return None
    optimizer.build(trainer.trainable_variables)
    return Checkpoint(context.unfinished, [*trainer.variables, *optimizer.variables], stopping)


def _optimizer(library: Any, settings: TrainingSettings, batches: int) -> Any:
    """Adam, with a learning rate that may rise from 0 and then falls as it is told.

    Where gradients are accumulated, Keras goes along the schedule and averages weights at every batch all the same.
    """
    total, accumulated = batches * settings.epochs, settings.gradient_accumulation
    if total < accumulated:
        raise StageError(
            f"gradient_accumulation: {accumulated} batches make one step, but the whole training "
            f"has {total}, so that nothing would be learnt",
            allowed=f"up to {total}",
            todo="lower it, or train for more epochs",
        )
    schedule = schedules.schedule(settings.schedule, settings.learning_rate, total, int(total * settings.warmup))
    averaged = {} if settings.ema is None else {"use_ema": True, "ema_momentum": settings.ema ** (1 / accumulated)}
    several = accumulated if accumulated > 1 else None
    adam = library.optimizers.Adam(schedule, gradient_accumulation_steps=several, **averaged)
    return library.optimizers.LossScaleOptimizer(adam) if settings.precision == "mixed_float16" else adam


def _weighted(loss: Loss, settings: TrainingSettings, data: Data) -> Loss:
    """The loss with the weight of each sample's class, where that is wanted; the mean weight is 1."""
    if settings.class_weights == "none":
        return loss
    counts = np.bincount(data.labels("train"), minlength=len(data.class_names))
    weights = (counts.sum() / (np.maximum(counts, 1) * np.count_nonzero(counts))).astype(np.float32)

    def weighted(batch: Batch, outputs: Any) -> Any:
        ops = keras().ops
        return loss.of(batch, outputs) * ops.take(weights, ops.cast(ops.reshape(batch.labels, (-1,)), "int32"))

    return replace(loss, of=weighted)


def _targets(data: Data, loss: Loss, split: Split) -> dict[str, NDArray[Any]]:
    """What Keras carries beside the inputs: fields of `Batch`, by name."""
    if data.task == "detection":
        from compress.training import detection

        return {"labels": detection.padded(data.objects(split))}
    return {"labels": data.labels(split)} | ({"taught": loss.taught[split]} if loss.taught else {})


def rows(history: dict[str, list[Any]]) -> list[dict[str, float | None]]:
    """Keras' history as one map for each epoch."""
    count = len(history.get("loss", []))
    return [_plain_row({name: values[epoch] for name, values in history.items()}) for epoch in range(count)]


def _plain_row(row: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> float | None:
    """A number for JSON; None where it is none."""
    return round(float(value), 6) if np.isfinite(value) else None


def _trainer(library: Any, model: Any, loss: Loss) -> Any:
    """A model around the model, whose loss sees the whole batch and all outputs, and its metrics labels and scores."""

    class Trainer(library.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def call(self, x: Any, training: bool = False) -> Any:
            return library.tree.map_structure(
                lambda each: library.ops.cast(each, "float32"), self.inner(x, training=training)
            )

        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
        ) -> Any:
            del sample_weight, training
            return library.ops.mean(loss.of(Batch(x, **y), y_pred)) + sum(self.losses)

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            scores = y_pred[0] if isinstance(y_pred, list | tuple) else y_pred
            return super().compute_metrics(x, y["labels"], scores, sample_weight)

    return Trainer()
