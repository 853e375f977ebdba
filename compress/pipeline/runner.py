"""A run: the stages, then the findings, then the report.

The report is written from the run record, after a failed or interrupted run too.
"""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from pathlib import Path

from compress.core.artifact import (
    BUNDLE_FILE,
    MODEL_COMPILED,
    MODEL_KERAS,
    MODEL_TFLITE,
    PLAN_FILE,
    RUNNER_FILE,
    SEGMENTS,
)
from compress.core.errors import (
    EXIT_INTERRUPTED,
    CorallineError,
    PipelineError,
    StoreError,
)
from compress.core.files import explain
from compress.pipeline import device_results, findings, record
from compress.pipeline.execution import Monitor, PipelineRun, run_stages
from compress.pipeline.record import RunResults
from compress.pipeline.schema import Pipeline
from compress.pipeline.store import STORE, Store
from compress.report import examples, render
from compress.report.placement import NODE_DATA_FILE
from compress.results.evaluation import EXAMPLES
from compress.results.run import ErrorRecord, RunRecord
from compress.tasks import task_of
from deploy.contract.durable_files import write_atomically


def run(
    pipeline: Pipeline,
    out: Path,
    monitor: Monitor,
    forced: frozenset[str] = frozenset(),
    store: Store | None = None,
    *,
    reports_interruption: bool = True,
    is_chief: bool = False,
) -> RunRecord:
    """Run a pipeline, and write report and outputs to `out/<name>`.

    Args:
        pipeline: what is run.
        out: the folder for the results.
        monitor: the receiver of reports about the run.
        forced: ids of steps to re-run.
        store: where artifacts are found and published; by default a folder in `out`.
        reports_interruption: whether Ctrl-C writes a report, and removes the outputs of earlier runs; otherwise the
            folder stays as it is.
        is_chief: whether this process has met the other workers of `strategy: multi_worker`.

    Returns:
        The record; its `status` is "ok", "over budget" or "not usable".

    Raises:
        CorallineError: something failed; the report is written all the same.
        KeyboardInterrupt: the same for Ctrl-C.
    """
    if pipeline.head.execution.strategy == "multi_worker" and not is_chief:
        raise PipelineError(
            "strategy: multi_worker is for `python -m compress run` alone",
            where="execution",
            allowed="one, mirrored, tpu",
        )
    opened = store or Store(out / STORE)
    opened.prepare()
    session = PipelineRun(pipeline, opened, forced, folder=out / pipeline.head.name, monitor=monitor)
    started = time.monotonic()
    try:
        run_stages(session)
        findings.collect(session)
    except (CorallineError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and not reports_interruption:
            raise
        try:
            _publish(session, _failure(session, error), time.monotonic() - started)
        except StoreError as second:  # a full disk, most likely: what went wrong first matters more
            monitor.log(str(second))
        raise
    return _publish(session, None, time.monotonic() - started)


def _failure(session: PipelineRun, error: CorallineError | KeyboardInterrupt) -> ErrorRecord:
    """Return the record of the error that ended a run."""
    stage = next((stage.id for stage in session.stages.values() if stage.status == "failed"), None)
    if isinstance(error, KeyboardInterrupt):
        return ErrorRecord(stage, str(error) or "interrupted with Ctrl-C", EXIT_INTERRUPTED)
    return ErrorRecord(stage, str(error), error.exit_code)


def _publish(session: PipelineRun, error: ErrorRecord | None, seconds: float) -> RunRecord:
    """Write the outputs and the report, and remove obsolete outputs of earlier runs."""
    outputs = _outputs(session) if error is None else {}
    bundle = f"{session.pipeline.head.name}.coralline"
    try:
        session.folder.mkdir(parents=True, exist_ok=True)
        old = {MODEL_KERAS, MODEL_TFLITE, MODEL_COMPILED, PLAN_FILE, RUNNER_FILE, NODE_DATA_FILE, bundle}
        for name in (old | {path.name for path in session.folder.glob(SEGMENTS)}) - outputs.keys():
            (session.folder / name).unlink(missing_ok=True)
        contents = {name: path.read_bytes() for name, path in outputs.items()}
        metrics = task_of(session.pipeline.data).metrics
        devices = device_results.measured(session.folder, contents[bundle], metrics) if bundle in contents else ()
        results = RunResults(outputs, devices)
        run_record = record.build(session.pipeline, session.stages, session.findings, results, error, seconds)
        pictures = {name: session.findings.tested.file(name).read_bytes() for name in examples.files(run_record)}
        contents |= render(run_record, pictures)
        _remove_examples(session.folder / EXAMPLES, keep=bool(pictures))
        contents |= {f"{EXAMPLES}/{name}": content for name, content in pictures.items()}
        with session.store.scratch() as scratch:
            for name, content in contents.items():
                mode = 0o755 if name == RUNNER_FILE else 0o644
                write_atomically(session.folder / name, content, scratch=scratch, mode=mode)
    except OSError as problem:
        raise explain(problem, "the report cannot be written") from problem
    return run_record


def _remove_examples(folder: Path, *, keep: bool) -> None:
    """Remove the pictures of an earlier run; keep the folder, or create it, for those of this run."""
    for path in folder.glob("[0-9]*-*.jpg"):
        path.unlink(missing_ok=True)
    if keep:
        folder.mkdir(exist_ok=True)
    elif folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _outputs(session: PipelineRun) -> dict[str, Path]:
    """Return the output files for the user, each from the latest artifact that has it."""
    names = {
        MODEL_KERAS: MODEL_KERAS,
        MODEL_TFLITE: MODEL_TFLITE,
        MODEL_COMPILED: MODEL_COMPILED,
        PLAN_FILE: PLAN_FILE,
        BUNDLE_FILE: f"{session.pipeline.head.name}.coralline",
        RUNNER_FILE: RUNNER_FILE,
    }
    outputs: dict[str, Path] = {}
    for artifact in session.artifacts.values():
        known = [name for name in artifact.files if name in names or fnmatchcase(name, SEGMENTS)]
        outputs.update({names.get(name, name): artifact.file(name) for name in known})
    return outputs | {name: session.findings.drawn.file(name) for name in session.findings.drawn.files}
