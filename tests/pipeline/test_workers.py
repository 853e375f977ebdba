"""A run on several workers, without TensorFlow: a stage that waits for all workers takes the place of a training."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
import worker_processes

from compress.core.artifact import Artifact, Facts
from compress.core.errors import CorallineError, PipelineError, StageError
from compress.core.execution import Execution
from compress.learning.context import Context
from compress.learning.training import strategies
from compress.learning.training.cluster import WorkerCluster
from compress.pipeline import runner, workers
from compress.pipeline.schema import Pipeline, load
from compress.pipeline.store import STORE, Store
from compress.report.record import RunRecord

ADDRESSES = ("localhost:2222", "localhost:2223", "localhost:2224")
MULTI = {"strategy": "multi_worker"}


class Together(tiny._Light):
    """A stage like a training: it needs all workers at the same time."""

    name: ClassVar[str] = "together"
    number: int = 0
    """A number that changes the key."""
    fails: bool = False
    """If true, the stage fails on the chief."""
    barrier: ClassVar[threading.Barrier]
    folders: ClassVar[list[Path]] = []

    def trains(self) -> bool:
        return True

    def run(self, artifact: Artifact, context: Context) -> Facts:
        assert context.unfinished is not None
        self.folders.append(context.unfinished)
        (context.unfinished / "state").touch()
        if self.fails and context.logs is not None:
            raise StageError("it cannot be trained")
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise StageError("lost a worker") from error
        return self.pass_on(artifact, context)


STAGES = {**tiny.STAGES, "together": Together}
Result = tuple[RunRecord | BaseException | None, tiny.Notes]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace TensorFlow, and shorten the waiting; return the indices of the workers that have met."""
    met: list[int] = []
    monkeypatch.setattr(
        strategies, "workers", lambda execution: _role.cluster if execution.strategy[:2] == "mu" else None
    )
    monkeypatch.setattr(strategies, "join", lambda execution, waiting: met.append(_role.cluster.index))
    for name, value in {"POLL_S": 0.01, "BEAT_S": 0.05, "LAST_WORD_S": 0.5}.items():
        monkeypatch.setattr(workers, name, value)
    Together.barrier = threading.Barrier(2, timeout=30)
    Together.folders.clear()
    return met


_role: Any = threading.local()


def project(folder: Path, *stages: Any, **keys: Any) -> Pipeline:
    return load(tiny.project(folder, stages, **{"execution": MULTI, "target": "cpu", **keys}), STAGES)


def start(out: Path, pipeline: Pipeline, index: int, *forced: str) -> Callable[[], Result]:
    """Start a worker in a thread; return the function that waits for its result."""
    notes = tiny.Notes()
    result: list[Any] = []

    def work() -> None:
        _role.cluster = WorkerCluster(ADDRESSES[:2], index)
        try:
            result.append(workers.run(pipeline, out, notes, frozenset(forced), Store(out / STORE)))
        except CorallineError as error:
            result.append(error)

    thread = threading.Thread(target=work)
    thread.start()

    def wait() -> Result:
        thread.join(60)
        assert not thread.is_alive()
        return result[0], notes

    return wait


def both(out: Path, pipeline: Pipeline, *forced: str) -> tuple[Result, Result]:
    """Run two workers at the same time; the second one starts first."""
    other = start(out, pipeline, 1, *forced)
    chief = start(out, pipeline, 0, *forced)
    return chief(), other()


def test_others_take_part_in_trainings_only(tmp_path: Path, quick: list[int]) -> None:
    pipeline = project(tmp_path, {"stamp": {"text": "a"}}, "together", "package")
    out = tmp_path / "runs"
    (record, chief), (nothing, other) = both(out, pipeline)
    assert isinstance(record, RunRecord)
    assert nothing is None
    assert tiny.statuses(record.to_json()) == dict.fromkeys(["model", "stamp", "together", "package"], "done")
    assert other.statuses == dict.fromkeys(["model", "stamp", "together", "package"], "cached")
    assert sorted(quick) == [0, 1]
    assert len(Together.folders) == 2
    assert sum(folder.parent.name == "unfinished" for folder in Together.folders) == 1  # the chief's
    assert tiny.unsound(out / ".store") == []
    assert chief.worked[-1] == "operator graph"
    assert not any("accuracy" in title for title in other.worked)


def test_nothing_is_trained_twice(tmp_path: Path, quick: list[int]) -> None:
    pipeline, out = project(tmp_path, "together"), tmp_path / "runs"
    both(out, pipeline)
    quick.clear()
    (record, _), (nothing, _) = both(out, pipeline)
    assert isinstance(record, RunRecord)
    assert set(tiny.statuses(record.to_json()).values()) == {"cached"}
    assert nothing is None
    assert quick == []
    assert start(out, pipeline, 1)()[0] is None  # without a chief, there is nothing to do
    assert len(Together.folders) == 2


def test_a_forced_stage_is_trained_again(tmp_path: Path) -> None:
    pipeline, out = project(tmp_path, "together"), tmp_path / "runs"
    both(out, pipeline)
    (record, _), (nothing, _) = both(out, pipeline, "together")
    assert isinstance(record, RunRecord)
    assert tiny.statuses(record.to_json())["together"] == "done"
    assert nothing is None
    assert len(Together.folders) == 4


def test_what_a_killed_chief_left_is_ignored(tmp_path: Path) -> None:
    pipeline, out = project(tmp_path, "together"), tmp_path / "runs"
    left = out / ".store" / "workers" / f"{workers._digest(WorkerCluster(ADDRESSES[:2], 0), pipeline)}.json"
    left.parent.mkdir(parents=True)
    left.write_text(json.dumps({"run": "killed", "beat": 7, "stage": "together", "key": "0", "together": True}))
    other = start(out, pipeline, 1)
    time.sleep(0.2)
    assert Together.folders == []
    record, _ = start(out, pipeline, 0)()
    assert isinstance(record, RunRecord)
    assert other()[0] is None


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"run": 1, "beat": "x"}', b'{"run": "a", "more": 1}', b"[" * 9**5]
)
def test_an_invalid_announcement_counts_as_none(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "announcement.json"
    path.write_bytes(content)
    reader = workers.Reader(path, "worker 0")
    assert reader.read() is None
    monkeypatch.setattr(workers, "START_S", -1.0)
    with pytest.raises(StageError, match="worker 0 did not start within"):
        reader.read()


def test_a_chief_that_falls_silent_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = workers.Board(tmp_path / "announcement.json")
    reader = workers.Reader(tmp_path / "announcement.json", "worker 0")
    board.announce(stage="a", key="b")
    now = reader.read()
    assert now is not None
    assert (now.stage, now.key, now.ended) == ("a", "b", None)
    monkeypatch.setattr(workers, "LOST_S", -1.0)
    with pytest.raises(StageError, match="lost worker 0"):
        reader.read()


@pytest.mark.parametrize("stages", [[{"together": {"fails": True}}], [{"fail": {}}, "together"]])
def test_others_say_why_the_chief_failed(tmp_path: Path, stages: Sequence[Any]) -> None:
    pipeline = project(tmp_path, *stages)
    Together.barrier = threading.Barrier(2, timeout=1)
    (failed, _), (error, _) = both(tmp_path / "runs", pipeline)
    assert isinstance(failed, StageError)
    assert isinstance(error, StageError)
    assert str(error).endswith(f"the chief: {failed}") or f"the chief: {failed}; " in str(error)


def test_other_settings_on_another_worker_are_an_error(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    other = start(out, project(tmp_path / "b", {"together": {"number": 2}}), 1)
    chief = start(out, project(tmp_path / "a", {"together": {"number": 1}}), 0)
    error, _ = other()
    Together.barrier.abort()
    chief()
    assert isinstance(error, StageError)
    assert "together: the chief makes this stage from something else; use the same pipeline file" in str(error)


def test_what_cannot_run_on_several_workers_is_refused(tmp_path: Path) -> None:
    pipeline = project(tmp_path, "together")
    with pytest.raises(PipelineError, match="multi_worker is for `python -m compress run` alone"):
        runner.run(pipeline, tmp_path / "runs", tiny.Notes())
    with pytest.raises(PipelineError, match="a recipe tries several"):
        project(tmp_path, recipe="auto")
    keras: dict[str, Any] = {"model": {"builder": "digits_cnn"}, "data": {"source": {"digits": {}}}}
    for stage in ("sparsify", {"quantize": {"method": "qat", "engine": "tfmot"}}):
        with pytest.raises(PipelineError, match="tfmot cannot train on several workers"):
            project(tmp_path, "train", stage, **keras)
    for strategy in ("multi_worker", "mirrored"):
        with pytest.raises(PipelineError, match="steps_per_execution: devices exchange gradients after every step"):
            project(tmp_path, "together", execution={"strategy": strategy, "steps_per_execution": 2})
        with pytest.raises(PipelineError, match="jit_compile: XLA cannot exchange gradients between devices"):
            project(tmp_path, "together", execution={"strategy": strategy, "jit_compile": True})
    assert Execution(jit_compile=True, steps_per_execution=2)


def test_the_command_says_what_is_missing(tmp_path: Path, coralline: tiny.Coralline) -> None:
    tiny.project(tmp_path, [], execution=MULTI, target="cpu")
    done = coralline("pipeline.yaml")
    assert done.returncode == 2
    assert "TF_CONFIG: strategy: multi_worker needs the addresses of all workers" in done.stderr


def test_tf_config_without_workers_is_noted(
    tmp_path: Path, coralline: tiny.Coralline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", worker_processes.tf_config(ADDRESSES, 0))
    tiny.project(tmp_path, [], target="cpu")
    done = coralline("pipeline.yaml")
    assert done.returncode == 0, done.stderr
    assert "TF_CONFIG is set, but is used with `execution: {strategy: multi_worker}` only" in done.stderr
