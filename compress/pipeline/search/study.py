"""The trials of a search: functions under Optuna's `study.optimize`, in a database that all processes share.

The process that runs a trial renews a heartbeat in the database. A trial whose heartbeat is too old is marked failed,
and waits to be run again with the same values (Optuna's `RetryHeartbeatStaleTrialCallback`). The record of a trial is
an attribute of the trial.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from compress.core.errors import CorallineError, PipelineError, StoreError
from compress.core.files import digest_of
from compress.pipeline.search.goals import MISSING, Goals
from compress.pipeline.search.space import Space
from compress.results.encoding import decode, encode
from compress.results.search import TrialRecord

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

RECORD = "record"
"""The attribute with the record of a trial."""
HEARTBEAT_S = 5
"""Seconds between two heartbeats; chosen: one small write of each process, and a death is seen soon."""
GRACE_S = 30
"""Seconds without a heartbeat after which a trial is run again: six heartbeats, for slow disks and networks."""
MOST_REPEATED = 3
"""Choices in a row that were made before, after which the next choice is random. A sampler that models the result takes
its best settings again and again, with other values of settings that the builder or the stages of the trial do not
have."""
MAX_DEATHS = 3
"""Times that a trial is run whose process dies: one that needs too much memory would end every process."""
START_S = 300.0
"""Seconds that a process which joins a search waits for it: the tasks of a cluster start minutes apart."""
JOIN_HINT = (
    "start the command without --join, too, with the same pipeline file, data and versions; torch, which decides the "
    "sampler, must be installed on all machines or on none"
)
ALLOWED = "sqlite:///FILE, postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"


def require_optuna() -> Any:
    """Return the module `optuna`.

    Raises:
        PipelineError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise PipelineError("search needs Optuna", hint="pip install 'optuna~=5.0'") from error
    optuna.logging.set_verbosity(logging.ERROR)
    return optuna


def sampler_name() -> str:
    """Return the name of the sampler that chooses trials here: Optuna's GPSampler needs torch."""
    return "GPSampler" if importlib.util.find_spec("torch") else "TPESampler"


def new_sampler(seed: int, name: str) -> BaseSampler:
    """Return a sampler of Optuna. Both that `sampler_name` knows take several objectives and constraints."""
    from optuna.samplers import GPSampler, RandomSampler, TPESampler

    with _quiet():
        if name == "GPSampler":
            return GPSampler(seed=seed)
        if name == "RandomSampler":
            return RandomSampler(seed=seed)
        return TPESampler(seed=seed, multivariate=True, constant_liar=True)


class SearchStudy:
    """The trials of one search.

    Args:
        space: what is varied.
        goals: what the search is for.
        name: the name of the pipeline.
        identity: what the values of trials depend on; a search with another identity has other trials.
        seed: the seed of the choices.
        url: the database.
        joins: whether another process creates the tables and the study. Two processes that create tables at the same
            time make each other fail.

    Raises:
        PipelineError: Optuna or a driver is not installed, or the database cannot be used.
    """

    def __init__(
        self,
        space: Space,
        goals: Goals,
        name: str,
        identity: Mapping[str, Any],
        seed: int,
        url: str,
        *,
        joins: bool = False,
    ) -> None:
        self._optuna = require_optuna()
        self._space, self._goals, self._seed = space, goals, seed
        self._salt = random.SystemRandom().randrange(2**32) if joins else 0  # for processes that ask at the same time
        self._finished: dict[int, TrialRecord] = {}
        self.name = f"{name}-{digest_of({**identity, 'sampler': sampler_name()})[:12]}"
        with _opening(url), _quiet():
            self._study: Study = self._joined(url) if joins else self._created(url)

    def _created(self, url: str) -> Study:
        directions = ["maximize" if metric.higher_is_better else "minimize" for metric in self._goals.objectives]
        study: Study = self._optuna.create_study(
            study_name=self.name, storage=_storage(url), directions=directions, load_if_exists=True
        )
        if not study.get_trials(deepcopy=False):
            study.enqueue_trial(self._space.of_file())
        return study

    def _joined(self, url: str) -> Study:
        """Return the study as soon as another process has created it, after the tables."""
        from sqlalchemy import create_engine, text
        from sqlalchemy.exc import OperationalError, ProgrammingError

        engine = create_engine(url)
        end, reason = time.monotonic() + START_S, "nobody has begun it"
        while True:
            try:
                with engine.connect() as connection:
                    found = connection.execute(text("SELECT 1 FROM studies WHERE study_name = :n"), {"n": self.name})
                    if found.first() is not None:
                        break
            except (OperationalError, ProgrammingError) as error:  # no database, or no tables
                reason = _first_line(error)
            if time.monotonic() > end:
                what = f"the search {self.name} is not in the database: {reason}"
                raise PipelineError(what, where="--storage", hint=JOIN_HINT)
            time.sleep(1.0)
        engine.dispose()
        storage = _storage(url, skip_table_creation=True)
        study: Study = self._optuna.load_study(study_name=self.name, storage=storage)
        return study

    def records(self) -> list[TrialRecord]:
        """Return the trials that have begun.

        Raises:
            StoreError: a stored record is invalid, or the database is away.
        """
        states = self._optuna.trial.TrialState
        with _explained():
            trials = self._study.get_trials(deepcopy=False)
        records = []
        for trial in trials:
            if trial.state == states.WAITING:
                continue
            record = self._finished.get(trial.number) or self._record(trial)
            if trial.state.is_finished():
                self._finished[trial.number] = record
            records.append(record)
        return records

    def has_waiting(self) -> bool:
        """Whether values wait for a process: those of the file, or of a trial that was interrupted."""
        with _explained():
            return bool(self._study.get_trials(deepcopy=False, states=[self._optuna.trial.TrialState.WAITING]))

    def release_dead(self) -> None:
        """Let trials whose process has died wait to be run again. `optimize` does this before every trial."""
        with _explained(), _quiet():
            self._optuna.storages.fail_stale_trials(self._study)

    def run_trial(self, run: Callable[[int, dict[str, Any]], TrialRecord]) -> TrialRecord | None:
        """Run one trial under `study.optimize`. A trial that is interrupted waits to be run again.

        Args:
            run: runs a trial by its number and values.

        Returns:
            The record; None if another process took this one for dead, and runs the trial again.
        """
        records = self.records()
        outcome: TrialRecord | BaseException | None = None

        def objective(trial: Trial) -> Sequence[float]:
            nonlocal outcome
            values = self._space.suggest(trial)
            try:
                outcome = run(trial.number, values)
            except (KeyboardInterrupt, CorallineError) as error:
                outcome = error
                reason = str(error) or "interrupted with Ctrl-C"
                with suppress(self._optuna.exceptions.UpdateFinishedTrialError):
                    record = TrialRecord(trial.number, "interrupted", values, reason=reason)
                    trial.set_user_attr(RECORD, encode(record))
                    self._study.enqueue_trial(trial.params)
                raise
            return self._told(trial, outcome, records)

        seed = self._seed * 1_000_003 + self._salt + sum(record.status != "interrupted" for record in records)
        with _explained(), _quiet():
            last = records[-MOST_REPEATED:]
            is_stuck = len(last) == MOST_REPEATED and all(record.status == "repeated" for record in last)
            self._study.sampler = new_sampler(seed % 2**32, "RandomSampler" if is_stuck else sampler_name())
            try:
                self._study.optimize(objective, n_trials=1)
            except (ValueError, self._optuna.exceptions.UpdateFinishedTrialError):  # the trial is marked failed
                if isinstance(outcome, BaseException):
                    raise outcome from None
                if outcome is None:
                    raise
                return None
        assert isinstance(outcome, TrialRecord)
        return outcome

    def _told(self, trial: Trial, record: TrialRecord, records: Sequence[TrialRecord]) -> Sequence[float]:
        """Store a record, and return the objectives for the sampler; NaN, which Optuna ignores, for a repeated trial.

        GPSampler learns only from trials with all objectives and the same constraints. So an objective that a stopped
        or failed trial does not have is the worst value of the trials so far; a constraint that such a trial does not
        decide counts as met for a stopped trial, and as violated for a failed one.

        Raises:
            TrialPruned: the trial has no objectives, and there is no value so far.
        """
        trial.set_user_attr(RECORD, encode(record))
        if record.status == "repeated":
            return [math.nan]
        known = {**record.expected, **record.values}
        for limit in self._goals.limits:
            unknown = 0.0 if record.status == "stopped" else MISSING
            trial.set_constraint(limit.name, limit.excess(known) if limit.metric.name in known else unknown)
        objectives = []
        for metric in self._goals.objectives:
            seen = [other.values[metric.name] for other in records if metric.name in other.values]
            if metric.name not in known and not seen:
                raise self._optuna.TrialPruned
            worst = min if metric.higher_is_better else max
            objectives.append(known[metric.name] if metric.name in known else worst(seen))
        return objectives

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        """Return the record of a trial.

        Raises:
            StoreError: the stored record is invalid.
        """
        try:
            settings = self._space.values(trial.params)
            if not trial.state.is_finished():
                return TrialRecord(trial.number, "running", settings)
            content = trial.user_attrs.get(RECORD)
            record = None if content is None else replace(decode(TrialRecord, content), settings=settings)
        except (ValueError, LookupError, TypeError) as error:
            what = f"the stored record of trial {trial.number} is invalid: {error}"
            raise StoreError(what, where="search", hint="begin a new search with another name or --out") from error
        has_failed = trial.state == self._optuna.trial.TrialState.FAIL
        if record is not None and (not has_failed or record.status in ("interrupted", "repeated")):
            return replace(record, number=trial.number)
        deaths = 1 + len(trial.system_attrs.get("retry_history", ()))
        if deaths < MAX_DEATHS:
            return TrialRecord(trial.number, "interrupted", settings, reason="its process ended")
        return TrialRecord(trial.number, "failed", settings, reason=f"its process ended {deaths} times")

    def close(self) -> None:
        """Close the connections to the database."""
        self._study._storage.remove_session()
        self._study._storage._backend.engine.dispose()  # type: ignore[attr-defined]


def _storage(url: str, *, skip_table_creation: bool = False) -> BaseStorage:
    """Return the database of trials, with heartbeats."""
    from optuna.exceptions import StorageInternalError
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
    from sqlalchemy.exc import SQLAlchemyError

    class Storage(RDBStorage):
        """A database whose heartbeats go on after the database was away for a moment."""

        def record_heartbeat(self, trial_id: int) -> None:
            with suppress(StorageInternalError, SQLAlchemyError):
                super().record_heartbeat(trial_id)

    return Storage(
        url,
        engine_kwargs={
            "pool_pre_ping": True,  # a connection that was lost is opened again
            "connect_args": {"timeout": 60} if url.startswith("sqlite") else {},  # for the lock of the file
        },
        heartbeat_interval=HEARTBEAT_S,
        grace_period=GRACE_S,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=MAX_DEATHS - 1),
        skip_table_creation=skip_table_creation,
    )


@contextmanager
def _opening(url: str) -> Iterator[None]:
    """Convert the errors of a database that cannot be opened.

    Raises:
        PipelineError: the URL is invalid, a driver is not installed, or the database cannot be reached.
    """
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    if urlsplit(url).netloc.count("@") > 1:
        hint = "write %40 for an @ in a user name or a password"
        raise PipelineError("the URL has more than one @", where="--storage", allowed=ALLOWED, hint=hint)
    try:
        yield
    except ImportError as error:
        hint = "pip install 'psycopg[binary]~=3.2'" if url.startswith("postgresql") else ""
        what = f"the storage needs a driver: {error}"
        raise PipelineError(what, where="--storage", allowed=ALLOWED, hint=hint) from error
    except (SQLAlchemyError, StorageInternalError, ValueError, RuntimeError, OSError) as error:
        # RuntimeError: the tables are those of another version of Optuna.
        what = f"the storage cannot be used: {_first_line(error.__cause__ or error)}"
        raise PipelineError(what, where="--storage", allowed=ALLOWED) from error


@contextmanager
def _explained() -> Iterator[None]:
    """Convert the errors of a database that is away.

    Raises:
        StoreError: the database cannot be used now.
    """
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        what = f"the storage of the search cannot be used: {_first_line(error.__cause__ or error)}"
        hint = "correct this, and run the same command again: no finished trial is lost"
        raise StoreError(what, where="search", hint=hint) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out Optuna's warnings about experimental features, such as heartbeats and GPSampler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
