"""Cross-layer equalization: scale channels between layers without changing the function.

Activations are quantized with one scale for a whole tensor, so a channel that is a hundred
times smaller than its neighbour is lost in rounding. Where everything between two layers
with weights is positively homogeneous (f(sx) = s f(x) for s > 0: ReLU, pooling, padding,
additions of channels with the same scale, products with a gate that is not scaled), a channel can be divided by s in
the layers that compute it and multiplied by s in the layers that use it. ReLU6 is homogeneous below 6:
through it, only those channels are scaled that stay below 6 on all calibration samples, before and after.

Source: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias
Correction, ICCV 2019 (factors from weights); Xiao et al., SmoothQuant, ICML 2023 (factors
from activations).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.learning.quantization import quantizer_placement
from compress.model.ir import channel_groups as structure
from compress.model.ir.channel_groups import ChannelGroups, ChannelTrace, Layout
from compress.model.ir.keras_graph import Layer, LayerOutput, Network
from compress.model.ir.layer_specs import MULTIPLY, RELU, spec_of

Factors = NDArray[np.float64]
"""By channel number, the divisor of the layer that computes the channel; layers that use it multiply by the same."""
MAX_ROUNDS = 20
"""Chosen; the rounds end sooner where no factor changes by more than 1%."""
LIMIT = 1e4
"""Largest factor: a channel that needs more is dead, not small."""
BOUNDED = frozenset({"sigmoid", "tanh", "relu6"})
"""Functions whose values are small: an operand of a product that they compute is its gate."""
CEILING, HEADROOM = 6.0, 0.9
"""The upper end of ReLU6, and the part of it that a channel may reach on calibration samples if it is made larger."""


def follow(network: Network, *, relu6: bool = False) -> ChannelGroups:
    """Return groups of channels of a canonical network that need one scale; those that cannot be scaled are pinned.

    With `relu6` channels may pass a ReLU6; `careful` then pins those that it clips.
    """
    return structure.find_groups_by(_through_relu6 if relu6 else _layout, network)


def _through_relu6(layer: Layer, call: int, inputs: list[Layout], trace: ChannelTrace) -> Layout | None:
    relu6 = spec_of(layer).activation(layer) == "relu6"
    return inputs[0] if relu6 else _layout(layer, call, inputs, trace)


def _layout(layer: Layer, call: int, inputs: list[Layout], trace: ChannelTrace) -> Layout | None:
    spec = spec_of(layer)
    if spec.channels == "depthwise" and layer.config.get("data_format") != "channels_first":
        if call:
            trace.couple_with_first_call(layer, call, inputs[0])
            return trace.layouts[LayerOutput(layer.name, 0)]
        return trace.new_channels(len(inputs[0]) * int(layer.config["depth_multiplier"]))
    if spec == MULTIPLY:
        return _multiplied(layer, call, inputs, trace)
    if spec.channels == "combines" and (len(inputs) == 1 or len({len(layout) for layout in inputs}) > 1):
        return None  # the other operand is a constant, or one channel for all: it is not scaled along
    if layer.config.get("groups", 1) != 1:
        return None
    scalable = spec.homogeneous or (spec.kernel is not None and spec.channels == "mixes")
    if scalable or _is_unbounded_relu(layer):
        return structure.output_layout(layer, call, inputs, trace)
    return None


def _is_unbounded_relu(layer: Layer) -> bool:
    """Return whether a layer is a ReLU, leaky or not, without an upper end."""
    spec = spec_of(layer)
    if spec == RELU:
        return not layer.config.get("threshold") and layer.config.get("max_value") is None
    return spec.activation(layer) in ("relu", "leaky_relu")


def _multiplied(layer: Layer, call: int, inputs: list[Layout], trace: ChannelTrace) -> Layout | None:
    """Return the channels of a product: those of the operand that is not its gate, which is pinned."""
    shapes = trace.network.shapes
    operands = layer.inputs(call)
    if len(inputs) == 1 and shapes[LayerOutput(layer.name, call)] == shapes[operands[0]]:
        return inputs[0]
    if len(inputs) != 2 or len(inputs[0]) != len(inputs[1]):
        return None
    gate = _gate(operands, trace.network)
    if gate is None:
        return None
    trace.pin(inputs[gate])
    return inputs[1 - gate]


def _gate(operands: list[LayerOutput], network: Network) -> int | None:
    """Return which operand of a product is its gate: the smaller one (it may be a constant), else the bounded one."""
    sizes = [prod(side or 1 for side in network.shapes[tensor]) for tensor in operands]
    if sizes[0] != sizes[1]:
        return int(np.argmin(sizes))
    functions = [spec_of(network.layers[tensor.layer]).activation(network.layers[tensor.layer]) for tensor in operands]
    bounded = [number for number, function in enumerate(functions) if function in BOUNDED]
    return bounded[0] if bounded else None


def clipped(network: Network) -> list[LayerOutput]:
    """Return the outputs of ReLU6, whose largest values `careful` needs."""
    return [
        LayerOutput(layer.name, call)
        for layer, call in network.in_order()
        if spec_of(layer).activation(layer) == "relu6"
    ]


def weighted_outputs(network: Network) -> list[LayerOutput]:
    """Return the outputs of the layers with weights, from whose largest values `from_activations` takes factors."""
    return [LayerOutput(layer.name) for layer in network.layers.values() if weighted(layer)]


def observed_tensors(network: Network, channels: ChannelGroups) -> list[LayerOutput]:
    """Return the tensors whose extremes are needed by channel: those that factors change, and those they depend on."""
    points = quantizer_placement.find(network)
    scaled_tensors = [
        tensor
        for tensor, layout in channels.layouts.items()
        if tensor in points and not channels.pinned[channels.group[layout]].all()
    ]
    return list(dict.fromkeys([*scaled_tensors, *weighted_outputs(network), *clipped(network)]))


def careful(
    channels: ChannelGroups, largest: Mapping[LayerOutput, NDArray[np.float64]]
) -> tuple[ChannelGroups, Factors]:
    """Pin the channels that a ReLU6 clips; return the channels and the smallest factor of each, 0 if there is no limit.

    Args:
        channels: from `follow`.
        largest: by `clipped` tensor the largest value of each of its channels, on all calibration samples.
    """
    reached = _reached(channels, largest)
    least = np.minimum(reached / (CEILING * HEADROOM), 1.0)
    return replace(channels, pinned=channels.pinned | (reached >= CEILING * 0.999)), least


def _reached(channels: ChannelGroups, largest: Mapping[LayerOutput, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return by channel number the largest value of all channels of its group."""
    reached = np.zeros(len(channels.group))
    for tensor, magnitudes in largest.items():
        np.maximum.at(reached, channels.group[channels.layouts[tensor]], magnitudes)
    return reached[channels.group]


def from_weights(network: Network, channels: ChannelGroups, least: Factors | float = 0.0) -> Factors:
    """Return factors that balance the largest weight that computes a channel with the largest weight that uses it."""

    def largest_outputs(current: Network, total: Factors) -> NDArray[np.float64]:
        del total
        return extents(current, channels)[0]

    return _balanced(network, channels, largest_outputs, 0.5, least)


def from_activations(
    network: Network,
    channels: ChannelGroups,
    largest: Mapping[LayerOutput, NDArray[np.float64]],
    share: float,
    least: Factors | float = 0.0,
) -> Factors:
    """Return factors that balance a channel's largest activation with the largest weight that uses it.

    Args:
        network: in canonical form.
        channels: from `follow`.
        largest: by tensor the largest magnitude of each of its channels, on calibration samples.
        share: the part of the imbalance of activations that moves into the weights, from 0 to 1.
        least: by channel number the smallest factor.
    """
    reached = _reached(channels, largest)

    def largest_outputs(current: Network, total: Factors) -> NDArray[np.float64]:
        del current
        return reached / total

    return _balanced(network, channels, largest_outputs, share, least)


def _balanced(
    network: Network,
    channels: ChannelGroups,
    largest_outputs: Callable[[Network, Factors], NDArray[np.float64]],
    share: float,
    least: Factors | float,
) -> Factors:
    """Return factors, improved in rounds, since those of one layer change the inputs of the next one."""
    total = np.ones(len(channels.group))
    for _ in range(MAX_ROUNDS):
        current = scaled(network, channels, total)
        step = _step(largest_outputs(current, total), extents(current, channels)[1], channels, share)
        total = np.clip(total * step, np.maximum(least, 1 / LIMIT), LIMIT)
        if np.abs(np.log(step)).max(initial=0.0) < 0.01:
            break
    return total


def _step(
    output_extents: NDArray[np.float64], input_extents: NDArray[np.float64], channels: ChannelGroups, share: float
) -> Factors:
    """Return the factors that balance made ** share and taken ** (1 - share); 1 for pinned or dead channels."""
    alive = (output_extents > 1e-9) & (input_extents > 1e-9) & ~channels.pinned
    return np.asarray(
        np.where(alive, output_extents, 1.0) ** share / np.where(alive, input_extents, 1.0) ** (1 - share)
    )


def extents(network: Network, channels: ChannelGroups) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return by channel number the largest weight that computes it, and the largest that uses it; equal in a group."""
    output_extents = np.zeros(len(channels.group))
    input_extents = np.zeros(len(channels.group))
    for layer in network.layers.values():
        if not weighted(layer):
            continue
        into, out = (
            channels.group[channels.layouts[tensor]] for tensor in (layer.inputs()[0], LayerOutput(layer.name))
        )
        axes = spec_of(layer).kernels[0]
        kernel = np.abs(layer.weights[0].astype(np.float64))
        np.maximum.at(output_extents, out, _largest(kernel, axes.output_axes))
        if kernel.shape[axes.into] == len(into):  # otherwise it is grouped, and its input pinned
            np.maximum.at(input_extents, into, _largest(kernel, (axes.into,)))
    return output_extents[channels.group], input_extents[channels.group]


def _largest(kernel: NDArray[np.float64], axes: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the largest value for each index along some axes."""
    kept = {axis % kernel.ndim for axis in axes}
    return np.ravel(kernel.max(axis=tuple(axis for axis in range(kernel.ndim) if axis not in kept)))


def scaled(network: Network, channels: ChannelGroups, factors: Factors) -> Network:
    """Return the network with channels divided where they are computed, and multiplied where they are used."""
    scales = np.where(channels.pinned, 1.0, factors)[channels.group]
    changed = {}
    for layer in network.layers.values():
        if weighted(layer):
            into, out = (scales[channels.layouts[tensor]] for tensor in (layer.inputs()[0], LayerOutput(layer.name)))
            changed[layer.name] = replace(layer, weights=_scaled(layer, into, out))
    return network.edited(changed, {})


def divisors(channels: ChannelGroups, factors: Factors) -> dict[LayerOutput, NDArray[np.float64]]:
    """Return by tensor the divisor of each channel in a network that is scaled by some factors."""
    scales = np.where(channels.pinned, 1.0, factors)[channels.group]
    return {tensor: scales[layout] for tensor, layout in channels.layouts.items() if len(layout)}


def by_layer(network: Network, channels: ChannelGroups, factors: Factors) -> dict[str, tuple[float, ...]]:
    """Return factors in the form of a plan: by the layer that computes the channels, without those that are all 1."""
    scales = np.where(channels.pinned, 1.0, factors)[channels.group]
    by_name = {
        layer.name: scales[channels.layouts[LayerOutput(layer.name)]]
        for layer in network.layers.values()
        if weighted(layer)
    }
    return {name: tuple(values.tolist()) for name, values in by_name.items() if (values != 1).any()}


def applied(network: Network, factors: Mapping[str, tuple[float, ...]]) -> Network:
    """Return the network scaled as a plan says.

    Raises:
        StageError: the plan is for another network, or scales pinned channels, or those of one group differently.
    """
    if not factors:
        return network
    channels = follow(network, relu6=True)
    numbered = by_number(channels, factors)
    for name, values in factors.items():
        if not np.array_equal(numbered[channels.group[channels.layouts[LayerOutput(name)]]], values):
            raise StageError(
                f"the plan has factors for a layer {name!r} that would have no effect",
                allowed="1 for channels that cannot be scaled, such as outputs; the same for channels that are added",
            )
    return scaled(network, channels, numbered)


def by_number(channels: ChannelGroups, factors: Mapping[str, tuple[float, ...]]) -> Factors:
    """Return the factors of a plan by channel number; 1 for channels that must stay.

    Raises:
        StageError: the plan is for another network.
    """
    numbered = np.ones(len(channels.group))
    for name, values in factors.items():
        layout = channels.layouts.get(LayerOutput(name))
        if layout is None or len(layout) != len(values):
            raise StageError(
                f"the plan has {len(values)} factors for a layer {name!r}",
                hint="quantize without `plan`, which makes a new one",
            )
        numbered[channels.group[layout]] = values
    numbered[channels.pinned] = 1.0
    return numbered


def _scaled(layer: Layer, into: Factors, out: Factors) -> tuple[NDArray[np.float32], ...]:
    axes = spec_of(layer).kernels[0]
    kernel = layer.weights[0].astype(np.float64)
    if kernel.shape[axes.into] == len(into):  # otherwise it is grouped, and its input pinned
        kernel = axes.times_inputs(kernel, into)
    kernel = axes.times_outputs(kernel, 1 / out)
    return (kernel.astype(np.float32), *((bias / out).astype(np.float32) for bias in layer.weights[1:]))


def weighted(layer: Layer) -> bool:
    """Return whether a layer computes channels from others with weights."""
    return bool(layer.calls) and spec_of(layer).kernel is not None
