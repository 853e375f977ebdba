"""Cases that are hard to quantize, made from models and calibration data that are easy to quantize.

This code does not use compress.learning.quantization.equalization, because it serves to measure it. It follows only
chains in which every tensor has one consumer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, tensors_in
from compress.model.ir.passes import fold

Floats = NDArray[np.float32]
IMBALANCES = (4, 16, 64)
#: Kernel axes: (in, out). A depthwise kernel has one axis for both.
AXES = {"Conv1D": (1, 2), "Conv2D": (2, 3), "Dense": (0, 1), "DepthwiseConv2D": (2, 2)}
LINEAR = {
    *("MaxPooling2D", "AveragePooling2D", "GlobalAveragePooling2D", "GlobalMaxPooling2D"),
    *("ZeroPadding2D", "Dropout", "SpatialDropout2D", "Identity"),
}
TOLERANCE = 1e-4
"""Largest difference of the float outputs, relative to max(1, the largest output)."""


def imbalanced(model: Any, times: int, seed: int, samples: Floats) -> tuple[Any, int]:
    """Scale channels inside a model by up to `times` and down to 1 / `times`, without a change of its function.

    Each channel between two layers with weights is multiplied by its own factor, log-uniform
    from 1 / times to times, in the layer that produces it, and divided by it in the layer that consumes it.

    Args:
        model: a Keras model.
        times: the largest factor.
        seed: the seed of the factors.
        samples: samples for which both models must give the same outputs.

    Returns:
        The model with folded batch norms, and the number of pairs of layers.
    """
    canonical = fold.canonical(keras_graph.read(model))
    random = np.random.default_rng((seed, times))
    changed, pairs = canonical, _pairs(canonical)
    for first, second in pairs:
        maker, taker = changed.layers[first], changed.layers[second]
        factors = float(times) ** random.uniform(-1, 1, maker.weights[0].shape[AXES[maker.kind][1]])
        changed = changed.edited({first: _made(maker, factors)}, {})
        changed = changed.edited({second: _taken(taker, factors)}, {})
    changed_model = keras_graph.build(changed)
    expected, actual = (np.asarray(keras_model.predict(samples, verbose=0)) for keras_model in (model, changed_model))
    worst = np.abs(expected - actual).max() / max(1.0, np.abs(expected).max())
    assert worst <= TOLERANCE, f"the injected imbalance changed the function by {worst:.1e}"
    return changed_model, len(pairs)


def scalable(model: Any) -> bool:
    """Return whether a model has channels into which an imbalance can be injected."""
    return bool(_pairs(fold.canonical(keras_graph.read(model))))


def _pairs(canonical: Network) -> list[tuple[str, str]]:
    """Return pairs of layers with weights between which every channel can be scaled freely."""
    takers = canonical.consumers()
    shown = set(tensors_in(canonical.outputs))
    pairs = []
    for layer in canonical.layers.values():
        if not _weighted(layer):
            continue
        tensor: LayerOutput | None = LayerOutput(layer.name)
        while tensor is not None:
            next_ones = takers.get(tensor, [])
            if len(next_ones) != 1 or tensor in shown:
                break
            after = canonical.layers[next_ones[0][0]]
            if _weighted(after):
                pairs.append((layer.name, after.name))
            tensor = LayerOutput(after.name) if _homogeneous(after) else None
    return pairs


def _weighted(layer: Layer) -> bool:
    single = layer.config.get("groups", 1) == 1 and layer.config.get("depth_multiplier", 1) == 1
    return layer.kind in AXES and len(layer.calls) == 1 and single


def _homogeneous(layer: Layer) -> bool:
    """Return whether a layer is homogeneous: scaling its input scales its output."""
    if len(layer.calls) != 1:
        return False
    if layer.kind == "ReLU":
        return not any(layer.config.get(name) for name in ("max_value", "negative_slope", "threshold"))
    return layer.kind in LINEAR or (layer.kind == "Activation" and layer.config["activation"] in ("relu", "linear"))


def _made(layer: Layer, factors: NDArray[np.float64]) -> Layer:
    kernel = _along(layer.weights[0], factors, AXES[layer.kind][1])
    return replace(layer, weights=(kernel, *((bias * factors).astype(np.float32) for bias in layer.weights[1:])))


def _taken(layer: Layer, factors: NDArray[np.float64]) -> Layer:
    return replace(layer, weights=(_along(layer.weights[0], 1 / factors, AXES[layer.kind][0]), *layer.weights[1:]))


def _along(kernel: Floats, factors: NDArray[np.float64], axis: int) -> Floats:
    return np.moveaxis(np.moveaxis(kernel.astype(np.float64), axis, -1) * factors, -1, axis).astype(np.float32)


def too_large(samples: Floats, seed: int) -> Floats:
    """Return the samples, with the values of one of them 50 times as large."""
    changed = samples.copy()
    changed[np.random.default_rng(seed).integers(len(changed))] *= 50
    return changed


def noise(samples: Floats, seed: int) -> Floats:
    """Return the samples, one of them replaced by noise that fills the range of all values."""
    changed, random = samples.copy(), np.random.default_rng(seed)
    one = random.integers(len(changed))
    changed[one] = random.uniform(samples.min(), samples.max(), samples.shape[1:])
    return changed


CORRUPTIONS = {"one sample x50": too_large, "one sample of noise": noise}
