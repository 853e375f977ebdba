"""`sparsify`: unstructured weight sparsity, so that the file compresses better."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from compress.core.artifact import Artifact, Facts, Kind
from compress.learning.context import Context, Need
from compress.learning.training.batches import EpochSettings
from compress.pipeline.stage import Stage
from compress.tasks.base import Use


class Sparsify(Stage, EpochSettings):
    """Train with unstructured sparsity (tfmot): set the smallest weights to zero. The download is smaller; the Edge TPU
    is not faster. Later stages that train, except cluster and quantize, undo it."""

    name: ClassVar[str] = "sparsify"
    version: ClassVar[int] = 5
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "tf-keras", "tensorflow-model-optimization")
    imports_tensorflow: ClassVar[bool] = True

    sparsity: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Fraction of zeros in each kernel at the end."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Number of passes over the training split; zeros are added in the first two thirds."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.002
    """Initial learning rate of Adam; it falls to 0 along a cosine."""

    def uses(self) -> tuple[Use, ...]:
        """Return tfmot."""
        return ("tfmot",)

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Train with sparsity; return the zeros per layer, the compressed sizes, and the history."""
        from compress.learning.tfmot import sparsity as tfmot
        from compress.model.ir import keras_graph
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        dense = keras_graph.read(working_model.read(artifact, context))
        sparse, facts = tfmot.sparsify(dense, self.sparsity, self, context)
        return facts | working_model.write_redundant(sparse, artifact, context)
