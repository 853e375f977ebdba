"""Bias correction: rounding moves the mean of a layer's outputs, and a bias moves it back.

Source: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias
Correction, ICCV 2019, section 4.2; here the shift is measured on samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from compress.ir.keras_graph import Network, Tensor
from compress.ir.layer_specs import spec_of
from compress.quantization import fake_quantization
from compress.quantization import quantizer_placement as rounding
from compress.quantization.activation_statistics import means_by_channel
from compress.quantization.plan import QuantizationPlan

SAMPLES = 64
"""Samples that a shift is measured on, at most."""
Shifts = dict[str, tuple[float, ...]]


def measured_shifts(network: Network, plan: QuantizationPlan, samples: NDArray[np.float32]) -> Shifts:
    """What brings the mean of each layer's outputs back, found from the input of the network to its output.

    Layers that do not depend on each other are corrected together; each is measured behind
    those that are corrected already.

    Args:
        network: in canonical form, with its channels scaled as the plan says and its weights on their grid.
        plan: the ranges.
        samples: preprocessed calibration samples [n, ...].
    """
    chosen = samples[:SAMPLES]
    levels = _levels(network)
    tensors = [Tensor(name) for name in levels]
    wanted = means_by_channel(network, tensors, chosen)
    points, shifts = rounding.find(network), dict[str, tuple[float, ...]]()
    for level in sorted(set(levels.values())):
        names = [name for name, depth in levels.items() if depth == level]
        quantized = fake_quantization.insert(shifted(network, shifts), points, plan)
        found = means_by_channel(quantized, [Tensor(name) for name in names], chosen)
        for name in names:
            shifts[name] = tuple((wanted[Tensor(name)] - found[Tensor(name)]).tolist())
    return shifts


def shifted(network: Network, shifts: Mapping[str, tuple[float, ...]]) -> Network:
    """The network with something added to its biases."""
    changed = {}
    for name, values in shifts.items():
        layer = network.layers[name]
        bias = layer.weights[1] if len(layer.weights) > 1 else np.float32(0)
        moved = (bias + np.asarray(values)).astype(np.float32)
        changed[name] = replace(layer.configured(use_bias=True), weights=(layer.weights[0], moved))
    return network.edited(changed, {})


def _levels(network: Network) -> dict[str, int]:
    """By layer with weights how many such layers lie at most between it and the input; called once each."""
    depth: dict[Tensor, int] = {}
    levels: dict[str, int] = {}
    for layer, call in network.in_order():
        below = max((depth[tensor] for tensor in (layer.given(call) if layer.calls else [])), default=0)
        weighted = spec_of(layer).kernel is not None and len(layer.calls) == 1
        if weighted:
            levels[layer.name] = below
        for tensor in network.shapes:
            if tensor.layer == layer.name and tensor.call == call:
                depth[tensor] = below + weighted
    return levels
