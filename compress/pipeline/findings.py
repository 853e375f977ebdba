"""The findings of a run: what probes measure of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compress.core.artifact import Artifact, Facts, Kind
from compress.core.errors import ModelError, StageError
from compress.core.measurement import Measurements
from compress.pipeline import record
from compress.pipeline.execution import PipelineRun
from compress.pipeline.probes import DataSummary, Evaluation, InputAlternatives, Latency, OperatorGraph, Size
from compress.pipeline.probes.latency import predict, unmeasured
from compress.pipeline.resolution import MEASURED
from compress.pipeline.stages.keras_probes import BatchNormStatistics, Sensitivity
from compress.results.encoding import decode
from compress.results.pruning import SensitivityRecord
from compress.tasks import task_of
from compress.tasks.findings import GAIN


def collect(session: PipelineRun) -> None:
    """Measure size and validation accuracy of every model, and test accuracy and latency of original and result."""
    findings = session.findings
    findings.data = session.probe("data", DataSummary(), {}).facts
    for name, artifact in session.artifacts.items():
        session.stages[name] = replace(session.stages[name], measurements=measure(session, name, artifact))
    _sensitivity(session)
    models = {name: artifact for name, artifact in session.artifacts.items() if artifact.kind in MEASURED}
    if session.original not in models:
        return
    result = list(models)[-1]
    pair = {"original": models[session.original], "result": models[result]}
    names = [entry.stage.class_names() for entry in reversed(session.pipeline.steps)]
    evaluation = Evaluation(split="test", labels=next(filter(None, names), ()))
    findings.tested = session.probe("accuracy on test", evaluation, pair)
    _examine_original(session)
    findings.latency = _latency(session, pair)
    if session.pipeline.target.cost.hosts:
        findings.prediction = predict(models[result], session.pipeline.target, session.pipeline.head.measure.host)
    findings.drawn = session.probe("operator graph", OperatorGraph(), {"model": models[result]})
    findings.stages = {"original": session.original, "result": result}


def _examine_original(session: PipelineRun) -> None:
    """Look for the cause of a bad original from a file: other preprocessing, or statistics of batch norms."""
    task, findings = task_of(session.pipeline.data), session.findings
    metric = task.metrics[0]
    value = findings.test["original"][metric.name]["value"]
    is_good = metric.higher_is_better and value is not None and value > 1 - GAIN
    if task.learns_from_original or is_good or session.original != "model" or session.pipeline.model.file is None:
        return
    subject = {"original": session.original_artifact}
    findings.inputs = session.probe("other preprocessing", InputAlternatives(), subject).facts
    if session.original_artifact.kind is Kind.KERAS:
        findings.batch_norms = session.probe("batch norm statistics", BatchNormStatistics(), subject).facts


def measure(session: PipelineRun, name: str, artifact: Artifact) -> Measurements:
    """Return the size and the validation accuracy of the model of a stage."""
    if artifact.kind not in MEASURED:
        return record.unmeasured(f"{artifact.kind}s are not measured", task_of(session.pipeline.data))
    subject = {"model": artifact}
    size = session.probe(f"size of {name}", Size(), subject)
    quality = session.probe(f"accuracy of {name}", Evaluation(split="validation"), subject)
    session.findings.validation[name] = quality.facts
    return record.measurements({**quality.facts["model"], **size.facts["model"]})


def _latency(session: PipelineRun, pair: Mapping[str, Artifact]) -> Facts:
    """Measure the latency of original and result.

    A degenerate model often has weights or scales that the accelerated kernels refuse. There the latency is missing, so
    that the run ends with the cause and not with its consequence.
    """
    settings = session.pipeline.head.measure.latency
    probe = Latency(runs=settings.runs, threads=settings.threads)
    try:
        return session.probe("latency", probe, pair).facts
    except ModelError as error:
        task, findings = task_of(session.pipeline.data), session.findings
        judgements = task.judge_outputs(findings.test, findings.data["classes"], "original", "result")
        if judgements["result"].verdict != "degenerate":
            raise
        return unmeasured(pair, str(error))


def _sensitivity(session: PipelineRun) -> None:
    """Measure the effect of removing channels from the last Keras model before pruning, if `measure.sensitivity` is
    set."""
    settings = session.pipeline.head.measure.sensitivity
    if settings is None:
        return
    unpruned = [session.artifacts.get(entry.id) for entry in session.pipeline.unpruned]
    models = [artifact for artifact in unpruned if artifact and artifact.kind is Kind.KERAS]
    if not models:
        session.findings.sensitivity = SensitivityRecord(missing="no stage before `prune` has a model with layers")
        return
    try:
        probe = Sensitivity(samples=settings.samples)
        facts = session.probe("sensitivity", probe, {"model": models[-1]}).facts
        session.findings.sensitivity = decode(SensitivityRecord, facts)
    except (StageError, ModelError) as error:  # the result of the run does not depend on the sensitivity
        session.findings.sensitivity = SensitivityRecord(missing=str(error))
