"""`sensitivity`: measure what the model loses when each group of layers gets narrower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from compress.core.artifact import Artifact, Facts
from compress.core.progress import Phase
from compress.learning.context import Context, Need
from compress.pipeline.stage import Probe
from compress.results.encoding import encode
from compress.tasks import task_of


class Sensitivity(Probe):
    """Remove the least important channels of one layer at a time, and measure the change of the outputs."""

    name: ClassVar[str] = "sensitivity"
    version: ClassVar[int] = 3
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "target"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")
    imports_tensorflow: ClassVar[bool] = True

    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Number of training samples for importance and sensitivity."""

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Return `curves` of the Keras model `subjects["model"]`: see `compress.results.pruning.SensitivityCurve`.

        Raises:
            StageError: no channel of the model can be removed, or none matters.
            ModelError: the model does not fit the data.
        """
        from compress.learning.pruning.importance import ImportanceSamples, refuse_constant
        from compress.learning.pruning.prunable import prepare, substitution
        from compress.learning.pruning.sensitivity import sensitivity_curves
        from compress.learning.training import loop
        from compress.model.ir import keras_graph
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        model = working_model.read(subjects["model"], context)
        inputs, labels = loop.chosen_inputs(context.data, self.samples, context.seed)
        refuse_constant(model, inputs)
        head = loop.head_of(model, context.data, context.specification)
        samples = ImportanceSamples(inputs, labels, head, task_of(context.data).counts_right)
        importance, curves_phase = Phase("importance of channels", unit="sample"), Phase("layers", 8.0, unit="width")
        context.progress.plan(importance, curves_phase)
        with context.progress.phase(importance):
            prunable = prepare(keras_graph.read(model), context.target, "taylor", samples, context.progress)
        if prunable.importance != "taylor":
            context.progress.note(f"sensitivity: {substitution('taylor', prunable.importance)}")
        with context.progress.phase(curves_phase):
            curves = sensitivity_curves(prunable, samples, context.progress.update)
        return {
            "samples": len(inputs),
            "importance": prunable.importance,
            "curves": encode(curves),
        }
