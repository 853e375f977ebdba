"""The progress line as text: its content, and the parts that it omits if there is little space."""

from __future__ import annotations

from typing import Any

import pytest

from compress.core.progress import Phase, RunStep
from compress.core.progress.tracker import Reading
from compress.surface.cli import progress_line

JOB = RunStep("prune", 3, 7)
TUNING = Phase("fine-tuning")
EPOCHS = Phase("", rounds=40, references={"loss": 2.3026})


def reading(**changes: Any) -> Reading:
    values: dict[str, Any] = {
        "phases": (TUNING, EPOCHS),
        "done": 21,
        "total": 400,
        "fraction": 0.43,
        "elapsed": 31.0,
        "left": 41.0,
        "left_of_phase": 30.0,
        "metrics": {"loss": 0.2134, "accuracy": 0.93},
    }
    return Reading(**(values | changes))


def texts(width: int, job: RunStep = JOB, **changes: Any) -> list[str]:
    return progress_line.fitted(progress_line.parts(job, reading(**changes), 123.0), width)


def test_everything_where_there_is_space() -> None:
    assert texts(200) == [
        *("[3/7]", "prune", "fine-tuning", "epoch 3 of 40", "43%", "0:31", "about 40 s left"),
        *("loss 0.213 (guessing 2.30)", "accuracy 0.930", "run 2:03"),
    ]


def test_a_probe_has_no_number_and_the_first_stage_no_time_of_the_run() -> None:
    assert texts(200, RunStep("latency"), phases=(), total=0, metrics={}) == [
        "latency",
        "43%",
        "0:31",
        "about 40 s left",
    ]
    assert "run 2:03" not in texts(200, RunStep("model", 1, 7))


@pytest.mark.parametrize("width", range(1, 160))
def test_it_fits_into_every_width_and_keeps_the_stage(width: int) -> None:
    line = progress_line.SEPARATOR.join(texts(width))
    assert len(line) <= width
    assert line.startswith(("[3/7]", "prune")) or "prune".startswith(line.rstrip("…"))


def test_percentage_and_time_left_stay_longest() -> None:
    assert texts(27) == ["prune", "43%", "about 40 s left"]
    assert texts(12) == ["prune", "43%"]


@pytest.mark.parametrize(
    ("phase", "done", "total", "expected"),
    [
        (Phase("x", unit="sample"), 1200, 31_000, "sample 1,200 of 31,000"),
        (Phase("x"), 0, 0, ""),
        (Phase("x", rounds=4), 0, 40, "epoch 1 of 4"),
        (Phase("x", rounds=4), 10, 40, "epoch 1 of 4"),
        (Phase("x", rounds=4), 11, 40, "epoch 2 of 4"),
        (Phase("x", rounds=4), 40, 40, "epoch 4 of 4"),
        (Phase("x", rounds=4, round_unit="turn"), 3, 2, "turn 3 of 4"),
        (Phase("x", rounds=1), 7, 40, "step 7 of 40"),
        (Phase("x"), 0, 5, "step 1 of 5"),
        (Phase("x", unit="layer"), 9, 8, "layer 8 of 8"),
    ],
)
def test_steps(phase: Phase, done: int, total: int, expected: str) -> None:
    assert progress_line.steps(reading(phases=(phase,), done=done, total=total)) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        *((0, "a few seconds"), (9.9, "a few seconds"), (12, "about 10 s"), (57, "about 55 s"), (58, "about 1 min")),
        *((150, "about 2 min"), (3500, "about 58 min"), (3600, "about 1 h"), (4900, "about 1 h 20 min")),
        *((40_000, "about 11 h"), (200_000, "about 2 days")),
    ],
)
def test_estimates_are_round(seconds: float, expected: str) -> None:
    assert progress_line.about(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.4, "0:00"), (67, "1:07"), (3600, "1:00:00"), (90_061, "25:01:01")]
)
def test_clock(seconds: float, expected: str) -> None:
    assert progress_line.clock(seconds) == expected


def test_100_percent_is_the_end() -> None:
    assert [progress_line.percent(value) for value in (0, 0.0099, 0.999, 1)] == ["0%", "0%", "99%", "100%"]


def test_no_time_left_in_the_first_seconds_and_that_of_the_phase_where_the_stage_has_none() -> None:
    assert progress_line.left(reading(elapsed=1.0)) == ""
    assert progress_line.left(reading(left=None)) == "about 30 s left of fine-tuning"
    assert progress_line.left(reading(left=None, left_of_phase=None)) == "estimating the time left"
    assert progress_line.left(reading(left=None, left_of_phase=None, fraction=None)) == ""


def test_a_plain_line() -> None:
    line = "[3/7] prune: fine-tuning, epoch 3 of 40, 43%, 0:31, about 40 s left, "
    line += "loss 0.213 (guessing 2.30), accuracy 0.930"
    assert progress_line.plain(JOB, reading()) == line
    assert progress_line.plain(RunStep("latency"), reading(phases=(), total=0, metrics={})).startswith("latency: 43%, ")


def test_large_and_small_metrics() -> None:
    assert progress_line.metric("loss", 123_456.0, {}) == "loss 1.23e+05"
    assert progress_line.metric("loss", float("nan"), {}) == "loss nan"


def test_the_bar() -> None:
    assert progress_line.bar(0.5, 10, filled="#", empty=".") == ("#####", ".....")
    assert progress_line.bar(None, 4, filled="#", empty=".") == ("", "....")
    assert progress_line.bar(1.0, 4, filled="#", empty=".") == ("####", "")
