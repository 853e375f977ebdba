"""Bias correction: rounding moves the mean of a layer's outputs, and a bias moves it back.

Source: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias
Correction, ICCV 2019, section 4.2; here the shift is measured on samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.ir.keras_graph import Layer, LayerOutput, Network, build
from compress.ir.layer_specs import spec_of
from compress.quantization import fake_quantization
from compress.quantization import quantizer_placement as rounding
from compress.quantization.activation_statistics import batch_size, means_by_channel
from compress.quantization.plan import QuantizationPlan

SAMPLES = 64
"""Samples that a shift is measured on, at most."""
LARGEST_BATCHES = 2
"""Batches of large activations (`activation_statistics.batch_size`) that are in memory at once, in addition."""
Shifts = dict[str, tuple[float, ...]]


def measured_shifts(network: Network, plan: QuantizationPlan, samples: NDArray[np.float32]) -> Shifts:
    """Measure what brings the mean of each layer's outputs back, from the input of the network to its output.

    The quantized network is computed once, layer by layer. Each layer is corrected as soon as it is computed, so that
    those behind it see the corrected values.

    Args:
        network: in canonical form, with its channels scaled as the plan says and its weights on their grid.
        plan: the ranges.
        samples: preprocessed calibration samples [n, ...].
    """
    import tensorflow

    chosen = samples[: min(SAMPLES, LARGEST_BATCHES * batch_size(network))]
    corrected = [layer.name for layer in network.layers.values() if _is_corrected(layer)]
    wanted = means_by_channel(network, [LayerOutput(name) for name in corrected], chosen)
    model = build(fake_quantization.insert(network, rounding.find(network), plan))
    shifts: Shifts = {}

    def correcting(operation: Any) -> Any:
        if operation.name not in corrected:
            return operation

        def call(*inputs: Any, **options: Any) -> Any:
            outputs = operation(*inputs, **options)
            means = tensorflow.reduce_mean(outputs, axis=list(range(len(outputs.shape) - 1)))
            shift = wanted[LayerOutput(operation.name)] - means.numpy()
            shifts[operation.name] = tuple(shift.tolist())
            return outputs + shift.astype(np.float32)

        return call

    model._run_through_graph([tensorflow.constant(chosen)], operation_fn=correcting)
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


def _is_corrected(layer: Layer) -> bool:
    """Whether a layer has one output whose mean a bias of its own can move."""
    return spec_of(layer).kernel is not None and len(layer.calls) == 1
