"""`quantize`: a full-integer .tflite file, by calibration or by training."""

from __future__ import annotations

from typing import ClassVar

from compress.core.artifact import MODEL_TFLITE, PLAN_FILE, Artifact, Facts, Kind
from compress.learning.context import Context, Need
from compress.learning.procedures.settings import QuantizeSettings
from compress.pipeline.stage import Stage
from compress.tasks.base import Use


class Quantize(Stage, QuantizeSettings):
    """Quantize the model to 8-bit integers: weights, activations, inputs and outputs."""

    name: ClassVar[str] = "quantize"
    version: ClassVar[int] = 19
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS, Kind.FLOAT_TFLITE})
    produces: ClassVar[Kind] = Kind.TFLITE
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "target"})
    tools: ClassVar[tuple[str, ...]] = (
        *("tensorflow", "keras", "ai-edge-litert"),
        *("tf-keras", "tensorflow-model-optimization"),
    )
    imports_tensorflow: ClassVar[bool] = True

    def trains(self) -> bool:
        """Return whether it is quantization-aware training with our own engine."""
        return self.method == "qat" and self.engine == "coralline"

    def uses(self) -> tuple[Use, ...]:
        """Return the methods of training, and of its teacher."""
        teacher = self.qat.distill
        uses: list[Use] = [*self.training_uses(teacher is None or teacher.weight < 1)]
        if self.engine == "tfmot":
            uses.append("tfmot qat")
        if self.qat.distill is not None:
            uses.append("qat teacher")
        return tuple(uses)

    def accepted_kinds(self) -> frozenset[Kind]:
        """Return the kinds of models: training and plans need layers."""
        layers = self.method == "qat" or self.plan is not None or self.scales_from is not None
        return self.consumes - {Kind.FLOAT_TFLITE} if layers else self.consumes

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write the int8 model and the plan; return facts about the candidates."""
        from compress.learning.procedures import quantization
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        model = working_model.read(artifact, context) if artifact.kind is Kind.KERAS else None
        result = quantization.quantize(model, artifact.file(MODEL_TFLITE), self, context)
        (context.folder / MODEL_TFLITE).write_bytes(result.content)
        if result.plan is not None:
            (context.folder / PLAN_FILE).write_text(result.plan)
        return dict(result.facts)
