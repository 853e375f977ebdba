"""`distill`: trains the model with the original as its teacher."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from compress.stage import Artifact, Context, Facts, Kind, Need, Settings, Stage
from compress.training.fit import TrainingSettings


class Decoupled(Settings):
    """Decoupled distillation (Zhao et al., 2022)."""

    right: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Weight of how sure the teacher is of the right class."""
    wrong: Annotated[float, Field(ge=0, le=1000)] = 8.0
    """Weight of what it says of the wrong classes among themselves; the paper's is 8 for small images."""


class Distill(Stage, TrainingSettings):
    """Trains the model on the scores of the original, and a little on the labels."""

    name: ClassVar[str] = "distill"
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "original"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")

    epochs: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Passes over the training split."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.002
    """Adam's learning rate at the start; it falls to 0 along a cosine."""
    temperature: Annotated[float, Field(ge=1, le=100)] = 4.0
    """How much the scores are softened: 1 leaves them as they are."""
    weight: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Share of the teacher in the loss; the rest is the labels'."""
    decoupled: Decoupled | None = None
    """Weighs what the teacher says of the right class and of the wrong ones apart; by default it is one."""

    def run(self, given: Artifact, context: Context) -> Facts:
        """The trained model and its history."""
        from compress.training import fit, working_model
        from compress.training.tensorflow import keras

        keras(context.seed)
        model, teacher = working_model.read(given, context), working_model.read(context.original, context)
        teacher.trainable = False
        loss = fit.distillation_loss(
            fit.head_of(model, context.data),
            teacher,
            fit.head_of(teacher, context.data),
            self.temperature,
            self.weight,
            (self.decoupled.right, self.decoupled.wrong) if self.decoupled else None,
        )
        facts = fit.fit(model, loss, self, context)
        working_model.write(model, context.folder)
        return facts
