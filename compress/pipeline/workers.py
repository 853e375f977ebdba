"""A run on several workers: the chief runs the pipeline, and the others take part in its trainings.

The chief announces in the store which stage it makes. Another worker waits for the artifact of each stage. Where a
stage trains, it runs the stage too, in a folder that it removes: the trainings of all workers exchange gradients
(`compress.learning.training.collectives`). Only the chief publishes artifacts, measures, and writes reports.

The announcement has a number that the chief increments every few seconds. A worker trusts it once it has seen it
change: clocks of different machines are never compared, and the announcement that a killed chief left is ignored.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from compress.core.artifact import Artifact, Kind
from compress.core.errors import CorallineError, StageError
from compress.core.files import digest_of, explain, write_atomically
from compress.core.progress import Phase, Progress
from compress.learning.context import Context
from compress.learning.training import strategies
from compress.learning.training.cluster import START_S, WorkerCluster
from compress.pipeline import runner
from compress.pipeline.runner import Monitor, PipelineRun, run_stages
from compress.pipeline.schema import Pipeline
from compress.pipeline.stage import Probe, Stage
from compress.pipeline.store import Store
from compress.report.json_values import decode
from compress.report.record import RunRecord, StageStatus

FOLDER = "workers"
"""The folder of the announcements in the store."""
BEAT_S = 5.0
"""Seconds between two announcements."""
POLL_S = 0.5
LOST_S = 180.0
"""Seconds without a new announcement after which the chief counts as lost; a network file system may show it late."""
LAST_WORD_S = 10.0
"""Seconds in which a chief that failed announces why."""


@dataclass(frozen=True)
class Announcement:
    """The state of the chief.

    Attributes:
        run: a random name of the chief's process.
        beat: a number that is incremented.
        stage: the id of the stage that it makes; empty: none.
        key: the key of that stage's artifact.
        together: whether it waits for the other workers, or has met them.
        made: the keys of the stages that it has made, by their id.
        ended: why it ended, empty after success; None while it runs.
    """

    run: str
    beat: int = 0
    stage: str = ""
    key: str = ""
    together: bool = False
    made: Mapping[str, str] = field(default_factory=dict)
    ended: str | None = None


class Board:
    """The file in which the chief announces its state.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._now = Announcement(uuid.uuid4().hex)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Announce again and again as long as the block runs, and how it ended."""
        closed = threading.Event()

        def beat() -> None:
            while not closed.wait(BEAT_S):
                with suppress(OSError):  # a full disk: the run itself reports it
                    self.announce()

        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.announce()
        except OSError as error:
            raise explain(error, "the store cannot be written", self._path) from error
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        ended = "interrupted; run the same command on all workers to continue"
        try:
            yield
            ended = ""
        except CorallineError as error:
            ended = str(error)
            raise
        finally:
            closed.set()
            thread.join()
            with suppress(OSError):
                self.announce(stage="", ended=ended)

    def announce(self, **changes: Any) -> None:
        """Write the state with some changes."""
        with self._lock:
            self._now = replace(self._now, beat=self._now.beat + 1, **changes)
            write_atomically(self._path, json.dumps(asdict(self._now)).encode())

    def made(self, stage: str, key: str) -> None:
        """Announce that a stage is complete."""
        self.announce(stage="", made={**self._now.made, stage: key})


class Reader:
    """Another worker's view of the chief's announcements.

    Args:
        path: the file.
        chief: the chief's number and address, for messages.
    """

    def __init__(self, path: Path, chief: str) -> None:
        self._path, self._chief = path, chief
        left = self._content()
        self._seen = None if left is None else (left.run, left.beat)
        self._since = time.monotonic()
        self._now: Announcement | None = None

    def read(self) -> Announcement | None:
        """Return the state of the chief; None before it runs.

        Raises:
            StageError: it has not started in time, or no longer announces anything.
        """
        content = self._content()
        if content is not None and (content.run, content.beat) != self._seen:
            self._seen = (content.run, content.beat)
            self._since = time.monotonic()
            self._now = content
        waited = time.monotonic() - self._since
        if self._now is None and waited > START_S:
            raise StageError(
                f"{self._chief} did not start within {START_S:.0f} s",
                hint="start the same command there; --out must be the same folder on all machines",
            )
        if self._now is not None and self._now.ended is None and waited > LOST_S:
            raise StageError(f"lost {self._chief}", hint="run the same command on all workers to continue")
        return self._now

    def _content(self) -> Announcement | None:
        """Return the file's content; None if there is none, or an invalid one."""
        try:
            return decode(Announcement, json.loads(self._path.read_bytes()))
        except (OSError, ValueError, RecursionError):
            return None


@dataclass
class ChiefRun(PipelineRun):
    """The run of the chief: it announces each stage that it makes, and meets the other workers before it trains.

    Attributes:
        board: where it announces.
        has_met: whether the other workers are there.
    """

    board: Board = field(kw_only=True)
    has_met: bool = False

    def _make(
        self, work: Stage | Probe, inputs: Mapping[str, Artifact], kind: Kind, key: str, context: Context
    ) -> Artifact:
        if isinstance(work, Probe):
            return super()._make(work, inputs, kind, key, context)
        title = next(entry.id for entry in self.pipeline.steps if entry.stage is work)
        # TensorFlow's server has to start before this process uses TensorFlow for anything else.
        together = self.has_met or self._trains_from(title)
        self.board.announce(stage=title, key=key, together=together)
        if together and not self.has_met:
            _meet(self.pipeline, context.progress)
            self.has_met = True
        artifact = super()._make(work, inputs, kind, key, context)
        self.board.made(title, key)
        return artifact

    def _trains_from(self, title: str) -> bool:
        """Return whether this stage or a later one trains."""
        first = next(index for index, entry in enumerate(self.pipeline.steps) if entry.id == title)
        return any(entry.stage.trains() for entry in self.pipeline.steps[first:] if not entry.skip)


@dataclass
class WorkerRun(PipelineRun):
    """The run of another worker: it waits for the chief's artifacts, and takes part in the trainings.

    Attributes:
        reader: the chief's announcements.
        has_met: whether the other workers are there.
    """

    reader: Reader = field(kw_only=True)
    has_met: bool = False

    def obtain(
        self, title: str, work: Stage | Probe, inputs: Mapping[str, Artifact], kind: Kind
    ) -> tuple[Artifact, StageStatus]:
        """Return the chief's artifact of a stage, after taking part in making it."""
        assert isinstance(work, Stage)
        with self._explained(""):
            key = self.key(work, inputs)
        job = self._job(title, work)
        started = time.monotonic()
        with self._explained(title, job.memory_settings), self.monitor.working(job) as progress:
            artifact = self._follow(title, work, inputs, key, progress)
        self._report(title, work, "cached", time.monotonic() - started)
        return artifact, "cached"

    def _follow(
        self, title: str, work: Stage, inputs: Mapping[str, Artifact], key: str, progress: Progress
    ) -> Artifact:
        """Wait for an artifact, and take part in the training if the chief makes it now."""
        has_trained = False
        is_noted = False
        while (artifact := self._arrived(title, key)) is None:
            now = self.reader.read()
            if now is not None:
                self._refuse_other(now, title, key)
                if now.together and not self.has_met:
                    _meet(self.pipeline, progress)
                    self.has_met = True
                if now.stage == title and work.trains() and not has_trained:
                    has_trained = True
                    self._take_part(title, work, inputs, key, progress)
                    continue
            if not is_noted:
                progress.note(f"{title}: waiting for the chief")
                is_noted = True
            time.sleep(POLL_S)
        return artifact

    def _arrived(self, title: str, key: str) -> Artifact | None:
        """Return the artifact if it is in the store; one that is forced has to be made by this chief."""
        if title in self.forced:
            now = self.reader.read()
            if now is None or now.made.get(title) != key:
                return None
        return self.store.find(key)

    def _refuse_other(self, now: Announcement, title: str, key: str) -> None:
        """Refuse to wait for a chief that has ended, or that makes something else.

        Raises:
            StageError: with the reason.
        """
        if now.ended is not None:
            time.sleep(POLL_S)  # the artifact may be there by now
            if self._arrived(title, key) is None:
                reason = now.ended or "it ended, but the artifact is not in the store here"
                raise StageError(f"the chief: {reason}", hint="--out must be the same folder on all machines")
        if now.stage == title and now.key != key:
            raise StageError(
                "the chief makes this stage from something else",
                hint="use the same pipeline file, data, versions and options on all machines",
            )

    def finish(self) -> None:
        """Wait for the end of a chief that has met this worker: TensorFlow takes a worker that leaves for a lost one.

        Raises:
            StageError: the chief failed.
        """
        while self.has_met:
            now = self.reader.read()
            if now is not None and now.ended is not None:
                if now.ended:
                    raise StageError(f"the chief: {now.ended}")
                return
            time.sleep(POLL_S)

    def _take_part(self, title: str, work: Stage, inputs: Mapping[str, Artifact], key: str, progress: Progress) -> None:
        """Run a stage together with the chief, from the same unfinished state, and discard the result."""
        with self.store.scratch() as folder:
            unfinished = folder.parent / "unfinished"
            shutil.copytree(self.store.unfinished(key), unfinished)
            context = replace(
                self._context(title, key, progress), folder=folder, unfinished=unfinished, logs=None, profile=None
            )
            try:
                self._facts(work, inputs, context)
            except StageError as error:
                raise self._cause(error) from error

    def _cause(self, error: StageError) -> StageError:
        """Return the reason that the chief announces, if it has one."""
        end = time.monotonic() + LAST_WORD_S
        while time.monotonic() < end:
            now = self.reader.read()
            if now is not None and now.ended:
                return error if now.ended == str(error) else StageError(f"the chief: {now.ended}")
            time.sleep(POLL_S)
        return error


def _meet(pipeline: Pipeline, progress: Progress) -> None:
    """Wait for all workers."""
    with progress.phase(Phase("waiting for all workers")):
        strategies.join(pipeline.head.execution, progress.note)


def run(pipeline: Pipeline, out: Path, monitor: Monitor, forced: frozenset[str], store: Store) -> RunRecord | None:
    """Run a pipeline on as many workers as it asks for.

    Args:
        pipeline: what is run.
        out: the folder for the results, the same for all workers.
        monitor: the receiver of reports about the run.
        forced: ids of stages to re-run.
        store: the store in `out`.

    Returns:
        The record; None on a worker that is not the chief.

    Raises:
        CorallineError: something failed here, or at the chief.
        KeyboardInterrupt: the same for Ctrl-C.
    """
    cluster = strategies.workers(pipeline.head.execution)
    if cluster is None:
        return runner.run(pipeline, out, monitor, forced, store)
    path = store.folder / FOLDER / f"{_digest(cluster, pipeline)}.json"
    if cluster.is_chief:
        board = Board(path)
        with board.open():
            return runner.run(pipeline, out, monitor, forced, store, session_of=partial(ChiefRun, board=board))
    store.prepare()
    folder = out / pipeline.head.name
    session = WorkerRun(pipeline, store, folder, monitor, forced, reader=Reader(path, cluster.named(0)))
    run_stages(session)
    session.finish()
    return None


def _digest(cluster: WorkerCluster, pipeline: Pipeline) -> str:
    """Return what names the announcements of a run."""
    return digest_of([pipeline.head.name, cluster.digest])
