"""The record of a run: plain values, all that the report shows. It is report.json, schema 1."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.errors import EXIT_INTERRUPTED, DegenerateError, ModelError, ResultError
from compress.files import file_digest
from compress.measurement import Measurement, missing
from compress.pipeline.acceptance import refusal
from compress.pipeline.schema import Pipeline, StageEntry
from compress.stage import host
from compress.tasks import TASKS, limits, task_of
from compress.tasks.base import Task
from compress.tasks.degeneracy import Judgement
from compress.tflite.interpreter import version
from compress.version import __version__

SCHEMA_VERSION = 1
TOOLS = (
    *("ai-edge-litert", "keras", "numpy", "scikit-learn"),
    *("tensorflow", "tensorflow-model-optimization", "tf-keras"),
)


def stage_row(step: StageEntry, task: Task) -> dict[str, Any]:
    """A step before it has run."""
    return {
        "id": step.id,
        "stage": step.stage.name,
        "status": "not run",
        "seconds": None,
        "reason": None,
        "kind": step.makes,
        "settings": step.stage.model_dump(mode="json", exclude={"id"}),
        "facts": {},
        "measurements": unmeasured(f"skipped: {step.skip}" if step.skip else "the run did not get so far", task),
    }


UNITS = {
    "parameters": "parameters",
    "macs": "MACs",
    "size_bytes": "bytes",
    "compressed_bytes": "bytes",
}


def unmeasured(reason: str, task: Task) -> dict[str, Any]:
    """Return the measurements of a stage that has none, with the reason."""
    units = {**{metric.name: metric.unit for metric in task.metrics}, **UNITS}
    return {name: missing(unit, reason).to_json() for name, unit in units.items()}


def quality(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a task from the facts of a model."""
    names = [metric.name for task in TASKS.values() for metric in task.metrics]
    return {name: facts[name] for name in names if name in facts}


def build(
    pipeline: Pipeline,
    rows: Mapping[str, dict[str, Any]],
    findings: Mapping[str, Any],
    outputs: Mapping[str, Path],
    error: dict[str, Any] | None,
    seconds: float,
) -> dict[str, Any]:
    """Build the run record.

    Args:
        pipeline: what was run.
        rows: the row of each step.
        findings: facts of the probes: `data`, `validation` by step, `test`, `latency`, `sensitivity`, and the `steps`
            that were compared.
        outputs: the files that were left for the user.
        error: what failed, if anything did.
        seconds: how long the run took.
    """
    models = _models(rows, findings)
    task = task_of(pipeline.data)
    comparison = _comparison(task, models, findings)
    budget = _budget(pipeline, models, comparison)
    answers = _answers(task, findings)
    status, error = _outcome(error, None if error else refusal(task, answers, findings, budget))
    return {
        "schema_version": SCHEMA_VERSION,
        "name": pipeline.head.name,
        "status": status,
        "error": error,
        "coralline": __version__,
        "seed": pipeline.head.seed,
        "seconds": round(seconds, 3),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "target": {"name": pipeline.target.name, "summary": pipeline.target.summary},
        "pipeline": dict(pipeline.settings),
        "data": _data(pipeline, findings),
        "stages": list(rows.values()),
        "models": models,
        "answers": {name: judgement.to_json() for name, judgement in answers.items()} or None,
        "comparison": comparison,
        "latency": _latency(findings),
        "placement": _placement(rows),
        "sensitivity": findings.get("sensitivity"),
        "budget": budget,
        "outputs": {
            name: {"sha256": file_digest(path), "size_bytes": path.stat().st_size} for name, path in outputs.items()
        },
        "environment": {**host(), "python": platform.python_version(), "tools": _tools(), "runtime": version()},
    }


def _answers(task: Task, findings: Mapping[str, Any]) -> dict[str, Judgement]:
    """Judge whether the answers of original and result depend on the input; empty if none was measured."""
    if "steps" not in findings:
        return {}
    return task.judge_answers(findings["test"], findings["data"]["classes"], "original", "result")


def _outcome(error: dict[str, Any] | None, refused: ResultError | None) -> tuple[str, dict[str, Any] | None]:
    """Return the status and the error of a run.

    Args:
        error: what ended the run early.
        refused: why the result of a complete run is not acceptable.
    """
    if error is not None:
        return ("interrupted" if error["exit_code"] == EXIT_INTERRUPTED else "failed"), error
    if refused is None:
        return "ok", None
    status = "degenerate" if isinstance(refused, DegenerateError) else "over budget"
    return status, {"stage": None, "message": str(refused), "exit_code": refused.exit_code}


def _tools() -> dict[str, str]:
    return {tool: importlib.metadata.version(tool) for tool in TOOLS}


def _models(rows: Mapping[str, dict[str, Any]], findings: Mapping[str, Any]) -> dict[str, Any]:
    """Test accuracy, size and latency of the original and the result."""
    if "steps" not in findings:
        return {"original": None, "result": None}
    models: dict[str, Any] = {}
    for name, step in findings["steps"].items():
        timed = {key: value for key, value in findings["latency"][name].items() if key != "times_ms"}
        measurements = {**rows[step]["measurements"], **quality(findings["test"][name]), **timed}
        models[name] = {"stage": step, "measurements": measurements}
    return models


def _comparison(task: Task, models: dict[str, Any], findings: Mapping[str, Any]) -> dict[str, Any] | None:
    if "steps" not in findings:
        return None
    comparison = task.compare(findings["test"], findings["data"]["classes"], "original", "result")
    for name, ratio in (("macs", "macs_ratio"), ("size_bytes", "size_ratio"), ("latency_ms", "latency_ratio")):
        comparison["measurements"][ratio] = _ratio(models, name).to_json()
    return comparison


def _ratio(models: dict[str, Any], name: str) -> Measurement:
    before, after = (models[side]["measurements"][name]["value"] for side in ("original", "result"))
    if before is None or after is None:
        return missing("fraction", f"{name} of both models was not measured")
    if not before:
        return missing("fraction", f"the original's {name} is {before}")
    return Measurement(after / before, "fraction", "measured", note="result / original, both measured in this run")


def _latency(findings: Mapping[str, Any]) -> dict[str, Any] | None:
    if "latency" not in findings:
        return None
    facts = findings["latency"]
    return {"conditions": facts["conditions"], **{name: facts[name]["times_ms"] for name in ("original", "result")}}


def _placement(rows: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the placement that the last compile stage reported."""
    found = [row["facts"] for row in rows.values() if "placement" in row["facts"]]
    if not found:
        return None
    facts = found[-1]
    return {
        **facts["placement"],
        "compiled": facts["compiled"],
        "reason": facts.get("reason", ""),
        "how_to_compile": facts.get("how_to_compile", ""),
        "expected_latency": facts.get("expected_latency", {}),
    }


def _budget(pipeline: Pipeline, models: dict[str, Any], comparison: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Each limit that was set, with what was measured."""
    limited = limits()
    units = {**dict.fromkeys(limited, "fraction"), "latency_ms": "ms", "size_bytes": "bytes"}
    rows = []
    for name, limit in pipeline.head.budget.model_dump(exclude_none=True).items():
        if comparison is None:
            measured = missing(units[name], "the run did not get so far").to_json()
        elif name in limited:
            measured = comparison["measurements"][name]
        else:
            measured = models["result"]["measurements"][name]
        value = measured["value"]
        holds = None if value is None else value <= limit
        rows.append({"name": name, "limit": limit, "unit": units[name], "measured": measured, "holds": holds})
    return rows


def _data(pipeline: Pipeline, findings: Mapping[str, Any]) -> dict[str, Any] | None:
    if "data" not in findings:
        return None
    source = pipeline.settings["data"]["source"]
    return {"source": source if isinstance(source, str) else next(iter(source)), **findings["data"]}


def quantized_layers(folder: Path) -> list[dict[str, Any]]:
    """Return the quantization error of each tensor, from the last `quantize` of a run.

    Raises:
        ModelError: the folder holds no report of a run that quantized.
    """
    path = folder / "report.json"
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))["stages"]
        found = [stage["facts"]["layers"] for stage in stages if "layers" in (stage.get("facts") or {})]
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path), todo="run the pipeline first") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError("is no report of ours", where=str(path), todo="run the pipeline again") from error
    if not found:
        raise ModelError(
            "has nothing about quantized layers",
            where=str(path),
            todo="run a pipeline with `quantize`; where the converter found the ranges, as the report says, layers are "
            "not told apart",
        )
    rows: list[dict[str, Any]] = found[-1]
    return rows
