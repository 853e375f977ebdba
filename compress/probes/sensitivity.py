"""What a model loses when channels of one set are removed: a curve for each set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from compress.stage import Artifact, Context, Facts, Need, Probe


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
        from compress.training import fit, importance, network, pruning, sensitivity, working_model
        from compress.training.importance import Samples
        from compress.training.tensorflow import keras

        keras(context.seed)
        model = working_model.read(subjects["model"], context)
        inputs, labels = fit.chosen_inputs(context.data, self.samples, context.seed)
        importance.refuse_constant(model, inputs)
        samples = Samples(inputs, labels, fit.head_of(model, context.data))
        cut = pruning.prepare(network.read(model), context.target, "taylor", samples)
        if cut.importance != "taylor":
            context.progress.note(f"sensitivity: {importance.instead('taylor', cut.importance)}")
        found = sensitivity.curves(cut, samples, context.progress.update)
        return {"samples": len(inputs), "importance": cut.importance, "curves": [curve.to_json() for curve in found]}
