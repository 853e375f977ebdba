"""Removal of squeeze-and-excite gates: the gate of each channel becomes its mean over training samples.

A gate costs a mean over the whole map, two small layers and a product of two tensors, which takes four more tiles of
memory; while it is computed, the map that it multiplies has to stay on the chip. The mean is a factor for each channel,
and is folded into the weights of a layer after or before it.

Replacing the gate's sigmoid by a hard sigmoid would gain nothing: LOGISTIC is one operator of the Edge TPU, and a hard
sigmoid is a ReLU6 and a MUL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.learning.replacement.activations import Replacements
from compress.model.ir.keras_graph import (
    Layer,
    LayerOutput,
    Network,
    build,
    subnetwork,
    tensors_in,
    used_calls,
    without_unused_calls,
)
from compress.model.ir.layer_specs import DEPTHWISE_CONV_2D, MULTIPLY, spec_of
from compress.model.ir.tensorflow import keras, run

Factors = NDArray[np.float64]
NAME = "squeeze_and_excite"
BATCH = 16
"""Samples that are run at once; chosen: the result does not depend on it."""


@dataclass(frozen=True)
class Gate:
    """A product of a map and a factor for each channel that is computed from that map.

    Attributes:
        product: the result [h, w, c].
        map: the tensor that is multiplied [h, w, c].
        factor: the gate [1, 1, c], [c] or with a single channel.
    """

    product: LayerOutput
    map: LayerOutput
    factor: LayerOutput


@dataclass(frozen=True)
class GateStatistics:
    """The values of a gate on samples.

    Attributes:
        mean: by channel the factor that changes the product least in the sense of least squares: the mean over
            samples, each weighted by the energy of its map.
        changed_energy: the share of the energy of the product that changes with the mean instead of the gate.
    """

    mean: Factors
    changed_energy: float


def find(network: Network) -> tuple[list[Gate], dict[str, str]]:
    """Return the gates of a network in the order of computation, and by product the reason why others are not gates."""
    gates: list[Gate] = []
    skipped: dict[str, str] = {}
    for layer, call in network.in_order():
        inputs = layer.inputs(call)
        if spec_of(layer) != MULTIPLY or len(inputs) != 2:
            continue
        small, large = sorted(inputs, key=lambda tensor: _is_map(network, tensor))
        if _is_map(network, small) or not _is_map(network, large):
            continue
        if _computed_from(network, small, large):
            gates.append(Gate(LayerOutput(layer.name, call), large, small))
        else:
            skipped[layer.name] = "its factors are not computed from the map that they multiply"
    return gates, skipped


def _is_map(network: Network, tensor: LayerOutput) -> bool:
    """Whether a tensor has several positions."""
    return any(size != 1 for size in network.shapes[tensor][:-1])


def _computed_from(network: Network, factor: LayerOutput, map: LayerOutput) -> bool:
    """Whether a factor depends on a map alone, or on the tensors that the map is an activation or norm of."""
    sources = {map}
    while len(inputs := network.sources(map)) == 1 and network.shapes[inputs[0]] == network.shapes[map]:
        (map,) = inputs
        sources.add(map)
    waiting = [factor]
    visited: set[LayerOutput] = set()
    while waiting:
        tensor = waiting.pop()
        if tensor in sources or tensor in visited:
            continue
        visited.add(tensor)
        if not network.layers[tensor.layer].calls:
            return False
        waiting += network.sources(tensor)
    return True


def measure(network: Network, gates: Sequence[Gate], samples: NDArray[np.float32]) -> dict[Gate, GateStatistics]:
    """Return the statistics of at least one gate on preprocessed training samples [n, ...]."""
    import tensorflow

    model = build(subnetwork(network, [tensor for gate in gates for tensor in (gate.map, gate.factor)]))
    library = keras()

    @tensorflow.function(reduce_retracing=True)
    def sums(batch):  # type: ignore[no-untyped-def]
        values = library.tree.flatten(run(model, batch))
        return [_gate_sums(map_values, factor) for map_values, factor in zip(values[::2], values[1::2], strict=True)]

    batches = [sums(tensorflow.constant(samples[start : start + BATCH])) for start in range(0, len(samples), BATCH)]
    totals = [np.sum([np.asarray(part) for part in parts], axis=0) for parts in zip(*batches, strict=True)]
    return {gate: _statistics(total, len(samples)) for gate, total in zip(gates, totals, strict=True)}


def _gate_sums(map_values: Any, factor: Any) -> Any:
    """Return the sums over samples of e, g e, g^2 e and g by channel: e is the energy of the map, g the gate."""
    import tensorflow

    positions = list(range(1, len(map_values.shape) - 1))
    energy = tensorflow.cast(tensorflow.reduce_sum(map_values**2, axis=positions), tensorflow.float64)
    gate = tensorflow.cast(tensorflow.reshape(factor, [-1, factor.shape[-1]]), tensorflow.float64)
    parts = [energy, gate * energy, gate**2 * energy, gate + 0 * energy]
    return tensorflow.stack([tensorflow.reduce_sum(part, axis=0) for part in parts])


def _statistics(sums: NDArray[np.float64], samples: int) -> GateStatistics:
    """Return the statistics from the sums of `_gate_sums`."""
    energy, gated, gated_twice, gates = sums
    mean = np.where(energy > 0, gated / np.where(energy > 0, energy, 1), gates / samples)
    total = float(gated_twice.sum())
    changed = max(float((gated_twice - mean * gated).sum()), 0.0)  # sum of (g - m)^2 e with m = (sum g e) / (sum e)
    return GateStatistics(mean, changed / total if total else 0.0)


def remove_gates(network: Network, measured: Mapping[Gate, GateStatistics]) -> tuple[Network, Replacements]:
    """Replace gates by their means, each folded into a layer or, where that is not possible, a depthwise convolution.

    The result is exact where a gate is the same for all samples.
    """
    removed: list[str] = []
    skipped: dict[str, str] = {}
    notes: dict[str, str] = {}
    for gate, statistics in reversed(list(measured.items())):  # from the last: one gate's input may be another's output
        name = gate.product.layer
        edit = _without_gate(network, gate, statistics.mean)
        if edit is None:
            skipped[name] = "its mean cannot be folded into a layer before or after it"
            continue
        network, placement = edit
        removed.insert(0, name)
        notes[name] = f"{placement}; the mean changes {statistics.changed_energy:.1%} of the energy of the product"
    replaced = {NAME: tuple(removed)} if removed else {}
    return without_unused_calls(network), Replacements(replaced, skipped, dict(reversed(notes.items())))


def _without_gate(network: Network, gate: Gate, mean: Factors) -> tuple[Network, str] | None:
    """Return the network without a gate, and the place of its mean; None if there is no place for it."""
    mean = np.broadcast_to(mean, (network.shapes[gate.map][-1] or len(mean),))
    readers = _foldable_readers(network, gate.product)
    ungated = network.edited({}, {gate.product: gate.map})
    if readers:
        scaled = {}
        for name in readers:
            layer = ungated.layers[name]
            kernel, *others = layer.weights
            changed = spec_of(layer).kernels[0].times_inputs(kernel, mean).astype(kernel.dtype)
            scaled[name] = replace(layer, weights=(changed, *others))
        return ungated.edited(scaled, {}), f"folded into {', '.join(readers)}"
    source = ungated.layers[gate.map.layer]
    other_users = set(_users(ungated, gate.map)) - set(_users(network, gate.product))
    if not other_users and gate.map not in set(tensors_in(network.outputs)) and _scalable(source):
        return ungated.edited({source.name: _scaled_outputs(source, mean)}, {}), f"folded into {source.name}"
    if len(network.shapes[gate.map]) != 3:
        return None
    return _with_convolution(network, gate, mean), "now a depthwise 1x1 convolution"


def _users(network: Network, tensor: LayerOutput) -> list[tuple[str, int]]:
    """Return the calls that read a tensor and that an output depends on."""
    live = used_calls(network)
    return [call for call in network.consumers().get(tensor, []) if call in live]


def _foldable_readers(network: Network, tensor: LayerOutput) -> list[str]:
    """Return the layers that read a tensor and can take a factor for each channel; none if one reader cannot."""
    readers: list[str] = []
    outputs = set(tensors_in(network.outputs))
    waiting = [tensor]
    while waiting:
        tensor = waiting.pop()
        users = _users(network, tensor)
        if tensor in outputs or not users:
            return []
        for name, call in users:
            layer = network.layers[name]
            if spec_of(layer).passes_factors:
                waiting.append(LayerOutput(name, call))
            elif network.shapes[tensor] and _takes_factors(layer):
                readers.append(name)
            else:
                return []
    return readers


def _takes_factors(layer: Layer) -> bool:
    """Whether a factor on each input channel of a layer can be folded into its kernel."""
    is_plain = layer.config.get("groups", 1) == 1 and layer.config.get("data_format") != "channels_first"
    return is_plain and bool(spec_of(layer).kernels) and len(layer.calls) == 1


def _scalable(layer: Layer) -> bool:
    """Whether the outputs of a layer can be scaled by its weights, and it is called once."""
    config = layer.config
    if len(layer.calls) != 1 or config.get("data_format") == "channels_first":
        return False
    spec = spec_of(layer)
    if spec.is_batch_norm:
        axis = config.get("axis", -1)
        last = (axis[0] if isinstance(axis, list) else axis) in (-1, 3)
        return last and config.get("scale", True) and config.get("center", True)
    linear = config.get("activation", "linear") in ("linear", None)
    return linear and spec.kernel is not None and spec.channels == "mixes"


def _scaled_outputs(layer: Layer, mean: Factors) -> Layer:
    spec = spec_of(layer)
    if spec.is_batch_norm:
        gamma, beta, *rest = layer.weights
        return replace(layer, weights=(_times(gamma, mean), _times(beta, mean), *rest))
    kernel, *bias = layer.weights
    scaled = spec.kernels[0].times_outputs(kernel, mean).astype(kernel.dtype)
    return replace(layer, weights=(scaled, *(_times(bias_vector, mean) for bias_vector in bias)))


def _times(weights: NDArray[Any], mean: Factors) -> NDArray[Any]:
    """Multiply one weight for each channel by one factor for each, in double precision."""
    return (weights.astype(np.float64) * mean).astype(weights.dtype)


def _with_convolution(network: Network, gate: Gate, mean: Factors) -> Network:
    """Replace a product by a depthwise 1x1 convolution."""
    name = network.free_name(f"{gate.product.layer}_mean")
    kernel = mean.reshape(1, 1, -1, 1).astype(np.float32)
    calls = ({"args": [gate.map], "kwargs": {}},)
    layer = DEPTHWISE_CONV_2D.layer(name, calls, (kernel,), kernel_size=1, use_bias=False)
    edited = network.edited({}, {gate.product: LayerOutput(name)}).edited({name: layer}, {})
    return replace(edited, shapes={**edited.shapes, LayerOutput(name): network.shapes[gate.product]})
