"""`predicted cost`: the costs of a model on the target, predicted before it is trained or quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from compress.core.artifact import Artifact, Facts
from compress.core.errors import ModelError, PipelineError
from compress.learning.context import Context, Need
from compress.pipeline.stage import Probe
from compress.targets.base import hardware_costs


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
