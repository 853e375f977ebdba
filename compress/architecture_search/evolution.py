"""Evolution: sub-networks that are better on validation, among those within the limits.

Source: Real et al., Regularized Evolution for Image Classifier Architecture Search, AAAI 2019 (mutation); Cai et al.,
Once-for-All, ICLR 2020, appendix (mutation and crossover under a limit of the latency).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from compress.architecture_search.elastic import ElasticNetwork, SubNetwork

PARENTS = 0.25
"""The number of parents, the best of all evaluated sub-networks, as a share of the population."""
MUTATION = 0.15
"""The probability that a choice is replaced by a random value."""
ATTEMPTS = 50
"""Children in a row that were seen before, after which children are random; after as many random ones the search
ends."""


@dataclass(frozen=True)
class EvaluatedSubNetwork:
    """A sub-network and its value, higher is better."""

    sub_network: SubNetwork
    value: float


class Evolution:
    """A search for the best sub-network.

    Args:
        elastic: the network and what may be smaller.
        fits: whether a sub-network is within the limits. The smallest one is.
        population: the number of sub-networks of one generation.
        seed: the seed of all random choices.
    """

    def __init__(self, elastic: ElasticNetwork, fits: Callable[[SubNetwork], bool], population: int, seed: int) -> None:
        self._elastic = elastic
        self._fits = fits
        self._population = population
        self._random = np.random.default_rng(seed)
        self._seen: set[SubNetwork] = set()

    def run(self, value: Callable[[SubNetwork], float], candidates: int) -> list[EvaluatedSubNetwork]:
        """Return all evaluated candidates, in the order of their evaluation.

        Args:
            value: returns the value of a sub-network.
            candidates: the number of evaluations at most; fewer if there are not as many sub-networks.
        """
        evaluated: list[EvaluatedSubNetwork] = []
        while len(evaluated) < candidates:
            count = min(self._population, candidates - len(evaluated))
            before = len(evaluated)
            children = self._children(self._parents(evaluated), count)
            evaluated += (EvaluatedSubNetwork(child, value(child)) for child in children)
            if len(evaluated) - before < count:
                break
        return evaluated

    def _parents(self, evaluated: list[EvaluatedSubNetwork]) -> list[SubNetwork]:
        best = sorted(evaluated, key=lambda candidate: -candidate.value)
        return [candidate.sub_network for candidate in best[: max(2, round(self._population * PARENTS))]]

    def _children(self, parents: list[SubNetwork], count: int) -> Iterator[SubNetwork]:
        """Yield new sub-networks within the limits: mutations and crossovers of parents, or random ones without."""
        failures = 0
        while count and failures < 2 * ATTEMPTS:
            child = self.repaired(self._child(parents if failures < ATTEMPTS else []))
            if child in self._seen:
                failures += 1
                continue
            self._seen.add(child)
            failures = 0
            count -= 1
            yield child

    def _child(self, parents: list[SubNetwork]) -> SubNetwork:
        if not parents:
            # Half of the first ones are as large as the limits allow, because larger ones are often better.
            child = self._elastic.random(self._random)
            return self.grown(self.repaired(child)) if self._random.random() < 0.5 else child
        first = self._elastic.values(self._parent(parents))
        if self._random.random() < 0.5:
            second = self._elastic.values(self._parent(parents))
            return self._elastic.sub_network([self._one_of(pair) for pair in zip(first, second, strict=True)])
        changed = [
            self._one_of(options) if self._random.random() < MUTATION else value
            for value, options in zip(first, self._elastic.options, strict=True)
        ]
        return self._elastic.sub_network(changed)

    def _parent(self, parents: list[SubNetwork]) -> SubNetwork:
        return parents[self._random.integers(len(parents))]

    def _one_of(self, values: tuple[int, ...]) -> int:
        return values[self._random.integers(len(values))]

    def repaired(self, sub_network: SubNetwork) -> SubNetwork:
        """Return a sub-network within the limits: random choices become smaller until it is."""
        while not self._fits(sub_network):
            smaller = list(self._changed(sub_network, 1))
            sub_network = smaller[self._random.integers(len(smaller))]
        return sub_network

    def grown(self, sub_network: SubNetwork) -> SubNetwork:
        """Return a sub-network in which no choice can be one value larger within the limits."""
        while True:
            larger = [candidate for candidate in self._changed(sub_network, -1) if self._fits(candidate)]
            if not larger:
                return sub_network
            sub_network = larger[self._random.integers(len(larger))]

    def _changed(self, sub_network: SubNetwork, step: int) -> Iterator[SubNetwork]:
        """Yield the sub-networks with one choice a number of values further (1: smaller, -1: larger)."""
        values = self._elastic.values(sub_network)
        for index, options in enumerate(self._elastic.options):
            position = options.index(values[index]) + step
            if 0 <= position < len(options):
                other = self._elastic.sub_network([*values[:index], options[position], *values[index + 1 :]])
                if other != sub_network:
                    yield other
