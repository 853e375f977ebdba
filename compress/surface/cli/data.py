"""Commands that compare runs, and that look at the data of a pipeline: compare, data, sensitivity."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.core.errors import PipelineError
from compress.core.progress import SilentProgress
from compress.surface.cli.output import note, show
from compress.surface.cli.parser import add_command

if TYPE_CHECKING:
    from compress.surface.cli.parser import Subparsers

MOST_RUNS = 6
"""Chosen: with more runs the columns of the table do not fit a terminal."""
NOTE_INTERVAL_S = 5
"""Chosen: seconds between two notes on the progress of `data`."""
SENSITIVITY = "-sensitivity"
"""The ending of the name of the run that `sensitivity` writes."""
MOST_SAMPLES = 1_000_000
"""Chosen, to refuse typing errors."""


def add_parsers(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_compare(subparsers)
    _add_data(subparsers)
    _add_sensitivity(subparsers)


def _add_compare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "compare", "Compare two or more runs with the first one", compare)
    help_text = "the folder of a run (runs/NAME), or a report.json"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=help_text)
    parser.add_json()


def compare(options: argparse.Namespace) -> int:
    """`python -m compress compare`."""
    from compress.report import run_comparison
    from compress.results.run import read_record

    if not 2 <= len(options.runs) <= MOST_RUNS:
        raise PipelineError(f"compare: {len(options.runs)} runs", allowed=f"2 to {MOST_RUNS} runs")
    records = [read_record(path) for path in options.runs]
    comparison = run_comparison.compare(records, [str(path) for path in options.runs])
    show(comparison.to_json(), comparison.text(), as_json=options.json)
    return 0


def _add_data(subparsers: Subparsers) -> None:
    summary = "Summarize a pipeline's data: counts, shapes, unreadable files"
    parser = add_command(subparsers, "data", summary, data)
    parser.add_argument("pipeline", type=Path, help="a pipeline file; its data set is read, no stage is run")
    parser.add_json()
    manifest = "write the checksums of all files, for `manifest: FILE`"
    parser.add_argument("--write-manifest", type=Path, metavar="FILE", help=manifest)


class _NotedProgress(SilentProgress):
    """Progress as a line on stderr every few seconds."""

    def __init__(self) -> None:
        self.last_note = time.monotonic()

    def update(self, done: int, total: int, **metrics: float) -> None:
        del metrics
        if time.monotonic() - self.last_note >= NOTE_INTERVAL_S:
            self.last_note = time.monotonic()
            self.note(f"{done:,} of {total:,} samples are read")

    def note(self, text: str) -> None:
        note(text)


def data(options: argparse.Namespace) -> int:
    """`python -m compress data`."""
    from compress.core.errors import DataError
    from compress.data import manifest
    from compress.data.summary import describe, examine
    from compress.pipeline.schema import load

    dataset = load(options.pipeline).data
    lines = []
    if options.write_manifest:
        count = manifest.write_for(dataset.source, options.write_manifest)
        lines.append(f"{options.write_manifest}: checksums of {count:,} files")
    summary, refused = examine(dataset, _NotedProgress())
    show(summary, "\n".join([*lines, describe(summary)]), as_json=options.json)
    return DataError.exit_code if refused else 0


def _add_sensitivity(subparsers: Subparsers) -> None:
    summary = "Measure what removing channels costs, layer by layer"
    parser = add_command(subparsers, "sensitivity", summary, sensitivity)
    parser.add_argument("pipeline", type=Path, help="a pipeline file; its stages before `prune` are run")
    samples = "number of training samples (default: 512)"
    parser.add_argument("--samples", type=int, default=512, metavar="N", help=samples)
    parser.add_out()
    parser.add_store()
    parser.add_json()


def sensitivity(options: argparse.Namespace) -> int:
    """`python -m compress sensitivity`."""
    curves, report = _measure(options.pipeline, options.samples, options.out, options.store)
    show(curves, _described(curves, report), as_json=options.json)
    return 0


def _measure(path: Path, samples: int, out: Path, store: str | None) -> tuple[dict[str, Any], Path]:
    """Run the steps before `prune`, and measure the resulting model with samples of the training split.

    The report is a separate run, which is named after the pipeline.

    Returns:
        The curves as plain values, schema 1, and the path of the report.

    Raises:
        CorallineError: the file is wrong, a step fails, or there is nothing to remove.
    """
    from compress.core.errors import StageError
    from compress.pipeline import runner
    from compress.pipeline.execution import LOG
    from compress.pipeline.schema import SensitivitySettings, load
    from compress.pipeline.shared_store import store_in
    from compress.surface.cli.console import Console
    from compress.tasks import task_of

    if not 1 <= samples <= MOST_SAMPLES:
        raise PipelineError(f"--samples {samples} is out of range", allowed=f"1 to {MOST_SAMPLES:,}")
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
    name = pipeline.head.name[: 64 - len(SENSITIVITY)] + SENSITIVITY
    head = pipeline.head.model_copy(update={"name": name, "measure": measured})
    shared = store_in(out, store)
    with Console(out / name / LOG) as console:
        console.line(f"coralline: sensitivity of {path} -> {out / name}")
        record = runner.run(replace(pipeline, head=head, steps=pipeline.unpruned), out, console, store=shared)
    sensitivity = record.to_json()["sensitivity"]
    if sensitivity["missing"]:
        raise StageError(sensitivity["missing"])
    return {"schema_version": 1, **sensitivity}, out / name / "report.html"


def _described(curves: dict[str, Any], report: Path) -> str:
    """Return a line for each set of channels, the most sensitive first."""
    lines = [f"accuracy on {curves['samples']} training samples by the channels that are kept; nothing is trained"]
    for curve in sorted(curves["curves"], key=lambda curve: -max(curve["divergence"])):
        more = f" (+{len(curve['layers']) - 1})" if len(curve["layers"]) > 1 else ""
        points = "  ".join(f"{kept}: {a:.3f}" for kept, a in zip(curve["kept"], curve["accuracy"], strict=True))
        lines.append(f"  {curve['layers'][0] + more:<32} {points}")
    return "\n".join([*lines, f"report: {report}"])
