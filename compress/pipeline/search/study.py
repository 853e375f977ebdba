"""The trials of a search in Optuna: who runs which, what they found, and what to try next.

Every process that works on a study asks for a trial, runs it and tells its result. A trial that runs names its owner,
and has a lease (`leases`). What a dead owner left is marked failed, and tried again.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.core.errors import PipelineError, StoreError
from compress.core.files import digest_of
from compress.pipeline.search.goals import Goals
from compress.pipeline.search.leases import LEASE, OWNER, SECOND_LOOK_S, LeaseWatch, is_elsewhere, owner, renewed
from compress.pipeline.search.space import Space
from compress.pipeline.search.storage import Show, close, opened
from compress.report.search_record import TrialRecord, TrialStatus

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

RECORD = "record"
"""The attribute with the result that the owner of a trial tells."""
TAKEN = "taken"
"""The attribute with the record of a process that takes a trial over. It counts if the trial ends in the state FAIL,
which an owner that has a result never tells."""
EXPECTED = "expected"
"""The attribute with the objectives that a stopped trial is expected to have, if all are known."""
ATTEMPT = "attempt"
MAX_ATTEMPTS = 3
"""Times that a trial is tried whose process dies."""


def require_optuna() -> Any:
    """Return the module `optuna`.

    Raises:
        PipelineError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise PipelineError("search needs Optuna", hint="pip install 'optuna~=5.0'") from error
    optuna.logging.set_verbosity(logging.ERROR)
    return optuna


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out warnings about experimental features of Optuna, and about fits of few trials."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class StudyState(NamedTuple):
    """The present trials of a search.

    Attributes:
        records: those that have begun.
        taken_over: the number of those whose process was found dead now, and that will be tried again.
        has_waiting: whether settings are planned that no process has begun: of the file, or of an interrupted trial.
    """

    records: list[TrialRecord]
    taken_over: int
    has_waiting: bool


class SearchStudy:
    """The trials of one search.

    Args:
        space: what is varied.
        goals: what it is for.
        name: the name of the pipeline.
        identity: what the values of trials depend on; another search has a new study.
        seed: the seed of the choices.
        storage: a URL of a database, or the folder for a journal file.
        show: shows one line, when the storage is away.

    Raises:
        StoreError: the storage cannot be used.
        PipelineError: Optuna is not installed, or the URL is invalid.
    """

    def __init__(
        self,
        space: Space,
        goals: Goals,
        name: str,
        identity: Mapping[str, Any],
        seed: int,
        storage: str | Path,
        show: Show = lambda text: None,
    ) -> None:
        self._optuna = require_optuna()
        self._space, self._goals, self._seed = space, goals, seed
        self._study: Study = self._opened(f"{name}-{digest_of(dict(identity))[:12]}", opened(storage, show))
        self._study.sampler = self._seeded_sampler()
        self._watch = LeaseWatch()
        self._running: int | None = None
        self._finished_records: dict[int, TrialRecord] = {}  # of trials that cannot change any more
        if not self._study.get_trials(deepcopy=False):
            parameters = space.of_file()
            if parameters:
                self._study.enqueue_trial(parameters)

    def _opened(self, name: str, storage: BaseStorage) -> Study:
        directions = ["maximize" if m.higher_is_better else "minimize" for m in self._goals.objectives]
        with _without_warnings():
            return self._optuna.create_study(  # type: ignore[no-any-return]
                study_name=name, storage=storage, directions=directions, load_if_exists=True
            )

    @property
    def name(self) -> str:
        """The name of the search in the storage: that of the pipeline, with a digest of what its trials depend on."""
        return self._study.study_name

    def look(self) -> StudyState:
        """Return the present trials. Those of dead processes will be tried again.

        It reads the trials once: their number decides what the storage of many processes has to do.
        """
        trials = self._trials()
        abandoned = self._abandoned(trials)
        count = sum(self._taken_over(trial) for trial in abandoned)
        current = self._trials() if abandoned else trials
        waiting = self._optuna.trial.TrialState.WAITING
        return StudyState(self._records(current), count, any(trial.state == waiting for trial in current))

    def records(self) -> list[TrialRecord]:
        """Return the trials that have begun."""
        return self._records(self._trials())

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _records(self, trials: Sequence[FrozenTrial]) -> list[TrialRecord]:
        states = self._optuna.trial.TrialState
        begun = [trial for trial in trials if trial.state != states.WAITING]
        for trial in begun:
            if trial.state.is_finished() and trial.number not in self._finished_records:
                self._finished_records[trial.number] = self._record(trial)
        return [self._finished_records.get(trial.number) or self._record(trial) for trial in begun]

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        """Return the record of a trial.

        Raises:
            StoreError: the stored record is invalid.
        """
        record = _record(trial)
        if not self._space.has(record.settings):
            raise _invalid(trial, f"{record.settings} are not settings of this search")
        return record

    def _taken_over(self, trial: FrozenTrial) -> bool:
        """Mark a trial of a dead process failed; return whether it will be tried again."""
        attempt = trial.user_attrs.get(ATTEMPT, 1)
        again = bool(attempt < MAX_ATTEMPTS)
        reason = "its process ended" if again else f"its process ended {attempt} times"
        status: TrialStatus = "interrupted" if again else "failed"
        record = TrialRecord(trial.number, status, trial.user_attrs.get("settings", {}), reason=reason)
        if not self._mark_failed(trial, record) or not again:
            return False
        planned = trial.system_attrs.get("fixed_params", {})  # of `enqueue_trial`: perhaps it did not come to them
        self._again({**planned, **trial.params}, attempt)
        return True

    def _abandoned(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Return the running trials whose owners are dead."""
        abandoned = [trial for trial in self._others(trials) if self._watch.is_expired(trial.number, trial.user_attrs)]
        leases = {trial.number: trial.user_attrs.get(LEASE) for trial in abandoned if is_elsewhere(trial.user_attrs)}
        if leases:
            time.sleep(SECOND_LOOK_S)
            renewed_since = {
                trial.number
                for trial in self._others(self._trials())
                if trial.user_attrs.get(LEASE) != leases.get(trial.number)
            }
            abandoned = [
                trial for trial in abandoned if trial.number not in leases or trial.number not in renewed_since
            ]
        return abandoned

    def _others(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Return the running trials of other processes."""
        running = self._optuna.trial.TrialState.RUNNING
        return [trial for trial in trials if trial.state == running and trial._trial_id != self._running]

    def _mark_failed(self, trial: FrozenTrial, record: TrialRecord) -> bool:
        """Mark a trial of another process failed; return False if a third process did."""
        storage = self._study._storage
        try:
            storage.set_trial_user_attr(trial._trial_id, TAKEN, record.to_json())
            self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
        except (ValueError, RuntimeError):  # Optuna's errors for a trial that is finished
            return False
        return True

    def _again(self, parameters: Mapping[str, Any], attempt: int) -> None:
        self._study.enqueue_trial(dict(parameters), user_attrs={ATTEMPT: attempt + 1})

    def sampler(self, seed: int) -> BaseSampler:
        """Return what chooses the next trial."""
        from compress.pipeline.search.sampler import FrontSampler

        return FrontSampler(self._space, seed)

    def _seeded_sampler(self) -> BaseSampler:
        from compress.pipeline.search.sampler import SeededByTrial

        return SeededByTrial(self.sampler, self._seed)

    def ask(self) -> tuple[Trial, dict[str, Any]]:
        """Return a new trial of this process, and the values that it chooses."""
        with _without_warnings():
            trial = self._study.ask()
            self._running = trial._trial_id
            trial.set_user_attr(OWNER, owner())
            values = self._space.suggest(trial)
        trial.set_user_attr("settings", values)
        return trial, values

    def close(self) -> None:
        """Close the connections to the storage."""
        close(self._study._storage)

    def leased(self, trial: Trial) -> AbstractContextManager[None]:
        """Renew the lease of a trial as long as the block runs."""
        return renewed(self._study._storage, trial._trial_id)

    def tell(self, trial: Trial, record: TrialRecord) -> bool:
        """Store the result of a trial; one that was interrupted is tried again.

        Returns:
            Whether it counts: another process may have taken the trial over while this one could not renew its lease.
        """
        states = self._optuna.trial.TrialState
        is_measured = all(metric.name in record.values for metric in self._goals.objectives)
        self._running = None
        try:
            for name, value in record.excess.items():
                trial.set_constraint(name, value)
            trial.set_user_attr(RECORD, record.to_json())
            names = [metric.name for metric in self._goals.objectives]
            if all(name in record.expected for name in names):
                trial.set_user_attr(EXPECTED, [record.expected[name] for name in names])
            with _without_warnings():
                if record.status in ("complete", "repeated") and is_measured:
                    self._study.tell(trial, [record.values[metric.name] for metric in self._goals.objectives])
                elif record.status != "interrupted":
                    self._study.tell(trial, state=states.PRUNED)  # FAIL is for trials without a result
                else:
                    self._study.tell(trial, state=states.FAIL)
        except (ValueError, RuntimeError):  # Optuna's errors for a trial that is finished
            stored = next(frozen_trial for frozen_trial in self._trials() if frozen_trial.number == trial.number)
            if not stored.state.is_finished():
                raise
            if _record(stored).to_json() != record.to_json():
                return False  # otherwise this process has told it, and the answer of the storage was lost
        if record.status == "interrupted":
            self._again(trial.params, trial.user_attrs.get(ATTEMPT, 1) - 1)  # an interruption is not a failed attempt
        return True


def stored_record(trial: FrozenTrial) -> Any:
    """Return the stored record of a finished trial, as plain values; None if its process ended without a result."""
    content = trial.user_attrs.get(RECORD)
    return trial.user_attrs.get(TAKEN, content) if trial.state.name == "FAIL" else content


def _invalid(trial: FrozenTrial, reason: str) -> StoreError:
    what = f"the stored record of trial {trial.number} is invalid: {reason}"
    return StoreError(what, where="search", hint="begin a new search with another name or --out")


def _record(trial: FrozenTrial) -> TrialRecord:
    """Return the record of a trial.

    Raises:
        StoreError: the stored record is invalid.
    """
    content = stored_record(trial)
    if content is not None and trial.state.is_finished():
        try:
            return replace(TrialRecord.from_json(content), number=trial.number)
        except ValueError as error:
            raise _invalid(trial, str(error)) from error
    settings = trial.user_attrs.get("settings", {})
    if trial.state.is_finished():
        return TrialRecord(trial.number, "interrupted", settings, reason="its process ended")
    return TrialRecord(trial.number, "running", settings)
