"""`sparsify` and `cluster`: weights that compress better, so that the download is smaller; with tfmot."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from compress.core.artifact import Artifact, Facts, Kind
from compress.learning.context import Context, Need
from compress.learning.training.batches import EpochSettings
from compress.pipeline.stage import Stage
from compress.tasks.base import Use

if TYPE_CHECKING:  # a dry run reads settings only
    from compress.model.ir.keras_graph import Network


class _Redundant(Stage, EpochSettings):
    """The common part of both stages."""

    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "tf-keras", "tensorflow-model-optimization")
    imports_tensorflow: ClassVar[bool] = True

    def uses(self) -> tuple[Use, ...]:
        """Return tfmot."""
        return ("tfmot",)


def _retrained(artifact: Artifact, context: Context, train: Callable[[Network], tuple[Network, Facts]]) -> Facts:
    """Write the trained model; return the pattern of each layer, the compressed sizes, and the history."""
    from compress.model.ir import keras_graph
    from compress.model.ir.tensorflow import keras
    from compress.pipeline.stages import working_model

    keras(context.seed)
    network, facts = train(keras_graph.read(working_model.read(artifact, context)))
    return facts | working_model.write_redundant(network, artifact, context)


class Sparsify(_Redundant):
    """Train with unstructured sparsity (tfmot): set the smallest weights to zero. The download is smaller; the Edge TPU
    is not faster. Later stages that train, except cluster and quantize, undo it."""

    name: ClassVar[str] = "sparsify"
    version: ClassVar[int] = 6

    sparsity: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Fraction of zeros in each kernel at the end."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Number of passes over the training split; zeros are added in the first two thirds."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.002
    """Initial learning rate of Adam; it falls to 0 along a cosine."""

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Train and write the sparse model."""
        from compress.learning.tfmot import adapter

        return _retrained(artifact, context, lambda network: adapter.sparsify(network, self.sparsity, self, context))


class Cluster(_Redundant):
    """Train with clustered weights (tfmot): each kernel has only a few different values. The download is smaller; the
    Edge TPU is not faster. Later stages that train, except quantize, undo it."""

    name: ClassVar[str] = "cluster"
    version: ClassVar[int] = 5

    clusters: Annotated[int, Field(ge=2, le=256)] = 16
    """Number of different values in one kernel. The zeros of a sparse kernel remain and count as one value."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Number of passes over the training split."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.0005
    """Initial learning rate of Adam; it falls to 0 along a cosine."""

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Train and write the clustered model."""
        from compress.learning.tfmot import adapter

        return _retrained(artifact, context, lambda network: adapter.cluster(network, self.clusters, self, context))
