"""Evolutionary search on calculated values, without a network to train."""

from __future__ import annotations

import numpy as np
import pytest

from compress.architecture_search.elastic import ElasticKernel, ElasticNetwork, ResidualBlock, SubNetwork
from compress.architecture_search.evolution import Evolution
from compress.ir.channel_groups import ChannelGroups
from compress.ir.keras_graph import LayerOutput, Network
from compress.pruning.layer_groups import LayerGroup

LEVELS = (32, 24, 16, 8)
LAYERS = ("a", "b", "c", "d", "e", "f")


@pytest.fixture
def elastic() -> ElasticNetwork:
    """Six layers; the last one is inside a residual block and has a large kernel."""
    channels = ChannelGroups({}, np.arange(1), np.ones(1, bool))
    groups = tuple(LayerGroup((name,), np.arange(32), 4) for name in LAYERS)
    block = ResidualBlock("sum", LayerOutput("e"), LayerOutput("f"), frozenset({"f"}))
    network = Network("test", {}, [], [], {})
    return ElasticNetwork(network, channels, groups, (LEVELS,) * 6, (block,), (ElasticKernel("f", (7, 5, 3)),))


def cost(sub_network: SubNetwork) -> float:
    widths = sub_network.widths if sub_network.blocks[0] else sub_network.widths[:-1]
    return float(sum(widths)) + 10 * sub_network.blocks[0] + (sub_network.kernels[0] if sub_network.blocks[0] else 0)


def value(sub_network: SubNetwork) -> float:
    """Return a value to which wide first layers add most. The block with a kernel of 5 is worth its cost."""
    weights = (6, 5, 4, 3, 2, 1)
    total = sum(weight * width**0.5 for weight, width in zip(weights, sub_network.widths, strict=True))
    return total + (30 - 3 * abs(sub_network.kernels[0] - 5) if sub_network.blocks[0] else 0)


def fits(sub_network: SubNetwork) -> bool:
    return cost(sub_network) <= 110


def best_possible(elastic: ElasticNetwork) -> float:
    grids = np.array(np.meshgrid(*elastic.options)).reshape(len(elastic.options), -1).T
    sub_networks = {elastic.sub_network([int(choice) for choice in row]) for row in grids}
    return max(value(sub_network) for sub_network in sub_networks if fits(sub_network))


def test_it_comes_close_to_the_best_of_all_within_the_limit(elastic: ElasticNetwork) -> None:
    evaluated = Evolution(elastic, fits, population=40, seed=0).run(value, 400)
    assert len(evaluated) == 400
    assert all(fits(candidate.sub_network) for candidate in evaluated)
    assert len({candidate.sub_network for candidate in evaluated}) == 400
    random = np.random.default_rng(0)
    drawn = [sub_network for sub_network in (elastic.random(random) for _ in range(2000)) if fits(sub_network)][:400]
    best = max(candidate.value for candidate in evaluated)
    assert best > max(map(value, drawn))
    assert best >= 0.995 * best_possible(elastic)


def test_the_same_seed_gives_the_same_candidates(elastic: ElasticNetwork) -> None:
    first, second, other = (Evolution(elastic, fits, 20, seed).run(value, 100) for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_it_ends_where_all_sub_networks_are_evaluated(elastic: ElasticNetwork) -> None:
    evaluated = Evolution(elastic, lambda sub_network: sub_network == elastic.smallest, 20, 0).run(value, 100)
    assert [candidate.sub_network for candidate in evaluated] == [elastic.smallest]


def test_parts_of_a_block_that_is_left_out_do_not_make_another_sub_network(elastic: ElasticNetwork) -> None:
    without = [*(32,) * 5, 24, 0, 7]
    assert elastic.sub_network(without) == elastic.sub_network([*(32,) * 5, 8, 0, 3])
    assert elastic.sub_network([*(32,) * 5, 24, 1, 7]).widths[-1] == 24


def test_a_grown_sub_network_cannot_grow_further(elastic: ElasticNetwork) -> None:
    evolution = Evolution(elastic, fits, 20, 0)
    grown = evolution.grown(elastic.smallest)
    assert fits(grown)
    values = elastic.values(grown)
    for index, options in enumerate(elastic.options):
        place = options.index(values[index])
        if place:
            larger = elastic.sub_network([*values[:index], options[place - 1], *values[index + 1 :]])
            assert larger == grown or not fits(larger)
