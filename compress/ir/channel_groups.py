"""Structured pruning, first of three questions: which channels move together?

Every channel of every layer that makes channels gets a number. Following the graph, a
tensor's *layout* is the number of the channel at each place of its last axis: an
addition ties the numbers of its operands together (union-find), a concatenation joins
layouts, a flatten repeats them. What is tied is kept or removed together; what the
graph does with channels in a way not known here (or shows to the outside) is pinned.

Idea: Fang et al., DepGraph, CVPR 2023; here by channel instead of by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.ir.keras_graph import Layer, LayerOutput, Network, tensors_in
from compress.ir.layer_specs import RESCALING, spec_of
from compress.ir.layer_specs.functions import ELEMENTWISE, canonical_name

Layout = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Channels:
    """Which channels there are, and which belong together.

    Attributes:
        layouts: the channel at each place of the last axis, by tensor.
        group: for each channel number the number of its group (the smallest in it).
        pinned: for each channel number whether it must stay.
        held: layers inside the network that pin channels, or have kernels and make channels, because it is not
            known here what they do with them.
    """

    layouts: Mapping[LayerOutput, Layout]
    group: NDArray[np.int64]
    pinned: Mask
    held: tuple[str, ...] = ()

    def tied(self, kept: Mask) -> Mask:
        """`kept`, by group, as a mask over channel numbers."""
        return kept[self.group] | self.pinned


class Numbering:
    """Channel numbers with union-find and pins, while a graph is followed."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.pins: list[Layout] = []
        self.fixed: set[int] = set()

    def fresh(self, count: int) -> Layout:
        """So many new channels."""
        start = len(self.parent)
        self.parent.extend(range(start, start + count))
        return np.arange(start, start + count)

    def root(self, number: int) -> int:
        """The number that stands for all that a number is tied to."""
        while self.parent[number] != number:
            self.parent[number] = self.parent[self.parent[number]]
            number = self.parent[number]
        return number

    def tie(self, first: Layout, second: Layout) -> None:
        """Ties the channels of two layouts, place by place."""
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            a, b = self.root(a), self.root(b)
            self.parent[max(a, b)] = min(a, b)

    def pin(self, layout: Layout) -> None:
        """Keeps the channels of a layout as they are."""
        self.pins.append(layout)
        self.fixed.update(layout.tolist())

    def free(self, layout: Layout) -> bool:
        """Whether a layout has channels that were not pinned so far."""
        return not self.fixed.issuperset(layout.tolist())


LayoutRule = Callable[[Layer, int, list[Layout], Network, Numbering, Mapping[LayerOutput, Layout]], Layout | None]
"""The layout that a call makes; None where it is not understood."""


def follow(network: Network) -> Channels:
    """Numbers the channels of a network and ties them."""
    return numbered(network, layout)


def numbered(network: Network, rule: LayoutRule) -> Channels:
    """The same with another rule for what a call makes of the layouts that it is given."""
    numbers = Numbering()
    layouts: dict[LayerOutput, Layout] = {}
    held: dict[str, None] = {}
    ends = set(tensors_in(network.outputs))
    for layer, call in network.in_order():
        given = [layouts[tensor] for tensor in layer.given(call)] if layer.calls else []
        outputs = sorted(t for t in network.shapes if t.layer == layer.name and t.call == call)
        made = rule(layer, call, given, network, numbers, layouts)
        own = any(numbers.free(each) for each in given) or any(weight.ndim > 1 for weight in layer.weights)
        if made is None and layer.calls and own and not ends.issuperset(outputs):
            held[layer.name] = None
        for tensor in outputs:
            layouts[tensor] = made if made is not None else _opaque(given, network.shapes[tensor], numbers)
    for tensor in ends:
        numbers.pin(layouts[tensor])
    group = np.array([numbers.root(number) for number in range(len(numbers.parent))], np.int64)
    pinned = np.zeros(len(group), bool)
    for layout in numbers.pins:
        pinned[group[layout]] = True
    return Channels(layouts, group, pinned[group], tuple(held))


def _opaque(given: list[Layout], shape: tuple[int | None, ...], numbers: Numbering) -> Layout:
    """What is not understood keeps all it is given, and makes channels that stay."""
    for layout in given:
        numbers.pin(layout)
    made = numbers.fresh(shape[-1] or 1 if shape else 1)
    numbers.pin(made)
    return made


def layout(
    layer: Layer,
    call: int,
    given: list[Layout],
    network: Network,
    numbers: Numbering,
    layouts: Mapping[LayerOutput, Layout],
) -> Layout | None:
    """The layout that a call makes; None where it is not understood."""
    spec = spec_of(layer)
    if layer.config.get("data_format") == "channels_first" or _by_position(layer):
        return None
    if spec.channels == "makes":
        return _made_by_maker(layer, call, given[0], numbers, layouts)
    if not _elementwise(layer):
        return None
    if spec.channels == "multiplies":
        return _multiplied(layer, call, given[0], numbers, layouts)
    if spec.channels == "keeps":
        return _kept(layer, call, given[0], network, numbers, layouts)
    if spec.channels == "ties":
        return _combined(layer, call, given, numbers)
    if spec.channels == "joins":
        rank = len(network.shapes[layer.given(call)[0]])
        return np.concatenate(given) if layer.config.get("axis", -1) in (-1, rank) else _stacked(given, numbers)
    if spec.channels == "reshapes":
        return _reshaped(layer, call, given[0], network, numbers, layouts)
    return None


def _multiplied(
    layer: Layer, call: int, given: Layout, numbers: Numbering, layouts: Mapping[LayerOutput, Layout]
) -> Layout:
    """The channels of a depthwise layer: each of its input as often as its multiplier says."""
    if call:  # a second call with other channels would need the same weights for them
        numbers.tie(layouts[layer.given(0)[0]], given)
    return np.repeat(given, layer.config["depth_multiplier"])


def _kept(
    layer: Layer,
    call: int,
    given: Layout,
    network: Network,
    numbers: Numbering,
    layouts: Mapping[LayerOutput, Layout],
) -> Layout | None:
    """The channels of the input, where the weights of the layer run along them."""
    last = (-1, len(network.shapes[layer.given(call)[0]]))
    if spec_of(layer).is_batch_norm and _axis(layer) not in last:
        return None
    if call and layer.weights:
        numbers.tie(layouts[layer.given(0)[0]], given)
    return given


def _combined(layer: Layer, call: int, given: list[Layout], numbers: Numbering) -> Layout | None:
    """The channels of all operands, tied; with one tensor only, no operand may have a value for each channel."""
    if len(given) > 1:
        return _tied(given, numbers)
    return None if _constants(layer.calls[call]) else given[0]


def _elementwise(layer: Layer) -> bool:
    """Whether the activation inside a layer, if there is one, treats each channel by itself."""
    activation = layer.config.get("activation") or "linear"
    return isinstance(activation, str) and canonical_name(activation) in ELEMENTWISE


def _by_position(layer: Layer) -> bool:
    """Whether a setting of a layer that goes by channel holds a number for each of them."""
    noise = layer.config.get("noise_shape")
    scales = (layer.config.get(name) for name in ("scale", "offset")) if spec_of(layer) == RESCALING else ()
    return bool(noise and noise[-1] not in (None, 1)) or any(isinstance(each, list | tuple | dict) for each in scales)


def _axis(layer: Layer) -> int:
    axis = layer.config.get("axis", -1)
    return int(axis[0] if isinstance(axis, list) else axis)


def _made_by_maker(
    layer: Layer, call: int, given: Layout, numbers: Numbering, layouts: Mapping[LayerOutput, Layout]
) -> Layout:
    """Fresh channels; a shared layer makes the same ones at each call, from tied inputs.

    A grouped convolution loses whole groups: what one group reads and makes is tied.
    """
    if call:
        numbers.tie(layouts[layer.given(0)[0]], given)
        return layouts[LayerOutput(layer.name, 0)]
    made = numbers.fresh(int(layer.config[spec_of(layer).width_setting]))
    if (groups := layer.config.get("groups", 1)) > 1:
        for into, out in zip(np.split(given, groups), np.split(made, groups), strict=True):
            together = np.concatenate([into, out])
            numbers.tie(np.full_like(together, out[0]), together)
    if not _elementwise(layer):
        numbers.pin(made)
    return made


def _tied(given: list[Layout], numbers: Numbering) -> Layout | None:
    """Operands of one element-wise layer; one with a single channel is broadcast and not tied."""
    full = max(given, key=len)
    for layout in given:
        if len(layout) == len(full):
            numbers.tie(full, layout)
        elif len(layout) == 1:
            numbers.pin(layout)
        else:
            return None
    return full


def _stacked(given: list[Layout], numbers: Numbering) -> Layout:
    """Operands that are joined along another axis: channel by channel the same ones."""
    for layout in given[1:]:
        numbers.tie(given[0], layout)
    return given[0]


def _constants(call: Any) -> bool:
    """Whether a call is given an array: one number for each channel, which cannot be cut; a single number can stay."""
    if isinstance(call, dict):
        return call.get("class_name") in ("__numpy__", "__tensor__") or any(map(_constants, call.values()))
    return isinstance(call, list | tuple) and any(map(_constants, call))


def _reshaped(
    layer: Layer,
    call: int,
    given: Layout,
    network: Network,
    numbers: Numbering,
    layouts: Mapping[LayerOutput, Layout],
) -> Layout | None:
    """The layout after a reshape, if every row along the new last axis has the same."""
    before, after = network.shapes[layer.given(call)[0]], network.shapes[LayerOutput(layer.name, call)]
    if None in before or None in after or not after:
        return None
    spread = np.broadcast_to(given, [side or 1 for side in before]).reshape(-1, after[-1] or 1)
    made: Layout = spread[0]
    if not (spread == made).all():
        return None
    if call and _has_target(layer):  # which is one for all its calls
        numbers.tie(layouts[LayerOutput(layer.name, 0)], made)
    return made


def _has_target(layer: Layer) -> bool:
    return "target_shape" in layer.config


def remove(network: Network, channels: Channels, kept: Mask) -> Network:
    """The network without the channels whose place in `kept` (by channel number) is False."""

    def keep(tensor: LayerOutput) -> Mask:
        mask: Mask = kept[channels.layouts[tensor]]
        return mask

    return replace(
        network,
        layers={name: _cut(layer, keep, network) for name, layer in network.layers.items()},
        shapes={
            tensor: (*shape[:-1], int(keep(tensor).sum())) if shape and shape[-1] else shape
            for tensor, shape in network.shapes.items()
        },
    )


def _cut(layer: Layer, keep: Callable[[LayerOutput], Mask], network: Network) -> Layer:
    """One layer with fewer channels in and out."""
    if not layer.calls:
        return layer
    before, after = keep(layer.given()[0]), keep(LayerOutput(layer.name))
    if before.all() and after.all():  # what is not understood may have its channels elsewhere
        return layer
    spec = spec_of(layer)
    if spec.kernels:
        return _cut_kernels(layer, before, after)
    if spec.channels == "keeps" and spec.weights_by_channel:
        each = (w[..., after] if w.shape and w.shape[-1] == len(after) else w for w in layer.weights)
        return replace(layer, weights=tuple(each))
    if _has_target(layer):
        shape = network.shapes[LayerOutput(layer.name)]
        return layer.configured(target_shape=[*shape[:-1], int(after.sum())])
    return layer


def _cut_kernels(layer: Layer, before: Mask, after: Mask) -> Layer:
    """A layer with kernels for fewer channels in and out; a group of a grouped one is kept or removed as a whole."""
    spec, groups = spec_of(layer), layer.config.get("groups", 1)
    changes = {spec.width_setting: int(after.sum())} if spec.width_setting else {}
    if groups > 1:
        changes["groups"] = int(after.sum()) * groups // len(after)
    kernels = []
    for axes, kernel in zip(spec.kernels, layer.weights, strict=False):
        if groups == 1:
            kernel = np.compress(before, kernel, axis=axes.into)
        if axes.depthwise:
            before = np.repeat(before, layer.config["depth_multiplier"])
        else:
            kernel = np.compress(after, kernel, axis=axes.out)
        kernels.append(kernel)
    biases = (w[..., after] for w in layer.weights[spec.bias_index :])
    return replace(layer, weights=(*kernels, *biases)).configured(**changes)
