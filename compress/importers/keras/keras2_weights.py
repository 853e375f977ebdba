"""Weights of Keras 2 as the layers of Keras 3 want them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tf_keras

_GATES = {"LSTM": (4, (0, 1, 3)), "GRU": (3, (0, 1)), **{f"ConvLSTM{axes}D": (4, (0, 1, 3)) for axes in (1, 2, 3)}}
"""Parts of the last axis of every weight of a layer, and which of them `recurrent_activation` is for.

In order input, forget, (cell), output, and update, reset, (hidden).
"""
_STEEPER = 1.2
"""`hard_sigmoid` is clip(0.2 x + 0.5) in Keras 2, and clip(x / 6 + 0.5) in Keras 3: there of 1.2 x."""


def scaled(kind: str) -> bool:
    """Whether a recurrent layer of this kind gets Keras 3's `hard_sigmoid` and weights for it."""
    return kind in _GATES


def copied(old: tf_keras.layers.Layer) -> list[Any]:
    """The weights of a layer, for its counterpart."""
    weights = list(old.get_weights())
    if not scaled(type(old).__name__) or old.get_config()["recurrent_activation"] != "hard_sigmoid":
        return weights
    parts, gates = _GATES[type(old).__name__]
    factors = [_STEEPER if part in gates else 1.0 for part in range(parts)]
    return [weight * np.repeat(np.array(factors, np.float32), weight.shape[-1] // parts) for weight in weights]


def turn_kernels(old: tf_keras.Model) -> None:
    """Turns the kernels of convolutions by half a turn: Theano, unlike TensorFlow, convolves as mathematics does.

    Source: keras 2.2, utils/conv_utils.py, convert_kernel, and engine/saving.py, which layers it is for.
    """
    for layer in old._flatten_layers():
        if type(layer).__name__ in ("Conv1D", "Conv2D", "Conv3D", "Conv2DTranspose", "ConvLSTM2D"):
            weights = layer.get_weights()
            for at, weight in enumerate(weights):
                if weight.ndim > 2:
                    weights[at] = np.flip(weight, tuple(range(weight.ndim - 2)))
            layer.set_weights(weights)
