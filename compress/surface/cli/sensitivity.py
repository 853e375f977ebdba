"""`python -m compress sensitivity`: the effect of removing channels from the model of a pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.core.errors import PipelineError, StageError
from compress.pipeline import runner
from compress.pipeline.execution import LOG
from compress.pipeline.schema import SensitivitySettings, load
from compress.pipeline.shared_store import store_in
from compress.surface.cli.console import Console
from compress.tasks import task_of

SCHEMA_VERSION = 1
SUFFIX = "-sensitivity"
MOST = 1_000_000


def measure(path: Path, samples: int, out: Path, store: str | None = None) -> tuple[dict[str, Any], Path]:
    """Run the steps before `prune`, and measure the resulting model.

    Args:
        path: a pipeline file.
        samples: of the training split, that it is measured with.
        out: the folder of runs; the report is a separate run, named after the pipeline.
        store: the location of a shared store, if there is one.

    Returns:
        The curves as plain values, schema 1, and the report's path.

    Raises:
        CorallineError: the file is wrong, a step fails, or there is nothing to remove.
    """
    if not 1 <= samples <= MOST:
        raise PipelineError(f"--samples {samples} is out of range", allowed=f"1 to {MOST:,}")
    pipeline = load(path)
    task = task_of(pipeline.data)
    refusal = task.why_not(["measured sensitivity"])
    if refusal is not None:
        what = f"{refusal.what} (the data is for {task.name})"
        raise PipelineError(what, where=str(path), allowed="data with one class for each sample")
    if not pipeline.unpruned:
        raise PipelineError(
            "the model has no Keras layers, so no channel can be removed",
            where=str(path),
            allowed="a Keras model, or a file that can be rebuilt as one",
        )
    measured = pipeline.head.measure.model_copy(update={"sensitivity": SensitivitySettings(samples=samples)})
    name = pipeline.head.name[: 64 - len(SUFFIX)] + SUFFIX
    head = pipeline.head.model_copy(update={"name": name, "measure": measured})
    shared = store_in(out, store)
    with Console(out / name / LOG) as console:
        console.line(f"coralline: sensitivity of {path} -> {out / name}")
        record = runner.run(replace(pipeline, head=head, steps=pipeline.unpruned), out, console, store=shared)
    sensitivity = record.to_json()["sensitivity"]
    if sensitivity["missing"]:
        raise StageError(sensitivity["missing"])
    return {"schema_version": SCHEMA_VERSION, **sensitivity}, out / name / "report.html"


def describe(report_json: dict[str, Any], report: Path) -> str:
    """Return a line for each set of channels, the most sensitive first."""
    lines = [f"accuracy on {report_json['samples']} training samples by the channels that are kept; nothing is trained"]
    for curve in sorted(report_json["curves"], key=lambda curve: -max(curve["divergence"])):
        more = f" (+{len(curve['layers']) - 1})" if len(curve["layers"]) > 1 else ""
        points = "  ".join(f"{kept}: {a:.3f}" for kept, a in zip(curve["kept"], curve["accuracy"], strict=True))
        lines.append(f"  {curve['layers'][0] + more:<32} {points}")
    return "\n".join([*lines, f"report: {report}"])
