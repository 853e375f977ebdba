"""Weights of Keras 2 layers in the form that Keras 3 layers use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tf_keras

_GATES = {"LSTM": (4, (0, 1, 3)), "GRU": (3, (0, 1)), **{f"ConvLSTM{axes}D": (4, (0, 1, 3)) for axes in (1, 2, 3)}}
"""Number of gates in the last axis of every weight of a layer, and the gates that use `recurrent_activation`.

LSTM: input, forget, cell, output. GRU: update, reset, hidden.
"""
_HARD_SIGMOID_FACTOR = 1.2
"""Factor of the weights: `hard_sigmoid` is clip(0.2 x + 0.5) in Keras 2, and clip(x / 6 + 0.5) in Keras 3."""


def scaled(kind: str) -> bool:
    """Return True if larger weights make up for the `hard_sigmoid` of Keras 3 in a layer of this kind."""
    return kind in _GATES


def copied(old: tf_keras.layers.Layer) -> list[Any]:
    """Return the weights of a layer for its counterpart in Keras 3."""
    weights = list(old.get_weights())
    if not scaled(type(old).__name__) or old.get_config()["recurrent_activation"] != "hard_sigmoid":
        return weights
    parts, gates = _GATES[type(old).__name__]
    factors = [_HARD_SIGMOID_FACTOR if part in gates else 1.0 for part in range(parts)]
    return [weight * np.repeat(np.array(factors, np.float32), weight.shape[-1] // parts) for weight in weights]


def rotate_kernels(old: tf_keras.Model) -> None:
    """Rotate the kernels of convolutions by 180 degrees: Theano convolves, and TensorFlow correlates.

    Source: keras 2.2, utils/conv_utils.py, convert_kernel, and engine/saving.py, for the layers.
    """
    for layer in old._flatten_layers():
        if type(layer).__name__ in ("Conv1D", "Conv2D", "Conv3D", "Conv2DTranspose", "ConvLSTM2D"):
            weights = layer.get_weights()
            for index, weight in enumerate(weights):
                if weight.ndim > 2:
                    weights[index] = np.flip(weight, tuple(range(weight.ndim - 2)))
            layer.set_weights(weights)
