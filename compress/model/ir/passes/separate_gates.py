"""Separation of the gate of SiLU and hard-swish: x * sigmoid(x) becomes conv(input) * sigmoid(gate(input)).

The gate is a second layer with the weights of the first one, so the function stays the same. SiLU itself is not
homogeneous: no channel in front of it can be scaled, and channels of very different size share one 8-bit range. The
first factor of the product can be scaled for each channel (`quantization.equalization`), and values of the gate beyond
the limits of its sigmoid make no difference. The price is one more layer with weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from compress.core.errors import StageError
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, tensors_in
from compress.model.ir.layer_specs import ACTIVATION, MULTIPLY, spec_of

GATES: Mapping[str, str] = {"silu": "sigmoid", "hard_silu": "relu6"}
"""The function of the gate, by activation: silu(x) = x sigmoid(x), hard_silu(x) = x / 6 relu6(x + 3)."""


@dataclass(frozen=True)
class GatedActivation:
    """An activation x * gate(x) after a layer with a kernel, which nothing else reads.

    Attributes:
        gate: the name of the sigmoid, if the activation is written as a product; else "".
    """

    source: str
    function: str
    gate: str = ""


def find(network: Network) -> dict[str, GatedActivation]:
    """Return by name the layers of a canonical network whose gate can be separated."""
    consumers = network.consumers()
    outputs = set(tensors_in(network.outputs))
    separable = {}
    for layer in network.layers.values():
        gated = _gated(network, layer)
        if gated is None:
            continue
        tensor = LayerOutput(gated.source)
        readers = {name for name, _ in consumers[tensor]}
        if readers == {layer.name, gated.gate} - {""} and tensor not in outputs:
            separable[layer.name] = gated
    return separable


def _gated(network: Network, layer: Layer) -> GatedActivation | None:
    """Return the activation x * gate(x) that a layer computes; x is the output of a layer with a kernel."""
    if len(layer.calls) != 1:
        return None
    function = spec_of(layer).activation(layer) or ""
    if function in GATES:
        source = layer.inputs()[0]
        return GatedActivation(source.layer, function) if _has_kernel(network, source) else None
    if spec_of(layer) != MULTIPLY or len(layer.inputs()) != 2:
        return None
    first, second = layer.inputs()
    for source, factor in ((first, second), (second, first)):
        gate = network.layers[factor.layer]
        is_gate = len(gate.calls) == 1 and spec_of(gate).activation(gate) == "sigmoid" and gate.inputs() == [source]
        if is_gate and _has_kernel(network, source):
            return GatedActivation(source.layer, "silu", gate.name)
    return None


def _has_kernel(network: Network, tensor: LayerOutput) -> bool:
    layer = network.layers[tensor.layer]
    is_linear = layer.config.get("activation", "linear") in ("linear", None)
    channels_last = layer.config.get("data_format") != "channels_first"
    return spec_of(layer).kernel is not None and len(layer.calls) == 1 and is_linear and channels_last


def separated(network: Network, names: Iterable[str]) -> Network:
    """Return the same function with the gates of the activations `names` (see `find`) separated.

    The product gets the name of the activation. Gates that are separate already stay.

    Raises:
        StageError: a layer has no gate that can be separated.
    """
    possible = find(network) if names else {}
    for name in names:
        if name in possible:
            network = _separated(network, name, possible[name])
        elif source_of(network, name) is None:
            raise StageError(
                f"the plan separates the gate of {name!r}, which has none",
                allowed="a SiLU or hard-swish after a layer with weights that nothing else reads",
                hint="quantize without `plan`, which makes a new one",
            )
    return network


def source_of(network: Network, name: str) -> str | None:
    """Return the layer that computes the first factor of a product whose gate is separated; None for other layers."""
    layer = network.layers.get(name)
    if layer is None or spec_of(layer) != MULTIPLY or len(layer.calls) != 1 or len(layer.inputs()) != 2:
        return None
    first, gate = (network.layers[tensor.layer] for tensor in layer.inputs())
    if spec_of(gate).activation(gate) not in GATES.values():
        return None
    copy = network.layers[gate.inputs()[0].layer]
    same_inputs = bool(first.calls) and bool(copy.calls) and first.inputs() == copy.inputs()
    is_copy = copy.name != first.name and copy.kind == first.kind and same_inputs
    return first.name if is_copy and spec_of(first).kernel is not None else None


def added_macs(network: Network, name: str) -> int:
    """Return the multiply-accumulates of the layer that computes the gate of a product, for one sample."""
    source = network.layers[source_of(network, name) or ""]
    axes = spec_of(source).kernels[0]
    positions = source.inputs()[0] if axes.transposed else LayerOutput(source.name)
    return int(source.weights[0].size * prod(size or 1 for size in network.shapes[positions][:-1]))


def _separated(network: Network, name: str, gated: GatedActivation) -> Network:
    source = network.layers[gated.source]
    copy = replace(source, name=network.free_name(f"{source.name}_gate"))
    copy = copy.configured(name=copy.name)
    function = GATES[gated.function]
    gate_name = gated.gate or network.free_name(f"{copy.name}_{function}")
    shape = network.shapes[LayerOutput(source.name)]
    if gated.function == "hard_silu":
        source = replace(source, weights=tuple((weight / 6).astype(np.float32) for weight in source.weights))
        kernel, *biases = copy.weights
        bias = biases[0] if biases else np.zeros(shape[-1] or 0, np.float32)
        copy = replace(copy.configured(use_bias=True), weights=(kernel, (bias + 3).astype(np.float32)))
    calls = ({"args": [LayerOutput(copy.name)], "kwargs": {}},)
    gate = ACTIVATION.layer(gate_name, calls, activation=function)
    factors = [LayerOutput(source.name), LayerOutput(gate_name)]
    product = MULTIPLY.layer(name, ({"args": [factors], "kwargs": {}},))
    added = {layer.name: layer for layer in (source, copy, gate, product)}
    network = network.edited(added, {})
    return replace(network, shapes={**network.shapes, LayerOutput(copy.name): shape, LayerOutput(gate_name): shape})
