"""Predicted costs of sub-networks, without converting them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache, cached_property, lru_cache

from compress.architecture_search.elastic import ElasticNetwork, SubNetwork
from compress.architecture_search.extraction import structure
from compress.pruning.cost import CostFigures, Costs, TrialConversion
from compress.targets.base import Target

TOLERANCE = 0.01
"""Errors at the largest network up to this share of a figure are not corrected."""
STRUCTURES = 64
"""Combinations of blocks and kernels whose costs are kept in memory, in addition to one for each block and kernel."""
CostErrors = dict[str, float]
"""By the name of a figure, what a file has more than predicted."""


class SubNetworkCosts:
    """The costs of all sub-networks of a network on a target.

    Costs follow from the operators, as in pruning. What converted files have more is added: the error at one
    sub-network to all of them (`calibrate`), that of a residual block where the block is kept (`correct_blocks`), and
    that of the largest network in proportion to the number of weights (`correct_largest`). A sub-network that was
    converted has the costs of its files.

    Args:
        elastic: the network and what may be smaller.
        target: the target.
        host: where latency is predicted; None: the target's default host.
        clock: the clock of the target; None: its first.
    """

    def __init__(
        self, elastic: ElasticNetwork, target: Target, host: str | None = None, clock: str | None = None
    ) -> None:
        self._elastic = elastic
        self._target = target
        self._host = target.cost.host(host)
        self._clock = target.cost.clock(clock)
        self._everywhere: CostErrors = {}
        self._by_block: list[CostErrors] = [{} for _ in elastic.blocks]
        self._at_largest: CostErrors = {}
        self._converted: dict[SubNetwork, CostFigures] = {}
        self._uncalibrated = cache(self._predicted)
        size = STRUCTURES + len(elastic.blocks) + len(elastic.kernels)  # as many as `Evolution.grown` compares
        self._structure = lru_cache(size)(self._costs_of_structure)

    def figures(self, sub_network: SubNetwork) -> CostFigures:
        """Return the costs of a sub-network; times in ms with four digits."""
        return self._converted.get(sub_network) or _rounded(self._corrected(sub_network))

    def errors(self, sub_network: SubNetwork, conversion: TrialConversion) -> CostErrors:
        """Return what the files of a sub-network have more than predicted."""
        predicted = self._corrected(sub_network)
        return {name: value - predicted[name] for name, value in self._of_files(conversion).items()}

    def wrong(self, sub_network: SubNetwork, conversion: TrialConversion) -> frozenset[str]:
        """Return the names of the figures whose error at a sub-network is more than the tolerance."""
        actual = self._of_files(conversion)
        errors = self.errors(sub_network, conversion)
        return frozenset(name for name, error in errors.items() if abs(error) > TOLERANCE * actual[name])

    def calibrate(self, sub_network: SubNetwork, conversion: TrialConversion) -> None:
        """Make the costs agree with the files of one sub-network, and change by as much at all others."""
        for name, error in self.errors(sub_network, conversion).items():
            self._everywhere[name] = self._everywhere.get(name, 0.0) + error
        self.remember(sub_network, conversion)

    def correct_blocks(
        self, sub_network: SubNetwork, conversion: TrialConversion, blocks: Sequence[int], names: Collection[str]
    ) -> None:
        """Add the error at a sub-network to some residual blocks, the same to each.

        Args:
            sub_network: a sub-network with one or more of these blocks.
            conversion: its files.
            blocks: the indices of the blocks.
            names: the figures to correct.
        """
        kept = sum(sub_network.blocks[index] for index in blocks)
        for name, error in self.errors(sub_network, conversion).items():
            for index in blocks if name in names else ():
                self._by_block[index][name] = self._by_block[index].get(name, 0.0) + error / kept
        self.remember(sub_network, conversion)

    def correct_largest(self, conversion: TrialConversion, names: Collection[str]) -> None:
        """Make some figures agree with the files of the largest network, in proportion to the number of weights."""
        errors = self.errors(self._elastic.largest, conversion)
        self._at_largest = {name: error for name, error in errors.items() if name in names}

    def remember(self, sub_network: SubNetwork, conversion: TrialConversion) -> None:
        """Store the costs that the files of a sub-network have."""
        if conversion.graph is not None:
            self._converted[sub_network] = _rounded({**self._corrected(sub_network), **self._of_files(conversion)})

    def _of_files(self, conversion: TrialConversion) -> dict[str, float]:
        """Return the costs of files, as far as there are any."""
        figures = {"macs": float(conversion.macs)}
        known = self._target.cost.objectives
        if conversion.graph is not None:
            figures["size_bytes"] = conversion.size_bytes
        if conversion.graph is not None and known:
            file = self._target.cost.of_file(conversion.graph)
            if "compute" in known:
                figures["compute_ms"] = file.compute_ms(self._clock)
            if "latency" in known:
                figures["latency_ms"] = file.latency_ms(self._host, self._clock)
            if "cache" in known:
                figures["streamed_bytes"] = file.streamed_bytes
        return figures

    def _corrected(self, sub_network: SubNetwork) -> dict[str, float]:
        """Return the predicted costs with the errors that are known."""
        figures: dict[str, float] = self._uncalibrated(sub_network).to_json()
        kept = [errors for errors, stays in zip(self._by_block, sub_network.blocks, strict=True) if stays]
        for errors in (self._everywhere, *kept):
            for name, error in errors.items():
                figures[name] += error
        for name, error in self._at_largest.items():
            figures[name] += error * self._size(sub_network)
        return figures

    def _size(self, sub_network: SubNetwork) -> float:
        """Return the share of the weights: 0 in the smallest sub-network, 1 in the largest."""
        least, most = self._parameters_of_ends
        return (self._uncalibrated(sub_network).parameters - least) / max(most - least, 1)

    @cached_property
    def _parameters_of_ends(self) -> tuple[int, int]:
        """The number of weights of the smallest sub-network and of the largest."""
        elastic = self._elastic
        return self._uncalibrated(elastic.smallest).parameters, self._uncalibrated(elastic.largest).parameters

    def _predicted(self, sub_network: SubNetwork) -> CostFigures:
        costs = self._structure(sub_network.blocks, sub_network.kernels)
        return costs.figures(sub_network.widths, self._host, self._clock)

    def _costs_of_structure(self, blocks: tuple[bool, ...], kernels: tuple[int, ...]) -> Costs:
        """Return the costs at all widths of the network with some blocks and kernels."""
        elastic = self._elastic
        network = structure(elastic, SubNetwork(elastic.largest.widths, blocks, kernels))
        return Costs(network, elastic.channels, elastic.groups, self._target)


def _rounded(figures: dict[str, float]) -> CostFigures:
    """Return figures with four digits of times, and whole numbers of everything else."""
    values = {
        name: float(f"{value:.4g}") if name.endswith("_ms") else max(round(value), 0) for name, value in figures.items()
    }
    return CostFigures(**values)  # type: ignore[arg-type]
