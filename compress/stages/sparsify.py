"""`sparsify`: sets weights to zero, so that the file packs smaller."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compress.artifact import Artifact, Facts, Kind
from compress.stage import Context, Need, Stage, Use
from compress.training.batches import Passes


class Sparsify(Stage, Passes):
    """Sets the smallest weights to zero while training (tfmot): a smaller download, no speed on the Edge TPU.
    Later stages that train, other than cluster and quantize, undo it."""

    name: ClassVar[str] = "sparsify"
    version: ClassVar[int] = 3
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "tf-keras", "tensorflow-model-optimization")

    method: Literal["magnitude", "2by4"] = "magnitude"
    """magnitude: a share of each kernel. 2by4: 2 of 4 neighbours along the input channels, for some other chips."""
    sparsity: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of zeros in each kernel at the end (magnitude)."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Passes over the training split; in the first two thirds zeros are added."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.002
    """Adam's learning rate at the start; it falls to 0 along a cosine."""

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if self.method == "2by4" and "sparsity" in self.model_fields_set:
            raise ValueError("sparsity goes with `method: magnitude`; 2by4 always makes half of the weights 0")
        return self

    def uses(self) -> tuple[Use, ...]:
        """Return tfmot."""
        return ("tfmot",)

    def run(self, given: Artifact, context: Context) -> Facts:
        """The sparse model, the zeros of every layer, the compressed size before and after, and the history."""
        from compress.engines.tfmot import sparsity as tfmot
        from compress.ir import keras_graph
        from compress.ir.tensorflow import keras
        from compress.stages import working_model

        keras(context.seed)
        dense = keras_graph.read(working_model.read(given, context))
        share = self.sparsity if self.method == "magnitude" else None
        sparse, facts = tfmot.sparsify(dense, share, self, context)
        return facts | working_model.write_redundant(sparse, given, context)
