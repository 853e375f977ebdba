"""`quantize`: a full-integer .tflite file, by calibration or by training."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from compress.core.artifact import MODEL_TFLITE, PLAN_FILE, Artifact, Facts, Kind
from compress.core.errors import StageError
from compress.core.files import file_digest
from compress.core.progress import Phase
from compress.learning.context import Context, Need
from compress.learning.distillation.settings import DistillationSettings
from compress.learning.quantization.settings import Calibration, PostTrainingSettings, RoundedTraining
from compress.learning.training.batches import EpochSettings
from compress.learning.training.loop import TrainingSettings
from compress.pipeline.stage import Stage
from compress.tasks import task_of
from compress.tasks.base import Use

if TYPE_CHECKING:  # a dry run reads settings only
    from compress.data.types import Data
    from compress.learning.quantization.calibration import CalibrationSplit
    from compress.learning.quantization.plan import QuantizationPlan
    from compress.learning.quantization.post_training import QuantizationResult
    from compress.learning.training.loop import Loss
    from compress.model.ir.keras_graph import Network
    from compress.model.ir.passes.cut_lookup import CutLookup
    from compress.tasks.base import Judge

SEARCHED = ("ranges", "equalize", "separate_gates", "correct_bias", "rounding", "search")
"""Settings of the search, which have no effect with a plan."""
FILES = ("plan", "scales_from")
"""Settings that are files."""
BY_MODEL = ("hardness", "coverage")
"""Methods of sample selection that need the float model."""


class QatSettings(RoundedTraining):
    """The settings of quantization-aware training (QAT)."""

    distill: DistillationSettings | None = None
    """Use the float model as a teacher: {weight: 0.9, temperature: 4}, or {} for these values."""


@dataclass(frozen=True)
class _QuantizePhases:
    """The phases of the stage.

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
    def of(cls, stage: Quantize, data: Data) -> _QuantizePhases:
        """Return the phases of a stage with these settings."""
        from compress.learning.quantization.post_training import search_cost
        from compress.learning.training.phases import BUILD, training

        held_out = stage.held_out_samples
        trained = training(data, stage) if stage.method == "qat" else Phase("", 0.0)
        qat = Phase("training", trained.weight + 4 * BUILD)
        return cls(
            samples=Phase("samples", BUILD / 4),
            search=Phase("search", search_cost(stage, stage.calibration_samples)),
            qat=(qat,) if stage.method == "qat" else (),
            writing=Phase("rewrites for the target", BUILD / 4),
            check=Phase("check of the file", BUILD / 4 + 2 * held_out, unit="sample"),
        )


class Quantize(Stage, TrainingSettings, PostTrainingSettings):
    """Quantize the model to 8-bit integers: weights, activations, inputs and outputs."""

    name: ClassVar[str] = "quantize"
    version: ClassVar[int] = 15
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS, Kind.FLOAT_TFLITE})
    produces: ClassVar[Kind] = Kind.TFLITE
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "target"})
    tools: ClassVar[tuple[str, ...]] = (
        *("tensorflow", "keras", "ai-edge-litert"),
        *("tf-keras", "tensorflow-model-optimization"),
    )
    imports_tensorflow: ClassVar[bool] = True

    method: Literal["ptq", "qat"] = "ptq"
    """ptq: post-training quantization. qat: quantization-aware training, kept only if it is better on the validation
    split."""
    engine: Literal["coralline", "tfmot"] = "coralline"
    """The training engine of qat. coralline: Keras 3 with fake quantization. tfmot: tensorflow-model-optimization,
    which supports fewer layers."""
    calibration_samples: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Number of training samples from which activation ranges are calibrated."""
    calibration: Calibration = Calibration()
    """How the calibration samples are selected."""
    held_out_samples: Annotated[int, Field(ge=1, le=100_000)] = 512
    """Number of other training samples (held-out samples) on which candidates are compared with the float model. All
    are used only if the first of them do not decide."""
    plan: Path | None = None
    """The quantization.json of an earlier run, possibly edited by hand. It is applied instead of a search."""
    scales_from: Path | None = None
    """A .tflite file of the same architecture, whose activation scales are used: the result can be put into its
    compiled program without a change of the instructions (`relink`). Channels are not equalized and biases not
    corrected. With `method: qat` it needs `qat: {ranges: fixed}`."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Number of passes over the training split (qat)."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.0005
    """Initial learning rate of Adam (qat)."""
    precision: Literal["float32"] = "float32"
    """QAT is done in float32 only: 16 bits would round differently from the 8-bit file."""
    qat: QatSettings = QatSettings()
    """The settings of `method: qat`."""

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine != "tfmot":
            return self
        if self.method == "ptq":
            raise ValueError("engine: tfmot trains, and can be used with `method: qat` only; this is `method: ptq`")
        ours = (TrainingSettings.model_fields.keys() - EpochSettings.model_fields.keys()) & self.model_fields_set
        if ours:
            raise ValueError(f"{', '.join(sorted(ours))}: with `engine: coralline` only; this is `engine: tfmot`")
        return self

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        searched = [name for name in SEARCHED if name in self.model_fields_set]
        if self.plan is not None and searched:
            names = ", ".join(searched)
            raise ValueError(f"{names}: a `plan` replaces the search; remove one of them")
        if self.scales_from is not None:
            self._check_scales_from()
        if self.qat.distill is not None:
            self.qat.distill.check_training(self)
        if self.subset is not None and self.subset.by in BY_MODEL and self.subset.of == "proxy":
            raise ValueError(f"subset: {{by: {self.subset.by}}}: the model is trained already; set `of: model`")
        return self

    def _check_scales_from(self) -> None:
        if self.plan is not None:
            raise ValueError("scales_from: a `plan` has ranges already; remove one of them")
        if self.method == "qat" and (self.engine == "tfmot" or self.qat.ranges != "fixed"):
            raise ValueError("scales_from: training changes ranges; set `engine: coralline` and `qat: {ranges: fixed}`")

    def trains(self) -> bool:
        """Return whether it is quantization-aware training with our own engine."""
        return self.method == "qat" and self.engine == "coralline"

    def uses(self) -> tuple[Use, ...]:
        """Return the methods of training, of its teacher, and of the choice of calibration samples."""
        uses: list[Use] = [*self.training_uses()]
        if self.engine == "tfmot":
            uses.append("tfmot qat")
        if self.qat.distill is not None:
            uses.append("qat teacher")
        if self.calibration.select in BY_MODEL:
            uses.append("selection by classes")
        return tuple(uses)

    def accepted_kinds(self) -> frozenset[Kind]:
        """Return the kinds of models: training, plans, and samples chosen by the model need layers."""
        has_plan = self.plan is not None or self.scales_from is not None
        layers = self.method == "qat" or has_plan or self.calibration.select in BY_MODEL
        return self.consumes - {Kind.FLOAT_TFLITE} if layers else self.consumes

    def with_paths_from(self, folder: Path) -> Self:
        """Return the stage with the paths of its files relative to `folder`."""
        files = {name: path for name in FILES if (path := getattr(self, name)) is not None}
        return self.model_copy(update={name: folder / path for name, path in files.items()})

    def identity(self) -> dict[str, Any]:
        """Return the settings, with the contents of files instead of their paths."""
        settings = super().identity()
        for name in FILES:
            path = getattr(self, name)
            try:
                settings |= {} if path is None else {name: file_digest(path)}
            except OSError as error:
                raise StageError(
                    f"the file cannot be read: {error.strerror}", where=str(path), hint=f"check quantize.{name}"
                ) from error
        return settings

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write the int8 model and the plan; return facts about the candidates."""
        from compress.learning.quantization import diagnostics, fidelity
        from compress.model.ir import keras_graph
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        model = working_model.read(artifact, context) if artifact.kind is Kind.KERAS else None
        parts, progress = _QuantizePhases.of(self, context.data), context.progress
        progress.plan(parts.samples, parts.search, *parts.qat, parts.writing, parts.check)
        lookup = None if model is None else self._cut_lookup(model, context)
        with progress.phase(parts.samples):
            samples = self._split(model, context)
        own_samples = samples
        if lookup is not None:
            calibration, held_out = lookup.rows(samples.calibration), lookup.rows(samples.held_out)
            own_samples = replace(samples, calibration=calibration, held_out=held_out, are_rows=True)
            model = keras_graph.build(lookup.network)
        result = (
            self._without_layers(artifact, samples, context)
            if model is None
            else self._run(model, own_samples, context, parts)
        )
        with progress.phase(parts.writing):
            rewritten = self._write(result, model, own_samples, context)
            if lookup is not None:
                self._add_table(lookup, context.folder / MODEL_TFLITE)
        files = (artifact.file(MODEL_TFLITE), context.folder / MODEL_TFLITE)
        judge = task_of(context.data).fidelity(context.specification)
        with progress.phase(parts.check):
            answers = fidelity.compared(*files, samples.held_out, judge, progress)
        warnings = diagnostics.about_outputs(answers, has_plan=result.plan is not None, trained=result.method == "qat")
        for text in warnings:
            context.progress.note(f"quantize: {text}")
        facts = samples.to_json() | result.to_json() | {"rewritten": rewritten, "agreement": answers.agreement}
        if result.own_scales is not None:
            facts |= {
                "scales_from": self._cost_of_scales(result.own_scales, files[0], answers.agreement, samples, judge)
            }
            own_agreement = facts["scales_from"]["agreement_own_scales"]
            context.progress.note(
                f"quantize: agreement {answers.agreement} with the old scales, {own_agreement} with its own"
            )
        return facts | {"warnings": [*result.warnings, *warnings]}

    def _cut_lookup(self, model: Any, context: Context) -> CutLookup | None:
        """Return the model without the lookup of an embedding at its beginning; None if it has none."""
        from compress.model.ir import keras_graph
        from compress.model.ir.passes import cut_lookup

        lookup = cut_lookup.cut(keras_graph.read(model))
        if lookup is None:
            return None
        settings = {"method: qat": self.method == "qat", "scales_from": self.scales_from is not None}
        for name, is_set in settings.items():
            if is_set:
                raise StageError(f"{name}: not possible with an embedding, whose lookup is cut off", hint="remove it")
        rows, width = lookup.table.shape
        context.progress.note(
            f"quantize: the lookup of the embedding is cut off: the file takes its rows, of {width} values; its table "
            f"of {rows:,} rows is in the metadata of the file, and the runner looks up"
        )
        return lookup

    def _add_table(self, lookup: CutLookup, file: Path) -> None:
        """Add the table of an embedding to the file, in the form of its input."""
        from compress.model.tflite import graph
        from compress.model.tflite import lookup as lookup_tables
        from compress.model.tflite.interpreter import LoadedModel

        (tensor,) = LoadedModel(file, reproducible=True).input_tensors
        table = lookup.stored(tensor)
        file.write_bytes(graph.serialize(lookup_tables.with_table(graph.read(file), table)))

    def _cost_of_scales(
        self, own_scales_model: bytes, float_file: Path, agreement: float, samples: CalibrationSplit, judge: Judge
    ) -> Facts:
        """Return the agreement with the float model with the old scales, and with the scales that it would have."""
        from compress.learning.quantization import fidelity

        with tempfile.TemporaryDirectory(prefix="coralline-") as folder:
            file = Path(folder) / MODEL_TFLITE
            file.write_bytes(own_scales_model)
            own_agreement = fidelity.compared(float_file, file, samples.held_out, judge).agreement
        return {"file": str(self.scales_from), "agreement": agreement, "agreement_own_scales": own_agreement}

    def _split(self, model: Any, context: Context) -> CalibrationSplit:
        """Choose calibration samples and held-out samples from the training split."""
        from compress.learning.quantization import calibration
        from compress.learning.training import subset

        choice = self.calibration.select
        samples = calibration.split(
            context.data,
            choice,
            self.calibration_samples,
            self.held_out_samples,
            model if choice in BY_MODEL else None,
            context.seed,
            context.specification,
        )
        facts = samples.to_json()
        if "calibration" in facts:
            context.progress.note(f"quantize: {subset.summary(facts['calibration'], 'calibration')}")
        return samples

    def _without_layers(self, artifact: Artifact, samples: CalibrationSplit, context: Context) -> QuantizationResult:
        """Quantize a float .tflite file with operators without Keras layers."""
        from compress.learning.quantization import post_training

        context.progress.note("quantize: the converter chooses the ranges, since the file has no Keras layers")
        with context.progress.phase(_QuantizePhases.of(self, context.data).search):
            result = post_training.quantize_file(artifact.file(MODEL_TFLITE).read_bytes(), samples.calibration, self.io)
        for warning in result.warnings:
            context.progress.note(f"quantize: {warning}")
        return result

    def _run(
        self, model: Any, samples: CalibrationSplit, context: Context, parts: _QuantizePhases
    ) -> QuantizationResult:
        """Quantize a Keras model; with `method: qat` train it too, and keep the better result."""
        from compress.learning.quantization import plan

        with context.progress.phase(parts.search):
            result = self._calibrated(model, samples, context, None if self.plan is None else plan.read(self.plan))
            if self.scales_from is not None:
                result = self._under_old_scales(result, model, samples, context)
        if self.method == "ptq":
            return result
        if result.plan is None:
            warning = f"no quantization-aware training: the ranges were {result.ranges}"
            context.progress.note(f"quantize: {warning}")
            return replace(result, warnings=(*result.warnings, warning))
        (training,) = parts.qat
        with context.progress.phase(training):
            return self._better_of(result, model, samples, context)

    def _calibrated(
        self, model: Any, samples: CalibrationSplit, context: Context, plan: QuantizationPlan | None
    ) -> QuantizationResult:
        """Quantize a Keras model by calibration, or by a plan."""
        from compress.learning.quantization import post_training

        without_edits = {"equalize": "off", "correct_bias": "off"}
        return post_training.quantize(
            model,
            samples.calibration,
            samples.held_out,
            self if self.scales_from is None else self.model_copy(update=without_edits),
            plan=plan,
            judge=task_of(context.data).fidelity(context.specification, logits=True),
            note=lambda text: context.progress.note(f"quantize: {text}"),
            progress=context.progress,
            are_rows=samples.are_rows,
        )

    def _under_old_scales(
        self, own_result: QuantizationResult, model: Any, samples: CalibrationSplit, context: Context
    ) -> QuantizationResult:
        """Return the result with the scales of `scales_from`."""
        from compress.learning.quantization import old_scales
        from compress.model.tflite import graph

        assert self.scales_from is not None
        if own_result.plan is None:
            raise StageError(f"scales_from: the ranges were {own_result.ranges}, so that they cannot be replaced")

        def rewrite(content: bytes) -> bytes:
            parsed = graph.parse(content)
            feeds = parsed.feeds(samples.calibration)
            return graph.serialize(context.target.legalize(parsed, feeds, io=self.io.upper()).graph)

        old = old_scales.read(self.scales_from)
        plan = old_scales.plan_for(*own_result.calibrated(), old, self.io, rewrite)
        result = self._calibrated(model, samples, context, plan)
        return replace(result, own_scales=own_result.content)

    def _better_of(
        self, ptq: QuantizationResult, model: Any, samples: CalibrationSplit, context: Context
    ) -> QuantizationResult:
        """Train with fake quantization; return the better result on validation, PTQ if both are equal."""
        from compress.learning.quantization import post_training, qat
        from compress.learning.training import phases
        from compress.model.ir import keras_graph

        progress = context.progress
        training = phases.training(context.data, self, "quantization-aware training")
        comparison = Phase("comparison with PTQ", phases.BUILD + 3 * phases.validation_cost(context.data))
        progress.plan(training, comparison)
        with progress.phase(training):
            trained, plan, history = self._train(ptq, keras_graph.read(model), samples, context)
        inputs = context.data.inputs("validation")
        task = task_of(context.data)
        judge = task.fidelity(context.specification)

        def score(rows: NDArray[np.float32]) -> float:
            return task.score(rows, context.data, "validation", context.specification)

        with progress.phase(comparison):
            outcome = qat.compared(ptq, trained, plan, inputs, score, judge, self.io)
            facts = {**history, task.score_name: dict(outcome.scores), "training_agrees": outcome.agreement}
            result = replace(outcome.result, training=facts, own_scales=ptq.own_scales)
            if result.method == "ptq":
                return result
            return post_training.described(result, trained, plan, samples.held_out, progress=progress)

    def _train(
        self, ptq: QuantizationResult, network: Network, samples: CalibrationSplit, context: Context
    ) -> tuple[Network, QuantizationPlan, Facts]:
        """Train with the selected engine, from the ranges of PTQ."""
        from compress.learning.quantization import calibration, qat
        from compress.learning.tfmot import adapter as tfmot
        from compress.model.ir.passes import fold

        canonical, plan = ptq.calibrated()
        if self.engine == "tfmot":
            start = calibration.calibrate(canonical, samples.calibration, ptq.range_method)
            return tfmot.train_quantized(network, start, self, context)
        loss = self._loss(canonical, context)
        return qat.train(canonical, plan, self, context, self.qat, fold.folded_norms(network), loss)

    def _loss(self, network: Network, context: Context) -> Loss | None:
        """Return the loss of QAT with the float network as the teacher; None without a teacher."""
        from compress.learning.distillation import losses, teachers
        from compress.learning.training import loop
        from compress.model.ir.keras_graph import build

        if self.qat.distill is None:
            return None
        model = build(network)
        teacher = teachers.of_model(model, context.data, "the float model", context.specification)
        head = loop.head_of(model, context.data, context.specification)
        return losses.loss_of(head, [teacher], self.qat.distill, self, context)

    def _write(
        self, result: QuantizationResult, model: Any, samples: CalibrationSplit, context: Context
    ) -> list[dict[str, Any]]:
        """Write the file and its plan; return the rewrites for the target's compiler."""
        from compress.learning.quantization import export, old_scales
        from compress.model.ir import keras_graph
        from compress.model.tflite import graph

        converted = graph.parse(result.content)
        legalized = context.target.legalize(converted, converted.feeds(samples.calibration), io=self.io.upper())
        content = graph.serialize(legalized.graph)
        if self.scales_from is not None:
            scaled = old_scales.with_scales(content, old_scales.read(self.scales_from))
            content = scaled.content
            if scaled.clipped_weights:
                clipped = f"{scaled.clipped_weights:,} weights of dense layers"
                context.progress.note(f"quantize: {clipped} are beyond their old scale, and clipped")
        # `legalize` removes some float operators; those that it writes itself run on the CPU.
        if export.float_operators(content).keys() & export.float_operators(result.content).keys():
            export.refuse_float(content, None if model is None else keras_graph.read(model))
        (context.folder / MODEL_TFLITE).write_bytes(content)
        if result.plan is not None:
            (context.folder / PLAN_FILE).write_text(result.plan.to_json())
        rewritten: list[dict[str, Any]] = legalized.to_json()["changes"]
        return rewritten
