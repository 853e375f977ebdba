"""A gate that is the same for all samples is removed exactly; any other becomes the mean that changes least."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compress.learning.replacement import squeeze_excite
from compress.learning.replacement.activations import Replacements
from compress.learning.replacement.squeeze_excite import GateStatistics
from compress.model.ir import keras_graph

pytestmark = pytest.mark.tensorflow


def images(count: int = 5) -> np.ndarray:
    return np.random.default_rng(0).random((count, 8, 8, 3), np.float32)


def gate(keras: Any, x: Any, *, constant: bool) -> Any:
    """Return the squeeze-and-excite gate of x: [n, 1, 1, c]."""
    layers, channels = keras.layers, x.shape[-1]
    y = layers.GlobalAveragePooling2D(keepdims=True)(x)
    y = layers.Conv2D(4, 1, activation="silu")(y)
    bias = keras.initializers.RandomNormal(seed=1)
    kernel = keras.initializers.Zeros() if constant else keras.initializers.RandomNormal(stddev=3.0, seed=2)
    return layers.Conv2D(channels, 1, activation="sigmoid", kernel_initializer=kernel, bias_initializer=bias)(y)


#: The place of the mean, and the layers before and after the product of a map and its gate.
PLACES: dict[str, tuple[str, Callable[[Any, Any, bool], Any]]] = {
    "convolution behind": (
        "folded into behind",
        lambda k, x, constant: k.layers.Conv2D(4, 3, name="behind")(x * gate(k, x, constant=constant)),
    ),
    "through a padding": (
        "folded into behind",
        lambda k, x, constant: k.layers.Conv2D(4, 3, name="behind")(
            k.layers.ZeroPadding2D()(k.layers.Dropout(0.1)(x * gate(k, x, constant=constant)))
        ),
    ),
    "depthwise behind": (
        "folded into behind",
        lambda k, x, constant: k.layers.DepthwiseConv2D(3, depth_multiplier=2, name="behind")(
            k.layers.Multiply()([gate(k, x, constant=constant), x])
        ),
    ),
    "separable behind": (
        "folded into behind",
        lambda k, x, constant: k.layers.SeparableConv2D(5, 3, name="behind")(x * gate(k, x, constant=constant)),
    ),
    "transposed behind": (
        "folded into behind",
        lambda k, x, constant: k.layers.Conv2DTranspose(5, 2, 2, name="behind")(x * gate(k, x, constant=constant)),
    ),
    "two behind": (
        "folded into one, other",
        lambda k, x, constant: (
            lambda y: k.layers.Conv2D(4, 1, name="one")(y) + k.layers.Conv2D(4, 1, name="other")(y)
        )(x * gate(k, x, constant=constant)),
    ),
    "norm in front": (
        "folded into front",
        lambda k, x, constant: (lambda y: k.ops.relu(y * gate(k, y, constant=constant)))(
            k.layers.BatchNormalization(name="front")(x)
        ),
    ),
    "convolution in front": (
        "folded into front",
        lambda k, x, constant: (lambda y: k.ops.tanh(y * gate(k, y, constant=constant)))(
            k.layers.Conv2D(6, 3, name="front", bias_initializer="random_normal")(x)
        ),
    ),
    "a shortcut around": (
        "now a depthwise 1x1 convolution",
        lambda k, x, constant: k.layers.Add()([x, x * gate(k, x, constant=constant)]),
    ),
}


def net(keras: Any, middle: Callable[[Any, Any, bool], Any], constant: bool) -> Any:
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(6, 3, activation="relu")(image)
    x = keras.layers.GlobalAveragePooling2D()(middle(keras, x, constant))
    return keras.Model(image, keras.layers.Dense(3)(x))


def ungated(model: Any, count: int) -> tuple[keras_graph.Network, Replacements]:
    """Remove constant gates from a model; check their number, and that the outputs stay the same."""
    network = keras_graph.read(model)
    gates, left = squeeze_excite.find(network)
    assert (len(gates), left) == (count, {})
    result, replacements = squeeze_excite.remove_gates(network, squeeze_excite.measure(network, gates, images()))
    assert len(replacements.replaced["squeeze_and_excite"]) == count
    actual, expected = (np.asarray(keras_model(images(7))) for keras_model in (keras_graph.build(result), model))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    return result, replacements


@pytest.mark.parametrize("place", PLACES)
def test_a_constant_gate_goes_exactly(keras: Any, place: str) -> None:
    where, middle = PLACES[place]
    network, replacements = ungated(net(keras, middle, True), 1)
    ((name, note),) = replacements.notes.items()
    assert note.startswith(where)
    assert "changes 0.0%" in note
    assert replacements.replaced == {"squeeze_and_excite": (name,)}
    assert not {"Multiply", "Sigmoid"} & {layer.kind for layer in network.layers.values()}
    assert sum(layer.kind == "GlobalAveragePooling2D" for layer in network.layers.values()) == 1  # the gate's is gone


def test_the_mean_is_the_one_that_changes_least(keras: Any) -> None:
    model = net(keras, PLACES["convolution behind"][1], False)
    network = keras_graph.read(model)
    (only_gate,), _ = squeeze_excite.find(network)
    samples = images(9)
    measured = squeeze_excite.measure(network, [only_gate], samples)[only_gate]
    values = keras_graph.build(keras_graph.subnetwork(network, [only_gate.map, only_gate.factor]))(samples)
    map, factor = (np.asarray(value, np.float64) for value in values)

    def moved(mean: np.ndarray) -> float:
        return float(((map * factor - map * mean) ** 2).sum() / ((map * factor) ** 2).sum())

    assert measured.changed_energy == pytest.approx(moved(measured.mean), rel=1e-4)
    assert measured.changed_energy > 1e-4
    for step in (-0.01, 0.01):
        assert moved(measured.mean + step) > moved(measured.mean)
    assert moved(factor.mean(axis=(0, 1, 2))) >= moved(measured.mean)


def test_gates_behind_gates_and_in_a_layer_that_is_called_twice(keras: Any) -> None:
    layers, times = keras.layers, keras.layers.Multiply()
    image = keras.Input((8, 8, 3))
    keras.utils.set_random_seed(0)
    x = layers.Conv2D(6, 3, activation="relu")(image)
    x = times([x, gate(keras, x, constant=True)])
    x = times([x, gate(keras, x, constant=True)])
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 1, name="behind")(x))
    network, _ = ungated(keras.Model(image, layers.Dense(3)(x)), 2)
    assert "Multiply" not in {layer.kind for layer in network.layers.values()}


def test_a_block_that_is_called_twice_gets_a_mean_for_each_call(keras: Any) -> None:
    layers = keras.layers
    keras.utils.set_random_seed(0)
    inside = keras.Input((8, 8, 6))
    y = layers.Conv2D(6, 3, padding="same", activation="relu")(inside)
    block = keras.Model(inside, layers.Multiply()([y, gate(keras, y, constant=True)]), name="block")
    image = keras.Input((8, 8, 3))
    x = block(block(layers.Conv2D(6, 1)(image)))
    ungated(keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x))), 2)


def test_what_is_no_gate_of_its_own_map_stays(keras: Any) -> None:
    layers = keras.layers
    image, other = keras.Input((8, 8, 3)), keras.Input((8, 8, 6))
    x = layers.Conv2D(6, 3, name="x")(image)
    modulated = layers.Multiply(name="modulated")([x, gate(keras, other, constant=False)])
    spatial = layers.Multiply(name="spatial")([x, layers.Conv2D(1, 1, activation="sigmoid")(x)])
    swish = layers.Multiply(name="swish")([x, layers.Activation("sigmoid")(x)])
    merged = layers.GlobalAveragePooling2D()(layers.Add()([modulated, spatial, swish]))
    gates, left = squeeze_excite.find(keras_graph.read(keras.Model([image, other], layers.Dense(2)(merged))))
    assert gates == []
    assert left == {"modulated": "its factors are not computed from the map that they multiply"}


@pytest.mark.parametrize("kind", ["vector", "dense", "single"])
def test_gates_of_other_shapes_are_recognised(keras: Any, kind: str) -> None:
    layers = keras.layers
    image = keras.Input((8, 8, 3))
    z = layers.BatchNormalization()(layers.Conv2D(6, 3, name="x")(image))
    x = layers.ReLU()(z)
    squeezed = layers.GlobalAveragePooling2D()(z)  # the mean of the map before its activation
    factor = layers.Dense(1 if kind == "single" else 6, activation="sigmoid")(squeezed)
    factor = layers.Reshape((1, 1, -1))(factor) if kind != "vector" else factor
    y = layers.Multiply()([x, factor])
    model = keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(layers.Conv2D(4, 1)(y))))
    network = keras_graph.read(model)
    gates, _ = squeeze_excite.find(network)
    assert len(gates) == 1
    measured = squeeze_excite.measure(network, gates, images())
    assert measured[gates[0]].mean.shape == (6,)
    assert keras_graph.build(squeeze_excite.remove_gates(network, measured)[0]).output_shape == (None, 2)


def test_what_cannot_be_folded_is_left_with_the_reason(keras: Any) -> None:
    layers = keras.layers
    sequence = keras.Input((8, 4))
    x = layers.Conv1D(4, 3, activation="relu")(sequence)
    factor = layers.Dense(4, activation="sigmoid")(layers.GlobalAveragePooling1D(keepdims=True)(x))
    y = layers.Multiply(name="gated")([x, factor])
    model = keras.Model(sequence, layers.Flatten()(y))
    network = keras_graph.read(model)
    (only_gate,), _ = squeeze_excite.find(network)
    unchanged, replacements = squeeze_excite.remove_gates(network, {only_gate: GateStatistics(np.full(4, 0.5), 0.0)})
    assert replacements.replaced == {}
    assert replacements.skipped == {"gated": "its mean cannot be folded into a layer before or after it"}
    assert set(unchanged.layers) == set(network.layers)
