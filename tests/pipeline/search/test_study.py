"""The trials of a search in the database: processes that die, machines that join, and what the sampler learns."""

from __future__ import annotations

import importlib.util
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import postgresql
import pytest
import tiny

optuna = pytest.importorskip("optuna", reason="optuna is not installed: pip install -e '.[search]'")

from compress.core.errors import PipelineError, StoreError  # noqa: E402
from compress.core.measurement import Metric  # noqa: E402
from compress.pipeline.search import study as studies  # noqa: E402
from compress.pipeline.search.goals import LATENCY, Goals, Limit  # noqa: E402
from compress.pipeline.search.space import Range, Space  # noqa: E402
from compress.pipeline.search.study import RECORD, SearchStudy  # noqa: E402
from compress.pipeline.yaml_file import Document  # noqa: E402
from compress.results.search import TrialRecord  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage")  # `kill` does not use `optimize`
SPACE = Space(Document(Path(), {"x": 1.5, "stages": []}, {}), (Range("x", ("x",), 0.0, 1.0),))
ACCURACY = Metric("accuracy", "Accuracy", "fraction", "accuracy_drop", limited=True)
GOALS = Goals((ACCURACY, LATENCY), (Limit("latency_ms", LATENCY, 5, 5),), "usb3", ACCURACY)
WORKER = """
import sys, time
from pathlib import Path
from test_study import GOALS, SPACE, complete
from compress.pipeline.search import study

study.HEARTBEAT_S, study.GRACE_S = 1, 3
searching = study.SearchStudy(SPACE, GOALS, "shared", {}, 0, sys.argv[1], joins=True)
folder = Path(sys.argv[2])

def run(number, values):
    if sys.argv[3] == "dies":
        (folder / "began").touch()
        time.sleep(60)
    time.sleep(0.2)
    return complete(number, values)

while (statuses := [record.status for record in searching.records()]).count("complete") < 6 or "running" in statuses:
    searching.run_trial(run)
"""


def complete(number: int, values: dict[str, Any]) -> TrialRecord:
    result = {"accuracy": values["x"], "latency_ms": 1 + values["x"]}
    return TrialRecord(number, "complete", values, result, excess=GOALS.excess(result))


def interrupted(number: int, values: dict[str, Any]) -> TrialRecord:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def server() -> Iterator[postgresql.Server]:
    if postgresql.MISSING:
        pytest.skip(postgresql.MISSING)
    with postgresql.serving() as running_server:
        yield running_server


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., SearchStudy]]:
    """A function that opens the study as a new process does."""
    studies_open: list[SearchStudy] = []

    def of(url: str = f"sqlite:///{tmp_path}/search.db", **options: Any) -> SearchStudy:
        studies_open.append(SearchStudy(SPACE, GOALS, "shared", {}, 0, url, **options))
        return studies_open[-1]

    yield of
    for study in studies_open:
        study.close()


def statuses(study: SearchStudy) -> list[str]:
    return [record.status for record in study.records()]


def kill(study: SearchStudy) -> int:
    """Begin a trial, and leave it as a process does that was killed a while ago; return its number."""
    trial = study._study.ask()
    SPACE.suggest(trial)
    study._study._storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]
    time.sleep(2.1)
    return int(trial.number)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "HEARTBEAT_S", 1)
    monkeypatch.setattr(studies, "GRACE_S", 1)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_process_is_killed_in_a_trial(
    request: pytest.FixtureRequest, opened: Callable[..., SearchStudy], tmp_path: Path, database: str
) -> None:
    """Of two processes, the first one is killed. Nothing is lost, and nothing is counted twice."""
    url = f"sqlite:///{tmp_path}/shared.db"
    if database == "postgresql":
        url = request.getfixturevalue("server").new_database()
    study = opened(url)
    environment = {
        **tiny.environment(),
        "PYTHONPATH": ":".join(map(str, (tiny.ROOT, Path(__file__).parent, *sys.path))),
    }

    def started(how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, url, str(tmp_path), how]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    dies = started("dies")
    while not (tmp_path / "began").exists():
        assert dies.poll() is None, dies.communicate()[1]
        time.sleep(0.05)
    works = started("works")
    dies.send_signal(signal.SIGKILL)
    dies.communicate()
    assert works.communicate(timeout=120)[1] == ""
    records = study.records()
    assert {record.status for record in records} == {"complete", "interrupted"}
    (lost,) = (record for record in records if record.status == "interrupted")
    assert [record.settings for record in records].count(lost.settings) == 2  # run again, once


@pytest.mark.usefixtures("soon")
def test_a_trial_whose_process_dies_three_times_has_failed(opened: Callable[..., SearchStudy]) -> None:
    study = opened()
    for _ in range(3):
        kill(study)
        study.release_dead()
    assert statuses(study) == ["interrupted", "interrupted", "failed"]
    assert study.records()[2].reason == "its process ended 3 times"
    assert len({str(record.settings) for record in study.records()}) == 1
    assert not study.has_waiting()


@pytest.mark.usefixtures("soon")
def test_the_result_of_a_process_that_was_taken_for_dead_does_not_count(
    opened: Callable[..., SearchStudy], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = opened(), opened()
    monkeypatch.setattr(owner._study._storage._backend, "record_heartbeat", lambda trial: None)  # type: ignore[attr-defined]

    def late(number: int, values: dict[str, Any]) -> TrialRecord:
        trial = owner._study.get_trials(deepcopy=False)[number]
        other._study._storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]
        time.sleep(2.1)
        assert other.run_trial(complete) is not None
        return complete(number, values)

    assert owner.run_trial(late) is None
    assert statuses(other) == ["interrupted", "complete"]


def test_an_interrupted_trial_waits_and_the_seed_decides_the_others(tmp_path: Path, opened: Any) -> None:
    def chosen(name: str, end: int | None) -> list[Any]:
        study = opened(f"sqlite:///{tmp_path}/{name}.db")
        for number in range(5):
            if number == end:
                with pytest.raises(KeyboardInterrupt):
                    study.run_trial(interrupted)
                assert study.has_waiting()
            study.run_trial(complete)
        records = study.records()
        assert [record.reason for record in records if record.status == "interrupted"] == (
            [] if end is None else ["interrupted with Ctrl-C"]
        )
        return [record.settings for record in records if record.status == "complete"]

    assert chosen("a", None) == chosen("b", 3)


def test_what_the_sampler_learns_of_trials_without_a_result(opened: Callable[..., SearchStudy]) -> None:
    study = opened()
    study.run_trial(lambda number, values: TrialRecord(number, "failed", values))  # there is no worst value yet
    results = [(0.9, 3.0), (0.5, 1.0)]
    for accuracy, latency in results:
        values = {"accuracy": accuracy, "latency_ms": latency}
        study.run_trial(lambda n, settings, values=values: TrialRecord(n, "complete", settings, values))
    study.run_trial(lambda n, settings: TrialRecord(n, "stopped", settings, expected={"latency_ms": 7.0}))
    study.run_trial(lambda number, settings: TrialRecord(number, "failed", settings))
    study.run_trial(lambda number, settings: TrialRecord(number, "repeated", settings))
    trials = study._study.get_trials()
    assert [trial.state.name for trial in trials] == ["PRUNED", *["COMPLETE"] * 4, "FAIL"]
    assert [trial.values for trial in trials[3:5]] == [[0.5, 7.0], [0.5, 3.0]]
    limits = [trial.constraints["latency_ms"] for trial in trials[:5]]
    assert limits == pytest.approx([1.0, -0.4, -0.8, 0.4, 1.0])
    assert statuses(study) == ["failed", "complete", "complete", "stopped", "failed", "repeated"]


def test_a_choice_is_random_after_three_repeated_ones(opened: Callable[..., SearchStudy]) -> None:
    study = opened()
    samplers = []
    for status in (*["repeated"] * 4, "complete", "repeated"):
        study.run_trial(
            lambda n, settings, status=status: complete(n, settings) if status == "complete"
            else TrialRecord(n, status, settings)
        )  # fmt: skip
        samplers.append(type(study._study.sampler).__name__)
    usual = studies.sampler_name()
    assert samplers == [usual, usual, usual, "RandomSampler", "RandomSampler", usual]


@pytest.mark.parametrize("found", [None, "torch"])
def test_the_sampler_is_part_of_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[..., SearchStudy], found: str | None
) -> None:
    names = []
    for present in (found, None):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, present=present: present)
        names.append((studies.sampler_name(), opened().name))
    assert [name for name, _ in names] == ["GPSampler" if found else "TPESampler", "TPESampler"]
    assert (names[0] == names[1]) is (found is None)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install torch")
def test_gp_sampler_chooses_after_the_first_ten(opened: Callable[..., SearchStudy]) -> None:
    study = opened()
    for number in range(14):
        failing = number in (2, 11)
        study.run_trial(
            lambda n, values, failing=failing: TrialRecord(n, "failed", values) if failing else complete(n, values)
        )
    assert len({record.settings["x"] for record in study.records()}) == 14


def test_a_process_that_joins_waits_for_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[..., SearchStudy]
) -> None:
    url = f"sqlite:///{tmp_path}/later.db"
    monkeypatch.setattr(studies.time, "sleep", lambda seconds: opened(url))
    assert opened(url, joins=True).has_waiting()
    monkeypatch.setattr(studies, "START_S", 0.0)
    with pytest.raises(PipelineError, match=r"the search shared-\w+ is not in the database: .*without --join"):
        opened(f"sqlite:///{tmp_path}/never.db", joins=True)


@pytest.mark.parametrize("content", [{"number": 0, "status": "done"}, [], {"status": []}])
def test_a_record_that_is_damaged_is_an_error(opened: Callable[..., SearchStudy], content: Any) -> None:
    study = opened()
    trial = study._study.ask()
    SPACE.suggest(trial)
    trial.set_user_attr(RECORD, content)
    study._study.tell(trial, [0.5, 1.0])
    with pytest.raises(StoreError, match="the stored record of trial 0 is invalid"):
        study.records()


def test_a_database_that_is_away_for_a_moment_ends_no_trial(
    server: postgresql.Server, opened: Callable[..., SearchStudy]
) -> None:
    study = opened(server.new_database())

    def restarts(number: int, values: dict[str, Any]) -> TrialRecord:
        server.stop("immediate")
        server.start()
        return complete(number, values)

    assert study.run_trial(restarts) is not None
    server.stop("immediate")
    try:
        with pytest.raises(StoreError, match=r"the storage of the search cannot be used: .*no finished trial is lost"):
            study.run_trial(complete)
    finally:
        server.start()
    assert statuses(study) == ["complete"]


def test_a_database_of_another_version_of_optuna(tmp_path: Path, opened: Callable[..., SearchStudy]) -> None:
    opened()
    with closing(sqlite3.connect(tmp_path / "search.db")) as connection:
        connection.execute("update alembic_version set version_num = 'v9.9.9'")
        connection.commit()
    with pytest.raises(PipelineError, match="the storage cannot be used: The runtime optuna version"):
        opened()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql+psycopg://localhost:1/x", "the storage cannot be used"),
        ("postgresql+nodriver://localhost/x", "the storage cannot be used"),
        ("nonsense", "the storage cannot be used"),
        ("postgresql+psycopg://user:sec@ret@127.0.0.1:1/db", "write %40 for an @"),
    ],
)
def test_a_database_that_cannot_be_used(opened: Callable[..., SearchStudy], url: str, says: str) -> None:
    with pytest.raises(PipelineError) as refusal:
        opened(url)
    assert says in str(refusal.value)
    assert "ret@" not in str(refusal.value)
