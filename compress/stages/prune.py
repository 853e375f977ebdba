"""`prune`: removes channels, so that layers get smaller."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from compress.stage import Artifact, Context, Facts, Kind, Need, Stage
from compress.training.fit import TrainingSettings


class Prune(Stage, TrainingSettings):
    """Removes the channels that matter least, then trains what is left on the labels."""

    name: ClassVar[str] = "prune"
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")

    keep_macs: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Largest share of the multiply-accumulates that may stay."""
    epochs: Annotated[int, Field(ge=0, le=10_000)] = 4
    """Passes over the training split afterwards; 0: none."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.002
    """Adam's learning rate at the start; it falls to 0 along a cosine."""

    def run(self, given: Artifact, context: Context) -> Facts:
        """The smaller model, what was removed, and the history."""
        from compress.training import fit, network, pruning, working_model
        from compress.training.tensorflow import keras

        keras(context.seed)
        smaller, plan = pruning.prune(network.read(working_model.read(given, context)), self.keep_macs)
        model = network.build(smaller)
        facts: Facts = {"plan": plan.to_json()}
        if self.epochs:
            facts.update(fit.fit(model, fit.label_loss(fit.head_of(model, context.data)), self, context))
        working_model.write(model, context.folder)
        return facts
