"""`train`: train the model on the labels, or only its head, or its layers one after another."""

from __future__ import annotations

from typing import ClassVar

from compress.core.artifact import Artifact, Facts, Kind
from compress.learning.context import Context, Need
from compress.learning.procedures.settings import TrainSettings
from compress.pipeline.stage import Stage
from compress.targets.base import Target
from compress.tasks.base import Use


class Train(Stage, TrainSettings):
    """Train the model on the training split. A model from a file is trained already, and is left as it is, unless it
    gets a new head (`model: {head: new}`) or `fine_tune` is set."""

    name: ClassVar[str] = "train"
    version: ClassVar[int] = 8
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.UNTRAINED, Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")
    imports_tensorflow: ClassVar[bool] = True
    makes_original: ClassVar[bool] = True

    fine_tune: bool = False
    """Train a model from a file further; its weights from before the training are kept if validation is worse."""

    def skip(self, kind: Kind, *, from_file: bool, target: Target) -> str | None:
        """Return why a model from a file is not trained; None for an untrained model."""
        if not from_file or self.fine_tune:
            return None
        return "the model came trained, from a file; `fine_tune: true` trains it further"

    def trains(self) -> bool:
        """Return True."""
        return True

    def uses(self) -> tuple[Use, ...]:
        """Return the methods of the training."""
        smoothing: tuple[Use, ...] = ("label smoothing",) if self.label_smoothing else ()
        return ("labels", *smoothing, *self.training_uses())

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write the trained model; return its history."""
        from compress.learning.procedures import training
        from compress.learning.training import phases
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        model = working_model.read(artifact, context)
        work = phases.training(context.data, self)
        context.progress.plan(work, working_model.WRITING)
        with context.progress.phase(work):
            result = training.train(model, self, context, is_trained=artifact.is_trained)
        working_model.write(result.model, context.folder, context.progress)
        return dict(result.facts)
