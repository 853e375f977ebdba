"""`quantize`: a full-integer .tflite file, by calibration or by training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from compress.artifact import MODEL_TFLITE, PLAN_FILE, Artifact, Facts, Kind
from compress.data.rows import blocks, rows
from compress.distillation.settings import Teaching
from compress.errors import StageError
from compress.files import file_digest
from compress.quantization.qat_settings import Calibration, RoundedTraining
from compress.stage import Context, Need, Stage, Use
from compress.tasks import task_of
from compress.training.batches import Passes
from compress.training.loop import TrainingSettings

if TYPE_CHECKING:  # a dry run reads settings only
    from compress.ir.keras_graph import Network
    from compress.quantization.plan import QuantizationPlan
    from compress.quantization.search import Search
    from compress.training.loop import Loss

Samples = NDArray[np.float32]
SEARCHED = ("ranges", "equalize", "correct_bias", "rounding")
"""What a plan says instead of a search."""
BY_MODEL = ("hardness", "coverage")
"""Ways to choose that ask the float model."""


@dataclass(frozen=True)
class Candidate:
    """A quantized model that may be kept."""

    method: str
    content: bytes
    network: Network
    plan: QuantizationPlan

    def signed(self) -> QuantizationPlan:
        """The plan, with a digest of the weights that it is for."""
        from compress.quantization.plan import weights_digest

        digest = weights_digest(self.network)
        return replace(self.plan, weights_digest=digest, trained_with_rounding=self.method == "qat")


class QatSettings(RoundedTraining):
    """Quantization-aware training: how ranges and batch norm behave, and which teacher there is."""

    distill: Teaching | None = None
    """Learns from the float model too: {weight: 0.9, temperature: 4}, or {} for these; decoupled too."""


class Quantize(Stage, TrainingSettings):
    """Makes all weights and activations 8-bit integers, inputs and outputs included."""

    name: ClassVar[str] = "quantize"
    version: ClassVar[int] = 5
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS, Kind.FLOAT_TFLITE})
    produces: ClassVar[Kind] = Kind.TFLITE
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "target"})
    tools: ClassVar[tuple[str, ...]] = (
        *("tensorflow", "keras", "ai-edge-litert"),
        *("tf-keras", "tensorflow-model-optimization"),
    )

    method: Literal["ptq", "qat"] = "ptq"
    """ptq: ranges from calibration. qat: trained with rounding; kept only if it wins on validation."""
    engine: Literal["coralline", "tfmot"] = "coralline"
    """What trains (qat): our own layers, or those of tensorflow-model-optimization, which takes fewer layers."""
    calibration_samples: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Training samples that ranges are taken from."""
    calibration: Calibration = Calibration()
    """Which ones."""
    held_back_samples: Annotated[int, Field(ge=1, le=100_000)] = 512
    """Further training samples that what is tried is compared with the float model on; all where few do not decide."""
    ranges: Literal["auto", "minmax", "sample_percentile", "percentile", "mse", "entropy"] = "auto"
    """How activation ranges are chosen; auto: what agrees best with the float model."""
    equalize: Literal["auto", "off"] = "auto"
    """auto: channels scaled across layers where that helps, with the same function; never if weights are clustered."""
    correct_bias: Literal["auto", "off"] = "auto"
    """auto: biases moved by what rounding shifts the mean of each layer's outputs, where that helps."""
    rounding: Literal["nearest", "learnt"] = "nearest"
    """learnt: each weight to the step below or above as serves its layer's output (AdaRound); takes minutes."""
    plan: Path | None = None
    """A quantization.json of an earlier run, as it was or edited by hand: applied instead of a search."""
    io: Literal["int8", "uint8"] = "int8"
    """Type of the file's input and output."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Passes over the training split (qat)."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.0005
    """Adam's learning rate at the start (qat)."""
    qat: QatSettings = QatSettings()
    """How ranges and batch norm behave in training, and who teaches."""

    @model_validator(mode="after")
    def _engine_trains(self) -> Self:
        if self.engine == "tfmot" and self.method == "ptq":
            raise ValueError("engine: tfmot trains, and goes with `method: qat`; this is `method: ptq`")
        searched = [name for name in SEARCHED if name in self.model_fields_set]
        if self.plan is not None and searched:
            raise ValueError(f"{', '.join(searched)}: with a `plan` nothing is searched; leave out one or the other")
        if self.qat.distill is not None:
            self.qat.distill.goes_with(self)
        if self.precision != "float32":
            raise ValueError(f"precision: {self.precision} would round otherwise than the 8-bit file; leave it out")
        if self.subset is not None and self.subset.by in BY_MODEL and self.subset.of == "proxy":
            raise ValueError(f"subset: {{by: {self.subset.by}}}: the model is trained already; say `of: model`")
        ours = (TrainingSettings.model_fields.keys() - Passes.model_fields.keys()) & self.model_fields_set
        if self.engine == "tfmot" and ours:
            raise ValueError(f"{', '.join(sorted(ours))}: with `engine: coralline` only; this is `engine: tfmot`")
        return self

    def uses(self) -> tuple[Use, ...]:
        """Return the methods of training, of its teacher, and of the choice of calibration samples."""
        uses: list[Use] = [*self.training_uses()]
        if self.engine == "tfmot":
            uses.append("tfmot qat")
        if self.qat.distill is not None:
            uses.append("qat teacher")
            uses += ["decoupled"] if self.qat.distill.decoupled else []
        if self.calibration.select in BY_MODEL:
            uses.append("selection by classes")
        return tuple(uses)

    def takes(self) -> frozenset[Kind]:
        """Training needs layers, and so do a plan and choosing samples by what the model makes of them."""
        layers = self.method == "qat" or self.plan is not None or self.calibration.select in BY_MODEL
        return self.consumes - {Kind.FLOAT_TFLITE} if layers else self.consumes

    def run(self, given: Artifact, context: Context) -> Facts:
        """The int8 model, the plan it was made by, and what was tried."""
        from compress.ir.tensorflow import keras
        from compress.quantization import diagnostics
        from compress.tflite.interpreter import LoadedModel

        keras(context.seed)
        facts: Facts = {"warnings": []}
        samples, held_back = self._samples(given, context, facts)
        warn = _warner(facts, context)
        if given.kind is Kind.FLOAT_TFLITE:
            warn(diagnostics.about_samples(samples))
            content = self._by_converter(given, samples, context, facts)
        else:
            content = self._by_plan(given, samples, held_back, context, facts)
        facts["rewritten"] = self._write(content, samples, given, context)
        wanted = LoadedModel(given.file(MODEL_TFLITE), reproducible=True).scores(held_back)
        found = LoadedModel(context.folder / MODEL_TFLITE, reproducible=True).scores(held_back)
        judge = task_of(context.data).fidelity(context.detector)
        same = judge.same(wanted, found)
        facts["agreement"] = round(float(same.mean()), 4)
        by_plan, trained = "layers" in facts, facts["kept"] == "qat"
        warn(diagnostics.about_answers(wanted, same, judge.snr_db(wanted, found), by_plan=by_plan, trained=trained))
        return facts

    def _by_converter(self, given: Artifact, samples: Samples, context: Context, facts: Facts) -> bytes:
        """A file without layers, quantized by TensorFlow's own quantizer."""
        from compress.quantization import float_tflite

        context.progress.note("quantize: the ranges are the converter's own, for a file that has no layers")
        facts |= {"kept": "ptq", "ranges": "found by the converter, for a file without layers"}
        return float_tflite.convert(given.file(MODEL_TFLITE).read_bytes(), samples, self.io)

    def _by_plan(self, given: Artifact, samples: Samples, held_back: Samples, context: Context, facts: Facts) -> bytes:
        """A model with layers, by the best plan."""
        from compress.ir import keras_graph as network
        from compress.ir.passes import fold
        from compress.quantization import diagnostics
        from compress.quantization.search import Search
        from compress.stages import working_model

        warn = _warner(facts, context)
        trained = network.read(working_model.read(given, context))
        warn([*diagnostics.about_samples(samples), *diagnostics.about_model(trained, samples)])
        judge = task_of(context.data).fidelity(context.detector, logits=True)
        search = Search(fold.canonical(trained), samples, held_back, self.io, self._outputs(context), judge=judge)
        content = self._quantized(search, trained, context, facts)
        warn(search.warnings)
        return content

    def _quantized(self, search: Search, given: Network, context: Context, facts: Facts) -> bytes:
        """The int8 model by the best plan; by the converter's own calibration where a plan leaves floats."""
        from compress.ir import keras_graph as network
        from compress.ir import weight_sparsity
        from compress.quantization import debug, export
        from compress.quantization.export import FloatOperatorsError
        from compress.tflite import graph, macs

        try:
            self._searched(search, given, context)
            facts["tried"] = search.to_json()
            best = Candidate("ptq", search.content, search.network, search.plan)
            if self.method == "qat":
                best = self._trained(given, search, best, context, facts)
        except FloatOperatorsError as error:
            if self.plan is not None:
                raise
            context.progress.note(f"{error.what}: using the converter's own calibration instead")
            if self.method == "qat":
                _warner(facts, context)([f"not trained with rounding, because {error.what}"])
            facts |= {"kept": "ptq", "ranges": f"found by the converter, because {error.what}"}
            return export.convert_calibrated(network.build(given), search.samples, self.io)
        plan = best.signed()
        count = debug.affordable_samples(best.network, macs.total_macs(graph.parse(best.content)))
        facts["layers"] = debug.to_json(debug.errors(best.network, plan, search.held_back[:count]))
        (context.folder / PLAN_FILE).write_text(plan.to_json())
        rounded = export.gridded(export.edited(best.network, best.plan), best.plan)
        facts["zeros"] = round(weight_sparsity.zeros(weight_sparsity.by_layer(rounded)), 4)
        facts |= {"kept": best.method, "ranges": best.plan.method}
        return best.content

    def beside(self, folder: Path) -> Self:
        """The same stage with the plan's path taken from `folder`."""
        return self if self.plan is None else self.model_copy(update={"plan": folder / self.plan})

    def identity(self) -> dict[str, Any]:
        """The content of a plan instead of its path."""
        settings = super().identity()
        try:
            return settings if self.plan is None else {**settings, "plan": file_digest(self.plan)}
        except OSError as error:
            raise StageError(
                f"the plan cannot be read: {error.strerror}", where=str(self.plan), todo="check quantize.plan"
            ) from error

    def _searched(self, search: Search, given: Network, context: Context) -> None:
        """Tries what the settings allow, and keeps what helps; a plan that was given is not searched for."""
        from compress.ir import weight_sparsity
        from compress.quantization import plan
        from compress.quantization.ranges import METHODS

        if self.plan is not None:
            search.given(plan.read(self.plan))
            return
        # Factors would give each channel of a clustered kernel values of its own.
        clustered = any(each.clustered for each in weight_sparsity.by_layer(given).values())
        methods = [*METHODS] if self.ranges == "auto" else [self.ranges]
        search.ranges(methods)
        tried: set[str] = set()
        while self.equalize == "auto" and not clustered and search.range_method not in tried:
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
        from compress.tflite.interpreter import LoadedModel

        def run(content: bytes, samples: NDArray[np.float32]) -> NDArray[np.float32]:
            path = context.folder / MODEL_TFLITE
            path.write_bytes(content)
            return LoadedModel(path, reproducible=True).scores(samples)

        return run

    def _write(self, content: bytes, samples: Samples, given: Artifact, context: Context) -> list[dict[str, Any]]:
        """Writes the model, and says what was rewritten for the target's compiler."""
        from compress.ir import keras_graph as network
        from compress.quantization import export
        from compress.stages import working_model
        from compress.tflite import graph

        path = context.folder / MODEL_TFLITE
        path.write_bytes(content)
        converted = graph.read(path)
        feeds = [[sample[np.newaxis]] for sample in samples]
        legalized = context.target.legalize(converted, feeds, io=self.io.upper())
        if legalized.graph is not converted:
            path.write_bytes(graph.serialize(legalized.graph))
        rewritten: list[dict[str, Any]] = legalized.to_json()["changes"]
        if export.float_operators(path.read_bytes()):
            layers = network.read(working_model.read(given, context)) if given.kind is Kind.KERAS else None
            export.refuse_float(path.read_bytes(), layers)
        return rewritten

    def _trained(self, given: Network, search: Search, ptq: Candidate, context: Context, facts: Facts) -> Candidate:
        """Trains with rounding; gives back whichever is better on validation, PTQ where they are equal."""
        from compress.engines.tfmot import qat as tfmot
        from compress.ir.passes import fold
        from compress.quantization import calibration, export, fidelity
        from compress.quantization import qat as training

        if self.engine == "tfmot":
            start = calibration.calibrate(search.network, search.samples, search.range_method)
            trained, plan, found = tfmot.train(given, start, self, context)
        else:
            trained, plan, found = training.train(
                ptq.network, ptq.plan, self, context, self.qat, fold.norms(given), self._qat_loss(ptq.network, context)
            )
        qat = Candidate("qat", export.convert(trained, plan, self.io), trained, plan)
        inputs = context.data.inputs("validation")
        answers = {each.method: self._answers(each.content, inputs, context) for each in (ptq, qat)}
        task = task_of(context.data)
        scores = {
            method: task.score(answer, context.data, "validation", context.detector)
            for method, answer in answers.items()
        }
        model = training.simulated(trained, plan)
        computed = [fidelity.side_by_side(model.predict(part, verbose=0)) for part in blocks(inputs)]
        same = task_of(context.data).fidelity(context.detector).same(answers["qat"], np.concatenate(computed))
        facts.update(found, **{task.score_name: scores}, training_agrees=float(same.mean()))
        return qat if scores["qat"] > scores["ptq"] else ptq

    def _qat_loss(self, network: Network, context: Context) -> Loss | None:
        """Return the loss of QAT with the float network as the teacher; None without a teacher."""
        from compress.distillation import losses, teachers
        from compress.ir.keras_graph import build
        from compress.training import loop

        if self.qat.distill is None:
            return None
        model = build(network)
        teacher = teachers.of_model(model, context.data, "the float model")
        return losses.loss_of(loop.head_of(model, context.data), [teacher], self.qat.distill, self, context)

    def _answers(self, content: bytes, inputs: NDArray[np.float32], context: Context) -> NDArray[np.float32]:
        """What a file gives for each sample: [n, outputs]."""
        outputs = self._outputs(context)
        return np.concatenate([outputs(content, part) for part in blocks(inputs)])

    def _samples(self, given: Artifact, context: Context, facts: Facts) -> tuple[Samples, Samples]:
        """Samples of the training split for calibration, and others held back; classes take turns among these."""
        from compress.quantization import calibration
        from compress.stages import working_model
        from compress.training import subset_selection

        began, select = time.monotonic(), self.calibration.select
        model = working_model.read(given, context) if select in BY_MODEL else None
        chosen, rest = calibration.divided(select, self.calibration_samples, model, context.data, context.seed)
        inputs = context.data.inputs("train")
        facts["calibration_samples"] = len(chosen)
        if select != "balanced":
            took = round(time.monotonic() - began, 1)
            facts["calibration"] = {"by": select, "samples": len(chosen), "of": len(inputs), "seconds": took}
            context.progress.note(f"quantize: {subset_selection.told(facts['calibration'], 'calibration')}")
        # Not sorted: the search looks at the first of the held-back ones first.
        held_back = rest[: self.held_back_samples]
        return rows(inputs, chosen), rows(inputs, held_back if len(held_back) else chosen)


def _warner(facts: Facts, context: Context) -> Callable[[list[str]], None]:
    """Shows warnings at once, and keeps them in the facts."""

    def warn(texts: list[str]) -> None:
        facts["warnings"] += texts
        for text in texts:
            context.progress.note(f"quantize: {text}")

    return warn
