"""Procedures that train a Keras model: train, distill, prune, replace_activations.

The caller has set the random generators (`compress.model.ir.tensorflow.keras`) before it loaded the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from compress.core.artifact import Facts
from compress.core.progress import Phase
from compress.data.types import Data
from compress.learning.context import Context
from compress.learning.distillation import features, losses, teachers
from compress.learning.distillation.teachers import Teacher
from compress.learning.procedures import ModelResult
from compress.learning.procedures.settings import DistillSettings, PruneSettings, ReplacementSettings, TrainSettings
from compress.learning.procedures.trial_conversion import TrialConverter
from compress.learning.pruning import iterative
from compress.learning.pruning.iterative import PruningOptions, Retraining
from compress.learning.pruning.objective import Objective
from compress.learning.replacement import retraining
from compress.learning.replacement.activations import Replacements
from compress.learning.replacement.gradual import OutputLoss
from compress.learning.replacement.retraining import ReplacementOptions
from compress.learning.training import healing, loop, phases, transfer
from compress.learning.training.loop import Batch, Loss
from compress.model.ir.layer_specs.functions import Activation
from compress.targets.base import Target

GATES = "squeeze_and_excite"


def train(model: Any, settings: TrainSettings, context: Context, *, is_trained: bool) -> ModelResult:
    """Train a model on the labels, or only its head.

    Args:
        model: a Keras model, which is trained in place.
        settings: the settings of the training.
        context: data, seed, progress.
        is_trained: whether the weights from before the training are kept if validation is worse afterwards.
    """
    loss = loop.smoothed_loss(loop.own_loss(model, context), settings.label_smoothing)
    fit = healing.heal if is_trained else loop.fit
    with transfer.frozen(model, settings) as count, transfer.flat(model, settings) as trained:
        facts = fit(trained, loss, settings, context, rates=transfer.rates(trained, settings))
    return ModelResult(model, {**facts, "frozen_layers": count} if count else facts)


def distill(
    model: Any, models: Sequence[Teacher], settings: DistillSettings, context: Context, *, is_trained: bool
) -> ModelResult:
    """Train a model on the outputs of teachers and on the labels.

    Args:
        model: the student, a Keras model, which is trained in place.
        models: the teachers.
        settings: the settings of the training and of the distillation.
        context: data, seed, progress.
        is_trained: whether the weights from before the training are kept if validation is worse afterwards.
    """
    head = loop.head_of(model, context.data, context.specification)
    hints = (
        features.set_up(model, models[0], settings.features, context.data, context.specification)
        if settings.features
        else None
    )
    names, schedule = [teacher.name for teacher in models], losses.schedule(settings)
    before, training = _distillation_phases(settings, context.data)
    context.progress.plan(*before, training)
    context.progress.note(f"distill: teachers ({', '.join(names)}) run {schedule}")
    loss = losses.loss_of(head, models, settings, settings, context, hints)
    fit = healing.heal if is_trained else loop.fit
    with context.progress.phase(training):
        facts = fit(hints.model if hints else model, loss, settings, context)
    facts |= {"teachers": names, "teachers_run": schedule}
    if hints:
        facts["features"] = [list(pair) for pair in hints.pairs]
    return ModelResult(hints.student if hints else model, facts)


def distillation_cost(settings: DistillSettings, data: Data) -> float:
    """Return the cost of `distill`, as the weight of a phase."""
    before, training = _distillation_phases(settings, data)
    return training.weight + sum(phase.weight for phase in before)


def _distillation_phases(settings: DistillSettings, data: Data) -> tuple[list[Phase], Phase]:
    """Return the run of the teachers before the training, if there is one, and the training."""
    before = [losses.teachers_phase(data)] if losses.schedule(settings) == losses.ONCE else []
    return before, phases.training(data, settings)


def prune(
    model: Any, settings: PruneSettings, context: Context, *, original: Any = None, float_file: bytes | None = None
) -> ModelResult:
    """Remove the least important channels until the model is small or fast enough, and train the rest.

    Args:
        model: a trained Keras model.
        settings: the objective, the choice of channels, and the training.
        context: data, seed, target, progress.
        original: the Keras model that teaches after each step, for `settings.distill`.
        float_file: the float .tflite file of the model, if there is one already.
    """
    objective = objective_of(settings, context.target)
    samples = loop.chosen_inputs(context.data, settings.samples, context.seed)[0]
    converter = TrialConverter(samples, context.target, [] if float_file is None else [(model, float_file)])
    options = pruning_options(settings)
    result = iterative.prune(
        model, objective, options, retraining_of(model, settings, context, original), context, converter
    )
    return ModelResult(
        result.model, {"objective": objective.to_json(), "steps": [step.to_json() for step in result.steps]}
    )


def pruning_options(settings: PruneSettings) -> PruningOptions:
    """Return the settings of the choice of channels."""
    return PruningOptions(settings.importance, settings.allocation, settings.samples, settings.steps)


def objective_of(settings: PruneSettings, target: Target) -> Objective:
    """Return the objective of a pruning; without a limit half of the cost may remain."""
    keep = settings.keep if settings.keep_macs is None else settings.keep_macs
    if keep is None and settings.at_most is None and settings.objective != "cache":
        keep = 0.5
    host, clock = target.cost.host(settings.host), target.cost.clock(settings.clock)
    return Objective(settings.objective, keep, settings.at_most, host, clock)


def retraining_of(model: Any, settings: PruneSettings, context: Context, original: Any) -> Retraining | None:
    """Return the training after each step, on labels and, with `distill`, on the original's scores."""
    epochs_between = settings.epochs_between if settings.steps > 1 else 0
    if not settings.epochs and not epochs_between:
        return None
    head = loop.head_of(model, context.data, context.specification)
    loss = loop.label_loss(head)
    if settings.distill is not None:
        teacher = teachers.of_model(original, context.data, "original", context.specification)
        loss = losses.loss_of(head, [teacher], settings.distill, settings, context)
    return Retraining(loss, settings, epochs_between)


def replace_activations(model: Any, settings: ReplacementSettings, context: Context) -> ModelResult:
    """Replace activations by ReLUs, remove gates if asked to, and train with the unchanged model as teacher.

    Args:
        model: a trained Keras model.
        settings: the replacement and the training.
        context: data, seed, progress.

    Returns:
        The changed model; if there is nothing to replace, the same model, and the fact `unchanged`.
    """

    def training_loss(student: Any, teacher: Any, context: Context) -> Loss:
        unchanged = teachers.of_model(teacher, context.data, "the unchanged model", context.specification)
        head = loop.head_of(student, context.data, context.specification)
        return losses.loss_of(head, [unchanged], settings, settings, context)

    def output_loss(model: Any, context: Context) -> OutputLoss:
        head = loop.head_of(model, context.data, context.specification)

        def loss(batch: Batch, outputs: Any, teacher_outputs: Any) -> Any:
            soft_targets = head.soft_targets([head.logits(teacher_outputs)], [1.0], settings.temperature)
            return losses.weighted(head, batch, outputs, soft_targets, settings)

        return loss

    kinds = get_args(Activation) if settings.activations == "all" else settings.activations
    options = ReplacementOptions(kinds, settings.by, settings.squeeze_and_excite == "remove", settings.samples)
    training = retraining.Training(settings, training_loss, output_loss, settings.gradual) if settings.epochs else None
    result = retraining.replace_activations(model, options, training, context)
    facts = _replacement_facts(result.replacements, settings, context)
    if result.model is None:
        return ModelResult(model, facts)
    return ModelResult(result.model, {**facts, **result.training, "accuracy": result.accuracy})


def _replacement_facts(replacements: Replacements, settings: ReplacementSettings, context: Context) -> Facts:
    """Return the replacements and the skipped activations as plain values, and show a summary."""
    by = {GATES: "its mean, in the weights", "prelu": "a slope for each channel"}
    requested: list[str] = [] if settings.activations == "all" else [*settings.activations]
    if settings.squeeze_and_excite == "remove":
        requested.append(GATES)
    not_found = [kind for kind in requested if kind not in replacements.replaced]
    replaced = {
        kind: {"count": len(layers), "by": by.get(kind, settings.by), "layers": list(layers)}
        for kind, layers in replacements.replaced.items()
    }
    note = context.progress.note
    for kind, facts in replaced.items():
        note(f"replace_activations: {facts['count']} {kind} -> {facts['by']}")
    for kind in not_found:
        note(f"replace_activations: {kind} is requested, but the model has none that can be replaced")
    if not replaced:
        note("replace_activations: nothing to replace; the model is passed on unchanged")
    return {
        "replaced": replaced,
        "unchanged": not replaced,
        "not_found": not_found,
        "skipped": dict(replacements.skipped),
        "details": dict(replacements.notes),
    }
