"""`replace_activations`: replace activations that are slow on the target, and remove squeeze-and-excite gates."""

from __future__ import annotations

import shutil
from typing import ClassVar

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts, Kind
from compress.learning.context import Context, Need
from compress.learning.procedures.settings import ReplacementSettings
from compress.pipeline.stage import Stage
from compress.tasks.base import Use


class ReplaceActivations(Stage, ReplacementSettings):
    """Replace activations by ReLUs, remove gates if asked to, then train with the unchanged model as teacher."""

    name: ClassVar[str] = "replace_activations"
    version: ClassVar[int] = 9
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")
    imports_tensorflow: ClassVar[bool] = True

    def trains(self) -> bool:
        """Return whether there is a training."""
        return self.epochs > 0

    def changes_cost(self) -> bool:
        """Return True."""
        return True

    def uses(self) -> tuple[Use, ...]:
        """Return the training after the replacement, which is distillation, and its methods."""
        if not self.epochs:
            return ()
        return ("healing by distillation", *self.training_uses(self.weight < 1))

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write the changed model; return the replacements, the skipped activations, and the accuracies."""
        from compress.learning.procedures import training
        from compress.learning.training import phases
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        model = working_model.read(artifact, context)
        work = phases.training(context.data, self, "replacement")
        context.progress.plan(work, working_model.WRITING)
        with context.progress.phase(work):
            result = training.replace_activations(model, self, context)
        if result.facts["unchanged"]:
            for name in (MODEL_KERAS, MODEL_TFLITE):
                shutil.copyfile(artifact.file(name), context.folder / name)
        else:
            working_model.write(result.model, context.folder, context.progress)
        return dict(result.facts)
