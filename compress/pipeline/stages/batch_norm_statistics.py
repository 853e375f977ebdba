"""A check of the batch norms of a loaded model: few training steps with a slow average leave wrong statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from compress.core.artifact import Artifact, Facts
from compress.learning.context import Context, Need
from compress.pipeline.stage import Probe


class BatchNormStatistics(Probe):
    """Measure the statistics of all batch norms again, and compare the quality with both."""

    name: ClassVar[str] = "batch norm statistics"
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")
    imports_tensorflow: ClassVar[bool] = True

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Return the facts of `training.bn_recalibration.compared_statistics` for the Keras model."""
        from compress.learning.training.bn_recalibration import compared_statistics
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        return compared_statistics(working_model.read(subjects["original"], context), context)
