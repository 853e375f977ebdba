"""A factorized layer computes the same at full rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compress.model.ir import keras_graph
from compress.model.ir.passes import factorize
from compress.model.ir.passes.factorize import Projection, Side

pytestmark = pytest.mark.tensorflow
SIDES: tuple[tuple[Side, ...], ...] = (("inputs",), ("outputs",), ("inputs", "outputs"))


def rotation(channels: int, rank: int | None = None) -> Projection:
    """A basis that is not orthonormal."""
    matrix = np.random.default_rng(channels).normal(size=(channels, channels)) + 3 * np.eye(channels)
    return Projection(matrix[:, :rank], np.linalg.inv(matrix)[:rank])


def network_of(keras: Any, layer: Any, shape: tuple[int, ...]) -> keras_graph.Network:
    inputs = keras.Input(shape)
    model = keras.Model(inputs, layer(inputs))
    generator = np.random.default_rng(0)
    model.set_weights([generator.normal(size=weight.shape) for weight in model.get_weights()])
    return keras_graph.read(model)


CASES: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "dense": (lambda layers: layers.Dense(6, activation="relu", name="l"), (10,)),
    "dense on a map": (lambda layers: layers.Dense(6, name="l"), (3, 3, 10)),
    "strides": (lambda layers: layers.Conv2D(6, 3, 2, padding="same", activation="relu", name="l"), (7, 7, 8)),
    "dilated": (lambda layers: layers.Conv2D(6, 3, dilation_rate=2, use_bias=False, name="l"), (7, 7, 8)),
    "1x1": (lambda layers: layers.Conv2D(6, 1, 2, name="l"), (7, 7, 8)),
    "causal": (lambda layers: layers.Conv1D(6, 3, padding="causal", name="l"), (7, 8)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sides", SIDES, ids="-".join)
def test_all_forms_of_a_layer_compute_the_same(keras: Any, case: str, sides: tuple[Side, ...]) -> None:
    make, shape = CASES[case]
    network = network_of(keras, make(keras.layers), shape)
    channels = {"inputs": shape[-1], "outputs": 6}
    projections = {side: rotation(channels[side]) for side in sides}
    factors = factorize.factorized(network, "l", projections, factorize.factor_names(network, "l"))
    samples = np.random.default_rng(1).normal(size=(2, *shape)).astype(np.float32)
    expected, actual = (np.asarray(keras_graph.build(variant)(samples)) for variant in (network, factors))
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
    assert len(factors.layers) == len(network.layers) + len(sides)
    assert factors.outputs == network.outputs


def test_a_lower_rank_has_narrower_layers_with_their_shapes(keras: Any) -> None:
    network = network_of(keras, keras.layers.Conv2D(6, 3, name="l"), (7, 7, 8))
    projections: dict[Side, Projection] = {"inputs": rotation(8, 3), "outputs": rotation(6, 2)}
    factors = factorize.factorized(network, "l", projections, factorize.factor_names(network, "l"))
    assert [factors.layers[name].weights[0].shape for name in ("l_narrow", "l_core", "l")] == [
        (1, 1, 8, 3),
        (3, 3, 3, 2),
        (1, 1, 2, 6),
    ]
    read = keras_graph.read(keras_graph.build(factors))
    assert read.shapes == factors.shapes
    assert factorize.is_linear(factors.layers["l_core"])
    assert not factorize.is_linear(factors.layers["l"])


def test_layers_that_cannot_be_factorized_say_why(keras: Any) -> None:
    layers = keras.layers
    cases = {
        "grouped": layers.Conv2D(8, 3, groups=2, name="l"),
        "not a dense layer or a convolution": layers.DepthwiseConv2D(3, name="l"),
    }
    for reason, layer in cases.items():
        assert reason in (factorize.refusal(network_of(keras, layer, (7, 7, 8)).layers["l"]) or "")
    shared = keras.layers.Dense(8, name="l")
    inputs = keras.Input((8,))
    twice = keras_graph.read(keras.Model(inputs, shared(shared(inputs))))
    assert "more than once" in (factorize.refusal(twice.layers["l"]) or "")
