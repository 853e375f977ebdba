"""Cross-layer equalization: a network with scaled channels computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networks
import numpy as np
import pytest

from compress.learning.quantization import equalization
from compress.model.ir import keras_graph
from compress.model.ir.passes.fold import canonical

pytestmark = pytest.mark.tensorflow

SCALED: dict[str, Callable[[Any, Any], Any]] = {
    "a leaky ReLU": lambda keras, x: keras.layers.LeakyReLU(0.2)(x),
    "a ReLU with a slope": lambda keras, x: keras.layers.ReLU(negative_slope=0.2)(x),
    "a leaky activation": lambda keras, x: keras.layers.Activation("leaky_relu")(x),
    "a series made longer": lambda keras, x: keras.layers.UpSampling1D(2)(keras.layers.Reshape((36, 8))(x)),
    "a mean of two": lambda keras, x: keras.layers.Average()([x, keras.layers.MaxPooling2D(2, 1, "same")(x)]),
    "a constant factor": lambda keras, x: x * 0.5,
    "a sum with what is pooled": lambda keras, x: keras.layers.Add()([x, keras.layers.MaxPooling2D(2, 1, "same")(x)]),
}
HELD: dict[str, Callable[[Any, Any], Any]] = {
    "a ReLU with an end": lambda keras, x: keras.layers.ReLU(max_value=2.0)(x),
    "a ReLU with a threshold": lambda keras, x: keras.layers.ReLU(threshold=0.3)(x),
    "a constant summand": lambda keras, x: x + 1.0,
    "one channel added to all": lambda keras, x: keras.layers.Add()([x, keras.layers.Conv2D(1, 1)(x)]),
    "one channel taken from all": lambda keras, x: keras.layers.Subtract()([x, keras.layers.Conv2D(1, 1)(x)]),
    "the mean of the channels": lambda keras, x: x - keras.ops.mean(x, axis=-1, keepdims=True),
    "a square": lambda keras, x: x * x,
}


@pytest.mark.parametrize("between", [*SCALED, *HELD])
def test_scaled_channels_do_not_change_what_is_computed(keras: Any, between: str) -> None:
    layers, held = keras.layers, between in HELD
    image = keras.Input((6, 6, 3))
    x = (SCALED | HELD)[between](keras, layers.Conv2D(8, 3, padding="same", name="first")(image))
    x = (layers.Conv1D if len(x.shape) == 3 else layers.Conv2D)(8, 1)(x)
    model = keras.Model(image, layers.Dense(5)(layers.Flatten()(x)))
    net = canonical(keras_graph.read(networks.randomized(model)))
    channels = equalization.follow(net)
    assert channels.pinned[channels.layouts[keras_graph.LayerOutput("first")]].all() == held
    factors = np.exp(np.random.default_rng(1).uniform(-3, 3, len(channels.group)))[channels.group]
    samples = np.random.default_rng(2).normal(size=(4, 6, 6, 3)).astype(np.float32)
    actual, expected = (
        np.asarray(keras_graph.build(network)(samples))
        for network in (equalization.scaled(net, channels, factors), net)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
