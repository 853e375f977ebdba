"""Squeeze and excite taken away: each channel's gate, which a network computes for each sample, becomes its mean.

A gate costs a mean over the whole map, two small layers and a product of two tensors, which takes four tiles of
memory more; while it is computed, the map that it is multiplied onto has to stay on the chip. The mean is a
factor for each channel, and is folded into the weights of a layer behind or in front of it.

A hard sigmoid in the place of the gate's sigmoid would gain nothing: LOGISTIC is one operator of the Edge TPU,
and a hard sigmoid is a ReLU6 and a MUL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.ir.keras_graph import Layer, LayerOutput, Network, build, living, needed, observed, tensors_in
from compress.ir.layer_specs import DEPTHWISE_CONV_2D, MULTIPLY, spec_of
from compress.ir.tensorflow import keras
from compress.replacement.activations import Swaps

Factors = NDArray[np.float64]
NAME = "squeeze_and_excite"
BATCH = 16


@dataclass(frozen=True)
class Gate:
    """A product of a map and a factor for each channel that is computed from that map.

    Attributes:
        product: the result [h, w, c].
        map: what is gated [h, w, c].
        factor: the gate [1, 1, c], [c] or with a single channel.
    """

    product: LayerOutput
    map: LayerOutput
    factor: LayerOutput


@dataclass(frozen=True)
class Measured:
    """What a gate is on samples.

    Attributes:
        mean: by channel the factor that changes the product least, in squares: the mean over samples, each
            weighted by the energy of its map.
        moved: share of the energy of the product that the mean, in the place of the gate, takes away or adds.
    """

    mean: Factors
    moved: float


def find(network: Network) -> tuple[list[Gate], dict[str, str]]:
    """The gates of a network in the order in which they are computed, and by product why others are none."""
    gates, left = [], {}
    for layer, call in network.in_order():
        given = layer.given(call) if layer.calls else []
        if spec_of(layer) != MULTIPLY or len(given) != 2:
            continue
        small, large = sorted(given, key=lambda tensor: _is_map(network, tensor))
        if _is_map(network, small) or not _is_map(network, large):
            continue
        if _computed_from(network, small, large):
            gates.append(Gate(LayerOutput(layer.name, call), large, small))
        else:
            left[layer.name] = "its factors are computed from another map than the one that they are multiplied onto"
    return gates, left


def _is_map(network: Network, tensor: LayerOutput) -> bool:
    """Whether a tensor has several positions."""
    return any(side != 1 for side in network.shapes[tensor][:-1])


def _computed_from(network: Network, factor: LayerOutput, map: LayerOutput) -> bool:
    """Whether a factor depends on nothing but a map, or what the map is an activation or norm of."""
    sources = {map}
    while len(above := _given(network, map)) == 1 and network.shapes[above[0]] == network.shapes[map]:
        (map,) = above
        sources.add(map)
    waiting, seen = [factor], set[LayerOutput]()
    while waiting:
        tensor = waiting.pop()
        if tensor in sources or tensor in seen:
            continue
        seen.add(tensor)
        if not network.layers[tensor.layer].calls:
            return False
        waiting += _given(network, tensor)
    return True


def _given(network: Network, tensor: LayerOutput) -> list[LayerOutput]:
    layer = network.layers[tensor.layer]
    return layer.given(tensor.call) if layer.calls else []


def measure(network: Network, gates: Sequence[Gate], samples: NDArray[np.float32]) -> dict[Gate, Measured]:
    """Runs the network on samples.

    Args:
        network: which the gates are of.
        gates: at least one.
        samples: preprocessed training samples [n, ...].
    """
    import tensorflow

    model = build(observed(network, [tensor for gate in gates for tensor in (gate.map, gate.factor)]))
    library = keras()

    @tensorflow.function(reduce_retracing=True)
    def sums(batch):  # type: ignore[no-untyped-def]
        values = library.tree.flatten(model(batch, training=False))
        found = []
        for values_of_map, factor in zip(values[::2], values[1::2], strict=True):
            axes = list(range(1, len(values_of_map.shape) - 1))
            energy = tensorflow.cast(tensorflow.reduce_sum(values_of_map**2, axis=axes), tensorflow.float64)
            gate = tensorflow.cast(tensorflow.reshape(factor, [-1, factor.shape[-1]]), tensorflow.float64)
            parts = [energy, gate * energy, gate**2 * energy, gate + 0 * energy]
            found.append(tensorflow.stack([tensorflow.reduce_sum(part, axis=0) for part in parts]))
        return found

    batches = [sums(tensorflow.constant(samples[start : start + BATCH])) for start in range(0, len(samples), BATCH)]
    totals = [np.sum([np.asarray(part) for part in parts], axis=0) for parts in zip(*batches, strict=True)]
    return {gate: _measured(total, len(samples)) for gate, total in zip(gates, totals, strict=True)}


def _measured(sums: NDArray[np.float64], samples: int) -> Measured:
    """From the sums over samples of e, g e, g^2 e and g, where e is the energy of a channel of the map, g its gate."""
    energy, once, twice, plain = sums
    mean = np.where(energy > 0, once / np.where(energy > 0, energy, 1), plain / samples)
    total = float(twice.sum())
    # The sum of (g - m)^2 e, where m = (sum of g e) / (sum of e).
    return Measured(mean, max(float((twice - mean * once).sum()), 0.0) / total if total else 0.0)


def removed(network: Network, measured: Mapping[Gate, Measured]) -> tuple[Network, Swaps]:
    """The network without some of its gates; the mean of each is folded into a layer, or is a depthwise 1x1 of its own.

    Exact where a gate is the same for all samples.
    """
    done, left, notes = [], {}, {}
    for gate, found in reversed(list(measured.items())):  # from the end: what a gate takes may be what another makes
        edited, where = _without(network, gate, found.mean)
        if edited is None:
            left[gate.product.layer] = where
            continue
        network = edited
        done.append(gate.product.layer)
        notes[gate.product.layer] = f"{where}; the mean gate moves {found.moved:.1%} of the energy behind it"
    return living(network), Swaps({NAME: tuple(done[::-1])} if done else {}, left, dict(reversed(notes.items())))


def _without(network: Network, gate: Gate, mean: Factors) -> tuple[Network | None, str]:
    """The network without one gate, and where its mean went; None and the reason where it cannot be."""
    map = gate.map
    mean = np.broadcast_to(mean, (network.shapes[map][-1] or len(mean),))
    takers = _takers(network, gate.product)
    bare = network.edited({}, {gate.product: map})
    if takers:
        scaled = {name: _scaled_inputs(bare.layers[name], mean) for name in takers}
        return bare.edited(scaled, {}), f"folded into {', '.join(takers)}"
    source = bare.layers[map.layer]
    users = set(_users(network, gate.product))
    others = set(_users(bare, map)) - users
    if not others and map not in set(tensors_in(network.outputs)) and _is_linear(source):
        return bare.edited({source.name: _scaled_outputs(source, mean)}, {}), f"folded into {source.name}"
    if len(network.shapes[map]) != 3:
        return None, "its mean cannot be folded into a layer beside it"
    return _with_factor(network, gate, mean), "now a depthwise 1x1 convolution"


def _users(network: Network, tensor: LayerOutput) -> list[tuple[str, int]]:
    """The calls that take a tensor and that an output depends on."""
    alive = needed(network)
    return [call for call in network.consumers().get(tensor, []) if call in alive]


def _takers(network: Network, tensor: LayerOutput) -> list[str]:
    """The layers that a factor for each channel of a tensor can be folded into; none if there is anything else."""
    found: list[str] = []
    shown = set(tensors_in(network.outputs))
    waiting = [tensor]
    while waiting:
        tensor = waiting.pop()
        users = _users(network, tensor)
        if tensor in shown or not users:
            return []
        for name, call in users:
            layer = network.layers[name]
            if spec_of(layer).passes_factors:
                waiting.append(LayerOutput(name, call))
            elif len(layer.calls) == 1 and _takes_factors(layer, network.shapes[tensor]):
                found.append(name)
            else:
                return []
    return found


def _takes_factors(layer: Layer, shape: Sequence[int | None]) -> bool:
    first = layer.config.get("data_format") == "channels_first"
    whole = layer.config.get("groups", 1) == 1 and not first
    return bool(shape) and whole and bool(spec_of(layer).kernels)


def _scaled_inputs(layer: Layer, mean: Factors) -> Layer:
    kernel, *rest = layer.weights
    scaled = spec_of(layer).kernels[0].times_inputs(kernel, mean)
    return replace(layer, weights=(scaled.astype(kernel.dtype), *rest))


def _is_linear(layer: Layer) -> bool:
    """Whether the outputs of a layer can be scaled by its weights, and nobody else calls it."""
    config = layer.config
    if len(layer.calls) != 1 or config.get("data_format") == "channels_first":
        return False
    spec = spec_of(layer)
    if spec.is_batch_norm:
        axis = config.get("axis", -1)
        last = (axis[0] if isinstance(axis, list) else axis) in (-1, 3)
        return last and config.get("scale", True) and config.get("center", True)
    linear = config.get("activation", "linear") in ("linear", None)
    return linear and spec.kernel is not None and spec.channels == "makes"


def _scaled_outputs(layer: Layer, mean: Factors) -> Layer:
    spec = spec_of(layer)
    if spec.is_batch_norm:
        gamma, beta, *rest = layer.weights
        return replace(layer, weights=(_times(gamma, mean), _times(beta, mean), *rest))
    kernel, *bias = layer.weights
    scaled = spec.kernels[0].times_outputs(kernel, mean).astype(kernel.dtype)
    return replace(layer, weights=(scaled, *(_times(each, mean) for each in bias)))


def _times(weights: NDArray[Any], mean: Factors) -> NDArray[Any]:
    """One weight for each channel times a factor for each, in double precision."""
    return (weights.astype(np.float64) * mean).astype(weights.dtype)


def _with_factor(network: Network, gate: Gate, mean: Factors) -> Network:
    """The network with a depthwise 1x1 convolution in the place of a product."""
    name = f"{gate.product.layer}_mean"
    while name in network.layers:
        name += "_"
    kernel = mean.reshape(1, 1, -1, 1).astype(np.float32)
    calls = ({"args": [gate.map], "kwargs": {}},)
    layer = DEPTHWISE_CONV_2D.layer(name, calls, (kernel,), kernel_size=1, use_bias=False)
    edited = network.edited({}, {gate.product: LayerOutput(name)}).edited({name: layer}, {})
    return replace(edited, shapes={**edited.shapes, LayerOutput(name): network.shapes[gate.product]})
