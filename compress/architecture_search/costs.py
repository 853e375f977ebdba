"""Predicted costs of sub-networks, without converting them."""

from __future__ import annotations

from functools import cache
from typing import Any

from compress.architecture_search.elastic import ElasticNetwork, SubNetwork
from compress.architecture_search.extraction import structure
from compress.pruning.cost import CostFigures, Costs, TrialConversion
from compress.targets.base import Target


class SubNetworkCosts:
    """The costs of all sub-networks of a network on a target.

    Costs follow from the operators, as in pruning. The difference to a converted file is added to all sub-networks
    (`calibrate`): it comes from layers that all of them have.

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
        self._differences: dict[str, float] = {}
        self._uncalibrated = cache(self._predicted)
        self._structures: dict[Any, Costs] = {}

    def figures(self, sub_network: SubNetwork) -> CostFigures:
        """Return the costs of a sub-network; times in ms with four digits."""
        figures = self._uncalibrated(sub_network).to_json()
        for name, difference in self._differences.items():
            value = figures[name] + difference
            figures[name] = float(f"{value:.4g}") if name.endswith("_ms") else max(round(value), 0)
        return CostFigures(**figures)

    def calibrate(self, sub_network: SubNetwork, conversion: TrialConversion) -> None:
        """Make the costs agree with the files of one sub-network."""
        actual = {"macs": float(conversion.macs)}
        known = self._target.cost.objectives
        if conversion.graph is not None:
            actual["size_bytes"] = conversion.size_bytes
        if conversion.graph is not None and known:
            file = self._target.cost.of_file(conversion.graph)
            if "compute" in known:
                actual["compute_ms"] = file.compute_ms(self._clock)
            if "latency" in known:
                actual["latency_ms"] = file.latency_ms(self._host, self._clock)
            if "cache" in known:
                actual["streamed_bytes"] = file.streamed_bytes
        predicted = self._uncalibrated(sub_network).to_json()
        self._differences = {name: value - predicted[name] for name, value in actual.items()}

    def _predicted(self, sub_network: SubNetwork) -> CostFigures:
        key = (sub_network.blocks, sub_network.kernels)
        if key not in self._structures:
            elastic = self._elastic
            network = structure(elastic, sub_network)
            self._structures[key] = Costs(network, elastic.channels, elastic.groups, self._target)
        return self._structures[key].figures(sub_network.widths, self._host, self._clock)
