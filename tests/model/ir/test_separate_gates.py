"""The gate of SiLU and hard-swish as a separate layer: the function stays the same."""

from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest

from compress.core.errors import StageError
from compress.model.ir import keras_graph
from compress.model.ir.passes import separate_gates
from compress.model.ir.passes.fold import canonical

pytestmark = pytest.mark.tensorflow
IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)


def network_of(keras: Any, first: Any, function: Any, *, with_another_reader: bool = False) -> keras_graph.Network:
    image = keras.Input((8, 8, 3))
    x = first(image)
    y = function(x)
    if with_another_reader:
        y = keras.layers.Concatenate()([y, x])
    model = keras.Model(image, keras.layers.Conv2D(4, 1, name="end")(y))
    return canonical(keras_graph.read(networks.randomized(model)))


@pytest.mark.parametrize("written", ["silu", "hard_silu", "in the layer", "operation", "product", "swapped product"])
@pytest.mark.parametrize("kind", ["Conv2D", "DepthwiseConv2D", "Dense", "Conv2DTranspose"])
def test_the_function_stays_the_same(keras: Any, written: str, kind: str) -> None:
    layers = keras.layers
    sizes = {"Conv2D": (6, 3), "DepthwiseConv2D": (3,), "Dense": (6,), "Conv2DTranspose": (6, 3)}[kind]
    settings: dict[str, Any] = {"activation": "silu"} if written == "in the layer" else {"use_bias": kind == "Conv2D"}
    first = getattr(layers, kind)(*sizes, name="first", **settings)
    functions = {
        "silu": layers.Activation("silu"),
        "hard_silu": layers.Activation("hard_silu"),
        "in the layer": lambda x: x,
        "operation": keras.ops.silu,
        "product": lambda x: layers.Multiply()([x, layers.Activation("sigmoid")(x)]),
        "swapped product": lambda x: keras.ops.sigmoid(x) * x,
    }
    network = network_of(keras, first, functions[written])
    (name,) = separate_gates.find(network)
    assert separate_gates.source_of(network, name) is None
    separated = separate_gates.separated(network, [name])
    assert separate_gates.source_of(separated, name) == "first"
    assert {"first", "first_gate"} <= separated.layers.keys()
    assert separated.shapes.keys() >= {keras_graph.LayerOutput(layer) for layer in separated.layers}
    expected, actual = (np.asarray(keras_graph.build(variant)(IMAGES)) for variant in (network, separated))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert separate_gates.separated(separated, [name]) == separated


def test_a_batch_norm_is_folded_into_both_layers(keras: Any) -> None:
    layers = keras.layers
    first = keras.Sequential([layers.Conv2D(6, 3, use_bias=False, name="first"), layers.BatchNormalization()])
    network = network_of(keras, first, layers.Activation("silu"))
    (name,) = separate_gates.find(network)
    separated = separate_gates.separated(network, [name])
    source = separated.layers[separate_gates.source_of(separated, name) or ""]
    copy = separated.layers[f"{source.name}_gate"]
    for original, other in zip(source.weights, copy.weights, strict=True):
        np.testing.assert_array_equal(original, other)
    assert len(source.weights) == 2


@pytest.mark.parametrize("function", ["relu", "sigmoid", "gelu", "tanh"])
def test_other_functions_have_no_gate(keras: Any, function: str) -> None:
    network = network_of(keras, keras.layers.Conv2D(6, 3), keras.layers.Activation(function))
    assert not separate_gates.find(network)
    with pytest.raises(StageError, match="which has none"):
        separate_gates.separated(network, ["end"])


def test_layers_with_other_readers_gates_and_outputs_stay(keras: Any) -> None:
    layers = keras.layers
    silu = layers.Activation("silu")
    assert not separate_gates.find(network_of(keras, layers.Conv2D(6, 3), silu, with_another_reader=True))
    gate = layers.Conv2D(6, 1, activation="sigmoid")
    assert not separate_gates.find(network_of(keras, layers.Conv2D(6, 3), lambda x: x * gate(x)))
    image = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(6, 3)(image)
    model = keras.Model(image, [x, keras.layers.Activation("silu")(x)])
    assert not separate_gates.find(canonical(keras_graph.read(model)))
