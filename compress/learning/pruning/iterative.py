"""Iterative pruning: remove channels and train, in one or more steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from compress.core.artifact import Facts
from compress.core.errors import StageError
from compress.core.progress import Phase
from compress.data.types import Data
from compress.learning.context import Context
from compress.learning.pruning.allocation import AllocationMethod, ImportanceLosses, importance_losses
from compress.learning.pruning.checkpoint import PruningCheckpoint, PruningState
from compress.learning.pruning.cost import Convert, TrialConversion
from compress.learning.pruning.importance import ImportanceMethod, ImportanceSamples, refuse_constant
from compress.learning.pruning.layer_groups import Widths
from compress.learning.pruning.objective import Allocation, CostLimits, Objective
from compress.learning.pruning.prunable import PrunableNetwork, prepare, substitution
from compress.learning.pruning.sensitivity import losses_by_width, sensitivity_curves
from compress.learning.training import healing, loop
from compress.learning.training.bn_recalibration import recalibrate_batch_norms
from compress.learning.training.loop import Loss, TrainingSettings
from compress.learning.training.phases import BACKWARD, BUILD, training_cost, validation_cost
from compress.learning.training.validation import validation_quality
from compress.model.ir import keras_graph, weight_sparsity
from compress.model.ir.keras_graph import Network
from compress.model.ir.tensorflow import set_weights
from compress.results.pruning import LayerWidths, PruningStep, SensitivityCurve
from compress.tasks import task_of
from compress.tasks.base import Quality

COMPARED: tuple[AllocationMethod, ...] = ("balanced", "uniform")
"""The allocation methods that `auto` compares."""


@dataclass(frozen=True)
class PruningOptions:
    """Settings of the choice of channels; see the stage `prune` for their meaning."""

    importance: ImportanceMethod = "taylor"
    allocation: Literal["auto"] | AllocationMethod = "auto"
    samples: int = 512
    steps: int = 1


@dataclass(frozen=True)
class Retraining:
    """Training after the removal of channels.

    Attributes:
        loss: the loss.
        settings: the settings; `settings.epochs` is the training after the last step.
        epochs_between: the epochs after each of the other steps.
    """

    loss: Loss
    settings: TrainingSettings
    epochs_between: int = 1

    def epochs(self, *, last: bool) -> int:
        """Return the epochs after a step."""
        return self.settings.epochs if last else self.epochs_between


@dataclass(frozen=True)
class PruningResult:
    """A pruned model.

    Attributes:
        model: the Keras model.
        steps: the steps that led to it.
    """

    model: Any
    steps: tuple[PruningStep, ...]


def prune(
    model: Any,
    objective: Objective,
    options: PruningOptions,
    retraining: Retraining | None,
    context: Context,
    convert: Convert,
) -> PruningResult:
    """Remove the least important channels of a classifier until an objective is met, and train after each step.

    An interrupted pruning continues where it stopped, if `context.unfinished` is the same folder.

    Args:
        model: a Keras model.
        objective: the cost that is made smaller, and its limit.
        options: how channels are chosen.
        retraining: the training after each step; None: no training.
        context: data, target, seed and progress.
        convert: makes the .tflite files whose costs are verified.

    Raises:
        StageError: the objective is out of reach, no channel can be removed, or the training fails.
        ModelError: the model is not a classifier of the data.
    """
    if retraining is not None and options.steps > 1:
        _refuse_idle_training(retraining, context)
    checkpoint = PruningCheckpoint(context) if context.unfinished else None
    state = PruningState()
    if checkpoint:
        state, model = checkpoint.load(model, options.steps)
    progress = context.progress
    progress.plan(
        *(phase for number in range(options.steps) for phase in _phases(number, options, retraining, context))
    )
    while not state.finished:
        choice, training = _phases(len(state.steps), options, retraining, context)
        if state.untrained is None:
            with progress.phase(choice):
                step, model = _Step(model, objective, options, retraining, context, convert).run(state.steps)
            state = replace(state, untrained=step)
            if checkpoint:
                checkpoint.save(model, state)
        with progress.phase(training):
            step = _retrain(model, state, retraining, context)
        state = PruningState((*state.steps, step))
        if checkpoint:
            checkpoint.save(model, state)
    return PruningResult(model, state.steps)


def pruning_cost(options: PruningOptions, epochs: int, epochs_between: int, data: Data) -> float:
    """Return the expected cost of a pruning, in the unit of `compress.learning.training.phases`."""
    choice = options.steps * _choice_cost(options)
    return choice + training_cost(data, epochs + epochs_between * (options.steps - 1)) + 2 * validation_cost(data)


def _choice_cost(options: PruningOptions) -> float:
    """Return the expected cost of choosing and removing channels once, without trial trainings."""
    return 4 * BUILD + BACKWARD * options.samples


def _phases(
    number: int, options: PruningOptions, retraining: Retraining | None, context: Context
) -> tuple[Phase, Phase]:
    """Return the phases of one step: the choice of channels, and the training after it."""
    suffix = f" {number + 1} of {options.steps}" if options.steps > 1 else ""
    last = number == options.steps - 1
    cost = 0.0
    if retraining is not None:
        cost = training_cost(context.data, retraining.epochs(last=last)) + 2 * validation_cost(context.data)
    choice = _choice_cost(options) + _trials_cost(options, retraining, context.data)
    return Phase(f"choice of channels{suffix}", choice), Phase(f"fine-tuning{suffix}", cost)


def _trials_cost(options: PruningOptions, retraining: Retraining | None, data: Data) -> float:
    """Return the expected cost of the trial trainings that compare allocation methods; 0 without a comparison."""
    compares = options.allocation == "auto" and retraining is not None and retraining.settings.epochs
    return len(COMPARED) * training_cost(data, 1) if compares else 0.0


def _refuse_idle_training(retraining: Retraining, context: Context) -> None:
    """Refuse a training between steps that is too short to change any weight; `fit` refuses the last training.

    Raises:
        StageError: an accumulated gradient needs more batches than there are.
    """
    settings = retraining.settings
    batches = settings.batches_per_epoch(len(context.data.labels("train"))) * retraining.epochs_between
    if 0 < batches < settings.gradient_accumulation:
        raise StageError(
            f"epochs_between: {retraining.epochs_between} has {batches} batches, and gradient_accumulation: "
            f"{settings.gradient_accumulation} needs more batches than that for one update: no weight would change "
            "between the steps",
            hint="raise epochs_between, or lower gradient_accumulation, or set epochs_between: 0",
        )


def _retrain(model: Any, state: PruningState, retraining: Retraining | None, context: Context) -> PruningStep:
    """Train a model after a step in place; return the step with the result of the training."""
    step = state.untrained
    assert step is not None
    epochs = retraining.epochs(last=step.done) if retraining else 0
    if retraining is None or not epochs or not step.layers:
        return step
    folder = f"step-{len(state.steps) + 1}"
    step_context = replace(
        context,
        unfinished=context.unfinished / folder if context.unfinished else None,
        logs=context.logs / folder if context.logs else None,
    )
    settings = retraining.settings.model_copy(update={"epochs": epochs})
    return replace(step, training=healing.heal(model, retraining.loss, settings, step_context))


@dataclass(frozen=True)
class _Step:
    """One step: the removal of channels, without the training after it. The attributes are the arguments of `prune`."""

    model: Any
    objective: Objective
    options: PruningOptions
    retraining: Retraining | None
    context: Context
    convert: Convert

    def run(self, earlier: tuple[PruningStep, ...]) -> tuple[PruningStep, Any]:
        """Return the step and the smaller model."""
        progress = self.context.progress
        importance, costs, widths, trials, norms = phases = self._parts()
        progress.plan(*phases)
        inputs, labels = loop.chosen_inputs(self.context.data, self.options.samples, self.context.seed)
        if not earlier:
            refuse_constant(self.model, inputs)
        samples = None
        if self.options.importance == "taylor" or self.options.allocation == "sensitivity":
            head = loop.head_of(self.model, self.context.data, self.context.specification)
            samples = ImportanceSamples(inputs, labels, head, task_of(self.context.data).counts_right)
        network = keras_graph.read(self.model)
        with progress.phase(importance):
            prunable = prepare(network, self.context.target, self.options.importance, samples, progress)
        with progress.phase(costs):
            conversion = self.convert(network, self.model)
        prunable = prunable.calibrated(prunable.full_widths, conversion)
        initial = earlier[0].cost.before if earlier else None
        steps_left = self.options.steps - len(earlier)
        limits = self.objective.limits(prunable, initial, steps_left)

        @cache
        def candidate(widths: Widths) -> tuple[Network, Any]:
            network = prunable.pruned(widths)
            return network, keras_graph.build(network)

        @cache
        def converted(widths: Widths) -> TrialConversion:
            return self.convert(*candidate(widths))

        curves: list[SensitivityCurve] = []
        with progress.phase(widths):
            if self.options.allocation == "sensitivity":
                assert samples is not None
                curves = sensitivity_curves(prunable, samples, progress.update)
            allocations = self._allocations(prunable, self._losses(prunable, curves), limits, converted)
        models = {method: candidate(allocation.widths)[1] for method, allocation in allocations.items()}
        with progress.phase(trials):
            method, qualities = self._best(allocations, models)
        allocation = allocations[method]
        layers = prunable.pruned_layers(allocation.widths)
        change = self.objective.change(prunable, allocation)
        recalibration: Facts = {}
        if allocation.widths != prunable.full_widths:
            with progress.phase(norms):
                recalibration = recalibrate_batch_norms(models[method], self.context)
        last = steps_left == 1
        step = PruningStep(
            importance=prunable.importance,
            allocation=method,
            cost=change,
            layers={name: LayerWidths(*widths) for name, widths in layers.items()},
            unsupported=prunable.channels.unsupported,
            done=last or change.after <= limits.final,
            trials=qualities,
            sensitivity=tuple(curves),
            warnings=tuple(self._warnings(prunable, conversion)),
            recalibration=recalibration,
        )
        return self._reported(step, limits, last=last), models[method]

    def _parts(self) -> tuple[Phase, Phase, Phase, Phase, Phase]:
        """Return the phases of the choice of channels."""
        data, options = self.context.data, self.options
        return (
            Phase("importance of channels", BUILD + BACKWARD * options.samples, unit="sample"),
            Phase("costs", BUILD),
            Phase("sensitivity of layers" if options.allocation == "sensitivity" else "widths", BUILD, unit="width"),
            Phase("trial trainings", _trials_cost(options, self.retraining, data)),
            Phase("batch norms", BUILD + 2 * validation_cost(data)),
        )

    def _losses(
        self, prunable: PrunableNetwork, curves: list[SensitivityCurve]
    ) -> Mapping[AllocationMethod, ImportanceLosses | None]:
        """Return the importance losses by allocation method; there are several methods where they are compared."""
        if self.options.allocation == "sensitivity":
            return {"sensitivity": [losses_by_width(curve) for curve in curves]}
        methods = COMPARED if self.options.allocation == "auto" else (self.options.allocation,)
        if self.retraining is None or not self.retraining.settings.epochs:
            methods = methods[:1]
        return {method: importance_losses(prunable, method) for method in methods}

    def _allocations(
        self,
        prunable: PrunableNetwork,
        losses: Mapping[AllocationMethod, ImportanceLosses | None],
        limits: CostLimits,
        converted: Callable[[Widths], TrialConversion],
    ) -> dict[AllocationMethod, Allocation]:
        """Return the allocation of each method; after the first, those that cannot reach the limit are left out.

        Raises:
            StageError: the first method cannot reach the limit.
        """
        allocations: dict[AllocationMethod, Allocation] = {}
        for method, lost in losses.items():
            try:
                allocations[method] = self.objective.allocate_verified(prunable, lost, limits, converted)
            except StageError:
                if not allocations:
                    raise
        return allocations

    def _best(
        self, allocations: Mapping[AllocationMethod, Allocation], models: Mapping[AllocationMethod, Any]
    ) -> tuple[AllocationMethod, dict[str, float]]:
        """Return the best allocation method, and the validation quality of each if they had to be compared."""
        if len({allocation.widths for allocation in allocations.values()}) == 1:
            return next(iter(allocations)), {}
        trials: dict[AllocationMethod, Quality] = {}
        best = next(iter(allocations))
        phases = {method: Phase(f"trial training: {method}") for method in allocations}
        self.context.progress.plan(*phases.values())
        for method, model in models.items():
            with self.context.progress.phase(phases[method]):
                trials[method] = self._trial_quality(model)
            if trials[best].is_worse_than(trials[method]):
                best = method
        return best, {method: quality.value for method, quality in trials.items()}

    def _trial_quality(self, model: Any) -> Quality:
        """Return the validation quality after one epoch of training; the model's weights stay as they were."""
        assert self.retraining is not None  # methods are compared only where there is training
        settings = self.retraining.settings
        batches = settings.batches_per_epoch(len(self.context.data.labels("train")))
        changes = {"epochs": 1, "ema": None, "early_stopping": None, "warmup": 0.0}
        changes["gradient_accumulation"] = min(settings.gradient_accumulation, batches)
        weights = model.get_weights()
        trial_context = replace(self.context, unfinished=None, logs=None)
        loop.fit(model, self.retraining.loss, settings.model_copy(update=changes), trial_context)
        quality = validation_quality(model, self.context)
        set_weights(model, weights)
        return quality

    def _warnings(self, prunable: PrunableNetwork, conversion: TrialConversion) -> list[str]:
        warnings = []
        empty = weight_sparsity.empty(prunable.network)
        if empty:
            warnings.append(f"all weights are 0 in {', '.join(empty)}: was the model trained?")
        if prunable.importance != self.options.importance:
            warnings.append(substitution(self.options.importance, prunable.importance))
        if conversion.missing is not None:
            warnings.append(f"size, time and memory are those of the layers that can be followed: {conversion.missing}")
        if conversion.has_loop:
            warnings.append("MACs leave out operators inside a loop of the float file: its recurrent layers")
        return warnings

    def _reported(self, step: PruningStep, limits: CostLimits, *, last: bool) -> PruningStep:
        """Show the warnings of a step; return it with a warning where the limit is missed in the end."""
        describe = self.objective.describe
        progress = self.context.progress
        if step.cost.before <= limits.final:
            progress.note(
                f"{self.objective.name} is {describe(step.cost.before)} already, and may be "
                f"{describe(limits.final)}: nothing to remove"
            )
        if last and step.cost.after > limits.final:
            missed = (
                f"{self.objective.name} is {describe(step.cost.after)}, above the limit of {describe(limits.final)}: "
                "no choice of channels came nearer"
            )
            step = replace(step, warnings=(*step.warnings, missed))
        for warning in step.warnings:
            progress.note(f"prune: {warning}")
        return step
