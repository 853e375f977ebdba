"""The trials of a search in Optuna: who runs which, what they found, and what to try next.

Every process that works on a study asks for a trial, runs it and tells its result. A trial that runs names its owner:
machine, process and the start of the process. What a dead owner left is marked failed, and tried again.
"""

from __future__ import annotations

import datetime
import fcntl
import logging
import os
import platform
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from compress.errors import PipelineError, StoreError
from compress.files import digest_of, explain
from compress.report.search_record import TrialRecord
from compress.search.goals import Goals
from compress.search.space import Space

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

JOURNAL = "journal.log"
RECORD = "record"
OWNER = "owner"
ATTEMPT = "attempt"
MAX_ATTEMPTS = 3
"""Times that a trial is tried whose process dies."""
OWNED_S = 10.0
"""Time after which a trial without an owner is taken for one whose process ended."""


def require_optuna() -> Any:
    """Return the module `optuna`.

    Raises:
        PipelineError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise PipelineError("search needs Optuna", hint="pip install 'coralline[search]'") from error
    optuna.logging.set_verbosity(logging.ERROR)
    return optuna


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out warnings about experimental features of Optuna, and about fits of few trials."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class SearchStudy:
    """The trials of one search.

    Args:
        space: what is varied.
        goals: what it is for.
        name: the name of the pipeline.
        identity: what the values of trials depend on; another search has a new study.
        seed: the seed of the choices.
        storage: a URL of a database, or the folder for a journal file.

    Raises:
        StoreError: the storage cannot be used.
        PipelineError: Optuna is not installed, or the URL is invalid.
    """

    def __init__(
        self, space: Space, goals: Goals, name: str, identity: Mapping[str, Any], seed: int, storage: str | Path
    ) -> None:
        self._optuna = require_optuna()
        self._space, self._goals, self._seed = space, goals, seed
        self._study: Study = self._opened(f"{name}-{digest_of(dict(identity))[:12]}", storage)
        if not self._study.get_trials(deepcopy=False):
            found = space.of_file()
            if found:
                self._study.enqueue_trial(found)

    def _opened(self, name: str, storage: str | Path) -> Study:
        directions = ["maximize" if m.higher_is_better else "minimize" for m in self._goals.objectives]
        try:
            opened = _journal(storage) if isinstance(storage, Path) else self._optuna.storages.get_storage(storage)
            with _without_warnings():
                return self._optuna.create_study(  # type: ignore[no-any-return]
                    study_name=name, storage=opened, directions=directions, load_if_exists=True
                )
        except OSError as error:
            raise explain(error, "the journal of the search cannot be used", Path(str(storage))) from error
        except (KeyError, ValueError) as error:
            raise StoreError("the journal of the search is damaged", where=str(storage), hint="remove it") from error
        except ImportError as error:
            raise PipelineError(f"the storage needs a driver: {error}", where="--storage") from error
        except Exception as error:
            if not type(error).__module__.startswith(("sqlalchemy", "optuna")):
                raise
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            allowed = "a URL such as sqlite:///search.db"
            raise PipelineError(f"the storage cannot be used: {first}", where="--storage", allowed=allowed) from error

    def records(self) -> list[TrialRecord]:
        """Return the trials that have begun."""
        states = self._optuna.trial.TrialState
        return [_record(each) for each in self._study.get_trials(deepcopy=False) if each.state != states.WAITING]

    def take_over(self) -> int:
        """Mark the trials of dead processes failed, and try them again; return their number."""
        states = self._optuna.trial.TrialState
        count = 0
        for each in self._study.get_trials(deepcopy=True, states=[states.RUNNING]):
            if _is_alive(each):
                continue
            attempt = each.user_attrs.get(ATTEMPT, 1)
            again = attempt < MAX_ATTEMPTS
            reason = "its process ended" if again else f"its process ended {attempt} times"
            record = TrialRecord(each.number, "interrupted" if again else "failed",
                                 each.user_attrs.get("settings", {}), reason=reason)  # fmt: skip
            if self._finished(each, record) and again:
                self._again(each.params, attempt)
                count += 1
        return count

    def _finished(self, trial: FrozenTrial, record: TrialRecord) -> bool:
        """Mark a trial of another process failed; return False if a third process did."""
        storage = self._study._storage
        try:
            storage.set_trial_user_attr(trial._trial_id, RECORD, record.to_json())
            self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
        except (ValueError, RuntimeError):  # Optuna's errors for a trial that is finished
            return False
        return True

    def _again(self, parameters: Mapping[str, Any], attempt: int) -> None:
        self._study.enqueue_trial(dict(parameters), user_attrs={ATTEMPT: attempt + 1})

    def sampler(self, seed: int) -> BaseSampler:
        """Return what chooses the next trial."""
        from compress.search.sampler import FrontSampler

        return FrontSampler(self._space, seed)

    def ask(self) -> tuple[Trial, dict[str, Any]]:
        """Return a new trial of this process, and the values that it chooses."""
        number = len(self._study.get_trials(deepcopy=False))
        with _without_warnings():
            # A seed for each trial: a search that was killed continues with the same choices.
            self._study.sampler = self.sampler((self._seed * 1_000_003 + number) % 2**32)
            trial = self._study.ask()
            trial.set_user_attr(OWNER, _owner())
            values = self._space.suggest(trial)
        trial.set_user_attr("settings", values)
        return trial, values

    def tell(self, trial: Trial, record: TrialRecord) -> None:
        """Store the result of a trial; one that was interrupted is tried again."""
        states = self._optuna.trial.TrialState
        for name, value in record.excess.items():
            trial.set_constraint(name, value)
        trial.set_user_attr(RECORD, record.to_json())
        is_measured = all(metric.name in record.values for metric in self._goals.objectives)
        with _without_warnings():
            if record.status in ("complete", "repeated") and is_measured:
                self._study.tell(trial, [record.values[metric.name] for metric in self._goals.objectives])
            elif record.status in ("complete", "stopped"):
                self._study.tell(trial, state=states.PRUNED)
            else:
                self._study.tell(trial, state=states.FAIL)
        if record.status == "interrupted":
            self._again(trial.params, trial.user_attrs.get(ATTEMPT, 1) - 1)  # an interruption is no failed attempt


def _record(trial: FrozenTrial) -> TrialRecord:
    content = trial.user_attrs.get(RECORD)
    if content is not None and trial.state.is_finished():
        return replace(TrialRecord.from_json(content), number=trial.number)
    settings = trial.user_attrs.get("settings", {})
    if trial.state.is_finished():
        return TrialRecord(trial.number, "interrupted", settings, reason="its process ended")
    return TrialRecord(trial.number, "running", settings)


def _owner() -> dict[str, Any]:
    """Return what identifies this process among those of all machines."""
    return {"host": platform.node(), "process": os.getpid(), "started": _start_of(os.getpid())}


def _start_of(process: int) -> str:
    """Return the start of a process in clock ticks since the start of the machine; "" if it does not run."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _is_alive(trial: FrozenTrial) -> bool:
    """Whether the process of a trial runs; on another machine it is taken for alive."""
    owner = trial.user_attrs.get(OWNER)
    if owner is None:  # the process asked for it a moment ago, or ended right after
        begun = trial.datetime_start
        return begun is not None and (datetime.datetime.now() - begun).total_seconds() < OWNED_S
    if owner["host"] != platform.node():
        return True
    return bool(owner["started"]) and _start_of(owner["process"]) == owner["started"]


class KernelLock:
    """A lock for Optuna's journal that the kernel releases when its process ends.

    Args:
        path: the file that is locked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = -1

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self._handle)


def _journal(folder: Path) -> Any:
    """Return the journal file in a folder as a storage. An incomplete last line, after a power cut, is removed."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / JOURNAL
    lock = KernelLock(folder / f"{JOURNAL}.lock")
    lock.acquire()
    try:
        with path.open("ab+") as stream:
            stream.seek(0)
            content = stream.read()
            if not content.endswith(b"\n"):
                stream.truncate(content.rfind(b"\n") + 1)
    finally:
        lock.release()
    return JournalStorage(JournalFileBackend(str(path), cast(Any, lock)))
