"""Quantization error by tensor: its noise, its share of the final error, and the likely cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.progress import SILENT, Progress
from compress.learning.quantization import equalization, quantizer_placement
from compress.learning.quantization.plan import LEVELS, QuantizationPlan, gridded, restructured, shifted
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
LEAST_SAMPLES = 4
"""Samples for the table of a large network; chosen."""
MOST_MACS = 20_000_000_000
"""Multiply-accumulates for a table of errors: about ten seconds of one core."""
SATURATED = 0.01
"""Share of clipped values above which they are reported; chosen."""


def affordable_samples(network: Network, macs: int) -> int:
    """Return the number of samples for `errors`, for a network with `macs` multiply-accumulates per sample."""
    runs = len(quantizer_placement.find(network)) + 2 * len(_weighted(network))
    return int(np.clip(MOST_MACS // max(runs * macs, 1), LEAST_SAMPLES, MOST_SAMPLES))


def errors(
    network: Network,
    plan: QuantizationPlan,
    samples: NDArray[np.float32],
    simulation: Simulation | None = None,
    progress: Progress = SILENT,
) -> list[LayerError]:
    """Return every rounded tensor, the one that costs most first.

    Args:
        network: in canonical form.
        plan: what it is quantized by.
        samples: preprocessed samples [n, ...]; a few dozen are enough.
        simulation: of the plan's network (`plan.restructured`) without a softmax at its end; None builds one.
        progress: receives the number of tensors that are done.
    """
    if simulation is None:
        simulation = Simulation(quantizer_placement.without_softmax(restructured(network, plan)))
    scaled = equalization.applied(simulation.network, plan.factors)
    noise = _noise(simulation, scaled, plan, samples, progress)
    total = sum(noise.values()) or 1.0
    simulation.use_float(plan)
    expected = simulation.values(samples)
    simulation.use_plan(plan)
    actual = simulation.values(samples)
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


def _noise(
    simulation: Simulation, scaled: Network, plan: QuantizationPlan, samples: NDArray[np.float32], progress: Progress
) -> dict[str, float]:
    """Return energies of the error of the logits; `scaled` is the network with its channels scaled as the plan says.

    By point when it alone is rounded, by layer and WEIGHTS when its weights alone are; by layer and SHIFTS the energy
    that is added when everything is rounded.
    """
    on_grid = gridded(scaled, plan)
    simulation.use_float(plan)
    simulation.assign_ranges(plan)
    expected = simulation.outputs(samples).astype(np.float64)

    def energy() -> float:
        difference = simulation.outputs(samples) - expected
        # Rounding to 0 before a logarithm or a division makes values infinite: they count as lost.
        return float((np.where(np.isfinite(difference), difference, expected) ** 2).sum())

    noise = {}
    weighted = _weighted(scaled)
    count = len(simulation.tensors) + len(weighted)
    for point in simulation.tensors:
        simulation.switch(point, on=True)
        noise[point] = energy()
        simulation.switch(point, on=False)
        progress.update(len(noise), count)
    for name in weighted:
        simulation.assign_layer(name, on_grid)
        noise[name + WEIGHTS] = energy()
        simulation.assign_layer(name, scaled)
        progress.update(len(noise), count)
    return noise | _added(simulation, on_grid, plan, energy)


def _added(
    simulation: Simulation, on_grid: Network, plan: QuantizationPlan, energy: Callable[[], float]
) -> dict[str, float]:
    """Return by layer and SHIFTS how much more energy the error has with its bias shifts than without."""
    if not plan.bias_shifts:
        return {}
    with_shifts = shifted(on_grid, plan.bias_shifts)
    simulation.assign_weights(with_shifts)
    simulation.switch(on=True)
    everything = energy()
    added = {}
    for name in plan.bias_shifts:
        simulation.assign_layer(name, on_grid)
        added[name + SHIFTS] = max(everything - energy(), 0.0)
        simulation.assign_layer(name, with_shifts)
    return added


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
