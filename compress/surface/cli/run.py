"""`run`: run a pipeline file."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.errors import PipelineError
from compress.core.measurement import LATENCIES, SIZES, Measurement
from compress.surface.cli.output import note, show, write, write_file
from compress.surface.cli.parser import PROGRAM, add_command

if TYPE_CHECKING:
    from compress.pipeline.schema import Pipeline
    from compress.results.run import RunRecord
    from compress.surface.cli.parser import Subparsers

USAGE = "[--dry-run] [--out DIR] [--store URL] [--force STAGE] [--profile] [--json]"


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    usage = f"{PROGRAM} [run] PIPELINE {USAGE}"
    parser = add_command(subparsers, "run", "Run a pipeline file; the word `run` may be omitted", run, usage=usage)
    parser.add_argument("pipeline", type=Path, help="the pipeline file")
    parser.add_argument("--dry-run", action="store_true", help="check the file and list what would be done")
    parser.add_out()
    parser.add_store()
    parser.add_argument(
        "--force", action="append", default=[], metavar="STAGE", help="re-run the stage with this id; repeatable"
    )
    parser.add_argument(
        "--profile", action="store_true", help="measure where the time goes, with a trace for TensorBoard's profiler"
    )
    parser.add_json()


def run(options: argparse.Namespace) -> int:
    """Run the pipeline, or list its steps, and print the results.

    Raises:
        CorallineError: the file is wrong, a stage failed, or the result exceeds the budget.
    """
    from compress.pipeline.schema import load

    pipeline = load(options.pipeline)
    if pipeline.head.recipe is not None:
        return _with_recipe(pipeline, options)
    if options.profile:
        pipeline = pipeline.profiled()
    known = [step.id for step in pipeline.steps]
    for name in options.force:
        if name not in known:
            raise PipelineError(f"--force: unknown stage {name!r}", allowed=", ".join(known))
    if options.dry_run:
        return _dry_run(pipeline, options)
    return _run(pipeline, options)


def _run(pipeline: Pipeline, options: argparse.Namespace) -> int:
    """Run a pipeline and print the results."""
    from compress.learning.training import strategies
    from compress.pipeline import runner
    from compress.pipeline.acceptance import result_error
    from compress.pipeline.execution import LOG, take_part
    from compress.pipeline.shared_store import store_in
    from compress.surface.cli.console import Console

    folder = options.out / pipeline.head.name
    store = store_in(options.out, options.store)
    execution = pipeline.head.execution
    worker = strategies.worker(execution)
    log = f"worker-{worker}.log" if worker else LOG
    forced = frozenset(options.force)
    with Console(folder / log) as console:
        console.line(f"coralline: {options.pipeline} -> {folder}")
        if worker is not None:  # TensorFlow's server has to start before this process uses TensorFlow
            console.line("coralline: waiting for the other workers")
            strategies.strategy(execution.strategy)
        elif os.environ.get(strategies.VARIABLE):
            console.line("coralline: TF_CONFIG is set, but is used with `execution: {strategy: multi_worker}` only")
        if worker:
            take_part(pipeline, options.out, console, forced, store)
            note(f"coralline: worker {worker} is done; the chief writes the results")
            return 0
        record = runner.run(pipeline, options.out, console, forced, store, is_chief=worker == 0)
    show(record.to_json(), _results(record, folder), as_json=options.json)
    if (error := result_error(record)) is not None:
        raise error
    return 0


def _with_recipe(pipeline: Pipeline, options: argparse.Namespace) -> int:
    """Find the cheapest recipe that meets the budget, and run it."""
    from compress.core.errors import BudgetError
    from compress.pipeline import schema, yaml_file
    from compress.pipeline.search import recipes
    from compress.pipeline.shared_store import store_in
    from compress.surface.cli.search import worker_process

    document = yaml_file.read(options.pipeline)
    if options.force or options.profile:
        raise PipelineError("--force and --profile cannot be used with `recipe: auto`")
    if options.dry_run:
        recipes.budget_of(document, pipeline)
        names = [recipe.name for recipe in recipes.RECIPES]
        show({"schema_version": 1, "recipes": names}, "\n".join(names), as_json=options.json)
        return 0
    store_in(options.out, options.store)  # an error of the shared store comes before the first recipe
    worker = worker_process(options.store)
    try:
        choice = recipes.choose(document, pipeline, options.out, worker, note)
    finally:
        worker.close()
    folder = options.out / pipeline.head.name
    write_file(folder / "recipes.json", json.dumps(choice.to_json(), indent=1) + "\n", "the recipes cannot be written")
    if not options.json:
        for result in choice.results:
            write(result.describe())
        write(f"{'cheapest within the budget' if choice.within_budget else 'nearest to the budget'}: {choice.chosen}")
    code = _run(schema.check(choice.document), options)
    if not choice.within_budget:
        raise BudgetError(f"no recipe meets the budget; the nearest: {choice.chosen}", where="recipe")
    return code


def _dry_run(pipeline: Pipeline, options: argparse.Namespace) -> int:
    from compress.pipeline.resolution import preview
    from compress.pipeline.shared_store import store_in

    store = store_in(options.out, options.store)
    steps = [
        {"id": step.id, "stage": step.stage.name, "status": status, "reason": step.skip}
        for step, status in preview(pipeline, options.out, frozenset(options.force), store)
    ]
    text = "\n".join(f"{row['id']:<20} {row['status']:<8} {row['reason'] or ''}".rstrip() for row in steps)
    show({"schema_version": 1, "name": pipeline.head.name, "steps": steps}, text, as_json=options.json)
    return 0


def _results(record: RunRecord, folder: Path) -> str:
    """Return the results of a run as text."""
    from compress.report import verdict

    lines = [] if record.latency is None else [verdict.latency_text(record.latency)]
    lines += _comparison(record)
    if record.verdict is not None:
        lines += [f"verdict: {record.verdict.level}", *(f"- {reason}" for reason in record.verdict.reasons)]
    if record.placement is not None:
        lines += ["compiled for the Edge TPU"] * record.placement.compiled
        lines.append(record.placement.summary)
    lines += [f"next, in {folder}: {command}" for command in verdict.commands(record)]
    return "\n".join([*lines, f"report: {folder / 'report.html'}"])


def _comparison(record: RunRecord) -> list[str]:
    """Return the measurements of both models as lines of a table, if there are two models."""
    if record.models is None:
        return []
    lines = [f"{'':<16} {'original':>12} {'result':>12}"]
    models = (record.models.original, record.models.result)
    for metric in (*record.metrics, *SIZES, LATENCIES[0]):
        before, after = (_formatted(model.measurements[metric.name]) for model in models)
        is_time_here = metric.name == "latency_ms" and record.latency is not None and record.latency.parts
        lines.append(f"{'cpu_ms (here)' if is_time_here else metric.name:<16} {before:>12} {after:>12}")
    return lines


def _formatted(measurement: Measurement) -> str:
    value = measurement.value
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
