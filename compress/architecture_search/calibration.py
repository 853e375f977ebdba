"""Calibration of the costs of sub-networks before the training, with the files of a few of them.

The costs of layers that cannot be followed, for example an attention, are known from files only, and a sub-network may
leave such layers out with their residual block. So the smallest sub-network and the largest are converted. Where the
costs of the largest are wrong, the smallest one with a block of each kind, and with all blocks, is converted, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from compress.architecture_search.costs import SubNetworkCosts
from compress.architecture_search.elastic import ElasticNetwork, ResidualBlock, SubNetwork
from compress.ir.keras_graph import Network
from compress.progress import Progress
from compress.pruning.cost import TrialConversion

MAX_KINDS = 4
"""Kinds of residual blocks of which one is converted alone."""
ConvertSubNetwork = Callable[[SubNetwork], TrialConversion]
BlockKind = tuple[int, ...]
"""The indices of residual blocks with the same layers."""


def calibrate(
    costs: SubNetworkCosts,
    elastic: ElasticNetwork,
    convert: ConvertSubNetwork,
    important: Collection[str],
    progress: Progress,
) -> TrialConversion:
    """Make costs that agree with the smallest sub-network agree with the largest one, too; return its files.

    Args:
        costs: the costs of sub-networks.
        elastic: the network and what may be smaller.
        convert: makes the files of a sub-network.
        important: the figures that are worth more conversions than this one.
        progress: receives the number of conversions, of which that of the smallest one is the first.
    """
    progress.update(1, 2)
    largest = convert(elastic.largest)
    wrong = costs.wrong(elastic.largest, largest)
    if not wrong.isdisjoint(important):
        _correct_blocks(costs, elastic, convert, wrong, progress)
    costs.correct_largest(largest, wrong)
    costs.remember(elastic.largest, largest)
    return largest


def _correct_blocks(
    costs: SubNetworkCosts,
    elastic: ElasticNetwork,
    convert: ConvertSubNetwork,
    names: Collection[str],
    progress: Progress,
) -> None:
    """Correct some figures by the files of the smallest sub-network with a block of each kind."""
    kinds = block_kinds(elastic)
    # A block inside of another one is converted with that one, whose error must be known before.
    alone = sorted(kinds[:MAX_KINDS], key=lambda kind: -len(elastic.blocks[kind[0]].layers))
    steps = [(kind, kind[:1]) for kind in alone]
    if len(elastic.blocks) > 1:
        all_blocks = tuple(range(len(elastic.blocks)))
        others = tuple(index for kind in kinds[MAX_KINDS:] for index in kind)
        # What the converter makes of a layer may depend on the layers around it: the blocks share the remaining error.
        steps.append((others or all_blocks, all_blocks))
    for number, (blocks, kept) in enumerate(steps):
        progress.update(2 + number, 2 + len(steps))
        sub_network = smallest_with(elastic, kept)
        costs.correct_blocks(sub_network, convert(sub_network), blocks, names)


def block_kinds(elastic: ElasticNetwork) -> list[BlockKind]:
    """Return the kinds of the residual blocks, the most frequent first."""
    kinds: dict[Any, list[int]] = {}
    for index, block in enumerate(elastic.blocks):
        kinds.setdefault(_layers_and_shapes(block, elastic.network), []).append(index)
    return sorted((tuple(indices) for indices in kinds.values()), key=lambda kind: -len(kind))


def _layers_and_shapes(block: ResidualBlock, network: Network) -> Any:
    """Return what the costs of a block depend on."""
    return tuple(
        (
            layer.kind,
            str(layer.config.get("activation")),
            tuple(network.shapes[tensor] for tensor in layer.inputs()),
            tuple(weight.shape for weight in layer.weights),
        )
        for layer in network.layers.values()
        if layer.name in block.layers
    )


def smallest_with(elastic: ElasticNetwork, kept: Iterable[int]) -> SubNetwork:
    """Return the smallest sub-network with some residual blocks, and with those around them."""
    indices = set(kept)
    additions = {elastic.blocks[index].addition for index in indices}
    indices |= {index for index, block in enumerate(elastic.blocks) if not block.layers.isdisjoint(additions)}
    smallest = elastic.smallest
    blocks = [int(index in indices) for index in range(len(elastic.blocks))]
    return elastic.sub_network([*smallest.widths, *blocks, *smallest.kernels])
