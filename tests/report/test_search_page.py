"""The page of a search: its table, its drawings, and hostile names."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from compress.core.measurement import SIZES, Measurement, Metric
from compress.report import search_page
from compress.results.search import FrontPoint, SearchRecord, TrialRecord

ACCURACY = Metric("accuracy", "Accuracy", "fraction", "accuracy_drop", limited=True)
LATENCY = Metric("latency_ms", "Predicted latency", "ms", "latency_ratio")
SIZE = SIZES[2]


def trial(number: int, accuracy: float, latency: float, **others: Any) -> TrialRecord:
    values = {"accuracy": accuracy, "latency_ms": latency, "size_bytes": 40_000 * latency}
    return TrialRecord(number, others.pop("status", "complete"), {"model.width": 0.1 * number}, values, **others)


TRIALS = (
    trial(0, 0.90, 1.0),
    trial(1, 0.80, 0.5),
    trial(2, 0.85, 1.2),
    trial(3, 0.95, 9.0, excess={"fits_cache": 0.4}),
    TrialRecord(4, "stopped", {"model.width": 3.0}, reason="latency_ms is predicted to be 12, and the limit is 5"),
    TrialRecord(5, "failed", {"model.width": 4.0}, reason="train: not enough memory"),
)
TEST = Measurement(0.88, "fraction", "measured", 0.85, 0.91, "test split, 500 samples")
FRONT = (
    FrontPoint(0, "groceries-0", "groceries-0/groceries-0.coralline", "groceries-0/model.tflite", TEST, "usable"),
    FrontPoint(1, "groceries-1", verdict="failed"),
)
RECORD = SearchRecord(
    name="groceries",
    status="complete",
    objectives=(ACCURACY, LATENCY, SIZE),
    constraints=("all parameters fit the cache",),
    host="usb3",
    sampler="GPSampler",
    settings={"model.width": "0.25 to 2, logarithmic"},
    trials=TRIALS,
    front=FRONT,
    recommended=0,
    reason="it has the best accuracy",
    hint="",
    notes=("The complete run of trial 1 failed: no space",),
    seconds=120.0,
    finished="2026-11-25T12:00:00+00:00",
    coralline="0.1.0",
)


def test_the_page_has_a_drawing_for_each_pair_of_objectives() -> None:
    page = search_page.page(RECORD)
    assert page.count("<svg") == 2
    idents = re.findall(r' id="([^"]+)"', page)
    assert len(idents) == len(set(idents))
    assert "Trial 0 is recommended: it has the best accuracy." in page
    assert page.count('class="cut">') == 2  # the trial that violates a condition
    assert 'href="groceries-0/report.html"' in page
    assert "violates fits_cache" in page
    assert "latency_ms is predicted to be 12, and the limit is 5" in page
    assert "6 trials: 4 complete, 1 stopped, 1 failed." in page
    assert "Not drawn: 2 trials without a result or with the settings of another one." in page


def test_the_text_has_the_front_with_the_test_split() -> None:
    text = search_page.text(RECORD)
    assert "groceries-0/groceries-0.coralline" in text
    assert "0.880" in text
    assert "39.1 KiB" in text
    assert "The complete run of trial 1 failed: no space." in text


def test_a_trial_within_the_budget_that_another_one_beats_is_not_on_the_line() -> None:
    line = re.compile(r'<polyline points="([^"]*)" class="way"')
    record = replace(RECORD, objectives=(ACCURACY, LATENCY))
    last = replace(FRONT[-1], is_dominated=True)
    marked = replace(record, front=(*FRONT[:-1], last))
    points = [len(line.findall(search_page.page(shown))[0].split()) for shown in (record, marked)]
    assert points == [len(FRONT), len(FRONT) - 1]
    assert f"All of them exceed the budget, except {last.number}: the best trials within it." in search_page.page(
        marked
    )


def test_one_objective_is_drawn_in_the_order_of_the_trials() -> None:
    page = search_page.page(replace(RECORD, objectives=(ACCURACY,)))
    assert page.count("<svg") == 1
    assert "of each complete trial, in their order" in page


UNMEASURED = tuple(replace(trial_record, values={}, excess={"accuracy": 1.0}) for trial_record in TRIALS[:4])


@pytest.mark.parametrize("trials", [(), TRIALS[4:], UNMEASURED])
def test_without_a_complete_trial(trials: tuple[TrialRecord, ...]) -> None:
    record = replace(RECORD, trials=trials, front=(), recommended=None, reason="no trial is complete")
    page = search_page.page(record)
    assert "<svg" not in page
    assert "No complete trial has accuracy and predicted latency." in page
    assert "<svg" not in search_page.page(replace(record, objectives=(ACCURACY,)))
    assert "No trial is recommended: no trial is complete." in search_page.text(record)


def test_a_long_search_has_a_page_that_a_browser_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_page, "MAX_ROWS", 2)
    monkeypatch.setattr(search_page, "MAX_DRAWN", 2)
    page = search_page.page(replace(RECORD, objectives=(ACCURACY, LATENCY)))
    assert "The last 2 trials; search.json has all" in page
    assert "Not drawn: 2 trials without a result, with the settings of another one or older than the last 2." in page
    assert [number for number in range(6) if f"<title>trial {number}:" in page] == [0, 1, 2, 3]  # with the front
    few = replace(RECORD, objectives=(ACCURACY, LATENCY), front=FRONT[:1])
    assert [number for number in range(6) if f"<title>trial {number}:" in search_page.page(few)] == [0, 2, 3]


def test_equal_values_and_hostile_names_are_drawn() -> None:
    hostile = "<script>alert(1)</script>"
    same = tuple(replace(TRIALS[0], number=number, settings={hostile: hostile}) for number in range(3))
    page = search_page.page(
        replace(RECORD, name=hostile, trials=same, front=RECORD.front[:1], settings={hostile: hostile})
    )
    assert "<script" not in page
    assert "nan" not in page.lower().split("<svg", 1)[1].split("</svg>")[0]
