"""One trial of a search: a pipeline up to its last model, measured on the validation split only.

The test split is not read: it is for the runs of the front at the end. Stages that trials share come from the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Kind
from compress.core.errors import PipelineError
from compress.core.measurement import SIZES
from compress.model.tflite.graph import read
from compress.pipeline import record
from compress.pipeline.execution import PipelineRun, run_stages
from compress.pipeline.findings import measure
from compress.pipeline.probes.latency import predict
from compress.pipeline.resolution import MEASURED
from compress.pipeline.schema import Pipeline, StageEntry
from compress.pipeline.search.early_stop import TrialProgress
from compress.pipeline.stages.keras_probes import PredictedCost
from compress.results.placement import OperatorPlacement
from compress.results.search import TrialRecord
from compress.tasks import task_of

Judge = Callable[[TrialProgress], str]
"""Returns the reason why a trial must stop; "" if it goes on."""


class _HopelessError(Exception):
    """The end of a hopeless trial; the message is the reason."""


def models_of(pipeline: Pipeline) -> Pipeline:
    """Return a pipeline without the stages after its last model.

    Raises:
        PipelineError: no stage makes a quantized model.
    """
    indices = [index for index, step in enumerate(pipeline.steps) if step.makes in MEASURED]
    if not indices or pipeline.steps[indices[-1]].makes not in (Kind.TFLITE, Kind.COMPILED):
        what = "no stage makes a quantized model, whose costs a search could predict"
        raise PipelineError(what, where="stages", hint="add quantize")
    return replace(pipeline, steps=pipeline.steps[: indices[-1] + 1])


@dataclass
class PipelineTrial:
    """A trial that runs.

    Attributes:
        session: the run of its pipeline.
        judge: decides after each stage whether the trial goes on.
        values: the quantities of the result (`TrialRecord.values`).
        stages: the quality after each stage.
        predicted: the costs that were predicted before the training.
        unknown: why no latency could be predicted; "" if a latency was predicted, or nothing predicts latencies.
    """

    session: PipelineRun
    judge: Judge
    values: dict[str, float] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    unknown: str = ""

    def run(self) -> TrialRecord:
        """Run the stages, and measure the result; return the record without number and settings.

        Raises:
            CorallineError: a stage failed.
        """
        try:
            run_stages(self.session, self._after)
        except _HopelessError as stop:
            return TrialRecord(0, "stopped", stages=self.stages, predicted=self.predicted, reason=str(stop))
        for name in self._measured_stages():
            self._measure(name)
        self._measure_result(self.session.artifacts[self._measured_stages()[-1]])
        original = self.stages.get(self.session.original or "")
        return TrialRecord(0, "complete", {}, self.values, self.stages, original, self.predicted, reason=self.unknown)

    def _measured_stages(self) -> tuple[str, ...]:
        steps = self.session.pipeline.steps
        return tuple(step.id for step in steps if step.skip is None and step.makes in MEASURED)

    def _after(self, entry: StageEntry, artifact: Artifact) -> None:
        """Ask after a stage, except the last one, whether to go on."""
        order = self._measured_stages()
        if entry.id == order[-1]:
            return
        learns = task_of(self.session.pipeline.data).learns_from_original
        if entry.id in order and not learns:  # without labels, quality is known at the end only
            self._measure(entry.id)
        if self._is_final_architecture(entry):
            self._predict(artifact)
        quality = self.stages.get(entry.id)
        reason = self.judge(TrialProgress(entry.id, order, quality, self.predicted))
        if reason:
            raise _HopelessError(reason)

    def _measure(self, name: str) -> None:
        """Measure the quality of a model on the validation split, and its sizes."""
        session = self.session
        measurements = measure(session, name, session.artifacts[name])
        session.stages[name] = replace(session.stages[name], measurements=measurements)
        quality = measurements[task_of(session.pipeline.data).metrics[0].name]
        if quality.value is not None:
            self.stages[name] = quality.value

    def _is_final_architecture(self, entry: StageEntry) -> bool:
        """Whether a model with layers is complete, and no later stage changes what it costs."""
        steps = self.session.pipeline.steps
        later = steps[steps.index(entry) + 1 :]
        has_layers = entry.makes in (Kind.UNTRAINED, Kind.KERAS)
        return has_layers and not any(step.stage.changes_cost() for step in later if step.skip is None)

    def _predict(self, artifact: Artifact) -> None:
        """Predict the costs of the final architecture, once."""
        if self.predicted or MODEL_KERAS not in artifact.files:
            return
        probe = PredictedCost(host=self._host())
        self.predicted = self.session.probe("predicted cost", probe, {"model": artifact}).facts["costs"]

    def _host(self) -> str:
        pipeline = self.session.pipeline
        return pipeline.target.cost.host(pipeline.head.measure.host) if pipeline.target.cost.hosts else ""

    def _measure_result(self, artifact: Artifact) -> None:
        """Fill in the quality and the costs of the last model."""
        session = self.session
        name = self._measured_stages()[-1]
        metrics = [metric.name for metric in (*task_of(session.pipeline.data).metrics, *SIZES)]
        known = {metric: session.stages[name].measurements[metric].value for metric in metrics}
        self.values = {metric: value for metric, value in known.items() if value is not None}
        ops = self._placements(artifact)
        self.values["cpu_share"] = sum(row.placement == "cpu" for row in ops) / max(1, len(ops))
        predicted = predict(artifact, session.pipeline.target, self._host() or None)
        for name in ("latency_ms", "streamed_bytes"):
            if name in predicted:
                self.values[name] = predicted[name]
        self.unknown = predicted.get("missing", "") if self._host() else ""

    def _placements(self, artifact: Artifact) -> tuple[OperatorPlacement, ...]:
        """Return where the operators run: as `compile` reported, or as predicted."""
        target = self.session.pipeline.target
        if not target.cost.hosts:
            return ()
        reported = record.placement(self.session.stages)
        return tuple(reported.ops if reported else target.check(read(artifact.file(MODEL_TFLITE))).ops)
