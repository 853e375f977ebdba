"""A factor and an offset for each channel as one depthwise 1x1 convolution, whose int8 weights hold any factor."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from compress.model.ir.tensorflow import keras


def by_channel(x: Any, factor: Any, offset: Any) -> Any:
    """Apply a factor and an offset, one for all channels or one for each; None if they run along another axis."""
    layers, channels, shape = keras().layers, x.shape[-1], x.shape[1:]
    try:
        factor, offset = (
            np.broadcast_to(np.asarray(values, np.float64).squeeze(), (channels,)).astype(np.float32)
            for values in (factor, offset)
        )
    except ValueError:  # along another axis
        return None
    convolution = layers.DepthwiseConv2D(1)
    if len(shape) == 3:
        y = convolution(x)
    else:
        y = layers.Reshape(shape)(convolution(layers.Reshape((prod(shape[:-1]), 1, channels))(x)))
    convolution.set_weights([factor.reshape(1, 1, channels, 1), offset])
    return y
