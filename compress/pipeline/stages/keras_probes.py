"""Probes of Keras models, which import TensorFlow: batch norms, predicted costs, sensitivity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from compress.core.artifact import Artifact, Facts
from compress.core.errors import ModelError, PipelineError
from compress.core.progress import Phase
from compress.learning.context import Context, Need
from compress.pipeline.stage import Probe
from compress.results.encoding import encode
from compress.targets.base import hardware_costs
from compress.tasks import task_of


class BatchNormStatistics(Probe):
    """Measure the statistics of all batch norms again, and compare the quality with both."""

    name: ClassVar[str] = "batch norm statistics"
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")
    imports_tensorflow: ClassVar[bool] = True

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Return the facts of `training.bn_recalibration.compared_statistics` for the Keras model."""
        from compress.learning.training.bn_recalibration import compared_statistics
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        return compared_statistics(working_model.read(subjects["original"], context), context)


class PredictedCost(Probe):
    """Quantize a model with poor ranges, only to read the costs of its file. They do not depend on its weights."""

    name: ClassVar[str] = "predicted cost"
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "target"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "ai-edge-litert")
    imports_tensorflow: ClassVar[bool] = True

    host: str
    """The host for which latency is predicted; "" without prediction."""

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Return the `costs` of `subjects["model"]` by name; `missing` has the reason if there is no 8-bit file."""
        from compress.learning.procedures.trial_conversion import SAMPLES, TrialConverter
        from compress.model.ir import keras_graph
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras()
        model = working_model.read(subjects["model"], context)
        converter = TrialConverter(context.data.inputs("train")[:SAMPLES], context.target)
        try:
            trial = converter(keras_graph.read(model), model)
        except ModelError as error:
            return {"costs": {}, "missing": str(error)}
        if trial.graph is None:
            return {"costs": {}, "missing": trial.missing or "there is no 8-bit file"}
        ops = context.target.check(trial.graph).ops
        costs: Facts = {"cpu_share": sum(row.placement == "cpu" for row in ops) / max(1, len(ops))}
        if self.host:
            costs["streamed_bytes"] = hardware_costs(context.target).of_file(trial.graph).streamed_bytes
            try:
                costs["latency_ms"] = hardware_costs(context.target).estimate(trial.graph, self.host, None).latency_ms
            except (ModelError, PipelineError) as error:
                return {"costs": costs, "missing": str(error)}
        return {"costs": costs}


class Sensitivity(Probe):
    """Remove the least important channels of one layer at a time, and measure the change of the outputs."""

    name: ClassVar[str] = "sensitivity"
    version: ClassVar[int] = 4
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "target"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")
    imports_tensorflow: ClassVar[bool] = True

    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Number of training samples for importance and sensitivity."""

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Return `curves` of the Keras model `subjects["model"]`: see `compress.results.pruning.SensitivityCurve`.

        Raises:
            StageError: no channel of the model can be removed, or none matters.
            ModelError: the model does not fit the data.
        """
        from compress.learning.pruning.importance import ImportanceSamples, refuse_constant
        from compress.learning.pruning.prunable import prepare, substitution
        from compress.learning.pruning.sensitivity import sensitivity_curves
        from compress.learning.training import loop
        from compress.model.ir import keras_graph
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        model = working_model.read(subjects["model"], context)
        inputs, labels = loop.chosen_inputs(context.data, self.samples, context.seed)
        refuse_constant(model, inputs)
        head = loop.head_of(model, context.data, context.specification)
        samples = ImportanceSamples(inputs, labels, head, task_of(context.data).counts_right)
        importance, curves_phase = Phase("importance of channels", unit="sample"), Phase("layers", 8.0, unit="width")
        context.progress.plan(importance, curves_phase)
        with context.progress.phase(importance):
            prunable = prepare(keras_graph.read(model), context.target, "taylor", samples, context.progress)
        if prunable.importance != "taylor":
            context.progress.note(f"sensitivity: {substitution('taylor', prunable.importance)}")
        with context.progress.phase(curves_phase):
            curves = sensitivity_curves(prunable, samples, context.progress.update)
        return {
            "samples": len(inputs),
            "importance": prunable.importance,
            "curves": encode(curves),
        }
