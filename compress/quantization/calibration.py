"""Calibration: the float model's activations on real samples make a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from compress.errors import StageError
from compress.quantization import points as rounding
from compress.quantization.plan import QuantizationPlan, nudged
from compress.training.network import Network, Tensor, build
from compress.training.tensorflow import keras

BATCH = 32


def calibrate(network: Network, samples: NDArray[np.float32]) -> QuantizationPlan:
    """The smallest range of every point that holds all activations of the samples.

    Args:
        network: in canonical form (`training.folding.canonical`).
        samples: preprocessed calibration samples [n, ...].

    Raises:
        StageError: an activation is NaN or infinite.
    """
    points = rounding.find(network)
    low, high = _extremes(network, list(points), samples)
    ranges: dict[str, tuple[float, float]] = {}
    for tensor, a, b in zip(points, low, high, strict=True):
        name = points[tensor]
        if not np.isfinite([a, b]).all():
            raise StageError(
                f"the activations of layer {tensor.layer!r} are not finite on the calibration samples",
                todo="look at the data's range, and at the training",
            )
        before = ranges.get(name, (0.0, 0.0))
        ranges[name] = (min(before[0], float(a)), max(before[1], float(b)))
    ranges.update(rounding.fixed(network, points))
    return QuantizationPlan(
        {name: nudged(*limits) for name, limits in ranges.items()}, f"min and max of {len(samples)} samples"
    )


def _extremes(
    network: Network, tensors: list[Tensor], samples: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lowest and highest value of every tensor over all samples."""
    import tensorflow

    library = keras()
    # A tensor that is an input goes through as it is; Keras gives the same object back.
    observed = build(replace(network, outputs=[tensors], name=f"{network.name}_observed"))

    @tensorflow.function(reduce_retracing=True)
    def extremes(batch):  # type: ignore[no-untyped-def]
        values = library.tree.flatten(observed(batch, training=False))
        axes = [tensorflow.reduce_min(v) for v in values], [tensorflow.reduce_max(v) for v in values]
        return tensorflow.stack(axes[0]), tensorflow.stack(axes[1])

    lows, highs = [], []
    for start in range(0, len(samples), BATCH):
        a, b = extremes(tensorflow.constant(samples[start : start + BATCH]))
        lows.append(a.numpy())
        highs.append(b.numpy())
    return np.min(lows, axis=0).astype(np.float64), np.max(highs, axis=0).astype(np.float64)
