"""Quantization error by tensor: its noise, its share of the final error, and the likely cause."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.progress import SILENT, Progress
from compress.learning.quantization import equalization, quantizer_placement
from compress.learning.quantization.activation_statistics import batch_size
from compress.learning.quantization.plan import LEVELS, QuantizationPlan, gridded, restructured
from compress.learning.quantization.simulation import Simulation
from compress.model.ir.keras_graph import Layer, Network, tensors_in
from compress.model.ir.layer_specs import spec_of
from compress.results.quantization import LayerError
from compress.tasks.base import snr_db

WEIGHTS = " (weights)"
"""Suffix of a layer's name: the rounding of its weights."""
SHIFTS = " (bias shifts)"
"""Suffix of a layer's name: the bias shifts of the plan."""
HARMFUL = 0.1
"""Share of the error above which bias shifts are reported as a cause."""
UNEVEN = 8.0
"""Ratio of the largest to the median output of a dense layer above which one scale is reported; chosen: 3 of 8 bits."""
WIDE = 4.0
"""Ratio to the range of 99.9% of the values above which a range is too wide."""
IMBALANCED = 32.0
"""Ratio of the largest to the median channel above which channels are imbalanced."""
DEAD = 0.25
"""Share of channels that are always 0 above which they are reported; chosen."""
MOST_SAMPLES = 32
"""Samples for a table of errors; chosen."""
LEAST_SAMPLES = 2
"""Samples for the table of a large network; chosen."""
MOST_MACS = 10_000_000_000
"""Multiply-accumulates for a table of errors: about ten seconds of one core with the simulation of a detector."""
COST = 8
"""Runs of the network for one sample: three, the layers once more with rounded weights, and the gradients."""
SATURATED = 0.01
"""Share of clipped values above which they are reported; chosen."""


def affordable_samples(macs: int) -> int:
    """Return the number of samples for `errors`, for a network with `macs` multiply-accumulates per sample."""
    return int(np.clip(MOST_MACS // max(COST * macs, 1), LEAST_SAMPLES, MOST_SAMPLES))


def errors(
    network: Network,
    plan: QuantizationPlan,
    samples: NDArray[np.float32],
    simulation: Simulation | None = None,
    progress: Progress = SILENT,
) -> list[LayerError]:
    """Return every rounded tensor, the one that costs most first.

    The contribution of each tensor to the error of the outputs is computed to first order: one gradient gives the
    contributions of all tensors.

    Args:
        network: in canonical form.
        plan: what it is quantized by.
        samples: preprocessed samples [n, ...]; a few dozen are enough.
        simulation: of the plan's network (`plan.restructured`) without a softmax at its end; None builds one.
        progress: receives the number of samples that are done.
    """
    if simulation is None:
        simulation = Simulation(quantizer_placement.without_softmax(restructured(network, plan)))
    scaled = equalization.applied(simulation.network, plan.factors)
    simulation.use_plan(plan)
    quantized, actual = simulation.values(samples)
    simulation.use_float(plan)
    float_outputs, expected = simulation.values(samples)
    error = quantized - float_outputs
    noise = _contributions(simulation, scaled, plan, samples, error, progress)
    if plan.bias_shifts and _shifts_help(simulation, plan, samples, error):
        noise |= {name + SHIFTS: 0.0 for name in plan.bias_shifts}
    total = sum(noise.values()) or 1.0
    rows = []
    for name, layer in _weighted(scaled).items():
        rows.append(LayerError(name + WEIGHTS, layer.kind, None, noise[name + WEIGHTS] / total, *_uneven(layer)))
        if name in plan.bias_shifts:
            share = noise[name + SHIFTS] / total
            cause, setting = "", ""
            if share >= HARMFUL:
                cause = "its bias shifts make the error larger"
                setting = "quantize: {correct_bias: off}, without a plan"
            rows.append(LayerError(name + SHIFTS, layer.kind, None, share, cause, setting))
    outputs = set(tensors_in(scaled.outputs))
    limits = quantizer_placement.saturating(simulation.network, simulation.points)
    for name, tensor in simulation.tensors.items():
        layer = scaled.layers[tensor.layer]
        if tensor in limits:  # what saturates makes no difference
            expected[name] = np.clip(expected[name], *limits[tensor])
        cause, setting = _cause(expected[name], name, plan, layer, tensor in outputs)
        ratios = snr_db(*(values[name].reshape(len(samples), -1) for values in (expected, actual)))
        ratio = round(float(ratios.mean()), 1)
        rows.append(LayerError(name, layer.kind, ratio, noise[name] / total, cause, setting))
    return [replace(row, share=round(row.share, 4)) for row in sorted(rows, key=lambda row: -row.share)]


def to_json(rows: list[LayerError]) -> list[dict[str, Any]]:
    """Return the rows as plain maps."""
    return [asdict(row) for row in rows]


def _contributions(
    simulation: Simulation,
    scaled: Network,
    plan: QuantizationPlan,
    samples: NDArray[np.float32],
    error: NDArray[np.float32],
    progress: Progress,
) -> dict[str, float]:
    """Return what the change of each tensor adds to the energy of an error of the outputs, to first order.

    The energy of an error is the scalar product of the error with itself, and the error is the sum of the effects of
    all changes. So the products of the effects with the error add up to the energy. The product of a change that makes
    the error smaller is negative; the result has 0 for this change.

    Args:
        simulation: it computes the float network.
        scaled: the network with its channels scaled as the plan says.
        plan: the plan.
        samples: preprocessed samples [n, ...].
        error: the error of their outputs [n, outputs].
        progress: receives the number of samples that are done.

    Returns:
        The energies by point, by layer and WEIGHTS, and by layer and SHIFTS.
    """
    import tensorflow

    error = np.nan_to_num(error)  # rounding to 0 before a logarithm or a division makes values infinite
    simulation.assign_ranges(plan)
    energies: dict[str, float] = {}
    size = batch_size(simulation.network)
    for start in range(0, len(samples), size):
        part = slice(start, start + size)
        changes = _Changes(simulation, scaled, plan)
        with tensorflow.GradientTape() as changes.tape:
            outputs = simulation.run_layers(samples[part], changes.added)
            rows = tensorflow.concat([tensorflow.reshape(output, [len(output), -1]) for output in outputs], axis=1)
        gradients = changes.tape.gradient(rows, changes.shares, error[part], tensorflow.UnconnectedGradients.ZERO)
        for name, gradient in gradients.items():
            energies[name] = energies.get(name, 0.0) + float(gradient)
        progress.update(min(start + size, len(samples)), len(samples))
    return {name: max(energy, 0.0) for name, energy in energies.items()}


def _shifts_help(
    simulation: Simulation, plan: QuantizationPlan, samples: NDArray[np.float32], error: NDArray[np.float32]
) -> bool:
    """Return whether the error of the outputs [n, outputs] is smaller with all bias shifts than without any."""
    simulation.use_float(plan)
    expected, _ = simulation.values(samples)
    simulation.use_plan(replace(plan, bias_shifts={}))
    without, _ = simulation.values(samples)
    return float((error**2).sum()) < float(((without - expected) ** 2).sum())


class _Changes:
    """The changes of the tensors of a float network by a plan, which are added to them with shares of 0.

    The gradient of an output by a share is what the whole change would add to the output, to first order.

    Attributes:
        tape: records the network.
        shares: by point, by layer and WEIGHTS, and by layer and SHIFTS, the share of the change.
    """

    tape: Any

    def __init__(self, simulation: Simulation, scaled: Network, plan: QuantizationPlan) -> None:
        self.shares: dict[str, Any] = {}
        self._simulation, self._scaled, self._on_grid = simulation, scaled, gridded(scaled, plan)
        self._shifts = plan.bias_shifts
        self._points = {layer.name: point for point, layer in simulation.quantizers.items()}
        self._weighted = _weighted(scaled)

    def added(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        """Return the output of a layer with its changes."""
        import tensorflow

        changes = {}
        with self.tape.stop_recording():
            if layer.name in self._points:
                rounded = tensorflow.quantization.fake_quant_with_min_max_vars(output, layer.low, layer.high)
                changes[self._points[layer.name]] = rounded - output
            elif layer.name in self._weighted:
                self._simulation.assign_layer(layer.name, self._on_grid)
                changes[layer.name + WEIGHTS] = layer(*inputs) - output
                self._simulation.assign_layer(layer.name, self._scaled)
                if layer.name in self._shifts:
                    changes[layer.name + SHIFTS] = tensorflow.constant(self._shifts[layer.name], output.dtype)
            for name in changes.keys() - self.shares.keys():
                self.shares[name] = tensorflow.zeros(())
        for name, change in changes.items():
            self.tape.watch(self.shares[name])
            output += self.shares[name] * change
        return output


def _weighted(network: Network) -> dict[str, Layer]:
    return {name: layer for name, layer in network.layers.items() if spec_of(layer).kernel is not None}


def _uneven(layer: Layer) -> tuple[str, str]:
    """Return cause and setting for a dense layer, which has one scale for the weights of all outputs."""
    axes = spec_of(layer).kernel
    if axes is None or axes.per_channel:
        return "", ""
    reach = np.abs(layer.weights[0]).max(axis=0)
    times = float(reach.max() / max(np.median(reach), 1e-12))
    if times < UNEVEN:
        return "", ""
    return f"one scale for outputs whose weights differ {times:.0f} times", "weight decay in training"


def _cause(value: NDArray[Any], point: str, plan: QuantizationPlan, layer: Layer, is_output: bool) -> tuple[str, str]:
    """Return the first of the known causes that fits the values of a tensor, and the setting that would change it."""
    low, high = plan.ranges[point]
    step = (high - low) / LEVELS
    clipped = float(((value < low - step) | (value > high + step)).mean())
    if clipped >= SATURATED:
        if plan.trained_with_rounding:
            setting = "quantize: {qat: {ranges: fixed}}, or a lower learning_rate"
        else:
            setting = "quantize: {ranges: minmax}, or more calibration_samples"
        return f"{clipped:.1%} of its values are clipped", setting
    needed = float(np.percentile(np.abs(value), 99.9))
    times = max(-low, high) / max(needed, 1e-9)
    if times >= WIDE and needed > 0:
        cause = f"its range is {times:.0f} times the range of 99.9% of its values"
        return cause, "quantize: {ranges: sample_percentile} or mse"
    reach = np.abs(value).max(axis=tuple(range(value.ndim - 1)))
    alive = reach[reach > 0]
    spread = float(alive.max() / np.median(alive)) if len(alive) > 1 else 1.0
    if spread >= IMBALANCED:
        if spec_of(layer).channels == "concatenates" and is_output:  # boxes and scores in one tensor
            cause = f"channels of very different magnitude share one scale (x{spread:.0f})"
            return cause, "end the model before they are joined"
        cause = f"its largest channel is {spread:.0f} times the median one"
        return cause, "quantize: {equalize: auto}; ReLU instead of ReLU6"
    dead = float((reach == 0).mean())
    return (f"{dead:.0%} of its channels are always 0", "prune them") if dead > DEAD else ("", "")


def describe(rows: list[dict[str, Any]], most: int = 20) -> str:
    """Describe the rows with the largest errors as text."""
    lines = [f"{'share':>7} {'SNR dB':>7}  tensor"]
    for row in rows[:most]:
        ratio = "" if row["snr_db"] is None else f"{row['snr_db']:.1f}"
        lines.append(f"{row['share']:>7.1%} {ratio:>7}  {row['point']} {row['kind']}".rstrip())
        if row["cause"]:
            lines.append(f"{'':>17}{row['cause']}: {row['setting']}")
    if len(rows) > most:
        lines.append(f"... and {len(rows) - most} more, with --json")
    return "\n".join(lines) + "\n"
