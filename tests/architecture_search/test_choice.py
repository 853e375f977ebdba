"""The choice among the evaluated sub-networks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from compress.architecture_search import search
from compress.architecture_search.elastic import SubNetwork
from compress.architecture_search.evolution import EvaluatedSubNetwork
from compress.architecture_search.search import Limits
from compress.errors import StageError

SIZES = {0: 5000, 1: 6000, 2: 7000, 3: 8000, 4: 9000}
"""File size by width, in bytes; the MACs are a tenth of it."""


class Costs:
    """Costs by width. Those of the widths in `wrong` are larger after their conversion, until the next conversion.

    All others are larger by `error`.
    """

    def __init__(self, wrong: set[int] | None = None) -> None:
        self.wrong, self.converted = wrong or set(), list[int]()
        self.error = 0

    def figures(self, sub_network: Any) -> Any:
        width = sub_network.widths[0]
        size = SIZES[width] + (10_000 if width in self.wrong and [width] == self.converted[-1:] else self.error)
        return SimpleNamespace(macs=SIZES[width] // 10, to_json=lambda: {"size_bytes": size})


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Any:
    def verify(elastic: Any, sub_network: Any, costs: Costs, convert: Any) -> Any:
        costs.converted.append(sub_network.widths[0])
        return SimpleNamespace(missing=None)

    monkeypatch.setattr(search, "_verify", verify)
    return Costs


def chosen(costs: Any, values: dict[int, float], samples: int | None, limit: int = 8000) -> Any:
    choice = choice_of(costs, values, samples, limit)
    return choice.candidate.sub_network.widths[0], choice.equal


def choice_of(costs: Any, values: dict[int, float], samples: int | None, limit: int = 8000) -> Any:
    candidates = [EvaluatedSubNetwork(SubNetwork((width,), (), ()), value) for width, value in values.items()]
    last = EvaluatedSubNetwork(SubNetwork((0,), (), ()), 0.1)
    elastic: Any = SimpleNamespace(smallest=last.sub_network)
    convert: Any = None
    return search._chosen(elastic, candidates, last, costs, Limits(size_bytes=limit), samples, convert)


def test_the_largest_within_one_standard_error(costs: Any) -> None:
    values = {1: 0.6, 2: 0.58, 3: 0.575, 4: 0.9}  # the last one is over the limit
    width, equal = chosen(costs(), values, 300)
    assert width == 3
    assert equal == {"samples": 300, "best": 0.6, "error": 0.028284, "sub_networks": 3}
    assert chosen(costs(), values, 1000)[0] == 1  # the standard error is 0.015
    assert chosen(costs(), {1: 1.0, 2: 0.999}, 300)[0] == 1  # the standard error is 0


def test_of_losses_the_best(costs: Any) -> None:
    assert chosen(costs(), {1: -0.5, 2: -0.501, 3: -0.5}, None) == (1, {})


def test_another_one_if_its_file_is_over_the_limit(costs: Any) -> None:
    wrong = costs(wrong={3})
    assert chosen(wrong, {1: 0.6, 2: 0.59, 3: 0.59}, 300)[0] == 2
    assert wrong.converted == [3, 2]
    several = costs(wrong={2, 3, 4})
    assert chosen(several, {1: 0.1, 2: 0.59, 3: 0.59, 4: 0.7}, 300, limit=9000)[0] == 1
    assert several.converted == [4, 3, 2, 1]


def test_the_smallest_one_if_the_files_of_all_candidates_are_over_the_limit(costs: Any) -> None:
    choice = choice_of(costs(wrong={1}), {1: 0.6}, 300)
    assert choice.candidate.sub_network.widths == (0,)
    assert choice.exceeded == ["size_bytes 16,000 (limit 8,000)"]
    with pytest.raises(StageError, match="the files of the best sub-networks exceed the limits: size_bytes 16,000"):
        choice_of(costs(wrong={0, 1}), {1: 0.6}, 300)


def test_the_closest_one_where_all_seem_to_be_over_the_limit_after_a_conversion(
    costs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = costs(wrong={3})

    def verify(elastic: Any, sub_network: Any, costs: Costs, convert: Any) -> SimpleNamespace:
        costs.converted.append(sub_network.widths[0])
        costs.error = 5000 if sub_network.widths[0] == 3 else 0
        return SimpleNamespace(missing=None)

    monkeypatch.setattr(search, "_verify", verify)
    choice = choice_of(wrong, {1: 0.59, 2: 0.6, 3: 0.6}, 300)
    assert wrong.converted == [3, 1, 2]
    assert choice.candidate.sub_network.widths == (2,)
    assert choice.warnings() == []
