"""Profiles: phases of stages, steps of trainings, and the command's option."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from blobs import Blobs, context

from compress.core.profiling import Profile, TrainingTimes
from compress.core.progress import Phase, SilentProgress
from compress.learning.context import Execution
from compress.learning.training import batches as preparation
from compress.learning.training import callbacks as monitoring
from compress.learning.training.callbacks import TrainingTimer
from compress.pipeline.schema import load


def test_phases_add_up_under_the_names_around_them(tmp_path: Path) -> None:
    profile = Profile(tmp_path)  # a folder with the traces of an earlier run
    progress = profile.watching(SilentProgress())
    for _ in range(2):
        with progress.phase(Phase("search")), progress.phase(Phase("")), progress.phase(Phase("ranges")):
            progress.update(1, 2)
            time.sleep(0.01)
    facts = profile.to_json()
    assert [*facts["phases"]] == ["search, ranges", "search"]
    assert all(seconds >= 0.02 for seconds in facts["phases"].values())
    assert (facts["trainings"], facts["trace"]) == ([], None)


def test_the_option_is_the_key(tmp_path: Path) -> None:
    path = tiny.project(tmp_path)
    assert load(path).profiled().head.execution == Execution(profile=True)
    assert load(tiny.project(tmp_path, execution={"profile": True})).head.execution == Execution(profile=True)


def test_a_run_with_the_option(tmp_path: Path, coralline: tiny.Coralline) -> None:
    path = tiny.project(tmp_path)
    assert coralline(path, "--profile", "--out", tmp_path / "out").returncode == 0
    record = json.loads((tmp_path / "out" / "tiny" / "report.json").read_text())
    assert all("phases" in stage["facts"]["profile"] for stage in record["stages"] if stage["status"] == "done")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([3.01, 0.01, 0.01], TrainingTimes(3010.0, 10.0, 0.0, 2)),
        ([3.04], TrainingTimes(3040.0, None, 0.0, 0)),
    ],
)
def test_tracing_belongs_to_the_first_step(tmp_path: Path, seconds: list[float], expected: TrainingTimes) -> None:
    profile = Profile(tmp_path)
    timer = TrainingTimer(profile)
    timer._seconds.extend(seconds)
    timer.record([])
    assert profile.trainings == [expected]


def test_a_training_is_in_a_phase(tmp_path: Path) -> None:
    profile = Profile(tmp_path)
    timer = TrainingTimer(profile)
    timer._seconds.extend([3.0, 1.0])
    progress = profile.watching(SilentProgress())
    with progress.phase(Phase("pruning")), progress.phase(Phase("")), progress.phase(Phase("trial")):
        timer.record([])
    assert profile.trainings[0].phase == "pruning, trial"
    assert profile.phase == ""


@pytest.mark.parametrize(
    ("threads", "batches", "expected_ms"),
    [
        (2, 1000, 10),
        (8, 1000, 10),
        (8, 20, 10),
        (200, 1000, 12.5),  # too slow for a second burst: with the start
        (200, 10, 250),
        (2, 0, 0),
    ],
)
def test_threads_prepare_batches_in_bursts(
    monkeypatch: pytest.MonkeyPatch, threads: int, batches: int, expected_ms: float
) -> None:
    now = 0.0

    def prepared() -> Iterator[int]:
        nonlocal now
        now += 0.5  # the start
        for number in range(batches):
            now += 0.01 * threads if number % threads == 0 else 0.0
            yield number

    monkeypatch.setattr(preparation, "THREADS", threads)
    monkeypatch.setattr(monitoring, "monotonic", lambda: now)
    assert monitoring._reading_ms(prepared()) == pytest.approx(expected_ms)


@pytest.mark.tensorflow
@pytest.mark.parametrize("epochs", [1, 4])
def test_steps_of_a_training(keras: Any, tmp_path: Path, epochs: int) -> None:
    from compress.learning.training import loop

    class FailedError(Exception):
        pass

    class Fail(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 4:  # a step of the trace
                raise FailedError

    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(2, "softmax")])
    settings = loop.TrainingSettings(epochs=epochs, batch_size=20)
    failing = replace(context(Blobs(), tmp_path), profile=Profile(tmp_path / "failed"))
    with pytest.raises(FailedError):
        loop.fit(model, loop.own_loss(model, failing), settings, failing, [lambda trained: Fail()])
    stage_context = replace(context(Blobs(), tmp_path), profile=Profile(tmp_path / "trace"))
    assert stage_context.profile is not None
    loop.fit(model, loop.own_loss(model, stage_context), settings, stage_context)
    (times,) = stage_context.profile.trainings
    assert times.steps == 5 * epochs - 1
    assert times.step_ms is not None
    assert times.first_step_ms > times.step_ms > 0
    assert times.input_ms > 0
    (trace,) = (tmp_path / "trace").glob("plugins/profile/*/*.xplane.pb")  # where TensorBoard looks
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    planes = xplane_pb2.XSpace.FromString(trace.read_bytes()).planes
    assert any(line.events for plane in planes for line in plane.lines)
    assert stage_context.profile.to_json()["trace"] == str(tmp_path / "trace")
