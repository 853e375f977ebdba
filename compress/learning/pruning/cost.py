"""Costs of a network by the widths of its layer groups: weights, multiply-accumulates, time and memory on a target.

A network becomes a list of `PrunableOperator`s: the operators of the .tflite file that will be made of it, with the
layouts of their channels. So the costs of all widths are known without building the smaller networks. Layers that
cannot be followed (a recurrent layer, an attention) keep their channels, and cost the same at all widths: that
difference is measured once, on the files that a trial conversion makes (`Costs.calibrated`).

"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.learning.pruning.layer_groups import LayerGroup, Widths
from compress.model.ir.channel_groups import ChannelGroups, Layout
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, tensors_in
from compress.model.ir.layer_specs import Kernel, spec_of
from compress.model.ir.layer_specs.functions import FUSED, canonical_name
from compress.model.ir.passes import fold
from compress.model.tflite.graph import Graph
from compress.results.pruning import CostFigures
from compress.targets.base import CostModel, NetworkCost, OperatorShape, Target, hardware_costs

_BYTES_BY_CHANNEL = 28
"""Of each output channel of a convolution in an 8-bit file: a bias; scale and zero point of it and of the kernel."""
_BYTES_BY_UNIT = 4
"""Of each output of a dense layer in an 8-bit file: a bias."""
_BYTES_BY_OPERATOR = 550
"""Of an operator with its tensors and their names, about."""
_NO_CHANNELS: Layout = np.zeros(0, np.int64)
Shape = tuple[int | None, ...]
Consumers = Mapping[LayerOutput, Sequence[tuple[str, int]]]
"""For each tensor the calls (layer, number) that read it."""


@dataclass(frozen=True)
class TrialConversion:
    """The .tflite files of a network, converted only to read their costs.

    Attributes:
        macs: multiply-accumulates of the float file.
        has_loop: whether the float file has operators inside a loop, which `macs` does not count.
        size_bytes: the size of the 8-bit file.
        graph: the 8-bit file; None where it cannot be made.
        missing: the reason why there is no 8-bit file, or None.
    """

    macs: int
    has_loop: bool = False
    size_bytes: int = 0
    graph: Graph | None = None
    missing: str | None = None


Convert = Callable[[Network, Any], TrialConversion]
"""(network, the same as a Keras model) -> the .tflite files that it becomes; see
`learning.procedures.trial_conversion`."""


@dataclass(frozen=True)
class PrunableOperator:
    """An operator, and the channels that it reads and makes.

    Attributes:
        shape: the operator with all its channels.
        inputs: the layout of its input; empty if its number of input channels stays.
        outputs: the layout of its output.
        macs: multiply-accumulates for each output channel, and for each input channel if `mixes`.
        mixes: whether each output channel is computed from all input channels.
        constant: whether it has a constant for each output channel, which is sent at every inference.
        channel_bytes: the bytes of each output channel in an 8-bit file, in addition to those of a `WeightArray`.
    """

    shape: OperatorShape
    inputs: Layout
    outputs: Layout
    macs: int = 0
    mixes: bool = False
    constant: bool = False
    channel_bytes: int = 0


@dataclass(frozen=True)
class WeightArray:
    """An array of weights, and the channels that its axes run along.

    Attributes:
        size: the number of weights for each combination of one channel from every layout.
        layouts: the layouts of the channels.
        channel_bytes: the bytes of each output channel in an 8-bit file, in addition to the weights; None for an
            array that is not a kernel.
    """

    size: int
    layouts: tuple[Layout, ...]
    channel_bytes: int | None = None


def operators(network: Network, channels: ChannelGroups, cost: CostModel) -> list[PrunableOperator]:
    """Return the operators that a network becomes on a target with this cost model."""
    consumers = network.consumers()
    result: list[PrunableOperator] = []
    for layer, call in network.in_order():
        spec = spec_of(layer)
        if not layer.calls or spec.keeps_values or spec.pads:  # nothing of it takes time
            continue
        output = LayerOutput(layer.name, call)
        source = next(iter(layer.inputs(call)), output)
        if spec.is_batch_norm:
            result += [] if _is_folded(layer, network, consumers) else _norm_operators(layer, source, network, channels)
            continue
        if spec.kernels:
            result += _kernel_operators(layer, source, output, network, channels)
            count = cost.activation_operators(_inner_function(layer))
        else:
            only_consumer = len(consumers.get(source, [])) == 1
            count = _operator_count(layer, network.layers[source.layer], cost, only_consumer=only_consumer)
        result += [_elementwise_operator(layer, source, output, network, channels)] * count
    return result


def _elementwise_operator(
    layer: Layer, source: LayerOutput, output: LayerOutput, network: Network, channels: ChannelGroups
) -> PrunableOperator:
    """Return an operator without a kernel that a layer becomes: a pooling, or one that works element by element."""
    spec = spec_of(layer)
    input_map, output_map = _map_shape(network.shapes[source]), _map_shape(network.shapes[output])
    kind, window = ("pool", spec.pool_window(layer.config, input_map)) if spec.pools else ("elt", (1, 1))
    shape = OperatorShape(kind, output_map, input_map, window, name=layer.name)
    by_channel = all(array.size == output_map[2] for array in layer.weights)  # not the slopes of a PReLU by position
    constant = spec.constant_by_channel and by_channel
    return PrunableOperator(shape, channels.layouts[source], channels.layouts[output], constant=constant)


def _norm_operators(
    norm: Layer, source: LayerOutput, network: Network, channels: ChannelGroups
) -> list[PrunableOperator]:
    """Return the operators of a batch norm that is not folded: a depthwise 1x1 convolution (`ir.passes.decompose`).

    One along another axis than the channels stays, and becomes a multiplication and an addition with constants.
    """
    shape = network.shapes[source]
    layout = channels.layouts[source]
    whole_map = _map_shape(shape)
    if not norm.normalizes_last_axis(len(shape)):
        by_element = OperatorShape("elt", whole_map, whole_map, name=norm.name)
        return [PrunableOperator(by_element, layout, layout, constant=True)] * 2
    convolution = OperatorShape("dw", whole_map, whole_map, name=norm.name)
    return [PrunableOperator(convolution, layout, layout, channel_bytes=1 + _BYTES_BY_CHANNEL)]


def _is_folded(norm: Layer, network: Network, consumers: Consumers) -> bool:
    """Whether a batch norm is folded into the layer before it, which `fold` decides on the layers around it.

    The decision does not depend on weights: single numbers take their place, since folding all of them takes a second.
    """
    before = _with_sources([norm.name], network)
    outputs = [LayerOutput(name, call) for name in before for call in range(len(network.layers[name].calls))]
    readers = [name for output in outputs for name, _ in consumers.get(output, [])]
    around = set(_with_sources([*before, *readers], network))
    layers = {
        name: replace(layer, weights=tuple(np.ones((1,) * array.ndim, array.dtype) for array in layer.weights))
        for name, layer in network.layers.items()
        if name in around
    }
    return norm.name not in fold.folded(replace(network, layers=layers)).layers


def _with_sources(names: Iterable[str], network: Network) -> list[str]:
    """Return layers, and those that the batch norms among them read; these may be batch norms too."""
    result = list(dict.fromkeys(names))
    for name in result:  # gets longer
        layer = network.layers[name]
        if spec_of(layer).is_batch_norm:
            result += dict.fromkeys(tensor.layer for tensor in tensors_in(layer.calls) if tensor.layer not in result)
    return result


def _inner_function(layer: Layer) -> str:
    """Return the activation in the settings of a layer, by its canonical name."""
    return canonical_name(str(layer.config.get("activation", "linear")))


def _operator_count(layer: Layer, before: Layer, cost: CostModel, *, only_consumer: bool) -> int:
    """Return the number of operators of a layer without a kernel: 0 if the operator before it does its work.

    Batch norms are counted by `_norm_operators`. The layer `before` makes the input, and `only_consumer` says whether
    no other layer reads that input.
    """
    spec, previous = spec_of(layer), spec_of(before)
    fusible = only_consumer and _inner_function(before) == "linear"
    function = spec.activation(layer)
    if function is None:
        return 1
    fuses = previous.kernels or previous.is_batch_norm or previous.fuses_relu
    if function == "linear" or (function in FUSED and fusible and fuses):
        return 0
    return max(cost.activation_operators(function), 1)


def _kernel_operators(
    layer: Layer, source: LayerOutput, output: LayerOutput, network: Network, channels: ChannelGroups
) -> list[PrunableOperator]:
    """Return the operators with weights that a layer becomes."""
    inputs, outputs = (channels.layouts[tensor] for tensor in (source, output))
    input_map, output_map = (_map_shape(network.shapes[tensor]) for tensor in (source, output))
    groups = layer.config.get("groups", 1)
    if groups > 1:
        return _grouped_operators(layer, (input_map, output_map), (inputs, outputs), groups)
    kernels = spec_of(layer).kernels
    result = []
    for axes, kernel in zip(kernels, layer.weights, strict=False):
        is_last = axes is kernels[-1]
        produced = outputs if is_last else np.repeat(inputs, layer.config["depth_multiplier"])
        produced_map = (*output_map[:2], len(produced))
        taps = _taps(kernel)
        kind = _kernel_kind(axes, kernel, network.shapes[output])
        shape = OperatorShape(kind, produced_map, input_map, taps, name=layer.name)
        positions = prod(input_map[:2]) if axes.transposed else prod(produced_map[:2])
        result.append(PrunableOperator(shape, inputs, produced, positions * prod(taps), mixes=not axes.depthwise))
        inputs, input_map = produced, produced_map
    return result


def _taps(kernel: NDArray[Any]) -> tuple[int, int]:
    """Return height and width of a kernel."""
    height, width = (1, 1, *kernel.shape[:-2])[-2:]
    return int(height), int(width)


def _kernel_kind(axes: Kernel, kernel: NDArray[Any], output: Shape) -> str:
    """Return the kind of the operator with a kernel; a dense layer on a map is a 1x1 convolution."""
    if axes.depthwise:
        return "dw"
    if axes.transposed:
        return "tconv"
    return "fc" if kernel.ndim == 2 and len(output) == 1 else "conv"


def _grouped_operators(
    layer: Layer, maps: tuple[tuple[int, int, int], tuple[int, int, int]], layouts: tuple[Layout, Layout], groups: int
) -> list[PrunableOperator]:
    """Return the operators of a grouped convolution: a SPLIT, one convolution for each group, a CONCATENATION."""
    input_map, output_map = maps
    inputs, outputs = layouts
    taps = _taps(layer.weights[0])
    group_inputs = len(inputs) // groups
    shape = OperatorShape("conv", output_map, (*input_map[:2], group_inputs), taps, name=layer.name)
    macs = prod(output_map[:2]) * prod(taps) * group_inputs
    convolutions = [PrunableOperator(shape, _NO_CHANNELS, part, macs) for part in np.split(outputs, groups)]
    split = OperatorShape("elt", input_map, input_map, name=layer.name)
    concatenation = OperatorShape("elt", output_map, output_map, name=layer.name)
    return [
        PrunableOperator(split, inputs, inputs),
        *convolutions,
        PrunableOperator(concatenation, outputs, outputs),
    ]


def _map_shape(shape: Shape) -> tuple[int, int, int]:
    """Return height, width and channels; dimensions that are missing or not fixed are 1."""
    height, width, channels = (1, 1, 1, *(size or 1 for size in shape))[-3:]
    return height, width, channels


def weight_arrays(network: Network, channels: ChannelGroups) -> list[WeightArray]:
    """Return all arrays of weights of a network."""
    result: list[WeightArray] = []
    for layer in network.layers.values():
        if not layer.weights or not layer.calls:
            continue
        if layer.config.get("data_format") == "channels_first":
            result += [WeightArray(array.size, ()) for array in layer.weights]
            continue
        inputs, outputs = (channels.layouts[tensor] for tensor in (layer.inputs()[0], LayerOutput(layer.name)))
        spec = spec_of(layer)
        for axes, array in zip(spec.kernels, layer.weights, strict=False):
            layouts: tuple[Layout, ...] = (inputs, outputs)
            if axes.depthwise:
                layouts = (inputs,)
            elif layer.config.get("groups", 1) > 1:
                layouts = (outputs,)
            channel_bytes = _BYTES_BY_CHANNEL if axes.per_channel else _BYTES_BY_UNIT
            result.append(WeightArray(array.size // prod(map(len, layouts)), layouts, channel_bytes))
        for array in layer.weights[len(spec.kernels) :]:
            by_channel = bool(array.shape) and array.shape[-1] == len(outputs)
            layouts = (outputs,) if by_channel else ()
            result.append(WeightArray(array.size // prod(map(len, layouts)), layouts))
    return result


@dataclass(frozen=True)
class _ChannelCount:
    """The number of channels of a layout at any widths.

    Attributes:
        fixed: channels that always stay.
        by_group: for each layer group in the layout its index, and its channels at every width from 0.
    """

    fixed: int
    by_group: tuple[tuple[int, NDArray[np.int64]], ...]

    def at(self, widths: Widths) -> int:
        """Return the number of channels at some widths."""
        return self.fixed + sum(int(channels[widths[index]]) for index, channels in self.by_group)


class _ChannelCounts:
    """The channel counts of layouts; equal layouts share one.

    Args:
        channels: the channels of the network.
        groups: its layer groups.
    """

    def __init__(self, channels: ChannelGroups, groups: Sequence[LayerGroup]) -> None:
        self.counts: list[_ChannelCount] = []
        self._channels = channels
        self._groups = groups
        self._rank = {
            int(member): (index, rank)
            for index, group in enumerate(groups)
            for rank, member in enumerate(group.members)
        }
        self._indices: dict[bytes, int] = {}

    def number(self, layout: Layout) -> int:
        """Return the index of a layout in `counts`."""
        key = layout.tobytes()
        if key not in self._indices:
            self._indices[key] = len(self.counts)
            self.counts.append(self._count(layout))
        return self._indices[key]

    def _count(self, layout: Layout) -> _ChannelCount:
        fixed = 0
        by_group: dict[int, NDArray[np.int64]] = {}
        for member in self._channels.group[layout].tolist():
            if member not in self._rank:
                fixed += 1
                continue
            index, rank = self._rank[member]
            added = by_group.setdefault(index, np.zeros(len(self._groups[index].members) + 1, np.int64))
            added[rank + 1] += 1
        return _ChannelCount(fixed, tuple((index, added.cumsum()) for index, added in by_group.items()))


class Costs:
    """Costs of a network by the widths of its layer groups.

    Args:
        network: the network with all channels.
        channels: its channels.
        groups: its layer groups.
        target: the target that time and memory are predicted for.
    """

    def __init__(
        self,
        network: Network,
        channels: ChannelGroups,
        groups: Sequence[LayerGroup],
        target: Target,
    ) -> None:
        self.target = target
        self.full_widths: Widths = tuple(len(group.members) for group in groups)
        counts = _ChannelCounts(channels, groups)
        self._operators = [
            (operator, counts.number(operator.inputs), counts.number(operator.outputs))
            for operator in operators(network, channels, target.cost)
        ]
        self._weights = [
            (array, [counts.number(layout) for layout in array.layouts]) for array in weight_arrays(network, channels)
        ]
        self._counts = counts.counts
        inputs = (network.shapes[tensor] for tensor in tensors_in(network.inputs))
        self._input_bytes = sum(target.cost.input_bytes([size or 1 for size in shape]) for shape in inputs)
        outputs = (network.shapes[tensor] for tensor in tensors_in(network.outputs))
        self._output_bytes = sum(target.cost.output_bytes(_map_shape(shape)) for shape in outputs)
        self._target_operators: dict[tuple[int, int, int], OperatorShape] = {}
        self._corrections: dict[str, float] = {}
        self._file: tuple[Widths, NetworkCost] | None = None

    def calibrated(self, widths: Widths, conversion: TrialConversion) -> Costs:
        """Return costs that agree with the files at some widths, and differ by as much at all other widths."""
        uncalibrated = copy.copy(self)
        uncalibrated._corrections = {}
        uncalibrated._file = None
        corrections: dict[str, float] = {"macs": conversion.macs - uncalibrated.macs(widths)}
        result = copy.copy(uncalibrated)
        if conversion.graph is not None:
            corrections["size_bytes"] = conversion.size_bytes - uncalibrated.size_bytes(widths)
        if conversion.graph is not None and self.target.cost.objectives:
            file = hardware_costs(self.target).of_file(conversion.graph)
            cached = uncalibrated.cached_bytes(widths, uncalibrated.never_cached(widths))
            corrections["streamed_bytes"] = file.streamed_bytes - uncalibrated.streamed_bytes(widths)
            corrections["cached_bytes"] = file.cached_bytes(file.never_cached) - cached
            result._file = (widths, file)
        result._corrections = corrections
        return result

    def _channel_counts(self, widths: Widths) -> list[int]:
        return [count.at(widths) for count in self._counts]

    def macs(self, widths: Widths) -> int:
        """Return the multiply-accumulates of one inference."""
        counts = self._channel_counts(widths)
        total = 0
        for operator, inputs, outputs in self._operators:
            total += operator.macs * counts[outputs] * (counts[inputs] if operator.mixes else 1)
        return total + round(self._corrections.get("macs", 0))

    def parameters(self, widths: Widths) -> int:
        """Return the number of weights of all layers, as Keras counts them."""
        counts = self._channel_counts(widths)
        return sum(array.size * prod(counts[layout] for layout in layouts) for array, layouts in self._weights)

    def size_bytes(self, widths: Widths) -> int:
        """Return the size of the 8-bit file."""
        counts = self._channel_counts(widths)
        total = self._corrections.get("size_bytes", 0)
        for operator, _, outputs in self._operators:
            if counts[outputs]:
                total += _BYTES_BY_OPERATOR + operator.channel_bytes * counts[outputs]
        for array, layouts in self._weights:
            if array.channel_bytes is not None:
                total += array.size * prod(counts[layout] for layout in layouts)
                total += array.channel_bytes * counts[layouts[-1]]
        return round(total)

    def operators(self, widths: Widths) -> list[OperatorShape]:
        """Return the operators, with what the target needs to know of them."""
        counts = self._channel_counts(widths)
        return [
            self._target_operator(index, counts[inputs] if len(operator.inputs) else 0, counts[outputs])
            for index, (operator, inputs, outputs) in enumerate(self._operators)
            if counts[outputs]  # all channels of a group of a convolution may be removed
        ]

    def _target_operator(self, index: int, inputs: int, outputs: int) -> OperatorShape:
        """Return one operator with other numbers of channels; 0 input channels stand for those that it had."""
        key = (index, inputs, outputs)
        if key not in self._target_operators:
            operator = self._operators[index][0]
            shape = operator.shape
            narrow = replace(
                shape,
                output_shape=(*shape.output_shape[:2], outputs),
                input_shape=(*shape.input_shape[:2], inputs or shape.input_shape[2]),
                index=index,
                constant=operator.constant,
            )
            self._target_operators[key] = self.target.cost.operator(narrow)
        return self._target_operators[key]

    def on_target(self, widths: Widths) -> NetworkCost:
        """Return time and memory of the operators that can be followed."""
        return hardware_costs(self.target).of_operators(self.operators(widths), self._input_bytes, self._output_bytes)

    def compute_ms(self, widths: Widths, clock: str | None = None) -> float:
        """Return the time of the arithmetic alone, at a clock of the target; None: the first."""
        clock = self.target.cost.clock(clock)
        return self._predicted(f"compute_ms {clock}", widths, lambda cost: cost.compute_ms(clock))

    def latency_ms(self, widths: Widths, host: str | None = None, clock: str | None = None) -> float:
        """Return the predicted latency of one inference on a host of the target; None: its default host."""
        host = self.target.cost.host(host)
        clock = self.target.cost.clock(clock)
        return self._predicted(f"latency_ms {host} {clock}", widths, lambda cost: cost.latency_ms(host, clock))

    def _predicted(self, name: str, widths: Widths, figure: Callable[[NetworkCost], float]) -> float:
        """Return a figure of the operators, corrected by its error at the widths whose file is known."""
        if self._file is not None and name not in self._corrections:
            file_widths, file = self._file
            self._corrections[name] = figure(file) - figure(self.on_target(file_widths))
        return figure(self.on_target(widths)) + self._corrections.get(name, 0.0)

    def streamed_bytes(self, widths: Widths) -> int:
        """Return the bytes of parameters that are sent at every inference."""
        correction = round(self._corrections.get("streamed_bytes", 0))
        return max(self.on_target(widths).streamed_bytes + correction, 0)

    def cached_bytes(self, widths: Widths, without: Collection[int] = ()) -> int:
        """Return the on-chip memory that all parameters would take together, except those of some operators."""
        correction = round(self._corrections.get("cached_bytes", 0))
        return self.on_target(widths).cached_bytes(without) + correction

    def never_cached(self, widths: Widths) -> frozenset[int]:
        """Return the indices of the operators whose parameters are streamed however empty the memory is."""
        return frozenset(self.on_target(widths).never_cached)

    def figures(self, widths: Widths, host: str | None = None, clock: str | None = None) -> CostFigures:
        """Return all costs at some widths; times are rounded to four digits."""
        known = self.target.cost.objectives
        return CostFigures(
            self.macs(widths),
            self.parameters(widths),
            self.size_bytes(widths),
            float(f"{self.compute_ms(widths, clock):.4g}") if "compute" in known else None,
            float(f"{self.latency_ms(widths, host, clock):.4g}") if "latency" in known else None,
            self.streamed_bytes(widths) if "cache" in known else None,
        )
