"""Cases of fault injection: disturb a command, judge its files, and check that the next command finishes the work.

After every fault, files are old or new, an incomplete file is never used as a result, and an error is a message with a
documented exit code.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import disk_states
from fault_injection import ALL_OPERATIONS, FAULTS, SOUND, Fault, Forge, Outcome, library
from fault_subjects import NEW, OLD, PARTLY, REMOVED, Subject, subjects

POWER_CUT, TWO_AT_ONCE, OTHER_USER = "power cut", "two at once", "other user"
OWNERS = ("all", "all, hidden", "results", "results, hidden")
NOBODY = 65534


@dataclass(frozen=True)
class Case:
    """One disturbed command.

    Attributes:
        subject: the name of the `Subject` that is disturbed.
        fault: the name of the fault.
        at: the number of the operation; for `OTHER_USER` the index in `OWNERS`, for `TWO_AT_ONCE` a seed of the delay.
    """

    subject: str
    fault: str
    at: int

    def __str__(self) -> str:
        return f"{self.subject}/{self.fault}/{self.at}"

    @staticmethod
    def parse(text: str) -> Case:
        subject, fault, at = text.split("/")
        return Case(subject, fault, int(at))


@dataclass(frozen=True)
class Verdict:
    """The result of a case.

    Attributes:
        case: the case.
        state: the state of the files after the fault.
        code: the exit code of the disturbed command.
        wrong: what is wrong; empty if everything is right.
        errors: the messages of the disturbed command.
    """

    case: Case
    state: str
    code: int
    wrong: tuple[str, ...]
    errors: str


class Bench:
    """The environment for the cases of one process: a process that forks commands, and the files of each subject.

    Args:
        folder: the folder for all files.
        prepared: another `Bench` whose files `before` and `after` are used; None: they are made here.
    """

    def __init__(self, folder: Path, prepared: Bench | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._prepared = folder, prepared or self
        self._preload: Path = prepared._preload if prepared else library(folder)
        self._forge = Forge(self._preload, folder / "forge")
        self._second: Forge | None = None
        self._subjects = {subject.name: subject for subject in subjects()}
        self._operations: dict[str, list[disk_states.Operation]] = {}
        self._counted: dict[str, Counter[str]] = {}

    def close(self) -> None:
        for forge in (self._forge, self._second):
            if forge is not None:
                forge.close()

    @property
    def names(self) -> list[str]:
        return list(self._subjects)

    def _place(self, subject: Subject, what: str) -> Path:
        owner = self if what == "work" else self._prepared
        return owner._folder / subject.name / what

    def subject(self, name: str) -> Subject:
        """Return a subject with prepared files: `before`, `after`, and the record of the undisturbed command."""
        subject = self._subjects[name]
        if self._prepared is not self:
            self._place(subject, "work").parent.mkdir(exist_ok=True)
        elif name not in self._operations:
            work = self._place(subject, "work")
            work.mkdir(parents=True)
            subject.prepare(work)
            if subject.first:
                _expect(self._run(subject, SOUND, arguments=subject.first), 0)
            subject.change(work)
            _copy(work, self._place(subject, "before"))
            everything = Fault("none", family=f"{ALL_OPERATIONS},read,read_open")
            _expect(self._run(subject, everything, trace=self._place(subject, "trace")), 0)
            _copy(work, self._place(subject, "after"))
            lines = disk_states.read(self._place(subject, "trace"))
            self._operations[name] = [line for line in lines if line.name != disk_states.COUNTED]
            self._counted[name] = Counter(line.path for line in lines if line.name == disk_states.COUNTED)
        return subject

    def _run(self, subject: Subject, fault: Fault, trace: Path | None = None, arguments: Sequence[str] = ()) -> Outcome:
        work = self._place(subject, "work")
        return self._forge.run(arguments or subject.arguments, work, fault, trace, alone=subject.alone)

    def _state(self, subject: Subject) -> str:
        work, before, after = (self._place(subject, what) for what in ("work", "before", "after"))
        return subject.state(work, before, after)

    def _restore(self, subject: Subject) -> None:
        _copy(self._place(subject, "before"), self._place(subject, "work"))

    def positions(self, subject: Subject, fault: str) -> int:
        """Return the number of different cases of a fault."""
        if fault == TWO_AT_ONCE:
            return 1000
        if fault == OTHER_USER:
            return len(OWNERS)
        if fault == POWER_CUT:
            return (len(self._operations[subject.name]) + 1) * len(disk_states.HOW)
        if FAULTS[fault].action == "":
            return 1
        return sum(self._counted[subject.name][kind] for kind in FAULTS[fault].family.split(","))

    # --- judging ----------------------------------------------------------------------------------------------

    def judge(self, case: Case) -> Verdict:
        subject = self.subject(case.subject)
        self._restore(subject)
        if case.fault == POWER_CUT:
            return self._power_cut(subject, case)
        if case.fault == TWO_AT_ONCE:
            return self._two_at_once(subject, case)
        fault = self._fault(subject, case)
        outcome = self._run(subject, fault)
        self._own(subject)
        state = self._state(subject)
        wrong = _unknown(state) + _message(subject, outcome, kills=fault.kills)
        if outcome.code == 0 and state != NEW:
            wrong.append(f"the command succeeded, and its files are {state}")
        if outcome.code != 0 and fault.is_harmless:
            wrong.append("this fault must not matter")
        if not fault.kills and fault.action != "errors" and (left := subject.left(self._place(subject, "work"))):
            wrong.append(f"left behind: {left}")
        return Verdict(case, state, outcome.code, (*wrong, *self._sound(subject, state)), outcome.errors)

    def _fault(self, subject: Subject, case: Case) -> Fault:
        if case.fault != OTHER_USER:
            return replace(FAULTS[case.fault], at=case.at)
        work = self._place(subject, "work")
        what, _, hidden = OWNERS[case.at].partition(", ")
        kept = set() if what == "all" else {path.name for path in work.iterdir() if path.name not in _changed(subject)}
        for path in [work, *work.rglob("*")]:
            if path == work and what != "all":
                continue
            if path.relative_to(work).parts[:1] and path.relative_to(work).parts[0] in kept:
                continue
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
            if hidden and not path.is_symlink() and path != work:
                path.chmod(0o700 if path.is_dir() else 0o600)
        return Fault(OTHER_USER, plain=True)

    def _own(self, subject: Subject) -> None:
        work = self._place(subject, "work")
        for path in [work, *work.rglob("*")]:
            if path.lstat().st_uid == NOBODY:
                os.chown(path, 0, 0, follow_symlinks=False)

    def _sound(self, subject: Subject, state: str) -> Iterator[str]:
        """Run the command again, without faults; yield what is wrong afterwards."""
        outcome = self._run(subject, SOUND)
        if outcome.code != 0 and not (state == NEW and outcome.code in subject.again):
            yield f"the next command failed ({outcome.code}): {outcome.errors[-500:]}"
        elif (after := self._state(subject)) != NEW:
            yield f"after the next command the files are {after}"
        elif unfinished := subject.unfinished(self._place(subject, "work")):
            yield f"after the next command: {unfinished}"

    def _power_cut(self, subject: Subject, case: Case) -> Verdict:
        """Judge a possible state of the disk after a power cut, in the middle of the command or after its end."""
        count, how = divmod(case.at, len(disk_states.HOW))
        work, recorded = self._place(subject, "work"), self._prepared._place(subject, "work")
        operations = self._prepared._operations[subject.name]
        disk = disk_states.Disk(recorded, self._place(subject, "before"))
        for operation in operations[:count]:
            disk.apply(operation)
        shutil.rmtree(work)
        disk.write(work, disk_states.HOW[how], random.Random(case.at))
        state = self._state(subject)
        wrong = _unknown(state)
        if subject.is_durable and count == len(operations) and state != NEW:
            wrong.append(f"the command had succeeded, and after the power cut its files are {state}")
        return Verdict(case, state, 0, (*wrong, *self._sound(subject, state)), "")

    def _two_at_once(self, subject: Subject, case: Case) -> Verdict:
        """Judge the same command run twice, the second one starting up to a second later."""
        self._second = self._second or Forge(self._preload, self._folder / "second")
        work = self._place(subject, "work")
        amount = subject.amount(work)
        self._forge.start(subject.arguments, work, alone=subject.alone)
        time.sleep(random.Random(case.at).uniform(0, 1))
        self._second.start(subject.arguments, work, alone=subject.alone)
        outcomes = [self._forge.finish(), self._second.finish()]
        state = self._state(subject)
        wrong = _unknown(state)
        for outcome in outcomes:
            if outcome.code not in subject.again:
                wrong += _message(subject, outcome, kills=False)
        succeeded = sum(outcome.code == 0 for outcome in outcomes)
        if succeeded == 0 or state != NEW:
            wrong.append(f"{succeeded} of two commands succeeded, and the files are {state}")
        if amount is not None and subject.amount(work) != amount + succeeded:
            wrong.append(f"{succeeded} commands succeeded, and {subject.amount(work)} changes are there")
        errors = "\n".join(outcome.errors for outcome in outcomes)
        return Verdict(case, state, outcomes[1].code, (*wrong, *self._sound(subject, state)), errors)


def plan(bench: Bench, count: int, only: str = "") -> list[Case]:
    """Choose about `count` cases: equally many of each subject and fault, evenly spread over the operations.

    `only` is a prefix of the names of the cases; empty for all.
    """
    positions = {}
    for name in bench.names:
        for fault in (*FAULTS, POWER_CUT, TWO_AT_ONCE, OTHER_USER):
            if f"{name}/{fault}/".startswith(only) and _is_possible(bench.subject(name), fault):
                positions[name, fault] = bench.positions(bench.subject(name), fault)
    each = max(count // len(positions), 1)
    chosen = []
    for (name, fault), available in positions.items():
        number = min(each, available)
        chosen += [Case(name, fault, int(available / number * (index + 0.5))) for index in range(number)]
    return chosen


def _is_possible(subject: Subject, fault: str) -> bool:
    if fault == OTHER_USER:
        return os.geteuid() == 0
    if fault == "no links":
        return "deploy" in subject.name  # no other command creates links
    return not (subject.alone and fault in (POWER_CUT, TWO_AT_ONCE))


def _changed(subject: Subject) -> set[str]:
    """Return the top-level names in a subject's folder that its command changes."""
    names = getattr(subject, "files", ("out", "there", "log.jsonl", "shop.learnt", "shop.learnt.lock"))
    return {name.partition("/")[0] for name in names}


def _unknown(state: str) -> list[str]:
    return [] if state in (OLD, NEW, PARTLY, REMOVED) else [state]


def _message(subject: Subject, outcome: Outcome, *, kills: bool) -> list[str]:
    """Return what is wrong with the exit code and the messages of a command."""
    if kills and outcome.code == -9:
        return []
    wrong = []
    if outcome.code != 0 and outcome.code not in subject.codes:
        wrong.append(f"exit code {outcome.code}")
    if match := re.search(r"Traceback|\[Errno|Exception ignored|Error: ", outcome.errors):
        wrong.append(f"no words: {match.group()}")
    if outcome.code not in (0, *subject.again) and not re.search(
        r"^(coralline|runner): ", outcome.errors, re.MULTILINE
    ):
        wrong.append("no message")
    return wrong


def _expect(outcome: Outcome, code: int) -> None:
    if outcome.code != code:
        raise RuntimeError(f"exit code {outcome.code}: {outcome.errors}")


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
