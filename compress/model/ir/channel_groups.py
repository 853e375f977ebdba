"""Structured pruning, first of three questions: which channels must be removed together?

Every channel that a layer produces gets a number. The *layout* of a tensor holds the channel numbers along its last
axis. Calls are followed in order: an addition couples the channels of its operands (union-find), a concatenation joins
their layouts, a flatten repeats its layout. Coupled channels form a group, and are kept or removed together. A channel
is pinned, which means that it must be kept, if it reaches an output or a layer whose use of channels is not known.

Idea: Fang et al., DepGraph, CVPR 2023; here by channel instead of by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.keras_graph import Layer, LayerOutput, Network, tensors_in
from compress.model.ir.layer_specs import RESCALING, spec_of
from compress.model.ir.layer_specs.functions import ELEMENTWISE, canonical_name

Layout = NDArray[np.int64]
"""Channel numbers along the last axis of a tensor."""
Mask = NDArray[np.bool_]
"""One boolean for each channel number."""


@dataclass(frozen=True)
class ChannelGroups:
    """The channels of a network and their groups.

    Attributes:
        layouts: the layout of each tensor.
        group: for each channel number the number of its group, which is the smallest channel number in it.
        pinned: for each channel number whether it must be kept.
        unsupported: layers whose use of channels is not known, if they pin channels or have kernels, and do not make
            an output of the network.
    """

    layouts: Mapping[LayerOutput, Layout]
    group: NDArray[np.int64]
    pinned: Mask
    unsupported: tuple[str, ...] = ()

    def with_coupled(self, kept: Mask) -> Mask:
        """Return the mask of all channels whose group is kept, or that are pinned."""
        return kept[self.group] | self.pinned


class ChannelTrace:
    """Layouts, couplings and pins of a network while its calls are followed.

    Attributes:
        layouts: the layouts of the tensors that were followed so far.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.layouts: dict[LayerOutput, Layout] = {}
        self._parent: list[int] = []
        self._pinned: set[int] = set()

    def new_channels(self, count: int) -> Layout:
        """Return the layout of new channels."""
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        return np.arange(start, start + count)

    def couple(self, first: Layout, second: Layout) -> None:
        """Couple the channels of two layouts one by one."""
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            roots = self._root(a), self._root(b)
            self._parent[max(roots)] = min(roots)

    def pin(self, layout: Layout) -> None:
        """Pin the channels of a layout."""
        self._pinned.update(layout.tolist())

    def has_unpinned(self, layout: Layout) -> bool:
        """Whether a layout has channels that are not pinned so far."""
        return not self._pinned.issuperset(layout.tolist())

    def inputs(self, layer: Layer, call: int) -> list[Layout]:
        """Return the layouts of the tensors that a call reads."""
        return [self.layouts[tensor] for tensor in layer.inputs(call)]

    def couple_with_first_call(self, layer: Layer, call: int, layout: Layout) -> None:
        """Couple the input of a later call of a shared layer with that of the first: they meet the same weights."""
        if call:
            self.couple(self.layouts[layer.inputs(0)[0]], layout)

    def groups(self, unsupported: tuple[str, ...]) -> ChannelGroups:
        """Return the groups that were found."""
        group = np.array([self._root(number) for number in range(len(self._parent))], np.int64)
        pinned = np.zeros(len(group), bool)
        pinned[group[sorted(self._pinned)]] = True
        return ChannelGroups(self.layouts, group, pinned[group], unsupported)

    def _root(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number


LayoutRule = Callable[[Layer, int, list[Layout], ChannelTrace], Layout | None]
"""(layer, call, layouts of its inputs, trace) -> layout of its output; None if the use of channels is not known."""


def find_groups(network: Network) -> ChannelGroups:
    """Return the channel groups of a network."""
    return find_groups_by(output_layout, network)


def find_groups_by(rule: LayoutRule, network: Network) -> ChannelGroups:
    """Return the channel groups of a network by another rule for the layouts of outputs."""
    trace = ChannelTrace(network)
    unsupported: dict[str, None] = {}
    ends = set(tensors_in(network.outputs))
    outputs_of = network.outputs_by_call()
    for layer, call in network.in_order():
        inputs = trace.inputs(layer, call)
        outputs = outputs_of.get((layer.name, call), [])
        layout = rule(layer, call, inputs, trace)
        if layout is None and layer.calls and not ends.issuperset(outputs):
            has_kernels = any(weight.ndim > 1 for weight in layer.weights)
            if has_kernels or any(trace.has_unpinned(channels) for channels in inputs):
                unsupported[layer.name] = None
        for tensor in outputs:
            trace.layouts[tensor] = _pinned_layout(inputs, network.shapes[tensor], trace) if layout is None else layout
    for tensor in ends:
        trace.pin(trace.layouts[tensor])
    return trace.groups(tuple(unsupported))


def _pinned_layout(inputs: list[Layout], shape: tuple[int | None, ...], trace: ChannelTrace) -> Layout:
    """Pin all input channels of a layer that is not supported; return new channels, pinned too."""
    for layout in inputs:
        trace.pin(layout)
    new = trace.new_channels(shape[-1] or 1 if shape else 1)
    trace.pin(new)
    return new


def output_layout(layer: Layer, call: int, inputs: list[Layout], trace: ChannelTrace) -> Layout | None:
    """Return the layout of a call's output; None if the use of channels is not known."""
    spec = spec_of(layer)
    if layer.config.get("data_format") == "channels_first" or _has_setting_by_channel(layer):
        return None
    if spec.channels == "mixes":
        return _mixed(layer, call, inputs[0], trace)
    if not _has_elementwise_activation(layer):
        return None
    if spec.channels == "depthwise":
        trace.couple_with_first_call(layer, call, inputs[0])
        return np.repeat(inputs[0], layer.config["depth_multiplier"])
    if spec.channels == "preserves":
        return _preserved(layer, call, inputs[0], trace)
    if spec.channels == "combines":
        return _combined(layer, call, inputs, trace)
    if spec.channels == "concatenates":
        return _concatenated(layer, call, inputs, trace)
    if spec.channels == "reshapes":
        return _reshaped(layer, call, inputs[0], trace)
    return None


def _has_elementwise_activation(layer: Layer) -> bool:
    """Whether the activation in a layer's settings, if there is one, treats each channel separately."""
    activation = layer.config.get("activation") or "linear"
    return isinstance(activation, str) and canonical_name(activation) in ELEMENTWISE


def _has_setting_by_channel(layer: Layer) -> bool:
    """Whether a setting of a layer holds a value for each channel."""
    noise = layer.config.get("noise_shape")
    if noise and noise[-1] not in (None, 1):
        return True
    scales = [layer.config.get(name) for name in ("scale", "offset")] if spec_of(layer) == RESCALING else []
    return any(isinstance(scale, list | tuple | dict) for scale in scales)


def _mixed(layer: Layer, call: int, layout: Layout, trace: ChannelTrace) -> Layout:
    """Return new channels; a shared layer makes the same ones at each call.

    A grouped convolution loses whole groups: the channels that one group reads and makes are coupled.
    """
    if call:
        trace.couple_with_first_call(layer, call, layout)
        return trace.layouts[LayerOutput(layer.name, 0)]
    outputs = trace.new_channels(int(layer.config[spec_of(layer).width_setting]))
    groups = layer.config.get("groups", 1)
    if groups > 1:
        for group_inputs, group_outputs in zip(np.split(layout, groups), np.split(outputs, groups), strict=True):
            members = np.concatenate([group_inputs, group_outputs])
            trace.couple(np.full_like(members, group_outputs[0]), members)
    if not _has_elementwise_activation(layer):
        trace.pin(outputs)
    return outputs


def _preserved(layer: Layer, call: int, layout: Layout, trace: ChannelTrace) -> Layout | None:
    """Return the layout of the input, if the weights of the layer run along the channels."""
    rank = len(trace.network.shapes[layer.inputs(call)[0]])
    if spec_of(layer).is_batch_norm and not layer.normalizes_last_axis(rank):
        return None
    if layer.weights:
        trace.couple_with_first_call(layer, call, layout)
    return layout


def _combined(layer: Layer, call: int, inputs: list[Layout], trace: ChannelTrace) -> Layout | None:
    """Return the coupled layout of all operands; a tensor with a single channel is broadcast and not coupled.

    With one tensor only, no operand may be a constant with a value for each channel.
    """
    if len(inputs) == 1:
        return None if _has_array(layer.calls[call]) else inputs[0]
    widest = max(inputs, key=len)
    for layout in inputs:
        if len(layout) == len(widest):
            trace.couple(widest, layout)
        elif len(layout) == 1:
            trace.pin(layout)
        else:
            return None
    return widest


def _concatenated(layer: Layer, call: int, inputs: list[Layout], trace: ChannelTrace) -> Layout:
    """Return the joined layouts; a concatenation along another axis than the last one couples the channels."""
    rank = len(trace.network.shapes[layer.inputs(call)[0]])
    if layer.config.get("axis", -1) in (-1, rank):
        return np.concatenate(inputs)
    for layout in inputs[1:]:
        trace.couple(inputs[0], layout)
    return inputs[0]


def _has_array(arguments: Any) -> bool:
    """Whether the arguments of a call have an array, whose values per channel cannot be removed."""
    if isinstance(arguments, dict):
        is_array = arguments.get("class_name") in ("__numpy__", "__tensor__")
        return is_array or any(map(_has_array, arguments.values()))
    return isinstance(arguments, list | tuple) and any(map(_has_array, arguments))


def _reshaped(layer: Layer, call: int, layout: Layout, trace: ChannelTrace) -> Layout | None:
    """Return the layout after a reshape, if all rows along the new last axis have the same layout."""
    before = trace.network.shapes[layer.inputs(call)[0]]
    after = trace.network.shapes[LayerOutput(layer.name, call)]
    if None in before or None in after or not before or not after:  # a sample may be a single value
        return None
    rows = np.broadcast_to(layout, [size or 1 for size in before]).reshape(-1, after[-1] or 1)
    first: Layout = rows[0]
    if not (rows == first).all():
        return None
    if call and "target_shape" in layer.config:  # one setting for all calls
        trace.couple(trace.layouts[LayerOutput(layer.name, 0)], first)
    return first


def remove(network: Network, channels: ChannelGroups, kept: Mask) -> Network:
    """Return the network without the channels whose number is False in `kept`."""

    def mask_of(tensor: LayerOutput) -> Mask:
        mask: Mask = kept[channels.layouts[tensor]]
        return mask

    shapes = {
        tensor: (*shape[:-1], int(mask_of(tensor).sum())) if shape and shape[-1] else shape
        for tensor, shape in network.shapes.items()
    }
    layers = dict(network.layers)
    for layer in network.layers.values():
        if layer.calls:
            inputs, outputs = mask_of(layer.inputs()[0]), mask_of(LayerOutput(layer.name))
            layers[layer.name] = _narrowed(layer, inputs, outputs, network)
    return replace(network, layers=layers, shapes=shapes)


def _narrowed(layer: Layer, inputs: Mask, outputs: Mask, network: Network) -> Layer:
    if inputs.all() and outputs.all():  # also layers that are not supported, whose channels may be along another axis
        return layer
    spec = spec_of(layer)
    if spec.kernels:
        return _with_narrower_kernels(layer, inputs, outputs)
    if spec.channels == "preserves" and spec.weights_by_channel:
        along_channels = (len(outputs),)
        weights = (weight[..., outputs] if weight.shape[-1:] == along_channels else weight for weight in layer.weights)
        return replace(layer, weights=tuple(weights))
    if "target_shape" in layer.config:
        shape = network.shapes[LayerOutput(layer.name)]
        return layer.configured(target_shape=[*shape[:-1], int(outputs.sum())])
    return layer


def _with_narrower_kernels(layer: Layer, inputs: Mask, outputs: Mask) -> Layer:
    """Return a layer with kernels for fewer channels; groups of a grouped convolution stay or go as a whole."""
    spec = spec_of(layer)
    groups = layer.config.get("groups", 1)
    settings = {spec.width_setting: int(outputs.sum())} if spec.width_setting else {}
    if groups > 1:
        settings["groups"] = int(outputs.sum()) * groups // len(outputs)
    kernels = []
    for axes, kernel in zip(spec.kernels, layer.weights, strict=False):
        if groups == 1:
            kernel = np.compress(inputs, kernel, axis=axes.into)
        if axes.depthwise:
            inputs = np.repeat(inputs, layer.config["depth_multiplier"])
        else:
            kernel = np.compress(outputs, kernel, axis=axes.out)
        kernels.append(kernel)
    biases = (bias[..., outputs] for bias in layer.weights[spec.bias_index :])
    return replace(layer, weights=(*kernels, *biases)).configured(**settings)
