"""`prune`: remove channels, so that layers get narrower."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts, Kind
from compress.core.progress import Phase
from compress.learning.context import Context, Need
from compress.learning.distillation.settings import DistillationSettings
from compress.learning.training.loop import TrainingSettings, chosen_inputs
from compress.pipeline.stage import Stage, refused_host
from compress.targets.base import Target
from compress.tasks.base import Refusal, Use

if TYPE_CHECKING:  # a dry run reads settings only
    from compress.learning.pruning.iterative import Retraining
    from compress.learning.pruning.objective import Objective


class Prune(Stage, TrainingSettings):
    """Remove the least important channels until the model is small or fast enough, then train the rest."""

    name: ClassVar[str] = "prune"
    version: ClassVar[int] = 12
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "original", "target"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")
    imports_tensorflow: ClassVar[bool] = True

    objective: Literal["macs", "parameters", "size", "compute", "latency", "cache"] = "macs"
    """The cost to reduce. macs, parameters; size: bytes of the 8-bit file; compute: time of the Edge TPU's arithmetic
    alone; latency: predicted on a host; cache: reduce the model until all parameters stay in on-chip memory."""
    keep: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Limit: the share of the cost that may remain. Default: 0.5."""
    at_most: Annotated[float, Field(gt=0)] | None = None
    """Limit as an absolute value: MACs, parameters, bytes or milliseconds."""
    keep_macs: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Short form of `objective: macs` with `keep`."""
    host: str | None = None
    """Host that latency is predicted for: usb3 (default), usb2, pcie, devboard, pi4-usb3, pi5-usb3 or pi5-pcie for an
    Edge TPU; see `estimate`."""
    clock: str | None = None
    """Clock of an Edge TPU on USB: max (libedgetpu1-max, default) or std (libedgetpu1-std)."""
    importance: Literal["taylor", "batch_norm", "l2", "l1"] = "taylor"
    """Measure of a channel's importance. taylor: estimated change of the loss without the channel, on training samples.
    l1, l2: norm of its weights. batch_norm: L2 norm times the scale of the batch norm that follows."""
    allocation: Literal["auto", "balanced", "sensitivity", "global", "uniform"] = "auto"
    """Distribution of the removals over layers. balanced: keeps as much of every layer's importance as possible, so
    that no layer gets too narrow. sensitivity: removes channels of one layer at a time, and measures the change of the
    outputs. global: removes the least importance in total. uniform: about the same share of every layer. auto: trains
    the results of balanced and uniform for one epoch each, and keeps the better one on validation; without training:
    balanced."""
    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Number of training samples for importance and sensitivity."""
    steps: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of pruning steps, with training after each."""
    epochs: Annotated[int, Field(ge=0, le=10_000)] = 4
    """Epochs of training after the last step; 0: no training."""
    epochs_between: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Epochs of training after each step before the last one."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.002
    """Initial learning rate of Adam; low, because most weights are already trained."""
    distill: DistillationSettings | None = None
    """Also train on the outputs of the original model (knowledge distillation). Default: labels only."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.distill is not None:
            self.distill.check_training(self)
        limits = [name for name in ("keep", "at_most", "keep_macs") if getattr(self, name) is not None]
        if len(limits) > 1:
            raise ValueError(f"{limits[0]} and {limits[1]} are both limits: remove one")
        if self.keep_macs is not None and self.objective != "macs":
            raise ValueError(f"keep_macs is for objective: macs; use keep for {self.objective}")
        if self.objective == "cache" and limits:
            raise ValueError(f"{limits[0]} cannot be used with objective: cache; its limit is the Edge TPU's memory")
        return self

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write the pruned model; return the objective and the record of each step."""
        from compress.learning.pruning.iterative import PruningOptions, prune, pruning_cost
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model
        from compress.pipeline.stages.trial_conversion import TrialConverter

        keras(context.seed)
        model = working_model.read(artifact, context)
        objective = self._objective(context.target)
        options = PruningOptions(self.importance, self.allocation, self.samples, self.steps)
        pruning = Phase("pruning", pruning_cost(options, self.epochs, self.epochs_between, context.data))
        context.progress.plan(pruning, working_model.WRITING)
        samples = chosen_inputs(context.data, self.samples, context.seed)[0]
        converter = TrialConverter(samples, context.target, [(model, artifact.file(MODEL_TFLITE).read_bytes())])
        with context.progress.phase(pruning):
            result = prune(model, objective, options, self.retraining(model, context), context, converter)
        working_model.write(result.model, context.folder, context.progress)
        return {"objective": objective.to_json(), "steps": [step.to_json() for step in result.steps]}

    def _objective(self, target: Target) -> Objective:
        from compress.learning.pruning.objective import Objective

        keep = self.keep if self.keep_macs is None else self.keep_macs
        if keep is None and self.at_most is None and self.objective != "cache":
            keep = 0.5
        host, clock = target.cost.host(self.host), target.cost.clock(self.clock)
        return Objective(self.objective, keep, self.at_most, host, clock)

    def trains(self) -> bool:
        """Return whether there is a training after a step."""
        return bool(self.epochs or (self.steps > 1 and self.epochs_between))

    def changes_cost(self) -> bool:
        """Return True."""
        return True

    def uses(self) -> tuple[Use, ...]:
        """Return the measure of importance, and the methods of the training and of its teacher."""
        uses: list[Use] = ["channel importance", *self.training_uses()]
        if self.allocation == "sensitivity":
            uses.append("measured sensitivity")
        if self.distill is not None:
            uses.append("distillation")
        return tuple(uses)

    def refused_by_target(self, target: Target) -> Refusal | None:
        """Return the objective, host or clock that the target does not have."""
        from compress.learning.pruning.objective import predicted_objectives

        known = predicted_objectives(target.cost)
        if self.objective not in known:
            return Refusal(
                f"objective: {self.objective} is not predicted for the target {target.name}", ", ".join(known)
            )
        return refused_host(target, self.host, self.clock)

    def retraining(self, model: Any, context: Context) -> Retraining | None:
        """Return the training after each step, on labels and, if `distill` is set, the original's scores."""
        from compress.learning.distillation import losses, teachers
        from compress.learning.pruning.iterative import Retraining
        from compress.learning.training import loop
        from compress.pipeline.stages import working_model

        epochs_between = self.epochs_between if self.steps > 1 else 0
        if not self.epochs and not epochs_between:
            return None
        head = loop.head_of(model, context.data, context.specification)
        loss = loop.label_loss(head)
        if self.distill is not None:
            model_before = working_model.read(context.original, context)
            original = teachers.of_model(model_before, context.data, "original", context.specification)
            loss = losses.loss_of(head, [original], self.distill, self, context)
        return Retraining(loss, self, epochs_between)
