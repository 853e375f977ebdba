"""Bias correction: rounding shifts the mean of a layer's outputs, and its bias shifts it back.

Source: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias
Correction, ICCV 2019, section 4.2; here the shift is measured on samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.core.progress import SILENT, Progress
from compress.learning.quantization.activation_statistics import batch_size
from compress.learning.quantization.plan import QuantizationPlan
from compress.model.ir.keras_graph import Layer, LayerOutput, Network
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.tensorflow import split_inputs

if TYPE_CHECKING:
    from compress.learning.quantization.simulation import Simulation

SAMPLES = 64
"""Samples that a shift is measured on, at most."""
LARGEST_BATCHES = 2
"""Batches of large activations (`activation_statistics.batch_size`) that are in memory at once, in addition."""
Shifts = dict[str, tuple[float, ...]]
Observer = Callable[[str, Any], Any]
"""Given the name of a layer and its outputs, returns the outputs that the next layers use."""


def measured_shifts(
    simulation: Simulation, plan: QuantizationPlan, samples: NDArray[np.float32], progress: Progress = SILENT
) -> Shifts:
    """Measure what brings the mean of each layer's outputs back, from the input of the network to its output.

    The quantized network is computed once, layer by layer. Each layer is corrected as soon as it is computed, so that
    the layers after it use the corrected values.

    Args:
        simulation: of the network; afterwards it computes the plan.
        plan: the ranges and factors; its bias shifts are not used.
        samples: preprocessed calibration samples [n, ...].
        progress: receives the number of layers that are done, in both passes.
    """
    count = 2 * sum(map(_is_corrected, simulation.network.layers.values()))
    chosen = samples[: min(SAMPLES, LARGEST_BATCHES * batch_size(simulation.network))]
    means: dict[str, NDArray[np.float32]] = {}
    shifts: Shifts = {}

    def measure(layer: str, outputs: Any) -> Any:
        means[layer] = _means(outputs)
        progress.update(len(means), count)
        return outputs

    def correct(layer: str, outputs: Any) -> Any:
        shift = means[layer] - _means(outputs)
        shifts[layer] = tuple(shift.tolist())
        progress.update(len(means) + len(shifts), count)
        return outputs + shift

    simulation.use_float(plan)
    _run_layers(simulation, chosen, measure)
    simulation.use_plan(replace(plan, bias_shifts={}))
    _run_layers(simulation, chosen, correct)
    return shifts


def _means(outputs: Any) -> NDArray[np.float32]:
    """Return the mean of each channel over all samples and positions."""
    import tensorflow

    axes = list(range(len(outputs.shape) - 1))
    return np.asarray(tensorflow.reduce_mean(outputs, axis=axes))


def _run_layers(simulation: Simulation, samples: NDArray[np.float32], observe: Observer) -> None:
    """Compute the model eagerly; `observe` is called with the outputs of each layer that can be corrected."""
    corrected = {layer.name for layer in simulation.network.layers.values() if _is_corrected(layer)}

    def observing(operation: Any) -> Any:
        if operation.name not in corrected:
            return operation
        return lambda *inputs, **options: observe(operation.name, operation(*inputs, **options))

    simulation.model._run_through_graph(split_inputs(simulation.model.inputs, samples), operation_fn=observing)


def with_biases(network: Network) -> Network:
    """Return the network with a bias, 0 at first, in every layer that can be corrected."""
    added = [layer.name for layer in network.layers.values() if _is_corrected(layer) and len(layer.weights) == 1]
    return shifted(network, {name: (0.0,) * int(network.shapes[LayerOutput(name)][-1] or 0) for name in added})


def shifted(network: Network, shifts: Mapping[str, tuple[float, ...]]) -> Network:
    """Return the network with values added to its biases."""
    changed = {}
    for name, values in shifts.items():
        layer = network.layers[name]
        bias = layer.weights[1] if len(layer.weights) > 1 else np.float32(0)
        moved = (bias + np.asarray(values)).astype(np.float32)
        changed[name] = replace(layer.configured(use_bias=True), weights=(layer.weights[0], moved))
    return network.edited(changed, {})


def _is_corrected(layer: Layer) -> bool:
    """Return whether a layer has one output whose mean its own bias can shift."""
    channels_last = layer.config.get("data_format") != "channels_first"
    return spec_of(layer).kernel is not None and len(layer.calls) == 1 and channels_last
