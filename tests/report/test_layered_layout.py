"""The layout of graphs: layers, no overlaps, routes that end at their nodes."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from compress.report.layered_layout import GAP_X, Edge, Layout, layout

SIZE = (100.0, 40.0)


def drawn(count: int, edges: list[Edge]) -> Layout:
    """Return the layout of boxes of one size, after the checks for every graph."""
    result = layout([SIZE] * count, edges)
    for (x1, y1), (x2, y2) in itertools.combinations(result.centres, 2):
        assert abs(y1 - y2) >= SIZE[1] or abs(x1 - x2) >= SIZE[0] + GAP_X / 2 - 1e-6
    for x, y in result.centres:
        assert SIZE[0] / 2 - 1e-6 <= x <= result.width - SIZE[0] / 2 + 1e-6
        assert SIZE[1] / 2 - 1e-6 <= y <= result.height - SIZE[1] / 2 + 1e-6
    assert result.routes.keys() == set(edges)
    for (first, last), route in result.routes.items():
        assert route[0] == (result.centres[first][0], result.centres[first][1] + SIZE[1] / 2)
        assert route[-1] == (result.centres[last][0], result.centres[last][1] - SIZE[1] / 2)
        assert all(y1 < y2 or y1 == y2 for (_, y1), (_, y2) in itertools.pairwise(route))
        for x, y in route[1:-1]:
            assert not any(abs(x - a) < SIZE[0] / 2 and abs(y - b) < SIZE[1] / 2 - 1e-6 for a, b in result.centres)
    return result


def test_a_chain_is_straight() -> None:
    result = drawn(5, [(i, i + 1) for i in range(4)])
    assert len({x for x, _ in result.centres}) == 1
    assert result.width == SIZE[0]


def test_a_shortcut_goes_around_the_nodes_between_its_ends() -> None:
    result = drawn(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    assert len(result.routes[0, 3]) == 6
    xs = [x for x, _ in result.centres]
    assert max(xs) - min(xs) < 3


def test_branches_are_next_to_each_other() -> None:
    result = drawn(5, [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)])
    assert len({y for _, y in result.centres[1:4]}) == 1
    assert result.centres[0][0] == pytest.approx(result.centres[4][0])


def test_branches_do_not_cross() -> None:
    edges = [(0, 1), (0, 2), (1, 4), (2, 3), (3, 5), (4, 6)]
    result = drawn(7, edges)
    left = result.centres[1][0] < result.centres[2][0]
    assert (result.centres[4][0] < result.centres[3][0]) == left
    assert (result.centres[6][0] < result.centres[5][0]) == left


def test_a_node_without_predecessors_is_above_its_use() -> None:
    result = drawn(5, [(0, 1), (1, 2), (2, 3), (4, 3)])
    assert result.centres[4][1] == result.centres[2][1]


@pytest.mark.parametrize("edges", [[], [(0, 2)]])
def test_nodes_without_edges(edges: list[Edge]) -> None:
    assert len(drawn(3, edges).centres) == 3
    assert layout([], []).height == 0


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ValueError, match="cycle"):
        layout([SIZE] * 2, [(0, 1), (1, 0)])


@pytest.mark.parametrize("seed", range(5))
def test_any_graph(seed: int) -> None:
    dice = random.Random(seed)
    count = 40
    edges = {(dice.randrange(last), last) for last in range(1, count) for _ in range(dice.randrange(1, 3))}
    drawn(count, sorted(edges))


def test_five_hundred_operators_take_less_than_seconds() -> None:
    edges = [(i, i + 1) for i in range(499)] + [(i, i + 9) for i in range(0, 480, 3)] + [(0, 499), (40, 400)]
    started = time.process_time()
    layout([SIZE] * 500, edges)
    assert time.process_time() - started < 5
