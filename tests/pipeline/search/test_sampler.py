"""The choice of trials: values stay in their ranges, constraints are learned, fronts are better than random ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

optuna = pytest.importorskip("optuna", reason="optuna is not installed: pip install -e '.[search]'")

from compress.pipeline.search import sampler  # noqa: E402
from compress.pipeline.search.sampler import FrontSampler, SeededByTrial  # noqa: E402
from compress.pipeline.search.space import Choices, Range, Space  # noqa: E402
from compress.pipeline.search.study import EXPECTED, RECORD  # noqa: E402
from compress.pipeline.yaml_file import Document  # noqa: E402

STAGES = {"stages": [{"first": {}}, {"second": {}}]}
SPACE = Space(
    Document(Path(), STAGES, {}),
    (
        Choices("stages", ("stages",), (["first"], ["first", "second"])),
        Range("first.x", ("stages", 0, "first", "x"), 0.0, 1.0),
        Range("second.n", ("stages", 1, "second", "n"), 2, 8, step=2, integer=True),
        Range("rate", ("rate",), 1e-4, 1e-1, log=True),
        Choices("size", ("size",), (8, 16, 32)),
    ),
)
Objective = Callable[[dict[str, Any]], tuple[list[float] | None, float]]


def searched(
    objective: Objective, trials: int, directions: list[str], seed: int = 0
) -> tuple[Any, list[dict[str, Any]]]:
    """Run some trials; return the study and the choices. `objective` returns values (None: failed) and a violation."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(directions=directions)
    chosen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(trials):
            study.sampler = FrontSampler(SPACE, seed * 1000 + number)
            trial = study.ask()
            chosen.append(SPACE.suggest(trial))
            values, violation = objective(chosen[-1])
            trial.set_constraint("limit", violation)
            if values is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, values)
    return study, chosen


def trade_off(values: dict[str, Any]) -> tuple[list[float], float]:
    error = (values["first.x"] - 0.3) ** 2 + 1 / values["size"] + (0.2 if values["rate"] > 0.01 else 0.0)
    return [error, values["size"] + values.get("second.n", 9)], 0.0


def test_values_are_from_the_space_and_no_choice_is_made_twice() -> None:
    _, chosen = searched(trade_off, 20, ["minimize", "minimize"])
    for values in chosen:
        assert 0 <= values["first.x"] <= 1
        assert 1e-4 <= values["rate"] <= 1e-1
        assert values["size"] in (8, 16, 32)
        assert ("second.n" in values) == (values["stages"] == ["first", "second"])
        assert values.get("second.n", 2) in (2, 4, 6, 8)
    assert len({str(values) for values in chosen}) == 20


def test_the_same_seed_gives_the_same_choices() -> None:
    assert searched(trade_off, 12, ["minimize", "minimize"])[1] == searched(trade_off, 12, ["minimize", "minimize"])[1]
    assert searched(trade_off, 12, ["minimize", "minimize"], seed=1)[1] != searched(trade_off, 12, ["minimize"] * 2)[1]


@pytest.mark.filterwarnings("ignore")  # about experimental features of Optuna, and fits of few trials
def test_the_choices_of_running_trials_are_not_made_again_and_repeated_ones_are_no_failures() -> None:
    study, _ = searched(trade_off, 12, ["minimize", "minimize"])
    choose = FrontSampler(SPACE, 7).sample_relative
    first = choose(study, study.trials[0], {})
    study.enqueue_trial(first)
    running = study.ask()
    SPACE.suggest(running)
    assert choose(study, study.trials[0], {}) != first
    repeated = study.ask()
    repeated.set_user_attr(RECORD, {"status": "repeated"})
    study.tell(repeated, state=optuna.trial.TrialState.PRUNED)
    assert len(sampler._distinct(study.trials)) == 12


@pytest.mark.filterwarnings("ignore")  # about experimental features of Optuna, and fits of few trials
def test_an_interruption_changes_no_later_choice() -> None:
    def chosen(interrupted: int | None) -> list[dict[str, Any]]:
        study = optuna.create_study(
            directions=["minimize", "minimize"], sampler=SeededByTrial(lambda seed: FrontSampler(SPACE, seed), 3)
        )
        choices = []
        for number in range(14 + (interrupted is not None)):
            trial = study.ask()
            values = SPACE.suggest(trial)
            if number == interrupted:
                trial.set_user_attr(RECORD, {"status": "interrupted"})
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                study.enqueue_trial(trial.params)
                continue
            choices.append(values)
            study.tell(trial, trade_off(values)[0])
        return choices

    assert chosen(None) == chosen(4) == chosen(12)


def test_one_objective_of_which_more_is_better() -> None:
    study, _ = searched(lambda values: ([-trade_off(values)[0][0]], 0.0), 30, ["maximize"])
    assert study.best_trial.params["first.x"] == pytest.approx(0.3, abs=0.15)
    assert study.best_trial.params["size"] == 2  # the position of 32
    assert study.best_trial.params["rate"] <= 0.01


def test_constraints_and_failures_are_learned() -> None:
    def limited(values: dict[str, Any]) -> tuple[list[float] | None, float]:
        if values["rate"] > 0.03:
            return None, 0.0
        return trade_off(values)[0], values["first.x"] - 0.2  # the limit is far from the best value

    _, chosen = searched(limited, 35, ["minimize", "minimize"])
    early, late = chosen[:10], chosen[-15:]
    holding = [[values["first.x"] <= 0.2 and values["rate"] <= 0.03 for values in part] for part in (early, late)]
    assert sum(holding[1]) / 15 > 0.5 > sum(holding[0]) / 10


def test_without_a_trial_that_meets_the_constraints_their_violation_decides() -> None:
    _, chosen = searched(lambda values: (trade_off(values)[0], 0.1 + values["first.x"]), 25, ["minimize", "minimize"])
    assert sum(values["first.x"] < 0.15 for values in chosen[-10:]) > 5


def test_a_stopped_trial_counts_with_what_was_expected_of_it() -> None:
    study = optuna.create_study(directions=["maximize", "minimize"])
    for values in ([0.5, 1.0], [0.9, 3.0], [0.7, 2.0]):
        study.tell(study.ask(), values)
    for expected, limit in (([0.6, 3.0], 0.0), ([0.6, 3.0], 0.5), (None, 0.0)):
        trial = study.ask()
        trial.set_constraint("limit", limit)
        if expected:
            trial.set_user_attr(EXPECTED, expected)
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    losses = sampler._losses(study.get_trials(), study)
    assert losses[:3, 0].argsort().tolist() == [1, 2, 0]
    assert losses[2, 0] < losses[3, 0] < losses[0, 0]  # an accuracy of 0.6
    assert losses[3, 1] == losses[1, 1]  # a latency of 3 ms
    assert losses[4].tolist() == pytest.approx([1.15, 1.15])  # violates a condition
    assert losses[5].tolist() == pytest.approx([1.1, 1.1])  # nothing is known


def test_all_trials_may_fail() -> None:
    _, chosen = searched(lambda values: (None, 0.0), 14, ["minimize", "minimize"])
    assert len(chosen) == 14


def test_of_many_trials_only_some_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    process = sampler._Process

    def watched(points: Any, *arguments: Any) -> Any:
        sizes.append(len(points))
        return process(points, *arguments)

    monkeypatch.setattr(sampler, "FITTED", 16)
    monkeypatch.setattr(sampler, "_Process", watched)
    study, _ = searched(lambda values: ([trade_off(values)[0][0]], 0.0), 40, ["minimize"])
    assert max(sizes) == 16
    fitted = FrontSampler(SPACE, 0)._fitted(-np.arange(40.0)[:, None])
    assert len(set(fitted)) == 16
    assert {*range(32, 40)} <= {*fitted}  # the best ones
    assert study.best_trial.params["first.x"] == pytest.approx(0.3, abs=0.15)
