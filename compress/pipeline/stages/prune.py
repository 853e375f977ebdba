"""`prune`: remove channels, so that layers get narrower."""

from __future__ import annotations

from typing import ClassVar

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts, Kind
from compress.core.progress import Phase
from compress.learning.context import Context, Need
from compress.learning.procedures.settings import PruneSettings
from compress.pipeline.stage import Stage, refused_host
from compress.targets.base import Target
from compress.tasks.base import Refusal, Use


class Prune(Stage, PruneSettings):
    """Remove the least important channels until the model is small or fast enough, then train the rest."""

    name: ClassVar[str] = "prune"
    version: ClassVar[int] = 13
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "original", "target"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")
    imports_tensorflow: ClassVar[bool] = True
    removes_channels: ClassVar[bool] = True

    def trains(self) -> bool:
        """Return whether there is a training after a step."""
        return bool(self.epochs or (self.steps > 1 and self.epochs_between))

    def changes_cost(self) -> bool:
        """Return True."""
        return True

    def uses(self) -> tuple[Use, ...]:
        """Return the measure of importance, and the methods of the training and of its teacher."""
        uses: list[Use] = ["channel importance", *self.training_uses(self.distill is None or self.distill.weight < 1)]
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

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write the pruned model; return the objective and the record of each step."""
        from compress.learning.procedures import training
        from compress.learning.pruning.iterative import pruning_cost
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        model = working_model.read(artifact, context)
        is_taught = self.distill is not None and self.trains()
        teacher = working_model.read(context.original, context) if is_taught else None
        options = training.pruning_options(self)
        work = Phase("pruning", pruning_cost(options, self.epochs, self.epochs_between, context.data))
        context.progress.plan(work, working_model.WRITING)
        float_file = artifact.file(MODEL_TFLITE).read_bytes()
        with context.progress.phase(work):
            result = training.prune(model, self, context, original=teacher, float_file=float_file)
        working_model.write(result.model, context.folder, context.progress)
        return dict(result.facts)
