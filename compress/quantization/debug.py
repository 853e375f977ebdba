"""Where quantization loses: each rounded tensor's own noise, its share of the final error, and the likely cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.ir.keras_graph import Layer, LayerOutput, Network, build, observed, tensors_in
from compress.ir.layer_specs import spec_of
from compress.ir.tensorflow import keras
from compress.quantization import bias_correction, equalization, export, fake_quantization
from compress.quantization import quantizer_placement as rounding
from compress.quantization.plan import QuantizationPlan
from compress.tasks.base import snr_db

WEIGHTS = " (weights)"
"""Behind a layer's name: the rounding of its weights."""
SHIFTS = " (bias shifts)"
"""Behind a layer's name: what the plan adds to its biases."""
HARMFUL = 0.1
"""Share of the error above which bias shifts are a cause of it."""
UNEVEN = 8.0
WIDE = 4.0
"""A range so many times what 99.9% of the values need is too wide."""
IMBALANCED = 32.0
"""Between the largest and the median channel."""
DEAD = 0.25
MOST_SAMPLES = 32
LEAST_SAMPLES = 4
MOST_MACS = 20_000_000_000
"""Multiply-accumulates that a table of errors may take: some ten seconds of one core."""
SATURATED = 0.01


@dataclass(frozen=True)
class LayerError:
    """One rounded tensor, or the weights or the bias shifts of one layer.

    Attributes:
        point: its name in the plan; the layer's name and WEIGHTS for the rounding of weights, SHIFTS for bias shifts.
        kind: the kind of layer that makes it.
        snr_db: its signal-to-noise ratio, everything before it rounded too; None for weights and shifts.
        share: the part of the error of the logits that rounding it alone causes, or that bias shifts add to what
            rounding everything causes, 0 where they correct it; all shares add up to 1.
        cause: what is likely wrong with it, or "".
        setting: what would change it, or "".
    """

    point: str
    kind: str
    snr_db: float | None
    share: float
    cause: str
    setting: str


def affordable_samples(network: Network, macs: int) -> int:
    """Return how many samples `errors` should take of a network with so many multiply-accumulates for one sample."""
    runs = len(rounding.find(network)) + 2 * len(_weighted(network))
    return int(np.clip(MOST_MACS // max(runs * macs, 1), LEAST_SAMPLES, MOST_SAMPLES))


def errors(network: Network, plan: QuantizationPlan, samples: NDArray[np.float32]) -> list[LayerError]:
    """Every rounded tensor, the one that costs most first.

    Args:
        network: in canonical form.
        plan: what it is quantized by.
        samples: preprocessed samples [n, ...]; a few dozen will do.
    """
    scaled = rounding.without_softmax(_scaled(network, plan))
    points = rounding.find(scaled)
    by_name = {name: tensor for tensor, name in points.items()}
    noise = _noise(scaled, points, plan, samples)
    total = sum(noise.values()) or 1.0
    ratios = _ratios(scaled, points, plan, by_name, samples)
    looks = _looks(scaled, by_name, plan, samples)
    rows = []
    for name, layer in _weighted(scaled).items():
        rows.append(LayerError(name + WEIGHTS, layer.kind, None, noise[name + WEIGHTS] / total, *_uneven(layer)))
        if name in plan.bias_shifts:
            share = noise[name + SHIFTS] / total
            rows.append(LayerError(name + SHIFTS, layer.kind, None, share, *_moved(share)))
    for name, tensor in by_name.items():
        cause, setting = looks[name]
        kind = scaled.layers[tensor.layer].kind
        rows.append(LayerError(name, kind, round(ratios[name], 1), noise[name] / total, cause, setting))
    return [replace(row, share=round(row.share, 4)) for row in sorted(rows, key=lambda row: -row.share)]


def to_json(rows: list[LayerError]) -> list[dict[str, Any]]:
    """As plain maps."""
    return [asdict(row) for row in rows]


def _scaled(network: Network, plan: QuantizationPlan) -> Network:
    """What the float model computes, channels scaled as the plan says; every layer whose biases it moves has some."""
    none = {name: tuple(0.0 for _ in values) for name, values in plan.bias_shifts.items()}
    return bias_correction.shifted(equalization.applied(network, plan.factors), none)


def _noise(
    network: Network, points: Mapping[LayerOutput, str], plan: QuantizationPlan, samples: NDArray[np.float32]
) -> dict[str, float]:
    """Energies of the error of the logits.

    By point when it alone is rounded, by layer and WEIGHTS when its weights alone are; by layer and SHIFTS what is
    added to the energy when everything is rounded.
    """
    import tensorflow

    names = fake_quantization.layer_names(network, points)
    switched = fake_quantization.switched(fake_quantization.insert(network, points, plan))
    model, gridded = build(switched), export.gridded(network, plan)
    switches = {name: model.get_layer(layer).on for name, layer in names.items()}
    library = keras()  # AutoGraph logs all of os.environ when it is asked for in a traced function
    inputs = tensorflow.constant(samples)

    @tensorflow.function
    def outputs():  # type: ignore[no-untyped-def]
        values = library.tree.flatten(model(inputs, training=False))
        return [tensorflow.cast(value, tensorflow.float64) for value in values]

    wanted = outputs()

    def energy() -> float:
        return float(sum(tensorflow.reduce_sum((a - b) ** 2) for a, b in zip(outputs(), wanted, strict=True)))

    noise = {}
    for name, switch in switches.items():
        switch.assign(1.0)
        noise[name] = energy()
        switch.assign(0.0)
    for name, layer in _weighted(network).items():
        model.get_layer(name).set_weights(list(gridded.layers[name].weights))
        noise[name + WEIGHTS] = energy()
        model.get_layer(name).set_weights(list(layer.weights))
    for switch in switches.values():
        switch.assign(1.0)
    return noise | _added(model, gridded, plan, energy)


def _added(model: Any, gridded: Network, plan: QuantizationPlan, energy: Callable[[], float]) -> dict[str, float]:
    """By layer and SHIFTS how much more energy the error has than without them; the model rounds activations."""
    moved, added = bias_correction.shifted(gridded, plan.bias_shifts), {}
    for name in _weighted(moved):
        model.get_layer(name).set_weights(list(moved.layers[name].weights))
    everything = energy() if plan.bias_shifts else 0.0
    for name in plan.bias_shifts:
        model.get_layer(name).set_weights(list(gridded.layers[name].weights))
        added[name + SHIFTS] = max(everything - energy(), 0.0)
        model.get_layer(name).set_weights(list(moved.layers[name].weights))
    return added


def _weighted(network: Network) -> dict[str, Layer]:
    return {name: layer for name, layer in network.layers.items() if spec_of(layer).kernel is not None}


def _uneven(layer: Layer) -> tuple[str, str]:
    """A dense layer has one scale for the weights of all outputs."""
    axes = spec_of(layer).kernel
    if axes is None or axes.per_channel:
        return "", ""
    reach = np.abs(layer.weights[0]).max(axis=0)
    times = float(reach.max() / max(np.median(reach), 1e-12))
    if times < UNEVEN:
        return "", ""
    return f"one scale for outputs whose weights differ {times:.0f} times", "weight decay in training"


def _moved(share: float) -> tuple[str, str]:
    """Shifts are there to make the error smaller."""
    if share < HARMFUL:
        return "", ""
    return "what is added to its biases makes the error larger", "quantize: {correct_bias: off}, without a plan"


def _ratios(
    network: Network,
    points: Mapping[LayerOutput, str],
    plan: QuantizationPlan,
    by_name: Mapping[str, LayerOutput],
    samples: NDArray[np.float32],
) -> dict[str, float]:
    """By point the mean signal-to-noise ratio of a sample with everything rounded, and biases moved."""
    names = fake_quantization.layer_names(network, points)
    moved = bias_correction.shifted(export.gridded(network, plan), plan.bias_shifts)
    rounded = fake_quantization.insert(moved, points, plan)
    library, found = keras(), {}
    places = [LayerOutput(names[name], list(_calls(points, name)).index(tensor)) for name, tensor in by_name.items()]
    pairs = []
    for net, tensors in ((network, list(by_name.values())), (rounded, places)):
        values = library.tree.flatten(build(observed(net, tensors))(samples))
        pairs.append([np.asarray(value).reshape(len(samples), -1) for value in values])
    for name, wanted, made in zip(by_name, *pairs, strict=True):
        found[name] = float(snr_db(wanted, made).mean())
    return found


def _calls(points: Mapping[LayerOutput, str], name: str) -> list[LayerOutput]:
    return [tensor for tensor, other in points.items() if other == name]


def _looks(
    network: Network, by_name: Mapping[str, LayerOutput], plan: QuantizationPlan, samples: NDArray[np.float32]
) -> dict[str, tuple[str, str]]:
    """By point its likely cause of error and the setting that would change it, from its values."""
    values = keras().tree.flatten(build(observed(network, list(by_name.values())))(samples))
    shown = set(tensors_in(network.outputs))
    return {
        name: _cause(np.asarray(value), name, plan, network.layers[tensor.layer], tensor in shown)
        for (name, tensor), value in zip(by_name.items(), values, strict=True)
    }


def _cause(value: NDArray[Any], point: str, plan: QuantizationPlan, layer: Layer, is_output: bool) -> tuple[str, str]:
    """The first of the known causes that fits."""
    limits = plan.ranges[point]
    tests: tuple[Callable[[], tuple[str, str] | None], ...] = (
        lambda: _saturated(value, limits, plan.trained_with_rounding),
        lambda: _too_wide(value, limits),
        lambda: _one_for_all(value, layer, is_output),
        lambda: _imbalanced(value),
        lambda: _dead(value),
    )
    return next((found for test in tests if (found := test())), ("", ""))


def _saturated(value: NDArray[Any], limits: tuple[float, float], trained: bool) -> tuple[str, str] | None:
    step = (limits[1] - limits[0]) / 255
    beyond = float(((value < limits[0] - step) | (value > limits[1] + step)).mean())
    if beyond < SATURATED:
        return None
    if trained:
        setting = "quantize: {qat: {ranges: held}}, or a lower learning_rate"
    else:
        setting = "quantize: {ranges: minmax}, or more calibration_samples"
    return f"{beyond:.1%} of its values are cut off", setting


def _too_wide(value: NDArray[Any], limits: tuple[float, float]) -> tuple[str, str] | None:
    needed = float(np.percentile(np.abs(value), 99.9))
    times = max(-limits[0], limits[1]) / max(needed, 1e-9)
    if times < WIDE or needed == 0:
        return None
    return (
        f"its range is {times:.0f} times what 99.9% of its values need",
        "quantize: {ranges: sample_percentile} or mse",
    )


def _one_for_all(value: NDArray[Any], layer: Layer, is_output: bool) -> tuple[str, str] | None:
    """Boxes and scores in one tensor: large numbers set the scale for small ones."""
    if spec_of(layer).channels != "joins" or not is_output:
        return None
    spread = _spread(value)
    if spread is None or spread < IMBALANCED:
        return None
    return f"numbers of very different size share one scale (x{spread:.0f})", "end the model before they are joined"


def _imbalanced(value: NDArray[Any]) -> tuple[str, str] | None:
    spread = _spread(value)
    if spread is None or spread < IMBALANCED:
        return None
    return (
        f"its largest channel is {spread:.0f} times the median one",
        "quantize: {equalize: auto}; ReLU instead of ReLU6",
    )


def _dead(value: NDArray[Any]) -> tuple[str, str] | None:
    reach = np.abs(value).max(axis=tuple(range(value.ndim - 1)))
    share = float((reach == 0).mean())
    return (f"{share:.0%} of its channels are always 0", "prune them") if share > DEAD else None


def _spread(value: NDArray[Any]) -> float | None:
    """The largest channel over the median one, of those that are alive."""
    reach = np.abs(value).max(axis=tuple(range(value.ndim - 1)))
    alive = reach[reach > 0]
    return float(alive.max() / np.median(alive)) if len(alive) > 1 else None


def describe(rows: list[dict[str, Any]], most: int = 20) -> str:
    """What a person wants to know, as text: the worst first."""
    lines = [f"{'share':>7} {'SNR dB':>7}  tensor"]
    for row in rows[:most]:
        ratio = "" if row["snr_db"] is None else f"{row['snr_db']:.1f}"
        lines.append(f"{row['share']:>7.1%} {ratio:>7}  {row['point']} {row['kind']}".rstrip())
        if row["cause"]:
            lines.append(f"{'':>17}{row['cause']}: {row['setting']}")
    if len(rows) > most:
        lines.append(f"... and {len(rows) - most} more, with --json")
    return "\n".join(lines) + "\n"
