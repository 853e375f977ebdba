"""The training loop that all stages share: Keras' own `fit`, with our loss, progress and checks."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.core import memory
from compress.core.artifact import Facts
from compress.core.errors import StageError
from compress.core.progress import Phase
from compress.data.rows import rows as rows_of
from compress.data.types import Data, Split
from compress.learning.context import Context
from compress.learning.training import callbacks as monitoring
from compress.learning.training import phases, schedules, strategies
from compress.learning.training.augmentation import Augment
from compress.learning.training.batches import EpochSettings, batches, held_out
from compress.learning.training.bn_recalibration import recalibrate_batch_norms
from compress.learning.training.callbacks import LossScale
from compress.learning.training.checkpoint import Checkpoint
from compress.model.ir import mixed_precision as precision
from compress.model.ir.passes import cut_lookup
from compress.model.ir.tensorflow import keras, run
from compress.results.encoding import encode
from compress.results.training import TrainingLoss
from compress.tasks import task_of
from compress.tasks.base import Head, Specification, Use

COMPARED = 64
"""Training samples that workers compare before they train together; chosen: these are read quickly from files, too."""
GUESSED = 512
"""Number of training samples on which the loss of guessing is measured."""
GUESS_BATCH = 64
"""Samples whose loss is computed at once; chosen: the result does not depend on it."""
LARGE_TARGETS = 1 << 26
"""Bytes of targets above which a guess is made from the measured samples alone."""


@dataclass(frozen=True)
class Batch:
    """The input of a loss in addition to the model's outputs: tensors with a batch axis.

    Attributes:
        inputs: the samples that the model received, after augmentation.
        labels: the training targets of the task (`Task.targets`): for classification int64 [n].
        soft_targets: the outputs of teachers for these samples; None if they were not computed before the training.
        partner_labels: the training targets of the samples that these are mixed with; None if they are not mixed.
        share: the share of the samples in the mixture: [n].
        training: whether the weights are trained with these samples; False in validation.
    """

    inputs: Any
    labels: Any
    soft_targets: Any = None
    partner_labels: Any = None
    share: Any = None
    training: bool = False


@dataclass(frozen=True)
class Loss:
    """The value that training minimizes.

    Attributes:
        of: (batch, the model's outputs) -> loss of each sample [n].
        soft_targets: outputs of teachers, computed before the training without augmentation: one row for each sample
            of train and validation. Batches contain their rows.
        head: the meaning of the model's outputs; needed to show the loss of guessing.
        name: what the loss is, for people, with its unit.
    """

    of: Callable[[Batch, Any], Any]
    soft_targets: Mapping[Split, NDArray[np.float32]] = field(default_factory=dict)
    head: Head | None = None
    name: str = ""


@dataclass(frozen=True)
class Rate:
    """The learning rate of a weight, compared with the others.

    Attributes:
        factor: factor of the learning rate, for the weight or for each of its values.
        start: fraction of the training before which the weight does not change.
    """

    factor: float | NDArray[np.float32]
    start: float = 0.0


class TrainingSettings(EpochSettings):
    """The settings of stages that train with Keras 3."""

    schedule: schedules.Name = "cosine"
    """Decay of the learning rate. cosine: to 0 along a cosine. linear: to 0 along a line. steps: to a tenth after half
    of the training, and again after three quarters. constant: no decay."""
    warmup: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Fraction of the steps in which the learning rate first rises from 0."""
    gradient_accumulation: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of batches whose gradients are averaged for one update of the weights. Batches that are too few for an
    update at the end of the training change no weight. If they are more than a tenth of all, a lower number is used, at
    least half of this one, and a line of the progress output says so."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights with this decay (0.99 to 0.9999). Validation uses the average,
    which is far behind in the first epochs."""
    early_stopping: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Stop after this number of epochs without a better validation accuracy (for detectors: validation loss), and
    restore the weights of the best epoch."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weight the loss so that every class has the same total weight."""
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    """mixed_bfloat16, mixed_float16: compute in 16 bits where the result stays accurate, which is faster on hardware
    with 16-bit units. The weights and the resulting model are float32."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Reduce the kernels in every step by this fraction times the learning rate. Source: Loshchilov and Hutter,
    Decoupled Weight Decay Regularization, 2019."""
    tensorboard: bool = False
    """Write losses and accuracies for TensorBoard to runs/NAME/tensorboard."""

    def training_uses(self, labels: bool = True) -> tuple[Use, ...]:
        """Return the methods that these settings use and that not every task has; the loss may use no labels."""
        uses: list[Use] = []
        if self.class_weights != "none":
            uses.append("class weights")
        if labels and self.augment != Augment():
            uses.append("augmentation")
        if self.augment.rotate:
            uses.append("rotation")
        if self.augment.mixup:
            uses.append("mixup")
        return tuple(uses)


def head_of(model: Any, data: Data, specification: Specification = None) -> Head:
    """Return the meaning of a model's outputs; `specification` is the way to read them, if the layers do not define it.

    Raises:
        ModelError: the model does not fit the data, which defines the task.
    """
    return task_of(data).head(model, data, specification)


def chosen_inputs(data: Data, count: int, seed: int) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Return random samples of the training split with their training targets, in the order of the split."""
    inputs, targets = data.inputs("train"), task_of(data).targets(data, "train")
    order = np.sort(np.random.default_rng(seed).permutation(len(inputs))[:count])
    return rows_of(inputs, order), targets[order]


def own_loss(model: Any, context: Context) -> Loss:
    """Return the loss from the targets of the data alone, without a teacher.

    Raises:
        ModelError: the model does not fit the data.
    """
    return label_loss(head_of(model, context.data, context.specification))


def label_loss(head: Head) -> Loss:
    """Return the loss of a head on the labels."""
    return Loss(lambda batch, outputs: head.loss(batch.labels, outputs), head=head, name=head.loss_name)


def smoothed_loss(loss: Loss, amount: float) -> Loss:
    """Return a loss on labels of which a part is spread over all classes (label smoothing)."""
    if not amount:
        return loss
    head = loss.head
    assert head is not None

    def smoothed(batch: Batch, outputs: Any) -> Any:
        return (1 - amount) * loss.of(batch, outputs) + amount * head.smoothing_loss(outputs)

    return replace(loss, of=smoothed, name=f"{loss.name}, label smoothing {amount:g}")


def fit(
    model: Any,
    loss: Loss,
    settings: TrainingSettings,
    context: Context,
    callbacks: Sequence[Callable[[Any], Any]] = (),
    rates: Mapping[str, Rate] = MappingProxyType({}),
) -> Facts:
    """Train a model in place, then recalibrate its batch norms.

    With 16-bit precision or several devices, a copy of the model is trained, and the model gets its weights at the end.

    Args:
        model: a Keras model. Of several outputs the first is the classifier's, and the others are used only by the
            loss; a detector has two.
        loss: the value to minimize.
        settings: the training settings.
        context: data, seed, progress, devices.
        callbacks: functions that return additional Keras callbacks for the model that is trained.
        rates: the learning rates of weights that differ from the others, by the path of the weight.

    Returns:
        `history`: one map for each epoch with loss, accuracy (of classifiers) and their validation values.
        `loss`: what the loss is (`name`), and the loss of guessing (`guessing`; None where there is no guess).
        `best_epoch`: the epoch that early stopping restored, from 1.
        `batch_norms`: whether their recalibration was kept, if there are any.

    Raises:
        StageError: the loss is not finite, this machine does not have the devices, or the samples cannot be mixed.
    """
    keras(context.seed)
    training = _Training.of(model, loss, settings, context)
    compiled = training.compiled(rates)
    scale = training.loss_scale()
    epochs = monitoring.epochs_phase(settings.epochs, phases.training_cost(context.data, settings.epochs), scale)
    recalibration = Phase("batch norms", phases.BUILD + 2 * phases.validation_cost(context.data))
    context.progress.plan(epochs, recalibration)
    training.show_notes(compiled.first)
    with context.progress.phase(epochs):
        history = training.run(compiled, callbacks)
    if compiled.worker is not model:
        model.set_weights(compiled.worker.get_weights())
    with context.progress.phase(recalibration):  # the momentum of batch norms is too slow for a short training
        batch_norms = recalibrate_batch_norms(model, context)
    best = {} if compiled.stopping is None else {"best_epoch": compiled.stopping.best_epoch + 1}
    return {
        "history": history,
        "loss": encode(TrainingLoss(scale.name, scale.references.get("loss"))),
        **best,
        **batch_norms,
    }


@dataclass(frozen=True)
class _Compiled:
    """A model that is ready to be trained.

    Attributes:
        worker: the model whose weights are trained: the model itself, or its copy in 16 bits or on several devices.
        trainer: the Keras model around `worker` that has the loss.
        stopping: the callback of early stopping, or None.
        checkpoint: the state between epochs, or None.
        first: the number of epochs that an interrupted training has completed.
    """

    worker: Any
    trainer: Any
    stopping: Any
    checkpoint: Checkpoint | None
    first: int


@dataclass(frozen=True)
class _Training:
    """The arguments of `fit`, and what follows from them.

    Attributes:
        model: the model.
        loss: the loss with class weights, for mixed samples.
        settings: the training settings.
        context: data, seed, progress, devices.
        devices: the devices.
        targets: for train and validation the arrays that become fields of `Batch`.
        steps: number of batches in an epoch.
    """

    model: Any
    loss: Loss
    settings: TrainingSettings
    context: Context
    devices: strategies.Devices
    targets: Mapping[Split, Mapping[str, NDArray[Any]]]
    steps: int

    @classmethod
    def of(cls, model: Any, loss: Loss, settings: TrainingSettings, context: Context) -> _Training:
        """Return a training after a check that samples can be mixed and divided among the devices.

        Raises:
            StageError: the samples cannot be mixed or divided.
        """
        _refuse_mixed_rows(model, settings)
        splits: tuple[Split, ...] = ("train", "validation")
        targets = {split: _targets(context.data, loss, split) for split in splits}
        count = len(targets["train"]["labels"])
        devices = strategies.devices(context.execution)
        validation = len(targets["validation"]["labels"])
        devices.refuse(count, validation, settings.batch_size, settings.gradient_accumulation, settings.precision)
        steps = settings.batches_per_epoch(count)
        loss = _mixed(_weighted(loss, settings, context.data), settings)
        return cls(model, loss, settings, context, devices, targets, steps)

    def compiled(self, rates: Mapping[str, Rate]) -> _Compiled:
        """Return the model with its optimizer, in the state in which an interrupted training stopped.

        All variables are created in the scope of the strategy, which places them on every device. The checkpoint is
        read after that, because it contains the variables of the optimizer too, and before workers compare what they
        train, because all of them must continue after the same epoch.
        """
        library, settings, devices = keras(), self.settings, self.devices
        counts_right = task_of(self.context.data).counts_right
        with devices.strategy.scope(), devices.watched():
            is_copied = self.context.execution.strategy != "one"
            worker = precision.lowered(self.model, settings.precision, copy=is_copied)
            unknown = rates.keys() - {variable.path for variable in worker.variables}
            assert not unknown, f"learning rates of unknown weights: {sorted(unknown)}"
            trainer = devices.trainer(_trainer_class(library, worker, self.loss, devices.count))()
            optimizer = _optimizer(library, settings, self.steps, rates)
            trainer.compile(
                optimizer,
                metrics=["accuracy"] if counts_right else None,
                jit_compile=False,
            )
            stopping = _stopping(library, settings, "val_accuracy" if counts_right else "val_loss")
            checkpoint = _checkpoint(trainer, optimizer, stopping, self.context)
            first = checkpoint.restore(checkpoint.content()) if checkpoint else 0
            devices.start_together(lambda: self._what_is_trained(first), worker.variables)
        return _Compiled(worker, trainer, stopping, checkpoint, first)

    def loss_scale(self) -> LossScale:
        """Return the scale of the loss, with the accuracy of guessing if there are classes."""
        inputs, targets = self.context.data.inputs("train"), self.targets["train"]
        scale = loss_scale(self.model, self.loss, inputs, targets, self.context.seed)
        return scale.with_accuracy(targets["labels"]) if task_of(self.context.data).counts_right else scale

    def show_notes(self, first: int) -> None:
        """Tell the user about memory, left-over batches, and the epoch after which the training continues."""
        settings = self.settings
        memory_needed = phases.memory_estimate(self.model, self.context.data.inputs("train"))
        notes = [
            memory_needed.note(settings.batch_size, memory.memory()),
            schedules.accumulation_note(settings.gradient_accumulation, self.steps * settings.epochs),
            f"continues after epoch {first} of {settings.epochs}" if first else None,
        ]
        for note in filter(None, notes):
            self.context.progress.note(note)

    def run(self, compiled: _Compiled, callbacks: Sequence[Callable[[Any], Any]]) -> list[dict[str, float | None]]:
        """Train all epochs that are left; return the history with the epochs before an interruption."""
        context, settings, devices, first = self.context, self.settings, self.devices, compiled.first
        times = None if context.profile is None else monitoring.TrainingTimer(context.profile)
        augmentation = task_of(context.data).augmentation(settings.augment)
        inputs, targets = context.data.inputs("train"), self.targets["train"]
        dataset = batches(inputs, targets, settings, context.seed, first, augmentation)
        is_divided = devices.count > 1
        validation = held_out(context.data.inputs("validation"), self.targets["validation"], in_batches=is_divided)
        with devices.watched(), closing(times) if times else nullcontext():
            history = compiled.trainer.fit(
                devices.distributed(dataset),
                epochs=settings.epochs,
                initial_epoch=first,
                steps_per_epoch=self.steps,
                validation_data=devices.distributed(validation),
                # `distributed` returns an endless data set.
                validation_steps=int(validation.cardinality()) if is_divided else None,
                shuffle=False,  # `batches` has the order, which depends on seed and epoch alone
                verbose=0,
                callbacks=self._callbacks(compiled, callbacks, times),
            ).history
        if times is not None:
            times.record(dataset)
        earlier = [_plain_row(row) for row in compiled.checkpoint.rows[:first]] if compiled.checkpoint else []
        return [*earlier, *rows(history)]

    def _callbacks(
        self,
        compiled: _Compiled,
        callbacks: Sequence[Callable[[Any], Any]],
        times: monitoring.TrainingTimer | None,
    ) -> list[Any]:
        """Return Keras' callbacks, in the order in which Keras calls them.

        Steps are timed first, without the time of the other callbacks. A loss that is not finite ends the training
        before it gets into weights that are kept. Averages of weights and of the statistics of devices are in place
        before early stopping copies the weights. The checkpoint is last: moving averages are swapped back before.
        """
        context, library, first = self.context, keras(), compiled.first
        writes = not self.devices.worker  # of several workers, only the chief
        optional = [
            times.callback() if times else None,
            monitoring.reporting(library, context.progress, self.steps, self.settings.epochs, first),
            library.callbacks.SwapEMAWeights(swap_on_epoch=True) if self.settings.ema is not None else None,
            *self.devices.callbacks(compiled.worker),
            compiled.stopping,
            *(callback(compiled.worker) for callback in callbacks),
            monitoring.tensorboard(context.logs, first) if self.settings.tensorboard and context.logs else None,
            compiled.checkpoint.callback() if compiled.checkpoint and writes else None,
        ]
        return [callback for callback in optional if callback is not None]

    def _what_is_trained(self, first: int) -> list[Any]:
        """Return what must be equal on all workers of a training; `first` is the number of epochs in the checkpoint."""
        versions = [importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy")]
        settings = self.settings.model_dump(mode="json", exclude={"id"})
        inputs = self.context.data.inputs("train")
        compared = rows_of(inputs, np.unique(np.linspace(0, len(inputs) - 1, COMPARED).astype(np.int64)))
        samples = [len(inputs), hashlib.sha256(np.ascontiguousarray(compared).tobytes()).hexdigest()]
        labels = [hashlib.sha256(targets["labels"].tobytes()).hexdigest() for targets in self.targets.values()]
        weights = [[*weight.shape, str(weight.dtype), bool(weight.trainable)] for weight in self.model.weights]
        return [versions, settings, self.context.seed, self.loss.name, first, samples, labels, weights]


def loss_scale(
    model: Any, loss: Loss, inputs: NDArray[np.float32], targets: Mapping[str, NDArray[Any]], seed: int
) -> LossScale:
    """Return what a loss is, and what guessing costs: the best outputs that do not depend on the input.

    The guess has the same loss as the model, so that it is right with class weights and with teachers, too. The loss is
    measured on some samples: `targets` are the fields of `Batch` besides the inputs [n, ...].
    """
    head = loss.head
    shapes = [tuple(tensor.shape[1:]) for tensor in model.outputs]
    if head is None or any(None in shape for shape in shapes):
        return LossScale(loss.name)
    labels = targets["labels"]
    order = np.sort(np.random.default_rng(seed).permutation(len(labels))[:GUESSED])
    constant = head.constant_outputs(labels if labels.nbytes < LARGE_TARGETS else labels[order], shapes)
    if constant is None or [output.shape[1:] for output in constant] != shapes:
        return LossScale(loss.name)
    totals: dict[str, float] = {}
    for start in range(0, len(order), GUESS_BATCH):
        chosen = order[start : start + GUESS_BATCH]
        fields: dict[str, Any] = {name: rows_of(rows, chosen) for name, rows in targets.items()}
        batch = Batch(rows_of(inputs, chosen), **fields)
        outputs = [keras().ops.repeat(output, len(chosen), axis=0) for output in constant]
        values = {**head.training_values(batch.labels, outputs), "loss": loss.of(batch, outputs)}
        for name, value in values.items():
            totals[name] = totals.get(name, 0.0) + float(np.sum(np.asarray(value, np.float64)))
    references = {name: round(total / len(order), 6) for name, total in totals.items()}
    return LossScale(loss.name, {name: value for name, value in references.items() if np.isfinite(value)})


def _stopping(library: Any, settings: TrainingSettings, metric: str) -> Any:
    """Return the callback of early stopping, or None."""
    if settings.early_stopping is None:
        return None
    mode = "max" if metric.endswith("accuracy") else "min"
    return library.callbacks.EarlyStopping(
        metric, patience=settings.early_stopping, mode=mode, restore_best_weights=True
    )


def _checkpoint(trainer: Any, optimizer: Any, stopping: Any, context: Context) -> Checkpoint | None:
    """Return the checkpoint of the training; None if the context has no folder for it."""
    if context.unfinished is None:
        return None
    optimizer.build(trainer.trainable_variables)
    return Checkpoint(context.unfinished, [*trainer.variables, *optimizer.variables], stopping)


def _optimizer(
    library: Any,
    settings: TrainingSettings,
    batches: int,
    rates: Mapping[str, Rate] = MappingProxyType({}),
) -> Any:
    """Return Adam with the learning rate schedule and the weight decay of the settings, and the rates of some weights.

    With gradient accumulation, Keras still advances the schedule and averages the weights at every batch.
    """
    total = batches * settings.epochs
    accumulated = schedules.batches_per_update(settings.gradient_accumulation, total)
    schedule = schedules.schedule(settings.schedule, settings.learning_rate, total, int(total * settings.warmup))
    averaged = {} if settings.ema is None else {"use_ema": True, "ema_momentum": settings.ema ** (1 / accumulated)}
    several = accumulated if accumulated > 1 else None

    adam = _adam(library, rates, settings.weight_decay, total)(
        schedule, gradient_accumulation_steps=several, **averaged
    )
    return library.optimizers.LossScaleOptimizer(adam) if settings.precision == "mixed_float16" else adam


def _adam(library: Any, rates: Mapping[str, Rate], decay: float, steps: int) -> Any:
    """Return Keras' class Adam, or one with other learning rates for some weights, and with decoupled weight decay.

    The decay of a weight is multiplied by its learning rate, which Keras' own `weight_decay` does not do.
    """
    if not rates and not decay:
        return library.optimizers.Adam
    ops = library.ops

    class Adam(library.optimizers.Adam):  # type: ignore[misc]
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            path = self._trainable_variables[self._get_variable_index(variable)].path
            rate = rates.get(path)
            if rate is not None:
                started = self._iterations >= int(rate.start * steps)  # `iterations` counts updates, not batches
                learning_rate = learning_rate * ops.where(started, rate.factor, 0.0)
            if decay and path.rsplit("/", 1)[-1].endswith("kernel"):
                factor = ops.cast(learning_rate * decay, variable.dtype)
                self.assign_sub(variable, ops.multiply(variable, factor))
            super().update_step(gradient, variable, learning_rate)

    return Adam


def _refuse_mixed_rows(model: Any, settings: TrainingSettings) -> None:
    """Refuse mixup of samples that are indices of an embedding's rows: the mean of two indices is an unrelated row.

    Raises:
        StageError: mixup is set for such a model.
    """
    if settings.augment.mixup and cut_lookup.input_rows(model) is not None:
        raise StageError(
            "augment.mixup mixes the values of samples, and those of a model with an embedding are indices of its rows",
            hint="remove augment.mixup",
        )


def _mixed(loss: Loss, settings: TrainingSettings) -> Loss:
    """Return the loss for samples that are mixed with others: the losses of both, in the shares of the mixture."""
    if not settings.augment.mixup:
        return loss

    def mixed(batch: Batch, outputs: Any) -> Any:
        if batch.partner_labels is None:  # validation
            return loss.of(batch, outputs)
        partner = replace(batch, labels=batch.partner_labels)
        return batch.share * loss.of(batch, outputs) + (1 - batch.share) * loss.of(partner, outputs)

    return replace(loss, of=mixed)


def _weighted(loss: Loss, settings: TrainingSettings, data: Data) -> Loss:
    """Return the loss with class weights, if the settings have them; the mean weight is 1."""
    if settings.class_weights == "none":
        return loss
    counts = np.bincount(data.labels("train"), minlength=len(data.class_names))
    weights = (counts.sum() / (np.maximum(counts, 1) * np.count_nonzero(counts))).astype(np.float32)

    def weighted(batch: Batch, outputs: Any) -> Any:
        ops = keras().ops
        return loss.of(batch, outputs) * ops.take(weights, ops.cast(ops.reshape(batch.labels, (-1,)), "int32"))

    return replace(loss, of=weighted)


def _targets(data: Data, loss: Loss, split: Split) -> dict[str, NDArray[Any]]:
    """Return the arrays that Keras passes with the inputs: fields of `Batch`, by name."""
    fields = {"labels": task_of(data).targets(data, split)}
    if loss.soft_targets:
        fields["soft_targets"] = loss.soft_targets[split]
    return fields


def rows(history: dict[str, list[Any]]) -> list[dict[str, float | None]]:
    """Return Keras' history as one map for each epoch."""
    count = len(history.get("loss", []))
    return [_plain_row({name: values[epoch] for name, values in history.items()}) for epoch in range(count)]


def _plain_row(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return numbers for JSON; None for those that are not finite."""
    return {name: round(float(value), 6) if np.isfinite(value) else None for name, value in row.items()}


def _trainer_class(library: Any, model: Any, loss: Loss, replicas: int) -> type[Any]:
    """Return the class of a Keras model around the model that is trained.

    Its loss gets the batch and all outputs, its metrics get labels and scores. The gradients of the losses on all
    devices (`replicas`) are added.
    """

    class Trainer(library.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.value_means = [library.metrics.Mean(name) for name in loss.head.shown_values] if loss.head else []

        def call(self, x: Any, training: bool = False) -> Any:
            return library.tree.map_structure(
                lambda output: library.ops.cast(output, "float32"), run(self.inner, x, training)
            )

        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
        ) -> Any:
            del sample_weight
            batch = Batch(x, **y, training=training)
            values = loss.head.training_values(batch.labels, y_pred) if loss.head else {}
            for mean in self.value_means:
                mean.update_state(values[mean.name])
            losses = loss.of(batch, y_pred)
            if replicas == 1:
                return library.ops.mean(losses) + sum(self.losses)
            return strategies.share_of_mean(losses) + sum(self.losses) / replicas

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            scores = y_pred[0] if isinstance(y_pred, list | tuple) else y_pred
            return super().compute_metrics(x, y["labels"], scores, sample_weight)

    return Trainer
