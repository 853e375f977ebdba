"""The parts of a network that a sub-network may have smaller: widths of layers, residual blocks, kernels.

They are found in the graph of the largest network, so that any builder or file can be searched. Widths are those of the
layer groups of pruning; a residual block is all that an addition adds to one of its operands.

Idea: Cai et al., Once-for-All: Train One Network and Specialize it for Efficient Deployment, ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from compress.errors import StageError
from compress.ir import channel_groups
from compress.ir.channel_groups import ChannelGroups, ChannelTrace, Layout, Mask
from compress.ir.keras_graph import Layer, LayerOutput, Network, tensors_in
from compress.ir.layer_specs import ADD, CONV_1D, CONV_2D, DENSE, DEPTHWISE_CONV_2D, spec_of
from compress.pruning.importance import Scores, weight_scores
from compress.pruning.layer_groups import MIN_WIDTH, LayerGroup, Widths, layer_groups

SMALLEST_KERNEL = 3
"""Kernels are cropped to this size at the least."""


@dataclass(frozen=True, order=True)
class SubNetwork:
    """One choice of all elastic parts of a network.

    Attributes:
        widths: for each layer group the number of channel groups that are kept.
        blocks: for each residual block whether it is kept.
        kernels: for each elastic kernel its height and width.
    """

    widths: Widths
    blocks: tuple[bool, ...]
    kernels: tuple[int, ...]


@dataclass(frozen=True)
class ResidualBlock:
    """The layers between the two operands of an addition, which may be left out together with the addition.

    Attributes:
        addition: the name of the Add layer.
        start: the operand that stays.
        end: the operand that the block computes.
        layers: the layers of the block without the addition.
    """

    addition: str
    start: LayerOutput
    end: LayerOutput
    layers: frozenset[str]


@dataclass(frozen=True)
class ElasticKernel:
    """A square kernel of which the centre may be used alone.

    Attributes:
        layer: the name of the layer.
        sizes: the sizes, the largest first.
    """

    layer: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ElasticNetwork:
    """A network with all parts that may be smaller.

    Attributes:
        network: the largest network.
        channels: its channels.
        groups: its layer groups.
        levels: for each layer group the widths that are searched, the largest first.
        blocks: the residual blocks that may be left out.
        kernels: the kernels that may be smaller.
    """

    network: Network
    channels: ChannelGroups
    groups: tuple[LayerGroup, ...]
    levels: tuple[Widths, ...]
    blocks: tuple[ResidualBlock, ...]
    kernels: tuple[ElasticKernel, ...]

    @property
    def options(self) -> tuple[tuple[int, ...], ...]:
        """The values of each choice, the largest first: of widths, then of blocks (1, 0), then of kernels."""
        return (*self.levels, *((1, 0) for _ in self.blocks), *(kernel.sizes for kernel in self.kernels))

    @property
    def largest(self) -> SubNetwork:
        """The whole network."""
        return self.sub_network([values[0] for values in self.options])

    @property
    def smallest(self) -> SubNetwork:
        """The sub-network with the smallest value of every choice."""
        return self.sub_network([values[-1] for values in self.options])

    @property
    def count(self) -> int:
        """The number of sub-networks, those that differ only in layers that are left out counted once for each."""
        return int(np.prod([len(values) for values in self.options], dtype=object))

    def sub_network(self, values: Sequence[int]) -> SubNetwork:
        """Return the sub-network with a value for each choice, in the order of `options`.

        The parts of a block that is left out get their smallest values, so that equal networks are equal.
        """
        widths = list(values[: len(self.levels)])
        kept = [bool(value) for value in values[len(self.levels) : len(self.levels) + len(self.blocks)]]
        kernels = list(values[len(self.levels) + len(self.blocks) :])
        absent = frozenset().union(*(block.layers for block, stays in zip(self.blocks, kept, strict=True) if not stays))
        for index, group in enumerate(self.groups):
            if absent.issuperset(group.layers):
                widths[index] = self.levels[index][-1]
        for index, kernel in enumerate(self.kernels):
            if kernel.layer in absent:
                kernels[index] = kernel.sizes[-1]
        blocks = (stays and block.addition not in absent for block, stays in zip(self.blocks, kept, strict=True))
        return SubNetwork(tuple(widths), tuple(blocks), tuple(kernels))

    def values(self, sub_network: SubNetwork) -> tuple[int, ...]:
        """Return the value of each choice, in the order of `options`."""
        return (*sub_network.widths, *map(int, sub_network.blocks), *sub_network.kernels)

    def random(self, random: np.random.Generator) -> SubNetwork:
        """Return a sub-network with a random value of every choice."""
        return self.sub_network([values[random.integers(len(values))] for values in self.options])

    def kept_channels(self, widths: Widths) -> Mask:
        """Return the channels that stay at some widths: the first ones of each layer group."""
        kept = np.zeros(len(self.channels.group), bool)
        for group, width in zip(self.groups, widths, strict=True):
            kept[group.members[:width]] = True
        return self.channels.with_coupled(kept)


def find(network: Network, shares: Sequence[float], multiple: int, *, blocks: bool, kernels: bool) -> ElasticNetwork:
    """Return the elastic parts of a network.

    Args:
        network: the largest network.
        shares: the shares of the channels of a layer group that are searched; 1 is always one of them.
        multiple: widths are rounded to multiples of this.
        blocks: whether residual blocks may be left out.
        kernels: whether kernels may be smaller.

    Raises:
        StageError: nothing may be smaller.
    """
    channels = channel_groups.find_groups_by(_layout, network)
    scores = weight_scores(network, channels, "batch_norm")
    try:
        groups = layer_groups(network, channels, scores)
    except StageError:  # no channel can be left out
        groups = ()
    searched = [_with_levels(group, channels, scores, shares, multiple) for group in groups]
    elastic = ElasticNetwork(
        network,
        channels,
        tuple(group for group, _ in searched),
        tuple(levels for _, levels in searched),
        residual_blocks(network) if blocks else (),
        tuple(_kernels(network)) if kernels else (),
    )
    if elastic.count == 1:
        raise StageError(
            "no part of this model can be smaller: it has no layer whose channels can be left out, no residual block "
            "and no large kernel that the settings allow to change",
            hint="search a larger network, with more or smaller `widths`, or remove `search_architecture`",
        )
    return elastic


def _layout(layer: Layer, call: int, inputs: list[Layout], trace: ChannelTrace) -> Layout | None:
    """Return the layout of a call's output; None where `network` cannot run the layer with fewer channels."""
    runs = is_elastic_convolution(layer) or spec_of(layer) == DENSE or not spec_of(layer).kernels
    fixed = "target_shape" in layer.config
    return channel_groups.output_layout(layer, call, inputs, trace) if runs and not fixed else None


def is_elastic_convolution(layer: Layer) -> bool:
    """Whether a layer is a convolution that `network` can run with fewer channels, and with a smaller kernel."""
    if spec_of(layer) in (CONV_1D, CONV_2D):
        return layer.config.get("groups", 1) == 1 and layer.config.get("padding") != "causal"
    return spec_of(layer) == DEPTHWISE_CONV_2D


def _with_levels(
    group: LayerGroup, channels: ChannelGroups, scores: Scores, shares: Sequence[float], multiple: int
) -> tuple[LayerGroup, Widths]:
    """Return a layer group and its widths that are searched, the largest first.

    Layers that a concatenation joins have different members of the group. Its members are then put in bundles of
    `multiple`, each from the same layers, so that every layer has a multiple at every width.
    """
    parts = _parts(group, channels, scores)
    full = len(group.members)
    if len(parts) == 1:
        widths = {min(full, max(group.minimum, ceil(full * share / multiple - 1e-9) * multiple)) for share in shares}
        return group, tuple(sorted({full, *widths}, reverse=True))
    least = ceil(MIN_WIDTH / multiple) * multiple
    bundles = [part[start : start + multiple] for part in parts for start in range(least, len(part), multiple)]
    bundles.sort(key=lambda bundle: -float(scores[bundle].mean()))
    required = np.concatenate([part[:least] for part in parts])
    ends = [len(required), *(len(required) + np.cumsum([len(bundle) for bundle in bundles], dtype=int)).tolist()]
    widths = {next(end for end in ends if end >= full * share - 1e-9) for share in shares}
    ordered = LayerGroup(group.layers, np.concatenate([required, *bundles]), len(required))
    return ordered, tuple(sorted({full, *widths}, reverse=True))


def _parts(group: LayerGroup, channels: ChannelGroups, scores: Scores) -> list[Layout]:
    """Return the members of a layer group by the layers that produce them, the most important of each part first."""
    produced = [channels.group[channels.layouts[LayerOutput(layer)]] for layer in group.layers]
    is_produced = np.stack([np.isin(group.members, members) for members in produced])
    parts: dict[bytes, list[int]] = {}
    for index in np.argsort(-scores[group.members], kind="stable"):
        parts.setdefault(is_produced[:, index].tobytes(), []).append(int(group.members[index]))
    return [np.array(members) for members in parts.values()]


def residual_blocks(network: Network) -> tuple[ResidualBlock, ...]:
    """Return the residual blocks of a network: additions whose one operand is computed from the other one alone."""
    blocks = []
    for layer in network.layers.values():
        if spec_of(layer) != ADD or len(layer.calls) != 1:
            continue
        operands = layer.inputs()
        shapes = {network.shapes[tensor] for tensor in (*operands, LayerOutput(layer.name))}
        if len(operands) != 2 or len(shapes) != 1:
            continue
        for start, end in (operands, operands[::-1]):
            layers = _between(network, start, end)
            if layers and _is_closed(network, layers, layer.name):
                blocks.append(ResidualBlock(layer.name, start, end, layers))
    return tuple(blocks)


def _between(network: Network, start: LayerOutput, end: LayerOutput) -> frozenset[str]:
    """Return the layers that compute one tensor from another; none if it depends on something else."""
    layers: set[str] = set()
    waiting = [end]
    while waiting:
        tensor = waiting.pop()
        if tensor == start or tensor.layer in layers:
            continue
        layer = network.layers[tensor.layer]
        if len(layer.calls) != 1 or not layer.inputs():
            return frozenset()
        layers.add(layer.name)
        waiting += layer.inputs()
    return frozenset(layers)


def _is_closed(network: Network, layers: frozenset[str], addition: str) -> bool:
    """Whether nothing but an addition reads what some layers compute, apart from these layers."""
    ends = {tensor.layer for tensor in tensors_in(network.outputs)}
    readers = {reader for tensor, calls in network.consumers().items() if tensor.layer in layers for reader, _ in calls}
    return readers <= {*layers, addition} and not ends & layers


def _kernels(network: Network) -> list[ElasticKernel]:
    """Return the kernels of which the centre has the same outputs as the whole with zeros around it."""
    kernels = []
    for layer in network.layers.values():
        settings = layer.config
        if not is_elastic_convolution(layer) or layer.weights[0].ndim != 4 or settings.get("padding") != "same":
            continue
        height, width = layer.weights[0].shape[:2]
        dilated = settings.get("dilation_rate", 1) not in (1, (1, 1), [1, 1])
        if height == width and height % 2 and height > SMALLEST_KERNEL and not dilated:
            kernels.append(ElasticKernel(layer.name, tuple(range(height, SMALLEST_KERNEL - 1, -2))))
    return kernels
