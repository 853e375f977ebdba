"""`cluster`: weight clustering, so that the file compresses better."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from compress.core.artifact import Artifact, Facts, Kind
from compress.learning.context import Context, Need
from compress.learning.training.batches import EpochSettings
from compress.pipeline.stage import Stage
from compress.tasks.base import Use


class Cluster(Stage, EpochSettings):
    """Train with clustered weights (tfmot): each kernel has only a few different values. The download is smaller; the
    Edge TPU is not faster. Later stages that train, except quantize, undo it."""

    name: ClassVar[str] = "cluster"
    version: ClassVar[int] = 4
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "tf-keras", "tensorflow-model-optimization")
    imports_tensorflow: ClassVar[bool] = True

    clusters: Annotated[int, Field(ge=2, le=256)] = 16
    """Number of different values in one kernel. The zeros of a sparse kernel remain and count as one value."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Number of passes over the training split."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.0005
    """Initial learning rate of Adam; it falls to 0 along a cosine."""

    def uses(self) -> tuple[Use, ...]:
        """Return tfmot."""
        return ("tfmot",)

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Train with clustering; return the number of values per layer, the compressed sizes, and the history."""
        from compress.learning.tfmot import sparsity
        from compress.model.ir import keras_graph
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        free = keras_graph.read(working_model.read(artifact, context))
        clustered, facts = sparsity.cluster(free, self.clusters, self, context)
        return facts | working_model.write_redundant(clustered, artifact, context)
