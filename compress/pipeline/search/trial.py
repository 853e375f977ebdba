"""One trial of a search: a pipeline up to its last model, measured on the validation split only.

The test split is not read: it is for the runs of the front at the end. Stages that trials share come from the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

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
from compress.targets.base import OperatorPlacement
from compress.tasks import task_of

Judge = Callable[[TrialProgress], str]
"""Returns the reason why a trial must stop; "" if it goes on."""


class HopelessError(Exception):
    """The end of a hopeless trial; the message is the reason."""


@dataclass
class TrialMeasurements:
    """The measurements of a trial so far: the attributes of `TrialRecord` of the same names.

    Attributes:
        unknown: why no latency could be predicted; "" if it was, or nothing predicts it.
    """

    values: dict[str, float] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    original: float | None = None
    predicted: dict[str, float] = field(default_factory=dict)
    unknown: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the measurements as plain values."""
        return asdict(self)


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
        judge: decides after each stage whether it goes on.
        measured: what it has measured so far.
    """

    session: PipelineRun
    judge: Judge
    measured: TrialMeasurements = field(default_factory=TrialMeasurements)

    def run(self) -> None:
        """Run the stages, and measure the result.

        Raises:
            HopelessError: it is hopeless.
            CorallineError: a stage failed.
        """
        run_stages(self.session, self._after)
        for name in self._measured_stages():
            self._measure(name)
        if self.session.original in self.measured.stages:
            self.measured.original = self.measured.stages[self.session.original]
        self._measure_result(self.session.artifacts[self._measured_stages()[-1]])

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
        quality = self.measured.stages.get(entry.id)
        reason = self.judge(TrialProgress(entry.id, order, quality, self.measured.predicted))
        if reason:
            raise HopelessError(reason)

    def _measure(self, name: str) -> None:
        """Measure the quality of a model on the validation split, and its sizes."""
        session = self.session
        measurements = measure(session, name, session.artifacts[name])
        session.stages[name] = replace(session.stages[name], measurements=measurements)
        quality = measurements[task_of(session.pipeline.data).metrics[0].name]
        if quality.value is not None:
            self.measured.stages[name] = quality.value

    def _is_final_architecture(self, entry: StageEntry) -> bool:
        """Whether a model with layers is complete, and no later stage changes what it costs."""
        steps = self.session.pipeline.steps
        later = steps[steps.index(entry) + 1 :]
        has_layers = entry.makes in (Kind.UNTRAINED, Kind.KERAS)
        return has_layers and not any(step.stage.changes_cost() for step in later if step.skip is None)

    def _predict(self, artifact: Artifact) -> None:
        """Predict the costs of the final architecture, once."""
        if self.measured.predicted or MODEL_KERAS not in artifact.files:
            return
        probe = PredictedCost(host=self._host())
        self.measured.predicted = self.session.probe("predicted cost", probe, {"model": artifact}).facts["costs"]

    def _host(self) -> str:
        pipeline = self.session.pipeline
        return pipeline.target.cost.host(pipeline.head.measure.host) if pipeline.target.cost.hosts else ""

    def _measure_result(self, artifact: Artifact) -> None:
        """Fill in the quality and the costs of the last model."""
        session = self.session
        name = self._measured_stages()[-1]
        metrics = [metric.name for metric in (*task_of(session.pipeline.data).metrics, *SIZES)]
        known = {metric: session.stages[name].measurements[metric].value for metric in metrics}
        self.measured.values = {metric: value for metric, value in known.items() if value is not None}
        ops = self._placements(artifact)
        self.measured.values["cpu_share"] = sum(row.placement == "cpu" for row in ops) / max(1, len(ops))
        predicted = predict(artifact, session.pipeline.target, self._host() or None)
        for name in ("latency_ms", "streamed_bytes"):
            if name in predicted:
                self.measured.values[name] = predicted[name]
        self.measured.unknown = predicted.get("missing", "") if self._host() else ""

    def _placements(self, artifact: Artifact) -> tuple[OperatorPlacement, ...]:
        """Return where the operators run: as `compile` reported, or as predicted."""
        target = self.session.pipeline.target
        if not target.cost.hosts:
            return ()
        reported = record.placement(self.session.stages)
        return tuple(reported.ops if reported else target.check(read(artifact.file(MODEL_TFLITE))).ops)
