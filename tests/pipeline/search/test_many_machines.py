"""Searches on several machines: leases, an unavailable database, and the proxy."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import postgresql
import pytest
import tiny
from tiny import Coralline

optuna = pytest.importorskip("optuna", reason="optuna is not installed: pip install -e '.[search]'")

from compress.core.errors import PipelineError, StoreError  # noqa: E402
from compress.pipeline.search import leases, storage, study  # noqa: E402
from compress.pipeline.search.space import Range, Space  # noqa: E402
from compress.pipeline.search.study import SearchStudy  # noqa: E402
from compress.pipeline.yaml_file import Document  # noqa: E402
from compress.report.search_record import TrialRecord, TrialStatus  # noqa: E402

SPACE = Space(Document(Path(), {"x": 1.5, "stages": []}, {}), (Range("x", ("x",), 0.0, 1.0),))
GOALS: Any = SimpleNamespace(objectives=(SimpleNamespace(name="accuracy", higher_is_better=True),))


@pytest.fixture(scope="module")
def server() -> Iterator[postgresql.Server]:
    if postgresql.MISSING:
        pytest.skip(postgresql.MISSING)
    with postgresql.serving() as running_server:
        yield running_server


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten leases to a fraction of a second."""
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    monkeypatch.setattr(leases, "EXPIRY_S", 0.5)
    monkeypatch.setattr(study, "SECOND_LOOK_S", 0.2)


class Machine:
    """A process on another machine: its calls run with the name of that machine."""

    def __init__(self, name: str, location: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._name, self._monkeypatch = name, monkeypatch
        self.study = self(lambda: SearchStudy(SPACE, GOALS, "shared", {}, 0, location))

    def __call__(self, function: Callable[[], Any]) -> Any:
        """Call a function on the machine."""
        with self._monkeypatch.context() as patch:
            patch.setattr(leases, "machine", lambda: self._name)
            return function()

    def ask(self) -> Any:
        return self(self.study.ask)[0]

    def take_over(self) -> int:
        return int(self(self.study.look)[1])

    def tell(self, trial: Any, accuracy: float = 0.5, status: TrialStatus = "complete") -> bool:
        values = {"accuracy": accuracy} if status == "complete" else {}
        record = TrialRecord(trial.number, status, values=values)
        return bool(self(lambda: self.study.tell(trial, record)))

    def statuses(self) -> list[str]:
        return [record.status for record in self.study.records()]


@pytest.fixture(params=["journal", "postgresql"])
def machines(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Machine]]:
    location: str | Path = tmp_path
    if request.param == "postgresql":
        server = request.getfixturevalue("server")
        location = server.new_database()
    instances: list[Machine] = []

    def machine(name: str) -> Machine:
        instances.append(Machine(name, location, monkeypatch))
        return instances[-1]

    yield machine
    for instance in instances:
        instance.study.close()


@pytest.mark.usefixtures("soon")
def test_the_trial_of_a_dead_machine_is_taken_over_once(machines: Callable[[str], Machine]) -> None:
    dead, first, second = machines("a"), machines("b"), machines("c")
    lost = dead.ask()
    assert (first.take_over(), second.take_over()) == (0, 0)  # the first look
    time.sleep(0.6)
    assert (first.take_over(), second.take_over()) == (1, 0)
    again = second.ask()
    assert again.params == lost.params
    assert first.ask().params != lost.params
    assert second.tell(again)
    assert not dead.tell(lost, 0.9)  # the machine is not dead, but its result comes too late
    assert first.statuses() == ["interrupted", "complete", "running"]


def test_a_process_is_looked_for_on_its_own_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is not looked for in another container, or where the system does not show processes."""
    here = {leases.OWNER: leases.owner()}
    assert not leases.is_elsewhere(here)
    dead = {leases.OWNER: {**leases.owner(), "started": "1"}}
    watch = leases.LeaseWatch()
    assert [watch.is_expired(number, attributes) for number, attributes in enumerate((here, dead))] == [False, True]
    monkeypatch.setattr(leases, "machine", lambda: "another container")
    assert leases.is_elsewhere(here)
    assert not watch.is_expired(2, dead)
    monkeypatch.setattr(leases, "_start_of", lambda process: "")
    assert leases.is_elsewhere({leases.OWNER: leases.owner()})
    assert leases.is_elsewhere({leases.OWNER: "damaged"})


@pytest.mark.usefixtures("soon")
def test_a_renewed_lease_is_kept(machines: Callable[[str], Machine]) -> None:
    owner, other = machines("a"), machines("b")
    trial = owner.ask()
    with owner.study.leased(trial):
        for _ in range(4):
            assert other.take_over() == 0
            time.sleep(0.2)
    assert owner.tell(trial)
    assert other.statuses() == ["complete"]


@pytest.mark.usefixtures("soon")
def test_a_storage_that_was_away_ends_no_trial(machines: Callable[[str], Machine]) -> None:
    """While the storage is unavailable, nobody can renew a lease. The owner renews it right afterwards."""
    owner, other = machines("a"), machines("b")
    trial = owner.ask()
    assert other.take_over() == 0
    time.sleep(0.6)  # the storage is unavailable
    with owner.study.leased(trial):
        assert other.take_over() == 0
    assert owner.tell(trial)


def test_a_result_whose_confirmation_was_lost_counts_once(machines: Callable[[str], Machine]) -> None:
    machine = machines("a")
    trial = machine.ask()
    assert machine.tell(trial)
    assert machine.tell(trial)  # repeated, because the storage did not answer
    assert not machine.tell(trial, 0.7)
    assert machine.statuses() == ["complete"]


@pytest.mark.parametrize("result", ["complete", "failed"])
@pytest.mark.parametrize("ends_first", ["owner", "other"])
def test_a_trial_that_ends_while_it_is_taken_over_has_one_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_first: str, result: TrialStatus
) -> None:
    """The other process writes its takeover between the two writes of the owner."""
    owner, other = Machine("a", tmp_path, monkeypatch), Machine("b", tmp_path, monkeypatch)
    trial = owner.ask()
    running = other.study._trials()[0]
    owner_tells, other_tells = owner.study._study.tell, other.study._study.tell
    taken: list[bool] = []

    def at_the_same_time(*arguments: Any, **options: Any) -> None:
        def second(*others: Any, **other_options: Any) -> None:
            if ends_first == "owner":
                owner_tells(*arguments, **options)
            other_tells(*others, **other_options)

        monkeypatch.setattr(other.study._study, "tell", second)
        taken.append(other.study._taken_over(running))
        if ends_first == "other":
            owner_tells(*arguments, **options)

    monkeypatch.setattr(owner.study._study, "tell", at_the_same_time)
    assert owner.tell(trial, status=result) is (ends_first == "owner")
    assert taken == [ends_first == "other"]
    assert owner.statuses() == [result if ends_first == "owner" else "interrupted"]
    monkeypatch.undo()
    assert (owner.ask().params == trial.params) is taken[0]


def test_a_trial_whose_process_died_before_it_had_its_values_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine("a", tmp_path, monkeypatch)
    machine.study._study.enqueue_trial({"x": 0.25})
    machine.study._study.ask()
    assert machine.study._taken_over(machine.study._trials()[0])
    assert machine.ask().params == {"x": 0.25}


def test_a_record_that_is_damaged_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("a", tmp_path, monkeypatch)
    trial = machine.ask()
    trial.set_user_attr(study.RECORD, {"number": 0, "status": "done"})
    machine.study._study.tell(trial.number, 0.5)
    with pytest.raises(StoreError, match="the stored record of trial 0 is invalid: 'done' is not one of"):
        machine.statuses()


def test_a_database_that_is_restarted_ends_nothing(server: postgresql.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("a", server.new_database(), monkeypatch)
    trial = machine.ask()
    server.stop("immediate")
    accepted: list[bool] = []
    thread = threading.Thread(target=lambda: accepted.append(machine.tell(trial)))
    thread.start()
    time.sleep(1)
    assert accepted == []
    server.start()
    thread.join(timeout=60)
    assert accepted == [True]
    assert machine.statuses() == ["complete"]
    machine.study.close()


def test_a_transaction_that_was_cut_off_is_repeated(server: postgresql.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy.exc import PendingRollbackError

    machine = Machine("a", server.new_database(), monkeypatch)
    calls: list[bool] = []
    read = optuna.storages.RDBStorage._get_trials

    def cut_off(*arguments: Any, **options: Any) -> Any:
        calls.append(True)
        if len(calls) == 1:
            raise optuna.exceptions.StorageInternalError("during the commit") from PendingRollbackError("invalid")
        return read(*arguments, **options)

    monkeypatch.setattr(optuna.storages.RDBStorage, "_get_trials", cut_off)
    assert machine.statuses() == []
    assert len(calls) == 2
    machine.study.close()


def test_a_database_that_stays_away_is_an_error(server: postgresql.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "RETRY_S", 0.5)
    machine = Machine("a", server.new_database(), monkeypatch)
    server.stop()
    try:
        with pytest.raises(StoreError, match=r"the storage of the search has been away for 0 s: .*refused"):
            machine.ask()
    finally:
        server.start()
    assert len(machine.statuses()) == 0
    machine.study.close()


def test_a_storage_that_is_away_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy.exc import OperationalError

    class Away:
        calls = 0

        def get_all_studies(self) -> list[Any]:
            self.calls += 1
            if self.calls < 4:
                raise OperationalError("select", None, ConnectionError("refused"))
            return []

    monkeypatch.setattr(storage, "QUIET_S", 0.0)
    said: list[str] = []
    away: Any = Away()
    assert storage.retrying(away, said.append).get_all_studies() == []
    assert said == ["the storage of the search is away: (builtins.ConnectionError) refused; trying again for 300 s"]


def project(tmp_path: Path, trials: int) -> None:
    settings = {"remade.filters": {"from": 1, "to": 16}, "remade.weights": {"from": 0, "to": 40}}
    tiny.project(tmp_path, ({"remade": {}}, "compile"), search={"trials": trials, "settings": settings})


def shared(tmp_path: Path, url: str) -> list[str]:
    """Return the statuses of the trials of a search that two other processes join."""
    arguments: dict[str, Any] = {"cwd": tmp_path, "env": tiny.environment(), "text": True}
    command = tiny.command("search", "pipeline.yaml", "--storage", url)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    joined = [subprocess.Popen([*command, "--join"], **arguments, **pipes) for _ in range(2)]
    main = subprocess.run(command, **arguments, capture_output=True, check=False)
    assert main.returncode == 0, main.stderr
    counts = []
    for process in joined:
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        counts.append(int(stdout.split()[0]))
    content = json.loads((tmp_path / "runs" / "tiny" / "search" / "search.json").read_text())
    assert len(content["front"]) >= 1
    assert max(counts) > 0
    return [trial["status"] for trial in content["trials"] if trial["status"] != "repeated"]


def test_processes_join_a_search(server: postgresql.Server, tmp_path: Path) -> None:
    project(tmp_path, 8)
    statuses = shared(tmp_path, server.new_database())
    assert set(statuses) == {"complete"}
    assert 8 <= len(statuses) <= 10  # each process may begin one more


def test_processes_join_a_search_through_the_proxy(server: postgresql.Server, tmp_path: Path) -> None:
    project(tmp_path, 8)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = tiny.command("search-proxy", server.new_database(), "--port", str(port))
    proxy = subprocess.Popen(command, env=tiny.environment(), stderr=subprocess.PIPE, text=True)
    try:
        statuses = shared(tmp_path, f"grpc://localhost:{port}")
    finally:
        proxy.send_signal(signal.SIGINT)
        stderr = proxy.communicate(timeout=30)[1]
    assert set(statuses) == {"complete"}
    assert 8 <= len(statuses) <= 10
    assert f"grpc://localhost:{port}" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    "line",
    ["nonsense", "5", "null", "[]", "{}", '{"op_code": 99, "worker_id": ""}', pytest.param("[" * 100_000, id="deep")],
)
def test_journals_that_are_damaged(tmp_path: Path, line: str) -> None:
    (tmp_path / storage.JOURNAL).write_text(f"{line}\n{line}\n")
    with pytest.raises(StoreError, match=r"journal\.log: the journal of the search is damaged; restore it from a copy"):
        storage.opened(tmp_path)


def test_a_journal_on_a_full_disk_stays_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a line was written. The next process that writes removes it."""
    machine, other = Machine("a", tmp_path, monkeypatch), Machine("b", tmp_path, monkeypatch)
    trial = machine.ask()

    def full(handle: int) -> None:
        with (tmp_path / storage.JOURNAL).open("rb+") as stream:
            stream.truncate(stream.seek(0, os.SEEK_END) - 5)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("optuna.storages.journal._file.os.fsync", full)
        with pytest.raises(StoreError, match="the journal of the search cannot be written: the disk is full"):
            machine.tell(trial)
    assert other.tell(other.ask())
    assert machine.tell(trial)
    assert Machine("c", tmp_path, monkeypatch).statuses() == ["complete", "complete"]


def test_a_database_of_another_version_of_optuna(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/search.db"
    storage.close(storage.opened(url))
    with closing(sqlite3.connect(tmp_path / "search.db")) as connection:
        connection.execute("update alembic_version set version_num = 'v9.9.9'")
        connection.commit()
    with pytest.raises(PipelineError, match="the storage cannot be used: The runtime optuna version"):
        storage.opened(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql+psycopg://localhost:1/x", "the storage cannot be used"),
        ("postgresql+nodriver://localhost/x", "--storage"),
        ("grpc://localhost:port", "the storage cannot be used"),
        ("nonsense", "the storage cannot be used"),
    ],
)
def test_storages_that_cannot_be_used(
    coralline: Coralline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, says: str
) -> None:
    project(tmp_path, 2)
    done = coralline("search", "pipeline.yaml", "--storage", url)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_does_not_exist_is_refused(coralline: Coralline) -> None:
    done = coralline("search-proxy", "sqlite:///search.db", "--port", "99999")
    assert (done.returncode, done.stderr) == (2, "coralline: --port: 99999 is not a port; allowed: 1 to 65535\n")


def test_a_port_that_is_in_use_is_refused(coralline: Coralline) -> None:
    """Without the check, gRPC shares the port, and each client reaches one of two databases."""
    with closing(socket.socket()) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = coralline("search-proxy", "sqlite:///search.db", "--host", "127.0.0.1", "--port", str(port))
    assert done.returncode == 2
    expected = f"--port: the port {port} of 127.0.0.1 cannot be used: Address already in use; choose another --port"
    assert expected in done.stderr
    assert "searches use" not in done.stderr


def test_a_password_with_an_at_sign_is_refused_and_not_shown() -> None:
    with pytest.raises(PipelineError) as refusal:
        storage.opened("postgresql+psycopg://user:sec@ret@127.0.0.1:1/db")
    assert "write %40 for an @" in str(refusal.value)
    assert "ret" not in str(refusal.value).replace("--storage", "")


def test_a_proxy_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PROXY_S", 0.5)
    with pytest.raises(PipelineError, match="the storage cannot be used"):
        storage.opened("grpc://localhost:1")
