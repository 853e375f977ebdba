"""Fraction of a stage, from its reports."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from compress.core.progress import Phase
from compress.core.progress.tracker import Tracker

SHORT, LONG = Phase("short", 1.0), Phase("long", 3.0)


def tracker() -> Tracker:
    return Tracker(lambda text: None)


def test_without_a_plan_the_steps_are_all_of_the_work() -> None:
    work = tracker()
    assert work.reading().fraction is None
    work.update(3, 4, loss=0.5)
    assert work.reading().fraction == 0.75
    assert work.reading().metrics == {"loss": 0.5}
    assert (work.reading().done, work.reading().total) == (3, 4)


def test_phases_count_by_their_weight() -> None:
    work = tracker()
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
    work = tracker()
    with work.phase(Phase("fine-tuning")), work.phase(Phase("")):
        assert work.reading().phase_name == "fine-tuning"


def test_a_phase_that_was_not_announced_does_not_count() -> None:
    work = tracker()
    work.plan(SHORT, LONG)
    with work.phase(Phase("reading")):
        work.update(9, 10)
        assert work.reading().fraction == 0
        assert work.reading().total == 10
    assert work.reading().fraction == 0


def test_the_fraction_never_falls() -> None:
    work = tracker()
    work.update(8, 10)
    assert work.reading().fraction == 0.8
    work.update(1, 10)
    assert work.reading().fraction == 0.8
    work.plan(SHORT, LONG)
    assert work.reading().fraction == 0.8


def test_the_listener_hears_beginning_and_end_and_an_error_has_no_end() -> None:
    heard: list[tuple[list[str], bool]] = []

    def listen(phases: Sequence[Phase], seconds: float | None) -> None:
        heard.append(([phase.name for phase in phases], seconds is None))

    work = Tracker(lambda text: None, listen)

    def fail() -> None:
        with work.phase(SHORT):
            with work.phase(LONG):
                pass
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert heard == [(["short"], True), (["short", "long"], True), (["short", "long"], False)]
    assert work.reading().phases == ()


def test_inside_an_announced_phase_that_is_open_twice() -> None:
    """A search enters a phase twice; the second time does not count."""
    work = tracker()
    work.plan(SHORT, LONG)
    for _ in range(2):
        with work.phase(SHORT):
            work.update(1, 2)
    assert work.reading().fraction == pytest.approx(0.25)
