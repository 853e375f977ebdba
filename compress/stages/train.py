"""`train`: train the model on the labels."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from compress.artifact import Artifact, Facts, Kind
from compress.stage import Context, Need, Stage, Use
from compress.targets.base import Target
from compress.training.loop import TrainingSettings


class Train(Stage, TrainingSettings):
    """Train the model on the training split. A model that was loaded from a file is trained already, and is left as it
    is."""

    name: ClassVar[str] = "train"
    version: ClassVar[int] = 4
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.UNTRAINED, Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")
    imports_tensorflow: ClassVar[bool] = True

    epochs: Annotated[int, Field(ge=1, le=10_000)] = 30
    """Number of passes over the training split."""

    def skip(self, kind: Kind, *, from_file: bool, target: Target) -> str | None:
        """Return why a model from a file is not trained; None for an untrained model."""
        return "the model came trained, from a file" if from_file else None

    def uses(self) -> tuple[Use, ...]:
        """Return the methods of the training."""
        return ("labels", *self.training_uses())

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write the trained model; return its history."""
        from compress.ir.tensorflow import keras
        from compress.stages import working_model
        from compress.training import healing, loop, phases

        keras(context.seed)
        model = working_model.read(artifact, context)
        train = loop.fit if artifact.kind is Kind.UNTRAINED else healing.heal
        training = phases.training(context.data, self)
        context.progress.plan(training, working_model.WRITING)
        with context.progress.phase(training):
            facts = train(model, loop.own_loss(model, context), self, context)
        working_model.write(model, context.folder, context.progress)
        return facts
