"""The decisions of a search: the front, the early end of trials, and the recommendation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compress.core.measurement import SIZES, Metric
from compress.pipeline.search.early_stop import LEAST_SEEN, TrialProgress, expected, reason_to_stop
from compress.pipeline.search.goals import (
    CACHED,
    LATENCY,
    ON_CPU,
    STREAMED,
    WHOLE,
    Goals,
    Limit,
    dominates,
    front,
    losses,
)
from compress.pipeline.search.recommendation import Recommendation, recommend, to_complete
from compress.results.search import TrialRecord

ACCURACY = Metric("accuracy", "Accuracy", "fraction", "accuracy_drop", limited=True)
SIZE = SIZES[2]
GOALS = Goals((ACCURACY, LATENCY), (), "usb3", ACCURACY)


def trial(number: int, accuracy: float, latency: float, **others: Any) -> TrialRecord:
    values = {"accuracy": accuracy, "latency_ms": latency, "size_bytes": 1000 * latency, **others.pop("values", {})}
    return TrialRecord(number, others.pop("status", "complete"), values=values, **others)


def test_the_front_has_what_nothing_beats_in_everything() -> None:
    trials = [
        trial(0, 0.90, 3.0),
        trial(1, 0.80, 1.0),
        trial(2, 0.85, 3.0),  # dominated by 0
        trial(3, 0.90, 3.0),  # equal to 0
        trial(4, 0.99, 0.5, excess={"fits_cache": 0.1}),
        trial(5, 0.99, 0.5, status="stopped"),
        trial(6, 0.70, 1.0),  # dominated by 1
        trial(7, 0.95, 9.0, excess={"fits_cache": 0.0}),
    ]
    assert [record.number for record in front(trials, GOALS.objectives)] == [7, 0, 1]
    assert [record.number for record in front(trials, (LATENCY,))] == [1]
    assert dominates((1, 2), (1, 3))
    assert not dominates((1, 2), (1, 2))
    assert not dominates((1, 3), (2, 2))


def test_the_front_of_three_objectives_is_that_of_all_comparisons() -> None:
    random = np.random.default_rng(0)
    objectives = (ACCURACY, LATENCY, SIZE)
    trials = [
        trial(number, accuracy, latency, values={"size_bytes": size})
        for number, (accuracy, latency, size) in enumerate(random.integers(0, 20, (200, 3)).astype(float).tolist())
    ]
    points = {record.number: losses(record.values, objectives) for record in trials}
    best = {point for point in points.values() if not any(dominates(other, point) for other in points.values())}
    assert 3 < len(best) < len(trials)
    assert [points[record.number] for record in front(trials, objectives)] == sorted(best)


def test_constraints_and_unknown_quantities() -> None:
    limits = (Limit(WHOLE, ON_CPU, 0, 1), Limit(CACHED, STREAMED, 0, 8e6), Limit("latency_ms", LATENCY, 5, 5),
              Limit("accuracy", ACCURACY, 0.9, 0.9))  # fmt: skip
    goals = Goals((ACCURACY, SIZE), limits, "usb3", ACCURACY)
    values = {"accuracy": 0.81, "size_bytes": 1.0, "cpu_share": 0.25, "streamed_bytes": 0, "latency_ms": 4}
    excess = goals.excess(values)
    assert excess == pytest.approx({"mapped_whole": 0.25, "fits_cache": 0, "latency_ms": -0.2, "accuracy": 0.1})
    assert goals.excess({}) == dict.fromkeys(("accuracy", "size_bytes", *excess), 1.0)
    assert [limit.in_words() for limit in limits] == [
        "all operators run on the accelerator",
        "all parameters fit the cache",
        "latency_ms of at most 5",
        "accuracy of at least 0.9",
    ]


def state(quality: float | None = None, stage: str = "train", **costs: float) -> TrialProgress:
    return TrialProgress(stage, ("train", "quantize"), quality, costs)


def test_a_predicted_cost_over_a_limit_ends_a_trial_before_its_training() -> None:
    goals = Goals((ACCURACY, LATENCY), (Limit("latency_ms", LATENCY, 5, 5),), "usb3", ACCURACY)
    assert reason_to_stop(state(latency_ms=5.2), goals, []) == ""  # predictions are not exact
    expected = "latency_ms is predicted to be 7.1, and the limit is 5"
    assert reason_to_stop(state(latency_ms=7.1), goals, []) == expected
    on_chip_goals = Goals((ACCURACY, LATENCY), (Limit(WHOLE, ON_CPU, 0, 1),), "usb3", ACCURACY)
    assert "cpu_share is predicted to be 0.1" in reason_to_stop(state(cpu_share=0.1), on_chip_goals, [])


def test_predictions_that_were_wrong_in_this_search_end_no_trial() -> None:
    goals = Goals((ACCURACY, LATENCY), (Limit("latency_ms", LATENCY, 5, 5),), "usb3", ACCURACY)
    right = trial(0, 0.9, 4.0, predicted={"latency_ms": 4.1})
    wrong = trial(1, 0.9, 3.0, predicted={"latency_ms": 4.0})
    assert reason_to_stop(state(latency_ms=7.1), goals, [right])
    assert not reason_to_stop(state(latency_ms=7.1), goals, [right, wrong])


def seen(count: int) -> list[TrialRecord]:
    """Complete trials whose quality rises by at most 0.02 after `train`."""
    return [trial(i, 0.90, 3.0 + i, stages={"train": 0.88 + 0.01 * (i % 3), "quantize": 0.90}) for i in range(count)]


def test_a_quality_that_cannot_reach_the_front_ends_a_trial() -> None:
    hopeless = state(0.7, latency_ms=4.0)
    reason = reason_to_stop(hopeless, GOALS, seen(LEAST_SEEN))
    assert reason == (
        "accuracy is 0.7 after train, and 0.72 with the largest gain so far; trial 0 is better in every objective"
    )
    assert not reason_to_stop(hopeless, GOALS, seen(LEAST_SEEN - 1))
    assert not reason_to_stop(state(0.7, latency_ms=2.9), GOALS, seen(9))  # less accurate, and faster than all
    assert not reason_to_stop(state(0.7), GOALS, seen(9))  # the cost is not known yet
    assert not reason_to_stop(state(0.885, latency_ms=4.0), GOALS, seen(9))
    assert not reason_to_stop(state(None, latency_ms=4.0), GOALS, seen(9))
    others = [TrialRecord(record.number, "complete", values=record.values, stages={"prune": 0.9}) for record in seen(9)]
    assert not reason_to_stop(hopeless, GOALS, others)


def test_a_quality_that_cannot_reach_a_limit_ends_a_trial() -> None:
    goals = Goals((ACCURACY, LATENCY), (Limit("accuracy", ACCURACY, 0.85, 0.85),), "usb3", ACCURACY)
    assert reason_to_stop(state(0.8), goals, seen(LEAST_SEEN)).endswith("the limit is 0.85")
    assert not reason_to_stop(state(0.84), goals, seen(LEAST_SEEN))


FRONT = [trial(3, 0.95, 9.0, original=0.96), trial(1, 0.93, 4.0, original=0.94), trial(2, 0.80, 1.0, original=0.85)]


@pytest.mark.parametrize(
    ("budget", "number", "reason"),
    [
        (
            {},
            1,
            "without a budget, it is the one of the 3 trials on the front that is nearest to",
        ),
        ({"latency_ms": 5}, 1, "it has the best accuracy, 0.930, of the 2 trials on the front that meet the budget"),
        ({"accuracy_drop": 0.04}, 1, "it has the best predicted latency, 4.00 ms, of the 2 trials on the front that"),
        ({"accuracy_drop": 0.2}, 2, "from the best original of the search, so accuracy of 0.76"),
        ({"size_bytes": 2000, "accuracy_drop": 0.2}, 2, "size_bytes of at most 2000 and accuracy_drop of at most 0.2"),
        ({"latency_ms": 0.5}, None, "no trial meets the budget (latency_ms of at most 0.5); trial 2 is the nearest"),
        ({"accuracy_drop": 0.001}, None, "trial 3 is the nearest"),
    ],
)
def test_the_recommendation_for_a_budget(budget: dict[str, float], number: int | None, reason: str) -> None:
    recommendation = recommend(to_complete(FRONT, GOALS, budget, ACCURACY), FRONT, GOALS, budget, ACCURACY)
    assert recommendation.number == number
    assert reason in recommendation.reason
    assert recommendation.hint == ("" if number is not None else "allow more, or widen the ranges")


def test_a_budget_for_a_quantity_that_is_not_an_objective_extends_the_front() -> None:
    large, small = trial(0, 0.98, 1.0, values={"size_bytes": 4e5}), trial(1, 0.97, 1.1, values={"size_bytes": 2.5e5})
    smaller = trial(2, 0.90, 1.2, values={"size_bytes": 2e5})
    trials, budget = [large, small, smaller], {"size_bytes": 3e5}
    assert to_complete(trials, GOALS, {}, ACCURACY) == [large]
    completed = to_complete(trials, GOALS, budget, ACCURACY)
    assert completed == [large, small]
    recommendation = recommend(completed, trials, GOALS, budget, ACCURACY)
    expected = "it is the only trial that meets the budget (size_bytes of at most 300000)"
    assert recommendation == Recommendation(1, f"{expected}; all trials on the front exceed it")
    recommendation = recommend([large], trials, GOALS, budget, ACCURACY)
    expected = "the complete runs of all trials that meet the budget (size_bytes of at most 300000) failed"
    assert recommendation == Recommendation(None, expected)
    assert to_complete(trials, GOALS, {"size_bytes": 1e5}, ACCURACY) == [large]


def test_a_small_difference_of_a_cost_decides_nothing() -> None:
    trials = [trial(0, 0.52, 0.674), trial(1, 0.46, 0.665), trial(2, 0.31, 0.663)]
    assert recommend(trials, trials, GOALS, {}, ACCURACY).number == 0
    slow = [trial(0, 0.52, 2.674), *trials[1:]]
    assert recommend(slow, slow, GOALS, {}, ACCURACY).number == 1


def test_a_budget_without_an_objective_that_is_a_cost() -> None:
    f1 = Metric("macro_f1", "Macro F1", "fraction", "macro_f1_drop")
    goals = Goals((ACCURACY, f1), (), "usb3", ACCURACY)
    trials = [trial(n, accuracy, 1.0, original=0.9, values={"macro_f1": f}) for n, accuracy, f in
              ((0, 0.9, 0.7), (1, 0.85, 0.8), (2, 0.5, 0.9))]  # fmt: skip
    recommendation = recommend(trials, trials, goals, {"accuracy_drop": 0.1}, ACCURACY)
    assert recommendation.number in (0, 1)
    assert recommendation.reason.startswith(
        "it is the one of the 2 trials on the front that meet the budget (accuracy_drop of at"
    )


def test_a_drop_is_from_the_best_original_of_all_trials() -> None:
    beaten = trial(9, 0.5, 20.0, original=0.99)
    assert recommend(FRONT, [*FRONT, beaten], GOALS, {"accuracy_drop": 0.04}, ACCURACY).number == 3


def test_a_drop_from_an_unknown_original_is_not_held() -> None:
    trials = [trial(0, 0.9, 1.0)]
    recommendation = recommend(trials, trials, GOALS, {"accuracy_drop": 0.1}, ACCURACY)
    assert recommendation.number is None
    expected = "(accuracy_drop of at most 0.1, and the accuracy of the original is unknown); trial 0 is the"
    assert expected in recommendation.reason


def test_an_error_is_limited_relative_to_the_original() -> None:
    error = Metric("mae", "Mean absolute error", "", "mae_increase", limited=True)
    goals = Goals((error, LATENCY), (), "usb3", error)
    trials = [TrialRecord(n, "complete", values={"mae": mae, "latency_ms": ms}, original=2.0)
              for n, mae, ms in ((0, 2.1, 5.0), (1, 2.3, 2.0), (2, 3.0, 1.0))]  # fmt: skip
    assert [record.number for record in front(trials, goals.objectives)] == [0, 1, 2]
    assert recommend(trials, trials, goals, {"mae_increase": 0.2}, error).number == 1


FAR = trial(0, 0.9, 9.0, excess={"latency_ms": 0.8})
NEAR = trial(1, 0.7, 6.0, excess={"latency_ms": 0.2})
FAILED = trial(2, 1, 1, status="failed", reason="not enough memory")
STOPPED = trial(3, 1, 1, status="stopped", reason="latency_ms is predicted to be 9, and the limit is 5")
UNKNOWN = TrialRecord(4, "complete", values={"accuracy": 0.9}, excess={"latency_ms": 1.0}, reason="unknown operator")


@pytest.mark.parametrize(
    ("trials", "reason", "hint"),
    [
        ([], "no trial ended", "allow more"),
        ([FAILED], "no trial is complete, and 1 failed, the last one: not enough memory", "failed trials are not"),
        ([STOPPED], "no trial is complete; the last one was stopped: latency_ms is predicted to be 9", "allow more"),
        ([FAR, FAILED, NEAR], "meets all constraints; trial 1 is the nearest, and violates latency_ms", "allow more"),
        ([UNKNOWN], "trial 4 is the nearest, and has no latency_ms: unknown operator", ""),
    ],
)
def test_the_reason_without_a_trial_that_meets_the_constraints(
    trials: list[TrialRecord], reason: str, hint: str
) -> None:
    recommendation = recommend(to_complete(trials, GOALS, {}, ACCURACY), trials, GOALS, {}, ACCURACY)
    assert recommendation.number is None
    assert reason in recommendation.reason
    assert recommendation.hint.startswith(hint)
    assert bool(recommendation.hint) == bool(hint)


def test_what_a_stopped_trial_would_probably_have_had() -> None:
    stopped = TrialRecord(9, "stopped", stages={"train": 0.7}, predicted={"latency_ms": 4.0})
    gain = 0.9 - (0.88 + 0.89 + 0.90) / 3
    assert expected(stopped, GOALS, seen(3)) == pytest.approx({"latency_ms": 4.0, "accuracy": 0.7 + gain})
    other = replace(stopped, stages={"prune": 0.7})  # no complete trial began like this
    assert expected(other, GOALS, seen(3)) == {"latency_ms": 4.0, "accuracy": 0.7}
    assert expected(replace(stopped, stages={}), GOALS, seen(3)) == {"latency_ms": 4.0}


def test_only_the_metric_that_is_measured_after_each_stage_stops_a_trial() -> None:
    distance = Metric("distance", "Mean distance", "fraction", "distance_increase")
    goals = Goals((distance, LATENCY), (), "usb3", ACCURACY)
    others = [replace(record, values={**record.values, "distance": 0.1}) for record in seen(LEAST_SEEN)]
    assert not reason_to_stop(state(0.7, latency_ms=4.0), goals, others)
    only_costs = Goals((LATENCY, SIZE), (), "usb3", ACCURACY)
    assert reason_to_stop(state(0.7, latency_ms=4.0, size_bytes=9000), only_costs, others)
