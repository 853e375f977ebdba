"""What a network would cost with fewer channels: weights, multiply-accumulates, and time and memory on a target.

A network becomes a list of `Piece`s, each an operator of the .tflite file that will be made of it, with the layouts of
its channels. So the cost of any choice of channels is known without building the smaller network. What cannot be
followed (a recurrent layer, an attention) keeps its channels, and so costs the same in every choice: that much is taken
from the files of one of them (`draft`).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.ir.channel_groups import Channels, Layout
from compress.ir.keras_graph import Layer, LayerOutput, Network, tensors_in
from compress.ir.layer_specs import Kernel, spec_of
from compress.ir.layer_specs.functions import FUSED, canonical_name
from compress.targets.base import CostModel, NetworkCost, OperatorShape, Target
from compress.tflite.graph import Graph

Sets = Sequence[NDArray[np.int64]]
"""Groups of channels that are chosen among each other, the most important first."""
Counts = tuple[int, ...]
"""How many groups of each set are kept."""
_CHANNEL_BYTES, _DENSE_BYTES, _OPERATOR_BYTES = 28, 4, 550
"""In an 8-bit file, beside weights: of a convolution's channel (a bias; scale and zero point of it and of the kernel),
of a dense layer's (a bias), and of an operator with its tensors and their names, about."""
_NO_CHANNELS: Layout = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Draft:
    """The files that a network would become.

    Attributes:
        macs: multiply-accumulates of its float file.
        size_bytes: of its 8-bit file.
        graph: the 8-bit file; None where there can be none.
        missing: why there is none, or "".
    """

    macs: int
    size_bytes: int = 0
    graph: Graph | None = None
    missing: str = ""


@dataclass(frozen=True)
class Piece:
    """An operator, and the channels that it reads and makes.

    Attributes:
        layer: with all its channels.
        given: layout of its input; empty if that does not change.
        made: layout of its output.
        macs: multiply-accumulates for each channel made, and each channel read if `mixes`.
        mixes: whether every channel made is computed from all channels read.
        constant: whether it has a number for each channel made, which is sent at every inference.
    """

    layer: OperatorShape
    given: Layout
    made: Layout
    macs: int = 0
    mixes: bool = False
    constant: bool = False


@dataclass(frozen=True)
class Weights:
    """An array of weights: `each` for every combination of one channel from each layout.

    Of a kernel, `beside` tells the bytes that come with each of its output channels in an 8-bit file; None of others.
    """

    each: int
    layouts: tuple[Layout, ...]
    beside: int | None = None


def pieces(network: Network, channels: Channels, cost: CostModel) -> list[Piece]:
    """The operators that a network becomes on a target with these costs."""
    consumers = network.consumers()
    found: list[Piece] = []
    for layer, call in network.in_order():
        if _is_free(layer):
            continue
        given, made = layer.given(call)[:1], LayerOutput(layer.name, call)
        source = given[0] if given else made
        if spec_of(layer).kernels:
            found += _kernels(layer, network.shapes[source], network.shapes[made], channels, (source, made))
            count = cost.activation_operators(_inner_function(layer))
        else:
            count = _count(layer, source, network, cost, alone=len(consumers.get(source, [])) == 1)
        kind, window = _window(layer, network.shapes[source])
        form = OperatorShape(kind, _map(network.shapes[made]), _map(network.shapes[source]), window, name=layer.name)
        constant = spec_of(layer).constant_by_channel
        found += [Piece(form, channels.layouts[source], channels.layouts[made], constant=constant)] * count
    return found


def _is_free(layer: Layer) -> bool:
    """Whether nothing is left of a layer in the .tflite file, or nothing that takes time."""
    spec = spec_of(layer)
    return not layer.calls or spec.keeps_values or spec.pads


def _inner_function(layer: Layer) -> str:
    """The activation in the settings of a layer, by its first name."""
    return canonical_name(str(layer.config.get("activation", "linear")))


def _count(layer: Layer, source: LayerOutput, network: Network, cost: CostModel, *, alone: bool) -> int:
    """How many operators a layer without a kernel becomes: none if the one before does its work too."""
    before, spec = network.layers[source.layer], spec_of(layer)
    previous = spec_of(before)
    alone = alone and _inner_function(before) == "linear"
    if spec.is_batch_norm:
        return 0 if alone and previous.kernels else 2
    function = spec.activation(layer)
    if function is None:
        return 1
    if function in FUSED and alone and (previous.kernels or previous.is_batch_norm or previous.fuses_relu):
        return 0
    return 0 if function == "linear" else max(cost.activation_operators(function), 1)


def _window(layer: Layer, given: tuple[int | None, ...]) -> tuple[str, tuple[int, int]]:
    """Pooling and its window; everything else goes element by element."""
    spec = spec_of(layer)
    return ("pool", spec.pool_window(layer.config, _map(given))) if spec.pools else ("elt", (1, 1))


def _kernels(
    layer: Layer,
    given: tuple[int | None, ...],
    made: tuple[int | None, ...],
    channels: Channels,
    ends: tuple[LayerOutput, LayerOutput],
) -> list[Piece]:
    """The operators with weights that a layer becomes."""
    source, result = (channels.layouts[tensor] for tensor in ends)
    groups = layer.config.get("groups", 1)
    if groups > 1:
        return _grouped(layer, (_map(given), _map(made)), (source, result), groups)
    before, kernels, found = _map(given), spec_of(layer).kernels, []
    for axes, kernel in zip(kernels, layer.weights, strict=False):
        between = result if axes is kernels[-1] else np.repeat(source, layer.config["depth_multiplier"])
        after = (*_map(made)[:2], len(between))
        taps = _taps(kernel)
        form = OperatorShape(_form(axes, kernel, made), after, before, taps, name=layer.name)
        positions = prod(before[:2]) if axes.transposed else prod(after[:2])
        found.append(Piece(form, source, between, positions * prod(taps), mixes=not axes.depthwise))
        source, before = between, after
    return found


def _taps(kernel: NDArray[Any]) -> tuple[int, int]:
    """Height and width of a kernel."""
    height, width = (1, 1, *kernel.shape[:-2])[-2:]
    return int(height), int(width)


def _form(axes: Kernel, kernel: NDArray[Any], made: tuple[int | None, ...]) -> str:
    """What the target computes a kernel as; a dense layer on a map is a 1x1 convolution."""
    if axes.depthwise:
        return "dw"
    if axes.transposed:
        return "tconv"
    return "fc" if kernel.ndim == 2 and len(made) == 1 else "conv"


def _grouped(
    layer: Layer, maps: tuple[tuple[int, int, int], tuple[int, int, int]], ends: tuple[Layout, Layout], groups: int
) -> list[Piece]:
    """The operators of a grouped convolution: the compiler is given a split, one for each group, and their union."""
    (before, after), (source, result), name = maps, ends, layer.name
    taps, each = _taps(layer.weights[0]), len(source) // groups
    form = OperatorShape("conv", after, (*before[:2], each), taps, name=name)
    macs = prod(after[:2]) * prod(taps) * each
    parts = [Piece(form, _NO_CHANNELS, part, macs) for part in np.split(result, groups)]
    split, union = (OperatorShape("elt", one, one, name=name) for one in (before, after))
    return [Piece(split, source, source), *parts, Piece(union, result, result)]


def _map(shape: tuple[int | None, ...]) -> tuple[int, int, int]:
    """Height, width and channels."""
    height, width, channels = (1, 1, 1, *(side or 1 for side in shape))[-3:]
    return height, width, channels


def weights(network: Network, channels: Channels) -> list[Weights]:
    """All arrays of weights, by the channels that they run along."""
    found = []
    for layer in network.layers.values():
        if not layer.weights or not layer.calls:
            continue
        if layer.config.get("data_format") == "channels_first":
            found += [Weights(array.size, ()) for array in layer.weights]
            continue
        given, made = channels.layouts[layer.given()[0]], channels.layouts[LayerOutput(layer.name)]
        spec = spec_of(layer)
        for axes, array in zip(spec.kernels, layer.weights, strict=False):
            found.append(_kernel_weights(axes, array, _runs_along(axes, layer, given, made)))
        for array in layer.weights[len(spec.kernels) :]:
            along = (made,) if array.shape and array.shape[-1] == len(made) else ()
            found.append(Weights(array.size // prod(map(len, along)), along))
    return found


def _runs_along(axes: Kernel, layer: Layer, given: Layout, made: Layout) -> tuple[Layout, ...]:
    """The layouts of the channels that a kernel has weights for."""
    if axes.depthwise:
        return (given,)
    return (made,) if layer.config.get("groups", 1) > 1 else (given, made)


def _kernel_weights(axes: Kernel, array: NDArray[Any], along: tuple[Layout, ...]) -> Weights:
    bytes_by_channel = _CHANNEL_BYTES if axes.per_channel else _DENSE_BYTES
    return Weights(array.size // prod(map(len, along)), along, bytes_by_channel)


class Costs:
    """Costs of a network by how many groups of each set it keeps.

    Args:
        network: as it is.
        channels: of the network.
        sets: which groups are chosen among each other, the most important first.
        target: what time and memory are predicted for.
    """

    def __init__(self, network: Network, channels: Channels, sets: Sets, target: Target) -> None:
        self.target, self.sets = target, sets
        self._place = {int(g): (s, rank) for s, members in enumerate(sets) for rank, g in enumerate(members)}
        self._group = channels.group
        self._layouts: dict[bytes, int] = {}
        self._widths: list[tuple[int, tuple[tuple[int, NDArray[np.int64]], ...]]] = []
        self._pieces = [
            (each, self._known(each.given), self._known(each.made)) for each in pieces(network, channels, target.cost)
        ]
        self._weights = [(each, [self._known(one) for one in each.layouts]) for each in weights(network, channels)]
        inputs = (network.shapes[tensor] for tensor in tensors_in(network.inputs))
        self._inputs = sum(target.cost.input_bytes([side or 1 for side in shape]) for shape in inputs)
        outputs = [network.shapes[tensor] for tensor in tensors_in(network.outputs)]
        self._outputs = sum(target.cost.output_bytes(_map(shape)) for shape in outputs)
        self._cut: dict[tuple[int, int, int], OperatorShape] = {}
        self._missed = defaultdict[str, float](float)
        self._anchor: tuple[Counts, NetworkCost] | None = None

    def anchored(self, counts: Counts, files: Draft) -> Costs:
        """The same costs, but those of one choice are what its files tell, and all others are off by as much."""
        found = copy.copy(self)
        found._missed, found._anchor = defaultdict(float), None
        real: dict[str, float] = {"macs": files.macs - found.macs(counts)}
        if files.graph is not None:
            real["size_bytes"] = files.size_bytes - found.size_bytes(counts)
        if files.graph is not None and self.target.cost.objectives:
            file = self.target.cost.of_file(files.graph)
            real["streamed_bytes"] = file.streamed_bytes - found.streamed_bytes(counts)
            real["cached_bytes"] = file.cached_bytes(file.never_cached) - found.cached_bytes(
                counts, found.never_cached(counts)
            )
            found._anchor = counts, file
        found._missed.update(real)
        return found

    def _known(self, layout: Layout) -> int:
        """The number of a layout, counted set by set: how many of its channels the first groups of a set are."""
        key = layout.tobytes()
        if key not in self._layouts:
            self._layouts[key] = len(self._widths)
            fixed, found = 0, dict[int, NDArray[np.int64]]()
            for number in self._group[layout].tolist():
                if number not in self._place:
                    fixed += 1
                    continue
                index, rank = self._place[number]
                found.setdefault(index, np.zeros(len(self.sets[index]) + 1, np.int64))[rank + 1] += 1
            self._widths.append((fixed, tuple((index, each.cumsum()) for index, each in found.items())))
        return self._layouts[key]

    @property
    def everything(self) -> Counts:
        """All groups of all sets."""
        return tuple(map(len, self.sets))

    def widths(self, counts: Counts) -> list[int]:
        """Channels of each layout."""
        return [fixed + sum(int(each[counts[index]]) for index, each in parts) for fixed, parts in self._widths]

    def macs(self, counts: Counts) -> int:
        """Multiply-accumulates of one inference."""
        wide = self.widths(counts)
        own = sum(each.macs * wide[made] * (wide[given] if each.mixes else 1) for each, given, made in self._pieces)
        return own + round(self._missed["macs"])

    def parameters(self, counts: Counts) -> int:
        """Weights of all layers, as Keras counts them."""
        wide = self.widths(counts)
        return sum(each.each * prod(wide[one] for one in along) for each, along in self._weights)

    def size_bytes(self, counts: Counts) -> int:
        """The 8-bit file: a byte for each weight of a kernel, and what comes with each of its output channels."""
        wide = self.widths(counts)
        total = self._missed["size_bytes"] + _OPERATOR_BYTES * sum(wide[made] > 0 for *_, made in self._pieces)
        for each, along in self._weights:
            if each.beside is not None:
                total += each.each * prod(wide[one] for one in along) + each.beside * wide[along[-1]]
        return round(total)

    def layers(self, counts: Counts) -> list[OperatorShape]:
        """The operators, as the target knows them."""
        wide = self.widths(counts)
        return [
            self._narrowed(place, wide[given] if len(each.given) else 0, wide[made])
            for place, (each, given, made) in enumerate(self._pieces)
            if wide[made]  # a group of a convolution may be gone
        ]

    def _narrowed(self, place: int, given: int, made: int) -> OperatorShape:
        if (place, given, made) not in self._cut:
            layer = self._pieces[place][0].layer
            self._cut[place, given, made] = self.target.cost.operator(
                replace(
                    layer,
                    output_shape=(*layer.output_shape[:2], made),
                    input_shape=(*layer.input_shape[:2], given or layer.input_shape[2]),
                    index=place,
                    constant=self._pieces[place][0].constant,
                )
            )
        return self._cut[place, given, made]

    def network(self, counts: Counts) -> NetworkCost:
        """Time and memory on the target, of the operators that can be followed."""
        return self.target.cost.of_operators(self.layers(counts), self._inputs, self._outputs)

    def compute_ms(self, counts: Counts, clock: str | None = None) -> float:
        """The time of the arithmetic alone, at a clock of the target; None: the first."""
        clock = self.target.cost.clock(clock)
        return self._predicted(f"compute_ms {clock}", counts, lambda network: network.compute_ms(clock))

    def latency_ms(self, counts: Counts, host: str | None = None, clock: str | None = None) -> float:
        """The predicted latency of one inference on a host of the target; None: its default host."""
        host, clock = self.target.cost.host(host), self.target.cost.clock(clock)
        return self._predicted(f"latency_ms {host} {clock}", counts, lambda network: network.latency_ms(host, clock))

    def _predicted(self, name: str, counts: Counts, of: Callable[[NetworkCost], float]) -> float:
        """A cost of the operators, and what it misses of the choice whose file is known."""
        if self._anchor is not None and name not in self._missed:
            chosen, file = self._anchor
            self._missed[name] = of(file) - of(self.network(chosen))
        return of(self.network(counts)) + self._missed[name]

    def streamed_bytes(self, counts: Counts) -> int:
        """Parameters that are sent at every inference."""
        return max(self.network(counts).streamed_bytes + round(self._missed["streamed_bytes"]), 0)

    def cached_bytes(self, counts: Counts, without: Collection[int] = ()) -> int:
        """The on-chip memory that all parameters would take together, except those of some pieces."""
        return self.network(counts).cached_bytes(without) + round(self._missed["cached_bytes"])

    def never_cached(self, counts: Counts) -> frozenset[int]:
        """The pieces whose parameters are streamed however empty the memory is."""
        return frozenset(self.network(counts).never_cached)

    def to_json(self, counts: Counts, host: str | None = None, clock: str | None = None) -> dict[str, Any]:
        """All of them, as a plain map; time and memory only where the target predicts them."""
        found: dict[str, Any] = {
            "macs": self.macs(counts),
            "parameters": self.parameters(counts),
            "size_bytes": self.size_bytes(counts),
        }
        objectives = self.target.cost.objectives
        if "compute" in objectives:
            found["compute_ms"] = float(f"{self.compute_ms(counts, clock):.4g}")
        if "latency" in objectives:
            found["latency_ms"] = float(f"{self.latency_ms(counts, host, clock):.4g}")
        if "cache" in objectives:
            found["streamed_bytes"] = self.streamed_bytes(counts)
        return found
