"""`quantize`: a full-integer .tflite file, by calibration or by training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.stage import MODEL_TFLITE, Artifact, Context, Facts, Kind, Need, Stage
from compress.training.fit import TrainingSettings

if TYPE_CHECKING:  # a dry run reads settings only
    from compress.quantization.plan import QuantizationPlan
    from compress.quantization.search import Search
    from compress.training.network import Network

PLAN_FILE = "quantization.json"
FEW = 32
"""Calibration samples below which there is a warning."""


@dataclass(frozen=True)
class Candidate:
    """A quantized model that may be kept."""

    method: str
    content: bytes
    network: Network
    plan: QuantizationPlan


class Quantize(Stage, TrainingSettings):
    """Makes all weights and activations 8-bit integers, inputs and outputs included."""

    name: ClassVar[str] = "quantize"
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS, Kind.FLOAT_TFLITE})
    produces: ClassVar[Kind] = Kind.TFLITE
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "target"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "ai-edge-litert")

    method: Literal["ptq", "qat"] = "ptq"
    """ptq: ranges from calibration. qat: trained with rounding; kept only if it wins on validation."""
    calibration_samples: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Training samples that ranges are taken from, as many of each class as there are."""
    held_back_samples: Annotated[int, Field(ge=1, le=100_000)] = 128
    """Further training samples, on which what is tried is compared with the float model."""
    ranges: Literal["auto", "minmax", "sample_percentile", "percentile", "mse", "entropy"] = "auto"
    """How activation ranges are chosen; auto: what agrees best with the float model."""
    equalize: Literal["auto", "off"] = "auto"
    """auto: channels scaled across layers where that helps, without changing the function."""
    correct_bias: Literal["auto", "off"] = "auto"
    """auto: biases moved by what rounding shifts the mean of each layer's outputs, where that helps."""
    rounding: Literal["nearest", "learnt"] = "nearest"
    """learnt: each weight to the step below or above as serves its layer's output (AdaRound); takes minutes."""
    io: Literal["int8", "uint8"] = "int8"
    """Type of the file's input and output."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Passes over the training split (qat)."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.0005
    """Adam's learning rate at the start (qat); it falls to 0 along a cosine."""

    def takes(self) -> frozenset[Kind]:
        """Training needs layers."""
        return self.consumes - {Kind.FLOAT_TFLITE} if self.method == "qat" else self.consumes

    def run(self, given: Artifact, context: Context) -> Facts:
        """The int8 model, the plan it was made by, and what was tried."""
        from compress.quantization import conversion, debug
        from compress.quantization.conversion import FloatOperatorsError
        from compress.quantization.search import Search
        from compress.training import folding, network, working_model
        from compress.training.tensorflow import keras

        keras(context.seed)
        if given.kind is Kind.FLOAT_TFLITE:
            return self._by_converter(given, context)
        model = working_model.read(given, context)
        canonical = folding.canonical(network.read(model))
        samples, held_back = self._samples(context)
        facts: Facts = {
            "calibration_samples": len(samples),
            "warnings": self._warnings(network.read(model), samples, context),
        }
        search = Search(canonical, samples, held_back, self.io, self._outputs(context))
        try:
            self._searched(search, context)
        except FloatOperatorsError as error:
            if self.method == "qat":
                raise
            context.progress.note(f"{error.what}: using the converter's own calibration instead")
            content = conversion.convert_calibrated(model, samples, self.io)
            facts["ranges"] = f"found by the converter, because {error.what}"
            return facts | self._write(content, samples, context)
        if search.outliers:
            few = f"{len(search.outliers)} of {len(samples)} calibration samples"
            facts["warnings"].append(f"{few} reach more than three times as far as the others: are they corrupt?")
            context.progress.note(f"quantize: {facts['warnings'][-1]}")
        facts["tried"] = search.to_json()
        best = Candidate("ptq", search.content, canonical, search.plan)
        if self.method == "qat":
            best = self._trained(canonical, best, context, facts)
        facts["layers"] = debug.to_json(debug.errors(best.network, best.plan, held_back[:FEW]))
        (context.folder / PLAN_FILE).write_text(best.plan.to_json())
        facts |= {"kept": best.method, "ranges": best.plan.method}
        return facts | self._write(best.content, samples, context)

    def _by_converter(self, given: Artifact, context: Context) -> Facts:
        """A file without layers, quantized by TensorFlow's own quantizer; how well, is measured as in a search."""
        from compress.quantization import flatbuffer, search

        original = given.file(MODEL_TFLITE).read_bytes()
        samples, held_back = self._samples(context)
        facts: Facts = {"calibration_samples": len(samples), "warnings": self._warnings(None, samples, context)}
        context.progress.note("quantize: the ranges are the converter's own, for a file that has no layers")
        run = self._outputs(context)
        wanted = run(original, held_back)
        content = flatbuffer.convert(original, samples, self.io)
        trial = search.compared("ranges", "the converter's own", wanted, run(content, held_back))
        facts |= {"tried": [trial], "kept": "ptq", "ranges": "found by the converter, for a file without layers"}
        return facts | self._write(content, samples, context)

    def _warnings(self, trained: Network | None, samples: NDArray[np.float32], context: Context) -> list[str]:
        """What is strange about the calibration samples; it is told at once."""
        from compress.quantization import statistics

        found = []
        if len(samples) < FEW:
            found.append(f"{len(samples)} calibration samples are few: ranges may miss what comes later")
        if not np.ptp(samples, axis=0).any():
            found.append("all calibration samples are the same")
        far = statistics.misfit(trained, samples) if trained else None
        if far is not None and far > statistics.FAR:
            found.append(
                f"the calibration samples are {far:.0f} standard deviations from what the model's first batch norm "
                "saw in training: is data.preprocess what the model was trained with?"
            )
        for warning in found:
            context.progress.note(f"quantize: {warning}")
        return found

    def _searched(self, search: Search, context: Context) -> None:
        """Tries what the settings allow, and keeps what helps."""
        from compress.quantization.ranges import METHODS

        methods = [*METHODS] if self.ranges == "auto" else [self.ranges]
        search.ranges(methods)
        tried: set[str] = set()
        while self.equalize == "auto" and search.range_method not in tried:
            # What is best for channels of very different sizes says nothing of what is best once they are equal.
            tried.add(search.range_method)
            if search.equalization(search.range_method):
                search.ranges([method for method in methods if method != search.range_method])
        if self.correct_bias == "auto":
            search.bias()
        if self.rounding == "learnt":
            search.rounding(context.progress.note)

    def _outputs(self, context: Context) -> Callable[[bytes, NDArray[np.float32]], NDArray[np.float32]]:
        """Runs a candidate."""
        from compress.tflite.runtime import Model

        def run(content: bytes, samples: NDArray[np.float32]) -> NDArray[np.float32]:
            path = context.folder / MODEL_TFLITE
            path.write_bytes(content)
            return Model(path, reproducible=True).scores(samples)

        return run

    def _write(self, content: bytes, samples: NDArray[np.float32], context: Context) -> Facts:
        """Writes the model, rewritten for the target's compiler where there is something to rewrite."""
        from compress.edgetpu.legalize import legalize
        from compress.quantization import conversion
        from compress.tflite import graph

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

        edited = conversion.edited(network, ptq.plan)
        start = replace(ptq.plan, factors={}, bias_shifts={}, rounding={})
        trained, plan, history = training.train(edited, start, self, context)
        qat = Candidate("qat", conversion.convert(trained, plan, self.io), trained, plan)
        scores = {}
        for candidate in (ptq, qat):
            outputs = self._outputs(context)(candidate.content, context.data.inputs("validation"))
            scores[candidate.method] = float((outputs.argmax(axis=1) == context.data.labels("validation")).mean())
        facts.update(history, validation_accuracy=scores)
        return qat if scores["qat"] > scores["ptq"] else ptq

    def _samples(self, context: Context) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Samples of the training split for calibration, and others held back; classes take turns."""
        inputs, labels = context.data.inputs("train"), context.data.labels("train")
        order = np.random.default_rng(context.seed).permutation(len(inputs))
        turns = np.zeros(len(order), int)
        for label in np.unique(labels):
            own = labels[order] == label
            turns[own] = np.arange(own.sum())
        order = order[np.argsort(turns, kind="stable")]
        ends = min(self.calibration_samples, max(len(order) * 2 // 3, 1)), len(order)
        held_back = order[ends[0] : ends[0] + self.held_back_samples]
        return inputs[np.sort(order[: ends[0]])], inputs[np.sort(held_back if len(held_back) else order[: ends[0]])]
