"""The execution of stages and probes whose results the store does not have, and the publishing of these results.

Every exception of a library becomes one of ours here, with the title of the stage or probe.
"""

from __future__ import annotations

import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from compress.core import memory
from compress.core.artifact import Artifact, Facts, Kind
from compress.core.errors import CorallineError, StageError, cause_of
from compress.core.files import explain
from compress.core.profiling import Profile
from compress.core.progress import SILENT, Phase, Progress, RunStep
from compress.learning.context import Context
from compress.model.ir.tensorflow import keras
from compress.pipeline import record
from compress.pipeline.record import Findings
from compress.pipeline.resolution import Resolution, inputs_of
from compress.pipeline.schema import Pipeline, StageEntry
from compress.pipeline.stage import NOTHING, Probe, Stage, Work
from compress.pipeline.store import Store
from compress.results.run import StageRecord, StageStatus
from compress.tasks import task_of

LOG = "run.log"
"""The log file in the folder of a run."""
MEMORY_SETTINGS = ("batch_size", "calibration_samples", "held_out_samples", "samples")
"""Settings of stages that lower the memory that they take."""


class Monitor(Protocol):
    """The receiver of reports about a run."""

    def working(self, job: RunStep) -> AbstractContextManager[Progress]:
        """Show the progress of one piece of work, and send the output of libraries to the log."""

    def done(self, title: str, status: str, seconds: float | None, remark: str = "") -> None:
        """Report completed work: done, cached, skipped."""

    def log(self, text: str) -> None:
        """Write text to the log file only."""


@dataclass(kw_only=True)
class PipelineRun(Resolution):
    """The state of a run.

    Attributes:
        folder: where report and outputs go: `<out>/<name>`.
        monitor: the receiver of reports about the run.
        stages: the record of each stage, by id.
        findings: what the probes have reported.
    """

    folder: Path
    monitor: Monitor
    stages: dict[str, StageRecord] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)

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

    def obtain(self, title: str, work: Stage | Probe, inputs: Mapping[str, Artifact]) -> tuple[Artifact, StageStatus]:
        """Return the artifact of a stage or probe: "cached" from the store, or "done"."""
        with self._explained(""):  # errors of files and tools name their location
            key = self.key(work, inputs)
        job = self._job(title, work)
        with self._explained(title, job.memory_settings):
            stored = self.stored(title, key)
            if stored and self.store.is_shared(key):
                self._report(title, work, "cached", stored.seconds)
                return stored, "cached"
            started = time.monotonic()
            with self.monitor.working(job) as progress:
                artifact = stored
                status: StageStatus = "cached"
                if artifact is None:
                    artifact, status = self._fetched_or_made(title, work, inputs, key, progress)
                self.store.share(key, artifact, progress, replace=status == "done")
        self._report(title, work, status, stored.seconds if stored else time.monotonic() - started)
        return artifact, status

    def probe(self, title: str, probe: Probe, subjects: Mapping[str, Artifact]) -> Artifact:
        """Return the findings of a probe."""
        return self.obtain(title, probe, subjects)[0]

    def _fetched_or_made(
        self, title: str, work: Stage | Probe, inputs: Mapping[str, Artifact], key: str, progress: Progress
    ) -> tuple[Artifact, StageStatus]:
        """Return an artifact that the store does not have: of another run or machine, otherwise a new one."""
        waiting = f"{title}: another run is making this; waiting for it"
        with self.store.lock(key, lambda: progress.note(waiting)):
            artifact = self.stored(title, key)  # another run may have stored it
            if artifact is None and title not in self.forced:
                artifact = self.store.fetch(key, progress)
            if artifact is not None:
                return artifact, "cached"
            if title in self.forced:
                self.store.renew(key)
            return self._make(work, inputs, key, self._context(title, key, progress)), "done"

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

    def _make(self, work: Stage | Probe, inputs: Mapping[str, Artifact], key: str, context: Context) -> Artifact:
        """Run the stage or probe in a scratch folder, and publish the files."""
        started = time.monotonic()
        kind = work.produces if isinstance(work, Stage) else Kind.FINDINGS
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
        if work.imports_tensorflow and "tensorflow" not in sys.modules:  # a phase: the import takes some seconds
            with context.progress.phase(Phase("starting TensorFlow")):
                keras()
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
        current, status = session.obtain(entry.id, entry.stage, inputs_of(current))
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


@dataclass
class WorkerRun(PipelineRun):
    """The run of a worker that is not the chief: it takes part in every training, and uses the chief's artifacts."""

    def _fetched_or_made(
        self, title: str, work: Stage | Probe, inputs: Mapping[str, Artifact], key: str, progress: Progress
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
        return super()._fetched_or_made(title, work, inputs, key, progress)


def take_part(pipeline: Pipeline, out: Path, monitor: Monitor, forced: frozenset[str], store: Store) -> None:
    """Run the stages of a pipeline on a worker that is not the chief; the arguments are those of `run`.

    Raises:
        CorallineError: something failed.
    """
    store.prepare()
    run_stages(WorkerRun(pipeline, store, forced, folder=out / pipeline.head.name, monitor=monitor))
