"""`quantize`: a full-integer .tflite file, by calibration or by training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.edgetpu.legalize import legalize
from compress.quantization.conversion import FloatOperatorsError
from compress.quantization.plan import QuantizationPlan
from compress.stage import MODEL_TFLITE, Artifact, Context, Facts, Kind, Need, Stage
from compress.tflite import graph
from compress.tflite.runtime import Model
from compress.training.fit import TrainingSettings
from compress.training.network import Network

PLAN_FILE = "quantization.json"


@dataclass(frozen=True)
class Candidate:
    """A quantized model that may be kept."""

    method: str
    content: bytes
    plan: QuantizationPlan


class Quantize(Stage, TrainingSettings):
    """Makes all weights and activations 8-bit integers, inputs and outputs included."""

    name: ClassVar[str] = "quantize"
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.TFLITE
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "target"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "ai-edge-litert")

    method: Literal["ptq", "qat"] = "ptq"
    """ptq: ranges from calibration. qat: trained with rounding; kept only if it wins on validation."""
    calibration_samples: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Training samples that ranges are taken from."""
    io: Literal["int8", "uint8"] = "int8"
    """Type of the file's input and output."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Passes over the training split (qat)."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.0005
    """Adam's learning rate at the start (qat); it falls to 0 along a cosine."""

    def run(self, given: Artifact, context: Context) -> Facts:
        """The int8 model, the plan it was made by, and what was tried."""
        from compress.quantization import calibration, conversion
        from compress.training import folding, network, working_model
        from compress.training.tensorflow import keras

        keras(context.seed)
        model = working_model.read(given, context)
        canonical = folding.canonical(network.read(model))
        samples = self._samples(context)
        facts: Facts = {"calibration_samples": len(samples)}
        plan = calibration.calibrate(canonical, samples)
        try:
            content = conversion.convert(canonical, plan, self.io)
        except FloatOperatorsError as error:
            if self.method == "qat":
                raise
            context.progress.note(f"{error.what}: using the converter's own calibration instead")
            content = conversion.convert_calibrated(model, samples, self.io)
            facts["ranges"] = f"found by the converter, because {error.what}"
            return facts | self._write(content, samples, context)
        best = Candidate("ptq", content, plan)
        if self.method == "qat":
            best = self._trained(canonical, best, context, facts)
        (context.folder / PLAN_FILE).write_text(best.plan.to_json())
        facts |= {"kept": best.method, "ranges": best.plan.method}
        return facts | self._write(best.content, samples, context)

    def _write(self, content: bytes, samples: NDArray[np.float32], context: Context) -> Facts:
        """Writes the model, rewritten for the target's compiler where there is something to rewrite."""
        from compress.quantization import conversion

        path, rewritten = context.folder / MODEL_TFLITE, []
        path.write_bytes(content)
        if context.target.accelerated:
            feeds = [[sample[np.newaxis]] for sample in samples]
            found = legalize(graph.read(path), context.target, feeds, io=self.io.upper())
            path.write_bytes(graph.serialize(found.graph))
            rewritten = found.to_json()["changes"]
        conversion.refuse_float(path.read_bytes())
        return {"rewritten": rewritten}

    def _trained(self, network: Network, ptq: Candidate, context: Context, facts: Facts) -> Candidate:
        """Trains with rounding; gives back whichever is better on validation, PTQ where they are equal."""
        from compress.quantization import conversion, training

        trained, plan, history = training.train(network, ptq.plan, self, context)
        qat = Candidate("qat", conversion.convert(trained, plan, self.io), plan)
        scores = {}
        for candidate in (ptq, qat):
            path = context.folder / MODEL_TFLITE
            path.write_bytes(candidate.content)
            outputs = Model(path, reproducible=True).scores(context.data.inputs("validation"))
            scores[candidate.method] = float((outputs.argmax(axis=1) == context.data.labels("validation")).mean())
        facts.update(history, validation_accuracy=scores)
        return qat if scores["qat"] > scores["ptq"] else ptq

    def _samples(self, context: Context) -> NDArray[np.float32]:
        """Calibration samples, drawn from the training split."""
        inputs = context.data.inputs("train")
        chosen = np.random.default_rng(context.seed).permutation(len(inputs))[: self.calibration_samples]
        return inputs[np.sort(chosen)]
