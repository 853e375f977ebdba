"""A search from its pipeline file to its front: trials until there are enough, then the complete runs of the front."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compress.core.artifact import MODEL_TFLITE
from compress.core.errors import PipelineError, StageError, StoreError
from compress.core.files import digest_of, explain
from compress.core.measurement import Measurement
from compress.core.resources import __version__, manual
from compress.pipeline import schema
from compress.pipeline.schema import Pipeline
from compress.pipeline.search.early_stop import expected
from compress.pipeline.search.goals import Goals, front, read_goals
from compress.pipeline.search.recommendation import Recommendation, judged_budget, recommend, to_complete
from compress.pipeline.search.space import Choices, Dimension, Space, read_space
from compress.pipeline.search.study import SearchStudy, sampler_name
from compress.pipeline.search.trial import models_of
from compress.pipeline.search.worker import WorkerProcess, WorkKind, WorkRequest, trial_record
from compress.pipeline.yaml_file import read
from compress.report import search_page
from compress.report.wording import count, number, seconds
from compress.results.encoding import decode
from compress.results.search import COUNTED, FrontPoint, SearchRecord, SearchStatus, TrialRecord
from compress.tasks import task_of
from deploy.contract.durable_files import write_atomically

Show = Callable[[str], None]
"""Shows one line to the user."""
FOLDER = "search"
"""The folder of a search, in that of the runs of its pipeline."""
RECORD_FILE = "search.json"
DATABASE = "search.db"
"""The SQLite file with the trials of a search on one machine, in its folder."""
MAX_NAME = 64
"""The longest name of a run in the schema (`PipelineKeys.name`)."""
FIRST_FAILURES = 5
"""A search ends if so many trials of one command fail before another one works."""
FAILED = "failed"
"""The verdict on a trial of the front whose complete run failed."""
NOT_USABLE = "not usable"
"""The verdict of a complete run on a result that answers hardly better than by chance, for example."""
POLL_S = 2.0
"""Seconds between two looks at the trials of other processes, at the end."""
MAX_REPEATED = 50
"""A search ends after this number of choices in a row that were made before."""
EXAMPLE = "search: {settings: {prune.keep: {from: 0.3, to: 0.9}}}"


@dataclass(frozen=True)
class SearchPlan:
    """A checked search.

    Attributes:
        path: the pipeline file.
        pipeline: its pipeline, with the file's own values.
        space: what is varied.
        goals: what it is for.
        trials: the number of trials.
        digests: of the stages with the file's own values, and with each value that a search can choose.
    """

    path: Path
    pipeline: Pipeline
    space: Space
    goals: Goals
    trials: int
    digests: tuple[str, ...]

    def folder(self, out: Path) -> Path:
        """Return the folder of the search, in that of the results."""
        return out / self.pipeline.head.name / FOLDER

    def study(self, out: Path, storage: str | None = None, *, joins: bool = False) -> SearchStudy:
        """Return the trials of this search, those of earlier commands included.

        Args:
            out: the folder for results.
            storage: the URL of a database for the trials; None for a SQLite file in the folder of the search.
            joins: whether another process creates the search.

        Raises:
            PipelineError: Optuna is not installed, or the database cannot be used.
            StoreError: the folder cannot be written.
        """
        if storage is None:
            folder = self.folder(out).resolve()
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise explain(error, "the folder of the search cannot be written", folder) from error
            storage = f"sqlite:///{folder / DATABASE}"
        head = self.pipeline.head
        return SearchStudy(self.space, self.goals, head.name, self.identity(), head.seed, storage, joins=joins)

    def identity(self) -> dict[str, Any]:
        """Return what the values of trials depend on, with the contents of files instead of their paths."""
        content = {name: value for name, value in self.space.document.value.items() if name not in ("budget", "search")}
        search = {name: value for name, value in self.space.document.value["search"].items() if name != "trials"}
        return {
            "content": content,
            "search": search,
            "data": self.pipeline.data.digest,
            "stages": self.digests,
            "target": self.pipeline.target.digest,
        }


def read_plan(path: Path) -> SearchPlan:
    """Read and check the search of a pipeline file.

    Raises:
        PipelineError: the file has no search, or one that is invalid, or a budget that it cannot judge; with the line.
    """
    document = read(path)
    pipeline = schema.check(document)
    if pipeline.head.search is None:
        raise PipelineError("has no key `search`", where=str(path), allowed=EXAMPLE, hint=f"see {manual('search.md')}")
    if pipeline.head.execution.strategy == "multi_worker":
        raise PipelineError(
            "a search runs each trial in one process",
            where=f"{path}: execution",
            allowed="strategy: one, mirrored, tpu",
            hint=f"machines share the trials with `search --join`: {manual('search.md')}",
        )
    if pipeline.head.recipe is not None:
        what = "a search varies the settings of given stages, and `recipe: auto` chooses the stages"
        raise document.root.error(what, "recipe", hint="remove it to search")
    digests = [_digest(models_of(pipeline))]
    judged_budget(document, pipeline, "a search")
    space = read_space(document, lambda edited: digests.append(_digest(models_of(schema.check(edited)))))
    goals = read_goals(document, pipeline)
    return SearchPlan(path, pipeline, space, goals, pipeline.head.search.trials, tuple(digests))


def _digest(pipeline: Pipeline) -> str:
    """Return a digest of the stages of a pipeline: names, versions, settings, and the contents of their files."""
    return digest_of([[step.stage.name, step.stage.version, step.stage.identity()] for step in pipeline.steps])


class SettingsSearch:
    """A search that runs.

    Args:
        plan: what to search.
        out: the folder for results, with the store.
        study: its trials.
        worker: the process that runs trials.
        show: shows one line.
        joins: whether only trials are run, for a search on another machine.

    Attributes:
        folder: the folder of the search.
    """

    def __init__(
        self,
        plan: SearchPlan,
        out: Path,
        study: SearchStudy,
        worker: WorkerProcess,
        show: Show,
        *,
        joins: bool = False,
    ) -> None:
        self._plan, self._out, self._study, self._worker, self._show = plan, out, study, worker, show
        self._joins, self._waiting, self._trials_run = joins, False, 0
        self.folder = plan.folder(out)
        self._budget: dict[str, float] = plan.pipeline.head.budget.model_dump(exclude_none=True)
        self._metric = task_of(plan.pipeline.data).metrics[0]
        self._notes: list[str] = []
        self._points: dict[int, FrontPoint] = {}  # complete runs of this command, by the number of the trial
        self._ending = ""  # why there is nothing new to try now
        self._failures = 0

    def run(self) -> SearchRecord:
        """Run the trials that are missing, then the front; write search.json and search.html.

        Raises:
            StageError: the first trials all failed.
            StoreError: a file cannot be written.
            KeyboardInterrupt: it was interrupted; what is known is written.
        """
        try:
            while self._next():
                pass
            return self._run_front()
        except (KeyboardInterrupt, StageError) as error:
            self._notes = [str(error)] if isinstance(error, StageError) else []
            try:
                self._write_so_far()
            except StoreError as second:  # the first error matters more
                self._show(str(second))
            raise
        finally:
            self._worker.close()
            self._study.close()

    def _write_so_far(self) -> None:
        """Write what is known after an interruption or an error, complete runs of earlier commands included."""
        records = self._study.records()
        known = self._earlier_points(records) | self._points
        points = [
            known.get(trial.number, FrontPoint(trial.number, ""))
            for trial in to_complete(records, self._plan.goals, self._budget, self._metric)
        ]
        self._written(records, points, "interrupted")

    def _earlier_points(self, records: Sequence[TrialRecord]) -> dict[int, FrontPoint]:
        """Return the complete runs in search.json of trials that are the same now, by the number of the trial."""
        try:
            earlier = decode(SearchRecord, json.loads((self.folder / RECORD_FILE).read_text()))
        except (OSError, ValueError, RecursionError):
            return {}
        same = {trial.number for trial in earlier.trials if trial in records}
        return {point.number: point for point in earlier.front if point.number in same and point.verdict}

    def _run_front(self) -> SearchRecord:
        """Run the front completely, again while another process completes trials, and write the result."""
        while True:
            records = self._study.records()
            trials = to_complete(records, self._plan.goals, self._budget, self._metric)
            self._notes = [self._ending] if self._ending else []
            points = []
            for position, trial in enumerate(trials, 1):
                title = f"complete run of trial {trial.number} ({position} of {len(trials)})"
                points.append(self._completed(trial, title))
                self._points[trial.number] = points[-1]
            if self._study.records() == records:
                return self._written(records, points, "complete")

    def join(self) -> int:
        """Run trials until no more are missing; return how many this process has run.

        Raises:
            StageError: the first trials all failed.
            StoreError: a file cannot be written, or the storage is away.
            KeyboardInterrupt: it was interrupted.
        """
        try:
            while self._next():
                pass
        finally:
            self._worker.close()
            self._study.close()
        return self._trials_run

    def _next(self) -> bool:
        """Run the next trial; return False if the search is over."""
        records = self._study.records()
        self._ending = "" if self._study.has_waiting() else self._why_exhausted(records)
        counted = [record for record in records if record.status in COUNTED]
        if self._ending or len(counted) >= self._plan.trials:
            return self._waits_for([record for record in counted if record.status == "running"])
        title = f"({len(counted) + 1} of {self._plan.trials})"
        record = self._study.run_trial(lambda number, values: self._tried(number, values, title))
        if record is None:
            self._show("another process took a trial of this one for dead, and runs the trial again")
            return True
        if record.status == "repeated":
            return True
        title = f"trial {record.number} {title}"
        self._trials_run += 1
        counted.append(record)
        timed = [trial.seconds for trial in counted if trial.seconds]
        trials_left = self._plan.trials - len(counted)
        time_left = ""
        if trials_left and timed:
            time_left = f"; about {seconds(sum(timed) / len(timed) * trials_left)} left"
        self._show(f"{title}: {self._in_words(record)}{time_left}")
        # -1 after the first trial of this process that has worked.
        self._failures = self._failures + 1 if record.status == "failed" and self._failures >= 0 else -1
        if self._failures == FIRST_FAILURES:
            raise StageError(f"the first {FIRST_FAILURES} trials failed, the last one: {record.reason}", where="search")
        return True

    def _waits_for(self, running: Sequence[TrialRecord]) -> bool:
        """Wait a moment for the trials of other processes; return False if there is nothing to wait for."""
        if not running or self._joins:
            return False
        self._study.release_dead()
        if not self._waiting:
            self._show(f"waiting for {count(len(running), 'trial')} of other processes")
            self._waiting = True
        time.sleep(POLL_S)
        return True

    def _why_exhausted(self, records: Sequence[TrialRecord]) -> str:
        """Return why there is probably nothing new to try; "" if there is."""
        distinct = {json.dumps(record.settings, sort_keys=True) for record in records if record.status in COUNTED}
        all_tried = self._plan.space.count is not None and len(distinct) >= self._plan.space.count
        repeated = len(records) >= MAX_REPEATED and all(r.status == "repeated" for r in records[-MAX_REPEATED:])
        if not all_tried and not repeated:
            return ""
        reason = "all combinations were tried" if all_tried else f"{MAX_REPEATED} choices in a row were known"
        return f"The search ended after {count(len(distinct), 'trial')}: {reason}."

    def _tried(self, trial: int, values: dict[str, Any], title: str) -> TrialRecord:
        """Run a trial, and return its record; for settings that were tried before, the record of that trial."""
        # Not the records from before `optimize`, which may have marked the trial of a dead process as failed.
        others = [record for record in self._study.records() if record.number != trial]
        same = next((record for record in others if record.status in COUNTED and record.settings == values), None)
        if same is not None:
            return replace(same, number=trial, status="repeated", seconds=0, reason=f"as trial {same.number}")
        started = time.monotonic()
        goals = self._plan.goals
        request = self._request("trial", trial, values, f"trial {trial} {title}")
        result = self._worker.run(replace(request, goals=goals, seen=tuple(others)))
        record = trial_record(trial, values, result, time.monotonic() - started)
        if record.status == "complete":
            return replace(record, excess=goals.excess(record.values))
        if record.status == "stopped":
            known = expected(record, goals, others)
            excess = {limit.name: limit.excess(known) for limit in goals.limits if limit.metric.name in known}
            return replace(record, expected=known, excess=excess)
        return record

    def _request(self, kind: WorkKind, trial: int, values: dict[str, Any], title: str) -> WorkRequest:
        ending = f"-{trial}"
        name = self._plan.pipeline.head.name[: MAX_NAME - len(ending)] + ending
        document = self._plan.space.with_values(values, name)
        folder = self.folder / name if kind == "front" else self.folder
        path = self._plan.path.resolve()
        return WorkRequest(kind, str(path), document.value, str(self._out.resolve()), str(folder.resolve()), title)

    def _in_words(self, record: TrialRecord) -> str:
        known = [(metric, record.values[metric.name]) for metric in self._plan.goals.objectives
                 if metric.name in record.values]  # fmt: skip
        parts = [f"{metric.name} {number(value, metric.unit)}" for metric, value in known]
        text = ", ".join(parts) if record.status == "complete" else f"{record.status}: {record.reason}"
        violated = [name for name, excess in record.excess.items() if excess > 0]
        if record.status == "complete" and violated:
            text += f" (violates {', '.join(violated)})"
        settings = ", ".join(f"{name} {search_page.value_text(value)}" for name, value in record.settings.items())
        return f"{text}; {settings}; {seconds(record.seconds)}"

    def _completed(self, trial: TrialRecord, title: str) -> FrontPoint:
        """Return a point of the front after its complete run."""
        request = self._request("front", trial.number, dict(trial.settings), title)
        name = Path(request.folder).name
        result = self._worker.run(request)
        if "failed" in result:
            self._notes.append(f"The complete run of trial {trial.number} failed: {result['failed']}")
            self._show(self._notes[-1])
            return FrontPoint(trial.number, name, verdict=FAILED)
        done = result["done"]
        bundle, model = (
            f"{name}/{file}" if file in done["files"] else "" for file in (f"{name}.coralline", MODEL_TFLITE)
        )
        return FrontPoint(trial.number, name, bundle, model, decode(Measurement, done["test"]), done["verdict"])

    def _written(
        self, records: Sequence[TrialRecord], points: Sequence[FrontPoint], status: SearchStatus
    ) -> SearchRecord:
        """Write the record and the page."""
        plan = self._plan
        by_number = {record.number: record for record in records}
        trials = [by_number[point.number] for point in points if point.verdict != FAILED]
        choice = recommend(trials, records, plan.goals, self._budget, self._metric)
        if points and not trials:
            choice = Recommendation(None, "the complete runs of all trials on the front failed")
        if any(point.number == choice.number and point.verdict == NOT_USABLE for point in points):
            what = f"trial {choice.number} would be recommended ({choice.reason}), but its result is not usable"
            choice = Recommendation(None, what, "see its report")
        on_front = {trial.number for trial in front(records, plan.goals.objectives)}
        search_record = SearchRecord(
            name=plan.pipeline.head.name,
            status=status,
            objectives=plan.goals.objectives,
            constraints=tuple(limit.in_words() for limit in plan.goals.limits),
            host=plan.goals.host,
            sampler=sampler_name(),
            settings=varied(plan.space),
            trials=tuple(records),
            front=tuple(replace(point, is_dominated=point.number not in on_front) for point in points),
            recommended=choice.number,
            reason=choice.reason,
            hint=choice.hint,
            notes=tuple(self._notes),
            seconds=round(sum(record.seconds for record in records), 3),
            finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            coralline=__version__,
        )
        contents = {
            RECORD_FILE: json.dumps(search_record.to_json(), indent=1, allow_nan=False) + "\n",
            "search.html": search_page.page(search_record),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, content in contents.items():
                write_atomically(self.folder / name, content.encode())
        except OSError as error:
            raise explain(error, "the result of the search cannot be written", self.folder) from error
        return search_record


def varied(space: Space) -> dict[str, str]:
    """Return the choices or the range of each setting in words."""
    return {dimension.key: _in_words(dimension) for dimension in space.dimensions}


def _in_words(dimension: Dimension) -> str:
    if isinstance(dimension, Choices):
        return ", ".join(search_page.value_text(value) for value in dimension.values)
    step = f", step {dimension.step:g}" if dimension.step else ", whole numbers" if dimension.integer else ""
    return f"{dimension.low:g} to {dimension.high:g}{step}{', logarithmic' if dimension.log else ''}"
