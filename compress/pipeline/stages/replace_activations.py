"""`replace_activations`: replace activations that are slow on the target, and remove squeeze-and-excite gates."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts, Kind
from compress.learning.context import Context, Need
from compress.learning.distillation.settings import DistillationSettings
from compress.learning.training.loop import TrainingSettings
from compress.model.ir.layer_specs.functions import Activation
from compress.pipeline.stage import Stage
from compress.tasks.base import Use

if TYPE_CHECKING:  # a dry run reads settings only
    from compress.learning.replacement.activations import Replacements
    from compress.learning.replacement.gradual import OutputLoss
    from compress.learning.training.loop import Batch, Loss

GATES = "squeeze_and_excite"


class ReplaceActivations(Stage, TrainingSettings, DistillationSettings):
    """Replace activations by ReLUs, remove gates if asked to, then train with the unchanged model as teacher."""

    name: ClassVar[str] = "replace_activations"
    version: ClassVar[int] = 8
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")
    imports_tensorflow: ClassVar[bool] = True

    activations: Literal["all"] | list[Activation] = "all"
    """Activations to replace, also where they are written as several operators. On the Edge TPU silu becomes two
    operators, hard_silu three, gelu six; elu, selu, celu, mish and softplus 25; leaky_relu a PRELU, whose slopes are
    sent at every inference. tailed: any other function that is near 0 for low x, near x for high x and negative
    between. threshold (a ReLU that begins at another value) and prelu (with a slope for every position; it gets one for
    each channel) run on the CPU, and so do all operators after them."""
    by: Literal["relu", "relu6"] = "relu"
    """Replacement; both cost nothing. relu is the nearest, allows equalization (quantize: equalize), and quantize finds
    its output range; relu6 always ends at 6."""
    squeeze_and_excite: Literal["keep", "remove"] = "keep"
    """remove: each gate becomes its mean over training samples, folded into weights where possible. A gate runs on the
    Edge TPU, but needs the whole map before the next operator can start."""
    samples: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Number of training samples for the means of gates."""
    epochs: Annotated[int, Field(ge=0, le=10_000)] = 6
    """Epochs of training after the replacement, with the unchanged model as teacher; 0: no training."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.002
    """Initial learning rate of Adam."""

    gradual: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Part of the training in which each activation turns into its replacement step by step; 0: all of them before the
    training. For deep networks whose answers are lost after the replacement, such as detectors: use 0.4 and 200 epochs
    or more. It learns from the outputs of all convolutions, and sets each channel's mean and deviation to those of the
    unchanged model in every step."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        self.check_training(self)
        for name, set_to in (("early_stopping", self.early_stopping), ("subset", self.subset)):
            if self.gradual and set_to is not None:
                raise ValueError(f"gradual: {self.gradual} cannot be combined with {name}")
        if self.gradual and not self.epochs:
            raise ValueError(f"gradual: {self.gradual} is a part of the training, and `epochs: 0` has none")
        return self

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
        from compress.learning.replacement.retraining import ReplacementOptions, Training, replace_activations
        from compress.learning.training import phases
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        kinds = get_args(Activation) if self.activations == "all" else self.activations
        options = ReplacementOptions(kinds, self.by, self.squeeze_and_excite == "remove", self.samples)
        model = working_model.read(artifact, context)
        training = Training(self, self._loss, self._output_loss, self.gradual) if self.epochs else None
        work = phases.training(context.data, self, "replacement")
        context.progress.plan(work, working_model.WRITING)
        with context.progress.phase(work):
            result = replace_activations(model, options, training, context)
        facts = self._facts(result.replacements, context)
        if result.model is None:
            for name in (MODEL_KERAS, MODEL_TFLITE):
                shutil.copyfile(artifact.file(name), context.folder / name)
            return facts
        working_model.write(result.model, context.folder, context.progress)
        return {**facts, **result.training, "accuracy": result.accuracy}

    def _loss(self, student: Any, teacher: Any, context: Context) -> Loss:
        from compress.learning.distillation import losses, teachers
        from compress.learning.training import loop

        unchanged = teachers.of_model(teacher, context.data, "the unchanged model", context.specification)
        head = loop.head_of(student, context.data, context.specification)
        return losses.loss_of(head, [unchanged], self, self, context)

    def _output_loss(self, model: Any, context: Context) -> OutputLoss:
        from compress.learning.distillation import losses
        from compress.learning.training import loop

        head = loop.head_of(model, context.data, context.specification)

        def loss(batch: Batch, outputs: Any, teacher_outputs: Any) -> Any:
            soft_targets = head.soft_targets([head.logits(teacher_outputs)], [1.0], self.temperature)
            return losses.weighted(head, batch, outputs, soft_targets, self)

        return loss

    def _facts(self, replacements: Replacements, context: Context) -> Facts:
        """Return the replacements and the skipped activations as plain values, and show a summary."""
        requested: list[str] = [] if self.activations == "all" else [*self.activations]
        if self.squeeze_and_excite == "remove":
            requested.append(GATES)
        not_found = [kind for kind in requested if kind not in replacements.replaced]
        progress = context.progress
        for kind, layers in replacements.replaced.items():
            progress.note(f"replace_activations: {len(layers)} {kind} -> {self._replacement(kind)}")
        for kind in not_found:
            progress.note(f"replace_activations: {kind} is requested, but the model has none that can be replaced")
        if not replacements.replaced:
            progress.note("replace_activations: nothing to replace; the model is passed on unchanged")
        replaced: Mapping[str, Any] = {
            kind: {"count": len(layers), "by": self._replacement(kind), "layers": list(layers)}
            for kind, layers in replacements.replaced.items()
        }
        return {
            "replaced": replaced,
            "unchanged": not replaced,
            "not_found": not_found,
            "skipped": dict(replacements.skipped),
            "details": dict(replacements.notes),
        }

    def _replacement(self, kind: str) -> str:
        others = {GATES: "its mean, in the weights", "prelu": "a slope for each channel"}
        return others.get(kind, self.by)
