"""The procedure `quantize`: a full-integer .tflite file, by calibration or by training.

The caller has set the random generators (`compress.model.ir.tensorflow.keras`) before it loaded the model.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import MODEL_TFLITE, Facts
from compress.core.errors import StageError
from compress.core.progress import SILENT, Phase, Progress
from compress.data.types import Data
from compress.learning.context import Context
from compress.learning.distillation import losses, teachers
from compress.learning.procedures import QuantizedModel
from compress.learning.procedures.settings import QuantizeSettings
from compress.learning.quantization import (
    calibration,
    diagnostics,
    export,
    old_scales,
    plan,
    post_training,
    qat,
    quantizer_placement,
)
from compress.learning.quantization.calibration import CalibrationSplit
from compress.learning.quantization.diagnostics import FileAgreement
from compress.learning.quantization.plan import QuantizationPlan
from compress.learning.quantization.post_training import QuantizationResult
from compress.learning.tfmot import adapter as tfmot
from compress.learning.training import loop, phases
from compress.learning.training.loop import Loss
from compress.learning.training.phases import BUILD
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import Network
from compress.model.ir.passes import cut_lookup, fold
from compress.model.ir.passes.cut_lookup import CutLookup
from compress.model.tflite import graph
from compress.model.tflite import lookup as lookup_tables
from compress.model.tflite.interpreter import LoadedModel
from compress.tasks import task_of


def quantize(
    model: Any,
    float_file: Path,
    settings: QuantizeSettings,
    context: Context,
    samples: CalibrationSplit | None = None,
) -> QuantizedModel:
    """Quantize a model to full integer, and compare the file with the float file.

    Args:
        model: a Keras model; None for a float .tflite file that has operators without Keras layers.
        float_file: the float .tflite file of the model.
        settings: the settings of the search, and of the training with `method: qat`.
        context: data, seed, target, progress.
        samples: the samples for calibration and comparison; None to choose them from the training split.

    Raises:
        StageError: a setting does not fit the model, or some operators remain float.
        ModelError: the model does not fit the data.
    """
    parts, progress = _Phases.of(settings, context.data), context.progress
    progress.plan(parts.samples, parts.search, *parts.qat, parts.writing, parts.check)
    lookup = None if model is None else _cut_lookup(model, settings, context)
    with progress.phase(parts.samples):
        samples = samples or calibration.split(
            context.data, settings.calibration_samples, settings.held_out_samples, context.seed
        )
    work = _Quantization(model, _float_content(float_file), samples, settings, context)
    if lookup is not None:
        calibration_rows, held_out = lookup.rows(samples.calibration), lookup.rows(samples.held_out)
        rows = replace(samples, calibration=calibration_rows, held_out=held_out, are_rows=True)
        work = replace(work, model=keras_graph.build(lookup.network), float_file=None, samples=rows)
    result = _without_layers(float_file, work, parts) if model is None else work.run(parts)
    with progress.phase(parts.writing):
        content, rewritten = work.legalized(result)
        if lookup is not None:
            content = _with_table(content, lookup)
    with progress.phase(parts.check):
        answers = work.agreement(float_file, content, samples, progress)
    warnings = diagnostics.about_outputs(answers, has_plan=result.plan is not None, trained=result.method == "qat")
    for text in warnings:
        progress.note(f"quantize: {text}")
    facts = {"calibration_samples": len(samples.calibration), **result.to_json()}
    facts |= {"rewritten": rewritten, "agreement": answers.agreement}
    if result.own_scales is not None:
        own = work.agreement(float_file, result.own_scales, samples, SILENT).agreement
        facts["scales_from"] = {
            "file": str(settings.scales_from),
            "agreement": answers.agreement,
            "agreement_own_scales": own,
        }
        progress.note(f"quantize: agreement {answers.agreement} with the old scales, {own} with its own")
    facts["warnings"] = [*result.warnings, *warnings]
    return QuantizedModel(content, facts, None if result.plan is None else result.plan.to_json())


def _float_content(file: Path) -> bytes | None:
    """Return the content of a file that computes in float alone; None for one with 8-bit weights."""
    content = file.read_bytes()
    constants = (tensor for tensor in graph.parse(content).tensors if tensor.is_constant)
    return None if any(tensor.quantization and tensor.dtype in ("INT8", "UINT8") for tensor in constants) else content


@dataclass(frozen=True)
class _Phases:
    """The phases of `quantize`.

    Attributes:
        samples: the choice of samples.
        search: post-training quantization.
        qat: quantization-aware training, if it is set.
        writing: rewrites for the target.
        check: the comparison of the file with the float file.
    """

    samples: Phase
    search: Phase
    qat: tuple[Phase, ...]
    writing: Phase
    check: Phase

    @classmethod
    def of(cls, settings: QuantizeSettings, data: Data) -> _Phases:
        """Return the phases with these settings."""
        trained = phases.training(data, settings) if settings.method == "qat" else Phase("", 0.0)
        qat = Phase("training", trained.weight + 4 * BUILD)
        return cls(
            samples=Phase("samples", BUILD / 4),
            search=Phase("search", post_training.search_cost(settings, settings.calibration_samples)),
            qat=(qat,) if settings.method == "qat" else (),
            writing=Phase("rewrites for the target", BUILD / 4),
            check=Phase("check of the file", BUILD / 4 + 2 * settings.held_out_samples, unit="sample"),
        )


def _cut_lookup(model: Any, settings: QuantizeSettings, context: Context) -> CutLookup | None:
    """Return the model without the lookup of an embedding at its beginning; None if it has none."""
    lookup = cut_lookup.cut(keras_graph.read(model))
    if lookup is None:
        return None
    unfit = {"method: qat": settings.method == "qat", "scales_from": settings.scales_from is not None}
    for name, is_set in unfit.items():
        if is_set:
            raise StageError(f"{name}: not possible with an embedding, whose lookup is cut off", hint="remove it")
    rows, width = lookup.table.shape
    context.progress.note(
        f"quantize: the lookup of the embedding is cut off: the file takes its rows, of {width} values; its table "
        f"of {rows:,} rows is in the metadata of the file, and the runner looks up"
    )
    return lookup


def _with_table(content: bytes, lookup: CutLookup) -> bytes:
    """Return the file with the table of an embedding, in the form of the file's input."""
    with tempfile.TemporaryDirectory(prefix="coralline-") as folder:
        file = Path(folder) / MODEL_TFLITE
        file.write_bytes(content)
        (tensor,) = LoadedModel(file, reproducible=True).input_tensors
    return graph.serialize(lookup_tables.with_table(graph.parse(content), lookup.stored(tensor)))


def _without_layers(float_file: Path, work: _Quantization, parts: _Phases) -> QuantizationResult:
    """Quantize a float .tflite file with operators without Keras layers."""
    progress = work.context.progress
    progress.note("quantize: the converter chooses the ranges, since the file has no Keras layers")
    with progress.phase(parts.search):
        result = post_training.quantize_file(float_file.read_bytes(), work.samples.calibration, work.settings.io)
    for warning in result.warnings:
        progress.note(f"quantize: {warning}")
    return result


@dataclass(frozen=True)
class _Quantization:
    """The quantization of a Keras model.

    Attributes:
        model: the model, without the lookup of an embedding.
        float_file: the float .tflite file of the model, if there is one without 8-bit weights.
        samples: samples for calibration and comparison, as the model takes them.
        settings: the settings.
        context: data, seed, target, progress.
    """

    model: Any
    float_file: bytes | None
    samples: CalibrationSplit
    settings: QuantizeSettings
    context: Context

    def run(self, parts: _Phases) -> QuantizationResult:
        """Quantize the model; with `method: qat` train it too, and keep the better result."""
        settings, progress = self.settings, self.context.progress
        with progress.phase(parts.search):
            result = self._calibrated(None if settings.plan is None else plan.read(settings.plan))
            if settings.scales_from is not None:
                result = self._under_old_scales(result, settings.scales_from)
        if settings.method == "ptq":
            return result
        if result.plan is None:
            warning = f"no quantization-aware training: the ranges were {result.ranges}"
            progress.note(f"quantize: {warning}")
            return replace(result, warnings=(*result.warnings, warning))
        (training,) = parts.qat
        with progress.phase(training):
            return self._better_of(result)

    def _calibrated(self, applied: QuantizationPlan | None) -> QuantizationResult:
        """Quantize by calibration, or by a plan."""
        settings, progress = self.settings, self.context.progress
        without_edits = {"equalize": "off", "correct_bias": "off"}
        return post_training.quantize(
            self.model,
            self.samples.calibration,
            self.samples.held_out,
            settings if settings.scales_from is None else settings.model_copy(update=without_edits),
            float_file=self.float_file,
            plan=applied,
            judge=task_of(self.context.data).fidelity(self.context.specification, logits=self._has_activation_at_end),
            note=lambda text: progress.note(f"quantize: {text}"),
            progress=progress,
            are_rows=self.samples.are_rows,
        )

    @property
    def _has_activation_at_end(self) -> bool:
        """Whether a softmax or a sigmoid is the last layer, which the search leaves out of the comparison."""
        network = fold.split_activations(keras_graph.read(self.model))
        return quantizer_placement.without_softmax(network) is not network

    def _under_old_scales(self, own_result: QuantizationResult, file: Path) -> QuantizationResult:
        """Return the result with the scales of `scales_from`."""
        if own_result.plan is None:
            raise StageError(f"scales_from: the ranges were {own_result.ranges}, so that they cannot be replaced")

        def rewrite(content: bytes) -> bytes:
            parsed = graph.parse(content)
            feeds = parsed.feeds(self.samples.calibration)
            return graph.serialize(self.context.target.legalize(parsed, feeds, io=self.settings.io.upper()).graph)

        old = old_scales.read(file)
        result = self._calibrated(old_scales.plan_for(*own_result.calibrated(), old, self.settings.io, rewrite))
        return replace(result, own_scales=own_result.content)

    def _better_of(self, ptq: QuantizationResult) -> QuantizationResult:
        """Train with fake quantization; return the better result on validation, PTQ if both are equal."""
        context, progress = self.context, self.context.progress
        training = phases.training(context.data, self.settings, "quantization-aware training")
        comparison = Phase("comparison with PTQ", BUILD + 3 * phases.validation_cost(context.data))
        progress.plan(training, comparison)
        with progress.phase(training):
            trained, trained_plan, history = self._train(ptq)
        inputs = context.data.inputs("validation")
        task = task_of(context.data)
        judge = task.fidelity(context.specification)

        def score(rows: NDArray[np.float32]) -> float:
            return task.score(rows, context.data, "validation", context.specification)

        with progress.phase(comparison):
            outcome = qat.compared(ptq, trained, trained_plan, inputs, score, judge, self.settings.io)
            facts = {**history, task.score_name: dict(outcome.scores), "training_agrees": outcome.agreement}
            result = replace(outcome.result, training=facts, own_scales=ptq.own_scales)
            if result.method == "ptq":
                before, after = outcome.scores["ptq"], outcome.scores["qat"]
                advice = "more validation samples show smaller differences"
                if after < before:
                    advice = "a smaller learning_rate changes the model less"
                progress.note(
                    f"quantize: the training is not kept: {task.score_name} is {before:.3f} with post-training "
                    f"quantization and {after:.3f} after the training; {advice}"
                )
                return result
            return post_training.described(result, trained, trained_plan, self.samples.held_out, progress=progress)

    def _train(self, ptq: QuantizationResult) -> tuple[Network, QuantizationPlan, Facts]:
        """Train with the selected engine, from the ranges of PTQ."""
        settings, context = self.settings, self.context
        canonical, start = ptq.calibrated()
        network = keras_graph.read(self.model)
        if settings.engine == "tfmot":
            start = calibration.calibrate(canonical, self.samples.calibration, ptq.range_method)
            return tfmot.train_quantized(network, start, settings, context)
        loss = self._loss(canonical)
        return qat.train(canonical, start, settings, context, settings.qat, fold.folded_norms(network), loss)

    def _loss(self, network: Network) -> Loss | None:
        """Return the loss of QAT with the float network as the teacher; None without a teacher."""
        context, distillation = self.context, self.settings.qat.distill
        if distillation is None:
            return None
        model = keras_graph.build(network)
        teacher = teachers.of_model(model, context.data, "the float model", context.specification)
        head = loop.head_of(model, context.data, context.specification)
        return losses.loss_of(head, [teacher], distillation, self.settings, context)

    def legalized(self, result: QuantizationResult) -> tuple[bytes, list[dict[str, Any]]]:
        """Return the file, and its rewrites for the target's compiler."""
        converted = graph.parse(result.content)
        feeds = converted.feeds(self.samples.calibration)
        legalized = self.context.target.legalize(converted, feeds, io=self.settings.io.upper())
        content = graph.serialize(legalized.graph)
        if self.settings.scales_from is not None:
            scaled = old_scales.with_scales(content, old_scales.read(self.settings.scales_from))
            content = scaled.content
            if scaled.clipped_weights:
                clipped = f"{scaled.clipped_weights:,} weights of dense layers"
                self.context.progress.note(f"quantize: {clipped} are beyond their old scale, and clipped")
        # `legalize` removes some float operators; those that it writes itself run on the CPU.
        if export.float_operators(content).keys() & export.float_operators(result.content).keys():
            export.refuse_float(content, None if self.model is None else keras_graph.read(self.model))
        changes: list[dict[str, Any]] = legalized.to_json()["changes"]
        return content, changes

    def agreement(
        self, float_file: Path, content: bytes, samples: CalibrationSplit, progress: Progress
    ) -> FileAgreement:
        """Compare a quantized file with the float file on held-out samples of the data."""
        judge = task_of(self.context.data).fidelity(self.context.specification)
        with tempfile.TemporaryDirectory(prefix="coralline-") as folder:
            file = Path(folder) / MODEL_TFLITE
            file.write_bytes(content)
            return diagnostics.compared(float_file, file, samples.held_out, judge, progress)
