"""Fraction and time left of a stage, from its reports, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from compress.core.progress import Phase
from compress.core.progress.time_left import StepTimes
from compress.core.progress.tracker import Tracker

SHORT, LONG = Phase("short", 1.0), Phase("long", 3.0)


class Clock:
    """A clock that stays at its time until a test changes it."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def tracker(clock: Clock) -> Tracker:
    return Tracker(lambda text: None, clock=clock)


def steps(work: Tracker, clock: Clock, count: int, total: int, seconds: float) -> None:
    """Report the first `count` of `total` steps, each of which takes `seconds` seconds."""
    for done in range(1, count + 1):
        clock.time += seconds
        work.update(done, total)


# --- fraction -------------------------------------------------------------------------


def test_without_a_plan_the_steps_are_all_of_the_work() -> None:
    work = tracker(Clock())
    assert work.reading().fraction is None
    work.update(3, 4, loss=0.5)
    assert work.reading().fraction == 0.75
    assert work.reading().metrics == {"loss": 0.5}
    assert (work.reading().done, work.reading().total) == (3, 4)


def test_phases_count_by_their_weight() -> None:
    work = tracker(Clock())
    work.plan(SHORT, LONG)
    assert work.reading().fraction == 0
    with work.phase(SHORT):
        work.update(1, 2)
        assert work.reading().fraction == pytest.approx(0.125)
        assert work.reading().phase_name == "short"
    assert work.reading().fraction == pytest.approx(0.25)
    with work.phase(LONG):
        work.plan(Phase("a"), Phase("b"))
        with work.phase(Phase("a")):
            work.update(1, 2)
            assert [phase.name for phase in work.reading().phases] == ["long", "a"]
            assert work.reading().fraction == pytest.approx(0.25 + 0.75 * 0.25)
    assert work.reading().fraction == 1


def test_a_phase_without_a_name_is_shown_by_the_one_around_it() -> None:
    work = tracker(Clock())
    with work.phase(Phase("fine-tuning")), work.phase(Phase("")):
        assert work.reading().phase_name == "fine-tuning"


def test_a_phase_that_was_not_announced_does_not_count() -> None:
    work = tracker(Clock())
    work.plan(SHORT, LONG)
    with work.phase(Phase("reading")):
        work.update(9, 10)
        assert work.reading().fraction == 0
        assert work.reading().total == 10
    assert work.reading().fraction == 0


def test_the_fraction_never_falls() -> None:
    work = tracker(Clock())
    work.update(8, 10)
    assert work.reading().fraction == 0.8
    work.update(1, 10)
    assert work.reading().fraction == 0.8
    work.plan(SHORT, LONG)
    assert work.reading().fraction == 0.8


def test_the_listener_hears_beginning_and_end_and_an_error_has_no_end() -> None:
    clock, heard = Clock(), []

    def listen(phases: Sequence[Phase], seconds: float | None) -> None:
        heard.append(([phase.name for phase in phases], seconds))

    work = Tracker(lambda text: None, listen, clock)

    def fail() -> None:
        with work.phase(SHORT):
            clock.time += 2
            with work.phase(LONG):
                clock.time += 3
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert heard == [(["short"], None), (["short", "long"], None), (["short", "long"], 3.0)]
    assert work.reading().phases == ()


# --- time left ------------------------------------------------------------------------


def test_nothing_is_estimated_from_the_first_step() -> None:
    """The first step traces the graph: it takes 10 s, and the others take 0.5 s."""
    clock = Clock()
    work = tracker(clock)
    clock.time += 10
    work.update(1, 100)
    assert work.reading().left is None
    for done in range(2, 11):
        clock.time += 0.5
        work.update(done, 100)
    assert work.reading().left == pytest.approx(45)


def test_no_estimate_from_too_little() -> None:
    clock = Clock()
    work = tracker(clock)
    steps(work, clock, 3, 1000, 0.01)  # enough steps, too little time
    assert work.reading().left is None
    clock = Clock()
    work = tracker(clock)
    steps(work, clock, 2, 10, 5.0)  # enough time, only one measured step
    assert work.reading().left is None


def test_the_estimate_follows_a_change_of_speed() -> None:
    clock = Clock()
    work = tracker(clock)
    steps(work, clock, 100, 1000, 1.0)
    for done in range(101, 501):
        clock.time += 0.1
        work.update(done, 1000)
    assert work.reading().left == pytest.approx(50, rel=0.05)  # not 500 steps at the mean of 0.28 s


def test_one_slow_step_changes_little() -> None:
    clock = Clock()
    work = tracker(clock)
    steps(work, clock, 60, 100, 1.0)
    before = work.reading().left
    clock.time += 5
    work.update(61, 100)
    assert before is not None
    assert work.reading().left == pytest.approx(before, rel=0.15)


def test_it_counts_down_between_reports_but_a_step_that_takes_long_is_not_done() -> None:
    clock = Clock()
    work = tracker(clock)
    steps(work, clock, 5, 10, 2.0)
    assert work.reading().left == pytest.approx(10)
    clock.time += 1
    assert work.reading().left == pytest.approx(9)
    clock.time += 60
    assert work.reading().left == pytest.approx(8)


def test_no_estimate_for_more_work_than_was_measured() -> None:
    clock = Clock()
    work = tracker(clock)
    work.plan(SHORT, LONG)
    with work.phase(SHORT):
        steps(work, clock, 6, 10, 1.0)
        assert work.reading().left_of_phase == pytest.approx(4)
        assert work.reading().left is None  # no estimate for three times the measured work
        steps(work, clock, 10, 10, 0.4)
    assert work.reading().left is None
    with work.phase(LONG):
        assert work.reading().left is None
        steps(work, clock, 5, 10, 2.0)
        assert work.reading().left == pytest.approx(10)


def test_a_later_phase_costs_what_its_weight_says() -> None:
    clock = Clock()
    work = tracker(clock)
    work.plan(LONG, SHORT)
    with work.phase(LONG):
        steps(work, clock, 6, 10, 1.5)
        assert work.reading().left == pytest.approx(4 * 1.5 + 15 / 3)
    with work.phase(SHORT):
        work.update(0, 1000)
        assert work.reading().left is None  # a phase with steps has a rate of its own later


def test_the_first_steps_of_many_are_no_rate() -> None:
    """Several of the first steps trace functions: two of them, of 4,000 that take 25 ms, say hours."""
    clock = Clock()
    work = tracker(clock)
    steps(work, clock, 3, 4000, 5.0)
    assert work.reading().left is None
    for done in range(4, 400):
        clock.time += 0.025
        work.update(done, 4000)
    assert work.reading().left == pytest.approx(3601 * 0.025, rel=0.1)


def test_a_short_phase_without_steps_costs_what_a_measured_one_says() -> None:
    clock = Clock()
    work = tracker(clock)
    work.plan(LONG, SHORT)
    with work.phase(LONG):
        steps(work, clock, 30, 30, 1.0)
    with work.phase(SHORT):
        assert work.reading().left == pytest.approx(10)
        clock.time += 25
        assert work.reading().left is None  # the phase takes longer than expected


def test_inside_an_announced_phase_that_is_open_twice() -> None:
    """A search enters a phase twice; the second time does not count."""
    work = tracker(Clock())
    work.plan(SHORT, LONG)
    for _ in range(2):
        with work.phase(SHORT):
            work.update(1, 2)
    assert work.reading().fraction == pytest.approx(0.25)


def test_another_total_begins_a_new_series() -> None:
    times = StepTimes()
    for done in range(10):
        times.record(done, 100, float(done))
    assert times.left(9.0) == pytest.approx(91)
    times.record(1, 50, 10.0)
    assert times.left(10.0) is None
