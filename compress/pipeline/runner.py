"""The execution of a pipeline: the stages, then the probes, then the report.

A stage or probe runs only if the store has no artifact for its key. The report is written from the run record,
after a failed or interrupted run too.
"""

from __future__ import annotations

import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, cast

from compress.core import memory
from compress.core.artifact import (
    BUNDLE_FILE,
    MODEL_COMPILED,
    MODEL_KERAS,
    MODEL_TFLITE,
    PLAN_FILE,
    RUNNER_FILE,
    SEGMENTS,
    Artifact,
    Facts,
    Kind,
)
from compress.core.errors import (
    EXIT_INTERRUPTED,
    CorallineError,
    ModelError,
    PipelineError,
    StageError,
    StoreError,
    cause_of,
)
from compress.core.files import digest_of, explain, write_atomically
from compress.core.measurement import Measurements
from compress.core.profiling import Profile
from compress.core.progress import SILENT, Phase, Progress, RunStep
from compress.data.types import Data
from compress.learning.context import Context, Need
from compress.model.ir.tensorflow import keras
from compress.pipeline import device_results, record
from compress.pipeline.probes import DataSummary, Evaluation, InputAlternatives, Latency, Size
from compress.pipeline.probes.latency import predict, unmeasured
from compress.pipeline.probes.operator_graph import OperatorGraph
from compress.pipeline.probes.original_outputs import TaughtByOriginal
from compress.pipeline.record import Findings, RunResults
from compress.pipeline.schema import Pipeline, StageEntry
from compress.pipeline.stage import Probe, Stage, Work
from compress.pipeline.stages.batch_norm_statistics import BatchNormStatistics
from compress.pipeline.stages.package import Package
from compress.pipeline.stages.sensitivity import Sensitivity
from compress.pipeline.store import STORE, Store
from compress.report import examples, render
from compress.report.placement import NODE_DATA_FILE
from compress.results.encoding import decode
from compress.results.evaluation import EXAMPLES
from compress.results.pruning import SensitivityRecord
from compress.results.run import ErrorRecord, RunRecord, StageRecord, StageStatus
from compress.tasks import task_of
from compress.tasks.findings import GAIN

LOG = "run.log"
"""The log file in the folder of a run."""
MEMORY_SETTINGS = ("batch_size", "calibration_samples", "held_out_samples", "samples")
"""Settings of stages that lower the memory that they take."""
MEASURED = (Kind.KERAS, Kind.FLOAT_TFLITE, Kind.TFLITE, Kind.COMPILED)
"""The kinds that have a MODEL_TFLITE."""


NOTHING = Artifact("", Kind.UNTRAINED, Path(), {}, {}, 0.0)
"""The input of the first stage, and the original before it exists."""


class Monitor(Protocol):
    """The receiver of reports about a run."""

    def working(self, job: RunStep) -> AbstractContextManager[Progress]:
        """Show the progress of one piece of work, and send the output of libraries to the log."""

    def done(self, title: str, status: str, seconds: float | None, remark: str = "") -> None:
        """Report completed work: done, cached, skipped."""

    def log(self, text: str) -> None:
        """Write text to the log file only."""


@dataclass
class PipelineRun:
    """The state of a run.

    Attributes:
        pipeline: what is run.
        store: where artifacts are found and published.
        folder: where report and outputs go: `<out>/<name>`.
        monitor: the receiver of reports about the run.
        forced: ids of steps to re-run even if the store has their artifacts.
        stages: the record of each stage, by id.
        findings: the facts of the probes.
        artifacts: the artifact of each stage, by id.
        original: the id of the step whose model everything is compared with.
        tested: the findings on the test split, with the pictures of examples.
        drawn: the drawing of the result's operators.
        taught: the data set with the outputs of the original as targets, once they are needed.
    """

    pipeline: Pipeline
    store: Store
    folder: Path
    monitor: Monitor
    forced: frozenset[str] = frozenset()
    stages: dict[str, StageRecord] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    original: str | None = None
    tested: Artifact = NOTHING
    drawn: Artifact = NOTHING
    taught: TaughtByOriginal | None = None

    def find_original(self, entry: StageEntry | None = None) -> None:
        """Set the original before the first stage that changes the model: the last model that can be measured.

        A stage that trains an untrained model makes the first such model.
        """
        if self.original is None and (entry is None or entry.stage.name not in ("load", "train")):
            models = [name for name, artifact in self.artifacts.items() if artifact.kind in MEASURED]
            if entry is not None and not models and Kind.UNTRAINED in entry.stage.consumes:
                return
            self.original = models[-1] if models else next(iter(self.artifacts))

    @property
    def original_artifact(self) -> Artifact:
        """The original; NOTHING before it is known."""
        return self.artifacts.get(self.original or "", NOTHING)

    def stored(self, entry: StageEntry, current: Artifact | None) -> Artifact | None:
        """Return the artifact of a stage if it is in the store and not forced."""
        key = self.key(entry.stage, _inputs(current))
        artifact = None if entry.id in self.forced else self.store.look(key)
        if artifact is not None:
            self.artifacts[entry.id] = artifact
        return artifact

    def key(self, work: Work, inputs: Mapping[str, Artifact]) -> str:
        """Return the digest of everything that a result depends on."""
        pipeline = self.pipeline
        needs: dict[str, Any] = {
            "data": self._data_digest,
            "target": lambda: pipeline.target.digest,
            "seed": lambda: pipeline.head.seed,
            "name": lambda: pipeline.head.name,
            "original": lambda: self.original_artifact.digest,
        }
        return digest_of(
            {
                "work": [work.role, work.name, work.version],
                "settings": work.identity(),
                "environment": {**work.environment(), **work.target_environment(pipeline.target)},
                "given": {name: artifact.digest for name, artifact in inputs.items()},
                "needs": {need: needs[need]() for need in sorted(self._needs(work))},
            }
        )

    def _needs(self, work: Work) -> frozenset[Need]:
        """Return the dependencies of a result; a model whose outputs are described by their values needs the data."""
        described = task_of(self.pipeline.data).learns_from_original
        return work.needs | {"data"} if described else work.needs

    def _data_digest(self) -> str:
        """Return the digest of samples and targets."""
        digest = self.pipeline.data.digest
        if self._original_teaches:
            return digest_of({"data": digest, "targets": self.original_artifact.digest})
        return digest

    @property
    def _original_teaches(self) -> bool:
        """Whether the targets are the outputs of the original, and it is known."""
        return task_of(self.pipeline.data).learns_from_original and MODEL_TFLITE in self.original_artifact.files

    def data(self, progress: Progress) -> Data:
        """Return the data set, with the outputs of the original as targets if the task needs them."""
        if not self._original_teaches:
            return self.pipeline.data
        if self.taught is None:
            self.taught = TaughtByOriginal(self.pipeline.data, self.original_artifact, progress)
        self.taught.report_to(progress)
        return self.taught

    def accept_data(self) -> None:
        """Refuse all unreadable samples at once, before the first stage.

        Raises:
            DataError: the data is missing or invalid, or samples are unreadable.
        """
        data = self.pipeline.data
        with self._explained(""):
            data.work_in(self.store, SILENT)
            if not data.is_accepted():
                with self.monitor.working(RunStep("data")) as progress:
                    data.work_in(self.store, progress)
                    data.accept()

    def _find(self, title: str, key: str) -> Artifact | None:
        """Return the artifact from the store, unless the run is forced."""
        if title in self.forced:
            return None
        return self.store.find(key)

    def obtain(
        self, title: str, work: Stage | Probe, inputs: Mapping[str, Artifact], kind: Kind
    ) -> tuple[Artifact, StageStatus]:
        """Return the artifact of a stage or probe: "cached" from the store, or "done"."""
        with self._explained(""):  # errors of files and tools name their location
            key = self.key(work, inputs)
        job = self._job(title, work)
        with self._explained(title, job.memory_settings):
            stored = self._find(title, key)
            if stored and self.store.is_shared(key):
                self._report(title, work, "cached", stored.seconds)
                return stored, "cached"
            started = time.monotonic()
            with self.monitor.working(job) as progress:
                artifact = stored
                status: StageStatus = "cached"
                if artifact is None:
                    artifact, status = self._fetched_or_made(title, work, inputs, kind, key, progress)
                self.store.share(key, artifact, progress, replace=status == "done")
        self._report(title, work, status, stored.seconds if stored else time.monotonic() - started)
        return artifact, status

    def _fetched_or_made(
        self, title: str, work: Stage | Probe, inputs: Mapping[str, Artifact], kind: Kind, key: str, progress: Progress
    ) -> tuple[Artifact, StageStatus]:
        """Return an artifact that the store does not have: of another run or machine, otherwise a new one."""
        waiting = f"{title}: another run is making this; waiting for it"
        with self.store.lock(key, lambda: progress.note(waiting)):
            artifact = self._find(title, key)  # another run may have stored it
            if artifact is None and title not in self.forced:
                artifact = self.store.fetch(key, progress)
            if artifact is not None:
                return artifact, "cached"
            if title in self.forced:
                self.store.renew(key)
            return self._make(work, inputs, kind, key, self._context(title, key, progress)), "done"

    def _job(self, title: str, work: Work) -> RunStep:
        """Return what is shown of a stage or probe."""
        stages = [entry.id for entry in self.pipeline.steps if not entry.skip]
        number = stages.index(title) + 1 if isinstance(work, Stage) and title in stages else 0
        settings = tuple(name for name in MEMORY_SETTINGS if name in type(work).model_fields)
        return RunStep(title, number, len(stages), settings)

    @contextmanager
    def _explained(self, title: str, settings: Sequence[str] = ()) -> Iterator[None]:
        """Convert every exception of a library to one of ours, with the title of the work. This is the only such
        place. `settings` are those that lower the memory of the work."""
        try:
            yield
        except CorallineError as error:
            error.where = ": ".join(part for part in (title, self._user_file(error.where)) if part)
            raise
        except OSError as error:
            if memory.is_exhausted(error):
                raise _memory_error(title, settings) from error
            raise explain(error, title or "preparing the run", self.store.folder) from error
        except Exception as error:
            if _is_interrupt(error):
                raise KeyboardInterrupt from error
            self.monitor.log(traceback.format_exc())
            if memory.is_exhausted(error):
                raise _memory_error(title, settings) from error
            hint = f"the traceback is in {self.folder / LOG}"
            raise StageError(f"{type(error).__name__}: {cause_of(error)}", where=title, hint=hint) from error

    def _user_file(self, where: str) -> str:
        """Return the location of an error with the user's file, or the stage, instead of a path in the store."""
        for name, artifact in self.artifacts.items():
            source = self.pipeline.model.file if name == "model" else None
            for file in artifact.files:
                path = str(artifact.file(file))
                if where == path or where.startswith(f"{path}:"):
                    return (source or f"{file} of stage {name}") + where.removeprefix(path)
        return where

    def _report(self, title: str, work: Work, status: str, seconds: float) -> None:
        """Report every stage; probes are reported only if they took at least a second."""
        if isinstance(work, Stage) or (seconds >= 1 and status == "done"):
            self.monitor.done(title, status, seconds)

    def _make(
        self, work: Stage | Probe, inputs: Mapping[str, Artifact], kind: Kind, key: str, context: Context
    ) -> Artifact:
        """Run the stage or probe in a scratch folder, and publish the files."""
        started = time.monotonic()
        with self.store.scratch() as folder:
            facts = self._facts(work, inputs, replace(context, folder=folder))
            return self.store.publish(key, kind, folder, facts, time.monotonic() - started)

    def _facts(self, work: Stage | Probe, inputs: Mapping[str, Artifact], context: Context) -> Facts:
        """Run the stage or probe in the folder of the context, and return its facts."""
        subject = inputs.get("given") or next(iter(inputs.values()), NOTHING)
        specification = subject.facts.get("specification")
        context = replace(context, specification=specification)
        if context.profile is not None:
            context = replace(context, progress=context.profile.watching(context.progress))
        _start_tensorflow(work, context.progress)
        context = context.only(work.needs)
        if isinstance(work, Probe):
            return work.run(inputs, context)
        facts = work.run(subject, context)
        if specification:  # it belongs to the model
            facts = {"specification": specification, **facts}
        if context.profile is not None:
            facts = {**facts, "profile": context.profile.to_json()}
        return facts

    def _context(self, title: str, key: str, progress: Progress) -> Context:
        """Return the context of a stage or probe; its folder is set later."""
        pipeline = self.pipeline
        pipeline.data.work_in(self.store, progress)
        return Context(
            pipeline.head.name,
            Path(),
            self.data(progress),
            self.original_artifact,
            pipeline.target,
            pipeline.head.seed,
            pipeline.model.trust,
            progress,
            self.store.unfinished(key),
            self.folder / "tensorboard" / title,
            execution=pipeline.head.execution,
            profile=Profile(self.folder / "profile" / title) if pipeline.head.execution.profile else None,
        )


def _start_tensorflow(work: Work, progress: Progress) -> None:
    """Import TensorFlow for work that needs it, as a phase of its own: it takes some seconds."""
    if work.imports_tensorflow and "tensorflow" not in sys.modules:
        with progress.phase(Phase("starting TensorFlow")):
            keras()


def _memory_error(title: str, settings: Sequence[str]) -> StageError:
    """Return the error for work that ran out of memory."""
    error = memory.exhausted("there is not enough memory", settings)
    error.where = title
    return error


def _is_interrupt(error: BaseException) -> bool:
    """Whether Ctrl-C is the cause: imports of C extensions raise another error then."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


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
    session = PipelineRun(pipeline, opened, out / pipeline.head.name, monitor, forced)
    started = time.monotonic()
    try:
        run_stages(session)
        _probes(session)
    except (CorallineError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and not reports_interruption:
            raise
        try:
            _publish(session, _failure(session, error), time.monotonic() - started)
        except StoreError as second:  # a full disk, most likely: what went wrong first matters more
            monitor.log(str(second))
        raise
    return _publish(session, None, time.monotonic() - started)


@dataclass
class WorkerRun(PipelineRun):
    """The run of a worker that is not the chief: it takes part in every training, and uses the chief's artifacts."""

    def _fetched_or_made(
        self, title: str, work: Stage | Probe, inputs: Mapping[str, Artifact], kind: Kind, key: str, progress: Progress
    ) -> tuple[Artifact, StageStatus]:
        """Return the artifact of the chief, which holds the lock of the key while a stage is made.

        A training needs all workers, so that a worker takes part without the lock. It starts from a copy of the state
        that an interrupted run left, and removes the copy and its own result.
        """
        if isinstance(work, Stage) and work.trains():
            with self.store.scratch() as folder:
                unfinished = folder.parent / "unfinished"
                shutil.copytree(self.store.unfinished(key), unfinished)
                context = replace(self._context(title, key, progress), folder=folder, unfinished=unfinished)
                self._facts(work, inputs, replace(context, logs=None, profile=None))
            self.forced -= {title}
        return super()._fetched_or_made(title, work, inputs, kind, key, progress)


def take_part(pipeline: Pipeline, out: Path, monitor: Monitor, forced: frozenset[str], store: Store) -> None:
    """Run the stages of a pipeline on a worker that is not the chief; the arguments are those of `run`.

    Raises:
        CorallineError: something failed.
    """
    store.prepare()
    run_stages(WorkerRun(pipeline, store, out / pipeline.head.name, monitor, forced))


def _failure(session: PipelineRun, error: CorallineError | KeyboardInterrupt) -> ErrorRecord:
    """Return the record of the error that ended a run."""
    stage = next((stage.id for stage in session.stages.values() if stage.status == "failed"), None)
    if isinstance(error, KeyboardInterrupt):
        return ErrorRecord(stage, str(error) or "interrupted with Ctrl-C", EXIT_INTERRUPTED)
    return ErrorRecord(stage, str(error), error.exit_code)


def run_stages(session: PipelineRun, after: Callable[[StageEntry, Artifact], None] | None = None) -> None:
    """Run every stage in order; fill the records of stages, the artifacts and the original.

    Args:
        session: the run.
        after: is called after each stage with its artifact; an exception from it ends the run.
    """
    entries = session.pipeline.steps
    session.stages |= {entry.id: record.initial(entry, task_of(session.pipeline.data)) for entry in entries}
    session.accept_data()
    current: Artifact | None = None
    for entry in entries:
        stage = session.stages[entry.id]
        if entry.skip:
            session.stages[entry.id] = replace(stage, status="skipped", reason=entry.skip)
            session.monitor.done(entry.id, "skipped", None, entry.skip)
            continue
        session.find_original(entry)
        session.stages[entry.id] = replace(stage, status="failed")
        current, status = session.obtain(entry.id, entry.stage, _inputs(current), entry.stage.produces)
        session.artifacts[entry.id] = current
        session.stages[entry.id] = replace(
            stage,
            status=status,
            seconds=current.seconds,
            kind=current.kind,
            facts=current.facts,
        )
        if after is not None:
            after(entry, current)
    session.find_original()


def _inputs(artifact: Artifact | None) -> dict[str, Artifact]:
    """Return the input of a stage, by its name in the key."""
    return {} if artifact is None else {"given": artifact}


def _probes(session: PipelineRun) -> None:
    """Measure size and validation accuracy of every model, and test accuracy and latency of original and result."""
    findings = session.findings
    findings.data = session.obtain("data", DataSummary(), {}, Kind.FINDINGS)[0].facts
    for name, artifact in session.artifacts.items():
        session.stages[name] = replace(session.stages[name], measurements=measure(session, name, artifact))
    _sensitivity(session)
    models = {name: artifact for name, artifact in session.artifacts.items() if artifact.kind in MEASURED}
    if session.original not in models:
        return
    result = list(models)[-1]
    pair = {"original": models[session.original], "result": models[result]}
    packages = [entry.stage for entry in session.pipeline.steps if isinstance(entry.stage, Package)]
    labels = packages[-1].labels if packages else ()
    session.tested = session.obtain("accuracy on test", Evaluation(split="test", labels=labels), pair, Kind.FINDINGS)[0]
    findings.test = session.tested.facts
    _examine_original(session)
    findings.latency = _latency(session, pair)
    if session.pipeline.target.cost.hosts:
        findings.prediction = predict(models[result], session.pipeline.target, session.pipeline.head.measure.host)
    session.drawn = session.obtain("operator graph", OperatorGraph(), {"model": models[result]}, Kind.FINDINGS)[0]
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
    findings.inputs = session.obtain("other preprocessing", InputAlternatives(), subject, Kind.FINDINGS)[0].facts
    if session.original_artifact.kind is Kind.KERAS:
        probe = BatchNormStatistics()
        findings.batch_norms = session.obtain("batch norm statistics", probe, subject, Kind.FINDINGS)[0].facts


def measure(session: PipelineRun, name: str, artifact: Artifact) -> Measurements:
    """Return the size and the validation accuracy of the model of a stage."""
    if artifact.kind not in MEASURED:
        return record.unmeasured(f"{artifact.kind}s are not measured", task_of(session.pipeline.data))
    subject = {"model": artifact}
    size, _ = session.obtain(f"size of {name}", Size(), subject, Kind.FINDINGS)
    quality, _ = session.obtain(f"accuracy of {name}", Evaluation(split="validation"), subject, Kind.FINDINGS)
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
        return session.obtain("latency", probe, pair, Kind.FINDINGS)[0].facts
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
        facts = session.obtain(
            "sensitivity", Sensitivity(samples=settings.samples), {"model": models[-1]}, Kind.FINDINGS
        )[0].facts
        session.findings.sensitivity = decode(SensitivityRecord, facts)
    except (StageError, ModelError) as error:  # the result of the run does not depend on the sensitivity
        session.findings.sensitivity = SensitivityRecord(missing=str(error))


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
        pictures = {name: session.tested.file(name).read_bytes() for name in examples.files(run_record)}
        contents |= render(run_record, pictures)
        _remove_examples(session.folder / EXAMPLES, keep=bool(pictures))
        contents |= {f"{EXAMPLES}/{name}": content for name, content in pictures.items()}
        with session.store.scratch() as scratch:
            for name, content in contents.items():
                mode = 0o755 if name == RUNNER_FILE else 0o644
                write_atomically(session.folder / name, content, scratch, mode)
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
    return outputs | {name: session.drawn.file(name) for name in session.drawn.files}


def preview(
    pipeline: Pipeline, out: Path, forced: frozenset[str] = frozenset(), store: Store | None = None
) -> list[tuple[StageEntry, str]]:
    """Return what a run would do with each step: "cached", "skipped" or "to do"."""
    session = PipelineRun(pipeline, store or Store(out / STORE), out / pipeline.head.name, cast(Monitor, None), forced)
    current: Artifact | None = None
    is_known = True
    result = []
    for entry in pipeline.steps:
        if entry.skip:
            result.append((entry, "skipped"))
            continue
        if is_known:
            session.find_original(entry)
            current = session.stored(entry, current)
            is_known = current is not None
        result.append((entry, "cached" if is_known else "to do"))
    return result
