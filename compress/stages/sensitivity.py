"""What a model loses when channels of one set are removed: a curve for each set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from compress.artifact import Artifact, Facts
from compress.stage import Context, Need, Probe


class Sensitivity(Probe):
    """Takes the least important channels of each layer away by turns, and looks at the answers; nothing is trained."""

    name: ClassVar[str] = "sensitivity"
    version: ClassVar[int] = 3
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "target"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")

    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Training samples that importance and answers are measured with."""

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """`curves` of the subject `model`, a Keras model: see `training.sensitivity.Curve`.

        Raises:
            StageError: no channel of the model can be removed, or none matters to it.
            ModelError: it is no classifier of the data.
        """
        from compress.ir import keras_graph
        from compress.ir.tensorflow import keras
        from compress.pruning import allocation, importance, sensitivity
        from compress.pruning.importance import ImportanceSamples
        from compress.stages import working_model
        from compress.training import loop

        keras(context.seed)
        model = working_model.read(subjects["model"], context)
        inputs, labels = loop.chosen_inputs(context.data, self.samples, context.seed)
        importance.refuse_constant(model, inputs)
        samples = ImportanceSamples(inputs, labels, loop.head_of(model, context.data))
        cut = allocation.prepare(keras_graph.read(model), context.target, "taylor", samples)
        if cut.importance != "taylor":
            context.progress.note(f"sensitivity: {importance.instead('taylor', cut.importance)}")
        found = sensitivity.curves(cut, samples, context.progress.update)
        return {"samples": len(inputs), "importance": cut.importance, "curves": [curve.to_json() for curve in found]}
