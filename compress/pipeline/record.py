"""The construction of the run record from what stages and probes report."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compress.core.artifact import Artifact, Facts
from compress.core.errors import EXIT_INTERRUPTED, BudgetError, ModelError, NotUsableError, ResultError
from compress.core.files import file_digest
from compress.core.measurement import COSTS, SIZES, Measurement, Measurements, missing, ratio
from compress.core.resources import __version__
from compress.model.tflite.interpreter import version
from compress.pipeline.acceptance import Verdict, VerdictMaterial, judged, refusal
from compress.pipeline.schema import Pipeline, StageEntry
from compress.pipeline.stage import NOTHING, host
from compress.results.encoding import decode
from compress.results.evaluation import ComparisonRecord, DegeneracyRecord, ExamplesRecord
from compress.results.placement import HostLatencyRecord, LatencyAdvice, LatencyRecord, PlacementRecord
from compress.results.pruning import SensitivityRecord
from compress.results.run import (
    BudgetRecord,
    DataRecord,
    DeviceRecord,
    EnvironmentRecord,
    ErrorRecord,
    ModelRecord,
    ModelsRecord,
    OutputRecord,
    RunRecord,
    RunStatus,
    StageRecord,
    TargetRecord,
)
from compress.tasks import TASKS, limits, task_of
from compress.tasks.base import Task
from compress.tasks.findings import VerdictReason, about_original, channels, input_range

TOOLS = (
    *("ai-edge-litert", "keras", "numpy"),
    *("tensorflow", "tensorflow-model-optimization", "tf-keras"),
)
_EARLY: dict[int, RunStatus] = {EXIT_INTERRUPTED: "interrupted"}
_REFUSED: dict[type[ResultError], RunStatus] = {NotUsableError: "not usable", BudgetError: "over budget"}
RATIOS = [metric for metric in COSTS if metric.name in ("macs", "size_bytes", "latency_ms")]
"""The metrics whose ratio of result to original is part of the comparison."""


@dataclass
class Findings:
    """The facts that the probes of a run have reported so far.

    Attributes:
        data: the facts of `DataSummary`.
        validation: the facts of `Evaluation` on the validation split, by stage id.
        stages: the stage ids of `original` and `result`; empty before they are compared.
        tested: the artifact of `Evaluation` on the test split for both, with the pictures of examples.
        drawn: the artifact of `OperatorGraph` for the result.
        inputs: the facts of `InputAlternatives` for the original.
        batch_norms: the facts of `BatchNormStatistics` for the original.
        latency: the facts of `Latency` for both.
        prediction: the facts of `evaluation.latency.predict`; empty for a target without hosts.
        sensitivity: the facts of `Sensitivity`; None if it was not measured.
    """

    data: Facts = field(default_factory=dict)
    validation: dict[str, Facts] = field(default_factory=dict)
    stages: Mapping[str, str] = field(default_factory=dict)
    tested: Artifact = NOTHING
    drawn: Artifact = NOTHING
    inputs: Facts = field(default_factory=dict)
    batch_norms: Facts = field(default_factory=dict)
    latency: Facts = field(default_factory=dict)
    prediction: Facts = field(default_factory=dict)
    sensitivity: SensitivityRecord | None = None

    @property
    def test(self) -> Facts:
        """The facts of `Evaluation` on the test split for original and result."""
        return self.tested.facts


@dataclass(frozen=True)
class RunResults:
    """The files of a run for the user, and the results of devices that measured its bundle."""

    outputs: Mapping[str, Path] = field(default_factory=dict)
    devices: tuple[DeviceRecord, ...] = ()


def initial(entry: StageEntry, task: Task) -> StageRecord:
    """Return the record of a stage that has not run."""
    return StageRecord(
        id=entry.id,
        stage=entry.stage.name,
        status="not run",
        kind=entry.makes,
        settings=entry.stage.model_dump(mode="json", exclude={"id"}),
        measurements=unmeasured(f"skipped: {entry.skip}" if entry.skip else "the run did not get so far", task),
    )


def unmeasured(reason: str, task: Task) -> Measurements:
    """Return the measurements of a stage that has none, with the reason."""
    return {metric.name: missing(metric.unit, reason) for metric in (*task.metrics, *SIZES)}


def measurements(facts: Facts) -> Measurements:
    """Return the measurements among the facts of a probe about one model."""
    metrics = {metric.name for metric in COSTS} | {metric.name for task in TASKS.values() for metric in task.metrics}
    return {name: decode(Measurement, facts[name]) for name in facts if name in metrics}


def build(
    pipeline: Pipeline,
    stages: Mapping[str, StageRecord],
    findings: Findings,
    results: RunResults,
    error: ErrorRecord | None,
    seconds: float,
) -> RunRecord:
    """Build the run record.

    Args:
        pipeline: what was run.
        stages: the record of each stage, by id.
        findings: the facts of the probes.
        results: outputs and devices.
        error: what failed, if anything did.
        seconds: how long the run took.
    """
    task = task_of(pipeline.data)
    models = _models(stages, findings)
    comparison = _comparison(task, models, findings)
    latency = _latency(models, findings.prediction)
    budget = _budget(pipeline, models, comparison, latency)
    degeneracy = _degeneracy(task, findings)
    data = _data(pipeline, findings)
    placed = placement(stages)
    task_findings = _task_findings(task, findings)
    material = VerdictMaterial(
        degeneracy,
        task_findings,
        data,
        tuple(stages.values()),
        placed,
        budget,
        needs_every_class=task.needs_every_class,
    )
    verdict = None if error or not findings.stages else judged(material)
    status, error = _outcome(task, findings, verdict, budget, error)
    tools = {tool: importlib.metadata.version(tool) for tool in TOOLS}
    examples = findings.test.get("examples")
    return RunRecord(
        name=pipeline.head.name,
        status=status,
        error=error,
        coralline=__version__,
        seed=pipeline.head.seed,
        seconds=round(seconds, 3),
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        target=TargetRecord(pipeline.target.name, pipeline.target.summary),
        metrics=task.metrics,
        pipeline=pipeline.settings,
        data=data,
        stages=tuple(stages.values()),
        models=models,
        verdict=verdict.record if verdict else None,
        degeneracy=degeneracy,
        comparison=comparison,
        latency=latency,
        cpu_latency=_cpu_latency(findings),
        placement=placed,
        sensitivity=findings.sensitivity,
        budget=budget,
        outputs={name: OutputRecord(file_digest(path), path.stat().st_size) for name, path in results.outputs.items()},
        environment=EnvironmentRecord(**host(), python=platform.python_version(), runtime=version(), tools=tools),
        devices=results.devices,
        examples=None if examples is None else decode(ExamplesRecord, examples),
    )


def _degeneracy(task: Task, findings: Findings) -> DegeneracyRecord | None:
    """Judge whether the outputs of original and result depend on the input; None if they were not measured."""
    if not findings.stages:
        return None
    judgements = task.judge_outputs(findings.test, findings.data["classes"], "original", "result")
    return DegeneracyRecord(judgements["original"], judgements["result"])


def _task_findings(task: Task, findings: Findings) -> Sequence[VerdictReason]:
    """Return what the task says about the result; nothing if it was not measured."""
    if not findings.stages:
        return ()
    about_result = task.findings(findings.test, findings.data["classes"], "original", "result")
    metric = task.metrics[0]
    models = (Measurement(**findings.test[model][metric.name]) for model in ("original", "result"))
    causes = about_original(metric, findings.inputs, findings.batch_norms, *models)
    fit = input_range(findings.test.get("input_range"), labelled=not task.learns_from_original)
    # A task with labels or objects is judged by those: a channel that becomes constant may not matter to them.
    about_outputs = channels(findings.test.get("outputs", ())) if task.compares_values else []
    return [*causes, *fit, *about_outputs, *about_result]


def _first_degenerate(task: Task, findings: Findings) -> str | None:
    """Return the id of the first stage whose model gives one answer to nearly every validation sample."""
    for stage, facts in findings.validation.items():
        judgement = task.judge_outputs(facts, findings.data["classes"], "model", "model")["model"]
        if judgement.verdict == "degenerate":
            return stage
    return None


def _outcome(
    task: Task,
    findings: Findings,
    verdict: Verdict | None,
    budget: tuple[BudgetRecord, ...],
    error: ErrorRecord | None,
) -> tuple[RunStatus, ErrorRecord | None]:
    """Return the status and the error of a run; `error` is what ended it early."""
    if error is not None:
        return _EARLY.get(error.exit_code, "failed"), error
    refused = refusal(verdict, budget, _first_degenerate(task, findings))
    if refused is None:
        return "ok", None
    return _REFUSED[type(refused)], ErrorRecord(None, str(refused), refused.exit_code)


def _models(stages: Mapping[str, StageRecord], findings: Findings) -> ModelsRecord | None:
    """Return the test accuracy, size and latency of original and result; None if they were not compared."""
    if not findings.stages:
        return None
    models = []
    for name in ("original", "result"):
        stage = findings.stages[name]
        facts = {**findings.test[name], **findings.latency[name]}
        models.append(ModelRecord(stage, {**stages[stage].measurements, **measurements(facts)}))
    return ModelsRecord(*models)


def _comparison(task: Task, models: ModelsRecord | None, findings: Findings) -> ComparisonRecord | None:
    if models is None:
        return None
    facts = task.compare(findings.test, findings.data["classes"], "original", "result")
    comparison = decode(ComparisonRecord, {**facts, "outputs": findings.test.get("outputs", [])})
    before, after = (model.measurements for model in (models.original, models.result))
    ratios = {metric.change: ratio(before[metric.name], after[metric.name]) for metric in RATIOS}
    return replace(comparison, measurements={**comparison.measurements, **ratios})


def _latency(models: ModelsRecord | None, prediction: Facts) -> HostLatencyRecord | None:
    """Return the latency of the result: predicted for the host; for a target without hosts, measured on this CPU."""
    if models is None:
        return None
    if not prediction:
        name = f"this machine's CPU, {host()['cpu']}"
        return HostLatencyRecord(name, models.result.measurements["latency_ms"])
    if "missing" in prediction:
        return HostLatencyRecord(prediction["host"], missing("ms", prediction["missing"]))
    source = "the compiled model" if prediction["compiled"] else "the model that is not compiled"
    note = f"predicted by `estimate` from {source}, clock {prediction['clock']}"
    ends = (prediction["low_ms"], prediction["high_ms"])
    return HostLatencyRecord(
        prediction["host"],
        Measurement(prediction["latency_ms"], "ms", "predicted", *ends, note),
        prediction["parts"],
        prediction["streamed_bytes"],
        tuple(decode(LatencyAdvice, change) for change in prediction["advice"]),
    )


def _cpu_latency(findings: Findings) -> LatencyRecord | None:
    facts = findings.latency
    if not facts:
        return None
    return LatencyRecord(facts["conditions"], *(tuple(facts[name]["times_ms"]) for name in ("original", "result")))


def placement(stages: Mapping[str, StageRecord]) -> PlacementRecord | None:
    """Return the placement that the last compile stage reported."""
    reports = [stage.facts for stage in stages.values() if "placement" in stage.facts]
    return PlacementRecord.from_facts(reports[-1]) if reports else None


def _budget(
    pipeline: Pipeline,
    models: ModelsRecord | None,
    comparison: ComparisonRecord | None,
    latency: HostLatencyRecord | None,
) -> tuple[BudgetRecord, ...]:
    """Return each limit that was set, with its measurement."""
    units = {**dict.fromkeys(limits(), "fraction"), **{metric.name: metric.unit for metric in COSTS}}
    measured: Measurements = {}
    if models is not None and comparison is not None:
        measured = {**models.result.measurements, **comparison.measurements}
    if latency is not None:
        measured = {**measured, "latency_ms": latency.measurement}
    rows = []
    for name, limit in pipeline.head.budget.model_dump(exclude_none=True).items():
        actual = measured.get(name) or missing(units[name], "the run did not get so far")
        holds = None if actual.value is None else actual.value <= limit
        rows.append(BudgetRecord(name, limit, units[name], actual, holds))
    return tuple(rows)


def _data(pipeline: Pipeline, findings: Findings) -> DataRecord | None:
    if not findings.data:
        return None
    source = pipeline.settings["data"]["source"]
    name = source if isinstance(source, str) else next(iter(source))
    return decode(DataRecord, {"source": name, "samples_digest": pipeline.data.samples_digest, **findings.data})


def quantized_layers(folder: Path) -> list[dict[str, Any]]:
    """Return the quantization error of each tensor, from the last `quantize` of a run.

    Raises:
        ModelError: the folder holds no report of a run that quantized.
    """
    path = folder / "report.json"
    try:
        record = RunRecord.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path), hint="run the pipeline first") from error
    except (ValueError, RecursionError) as error:
        raise ModelError("is not a report of a run", where=str(path), hint="run the pipeline again") from error
    reports: list[list[dict[str, Any]]] = [stage.facts["layers"] for stage in record.stages if "layers" in stage.facts]
    if not reports:
        raise ModelError(
            "has no quantization error of any layer",
            where=str(path),
            hint="run a pipeline with `quantize`; the errors of layers are unknown if the converter chose the ranges",
        )
    return reports[-1]
