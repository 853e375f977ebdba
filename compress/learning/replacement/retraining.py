"""Replacement in a Keras model, followed by batch norm recalibration and training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from compress.core.artifact import Facts
from compress.core.errors import ModelError
from compress.core.measurement import missing, proportion
from compress.core.progress import Phase
from compress.learning.context import Context
from compress.learning.replacement import gradual, squeeze_excite
from compress.learning.replacement.activations import Replacements, replace_by_relu
from compress.learning.replacement.gradual import GradualTraining, OutputLoss
from compress.learning.training import healing, loop, phases
from compress.learning.training.bn_recalibration import recalibrate_batch_norms
from compress.learning.training.loop import Loss, TrainingSettings
from compress.learning.training.phases import BUILD, validation_cost
from compress.learning.training.validation import validation_quality
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import Network
from compress.model.ir.layer_specs.functions import Activation
from compress.model.ir.tensorflow import sample_shape
from compress.tasks import task_of
from compress.tasks.base import takes


@dataclass(frozen=True)
class ReplacementOptions:
    """The parts to replace; see the stage `replace_activations`."""

    activations: Collection[Activation]
    by: Literal["relu", "relu6"] = "relu"
    remove_gates: bool = False
    samples: int = 256


@dataclass(frozen=True)
class Training:
    """The training of the changed model, with the unchanged model as teacher.

    Attributes:
        settings: of the training.
        loss: (changed model, unchanged model, context) -> the loss.
        output_loss: (unchanged model, context) -> the loss on given outputs of both.
        gradual: the part of the training in which the activations are replaced; 0: before it.
    """

    settings: TrainingSettings
    loss: Callable[[Any, Any, Context], Loss]
    output_loss: Callable[[Any, Context], OutputLoss]
    gradual: float = 0.0


@dataclass(frozen=True)
class ReplacementResult:
    """A changed model.

    Attributes:
        model: the Keras model; None where nothing was replaced.
        replacements: the layers that were replaced or skipped.
        training: the facts of batch norm recalibration and training.
        accuracy: validation accuracy `before`, with the activations `replaced`, and `healed` by training.
    """

    model: Any | None
    replacements: Replacements
    training: Facts = field(default_factory=dict)
    accuracy: Mapping[str, Facts] = field(default_factory=dict)


def replace_activations(
    model: Any,
    options: ReplacementOptions,
    training: Training | None,
    context: Context,
) -> ReplacementResult:
    """Replace activations, remove gates, and train the changed model, if a training is set.

    Raises:
        ModelError: the model does not take the data's samples, or is not a classifier and would be trained.
    """
    _refuse_misfit(model, context, trains=training is not None)
    original = keras_graph.read(model)
    # Gates are removed first: they are measured with the activations that the model was trained with.
    without_gates, gates = _without_gates(original, options, context)
    network, activations = replace_by_relu(without_gates, options.activations, options.by)
    replacements = gates | activations
    if not replacements.replaced:
        return ReplacementResult(None, replacements)
    changed = keras_graph.build(network)
    check = Phase("batch norms", BUILD + 4 * validation_cost(context.data))
    retraining = phases.training(context.data, training.settings if training else None, "retraining")
    after = Phase("comparison", validation_cost(context.data))
    context.progress.plan(check, *([retraining, after] if training is not None else []))
    with context.progress.phase(check):
        facts = _recalibrated(changed, context)
        accuracy = {"before": _accuracy(model, context), "replaced": _accuracy(changed, context)}
    if training is not None and training.gradual and activations.replaced:
        how = GradualTraining(options.activations, options.by, training.gradual, training.output_loss(model, context))
        with context.progress.phase(retraining):
            network, activations, facts = gradual.train(original, without_gates, how, training.settings, context)
        changed, replacements = keras_graph.build(network), gates | activations
    elif training is not None:
        with context.progress.phase(retraining):
            facts |= healing.heal(changed, training.loss(changed, model, context), training.settings, context)
    if training is not None:
        with context.progress.phase(after):
            accuracy["healed"] = _accuracy(changed, context)
    return ReplacementResult(changed, replacements, facts, accuracy)


def _without_gates(network: Network, options: ReplacementOptions, context: Context) -> tuple[Network, Replacements]:
    """Return the network without gates, if that is asked for."""
    if not options.remove_gates:
        return network, Replacements()
    gates, skipped = squeeze_excite.find(network)
    replacements = Replacements(skipped=skipped)
    if gates:
        samples = loop.chosen_inputs(context.data, options.samples, context.seed)[0]
        network, removed = squeeze_excite.remove_gates(network, squeeze_excite.measure(network, gates, samples))
        replacements |= removed
    return network, replacements


def _refuse_misfit(model: Any, context: Context, *, trains: bool) -> None:
    """Refuse a model that cannot be trained; without training, one that does not take the data's samples."""
    try:
        loop.head_of(model, context.data, context.specification)
    except ModelError:
        if trains or not takes(sample_shape(model), context.data.input_shape):
            raise


def _recalibrated(model: Any, context: Context) -> Facts:
    """Return the facts of batch norm recalibration, or the reason why the model cannot be validated on the data."""
    try:
        loop.own_loss(model, context)
    except ModelError as error:
        return {"batch_norms": {"kept": False, "reason": str(error)}}
    return recalibrate_batch_norms(model, context)


def _accuracy(model: Any, context: Context) -> Facts:
    """Return the accuracy on the validation split; the test split is for the final comparison alone."""
    try:
        loop.head_of(model, context.data, context.specification)
    except ModelError as error:
        return missing("fraction", f"not a classifier of this data: {error}").to_json()
    if not task_of(context.data).counts_right:
        return missing("fraction", "the data has no classes").to_json()
    count = len(context.data.labels("validation"))
    right = round(validation_quality(model, context).value * count)
    return {**proportion(right, count, "validation split").to_json(), "n": count}
