from __future__ import annotations

from dataclasses import replace
from typing import Any

import networks
import numpy as np
import pytest

from compress.core.errors import ModelError
from compress.model.ir import keras_graph
from compress.model.ir.mixed_precision import lowered
from compress.model.ir.passes.fold import canonical

pytestmark = pytest.mark.tensorflow


def images(count: int = 3, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).random((count, 12, 12, channels), np.float32)


@pytest.mark.parametrize(
    "builder", [*networks.ALL, networks.nested_to_the_end, networks.shared_backwards], ids=lambda b: b.__name__
)
def test_a_model_read_and_built_again_computes_the_same(keras: Any, builder: networks.Builder) -> None:
    model = networks.randomized(builder(keras))
    again = keras_graph.build(keras_graph.read(model))
    inputs = images(channels=model.input_shape[-1])
    for actual, expected in zip(keras.tree.flatten(again(inputs)), keras.tree.flatten(model(inputs)), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_an_adapted_normalization_stays_adapted(keras: Any) -> None:
    read = keras_graph.read(model := networks.adapted(keras))
    inputs = np.random.default_rng(1).normal(30, 8, (5, 12, 12, 3)).astype(np.float32)
    expected = np.asarray(model(inputs))
    np.testing.assert_allclose(np.asarray(keras_graph.build(read)(inputs)), expected, atol=1e-5)
    np.testing.assert_allclose(np.asarray(keras_graph.build(canonical(read))(inputs)), expected, atol=1e-4)
    np.testing.assert_allclose(np.asarray(lowered(model, "mixed_bfloat16")(inputs)), expected, atol=0.1)


def test_layers_in_any_order_are_called_once_for_each_call(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(4)
    values = inputs = keras.Input((4,))
    for _ in range(5):  # shared layers that depend on each other
        values = second(first(values))
    model = networks.randomized(keras.Model(inputs, values))
    read = keras_graph.read(model)
    backwards = replace(read, layers=dict(reversed(read.layers.items())))
    calls, real = [], keras.layers.Layer.__call__
    with monkeypatch.context() as patched:
        patched.setattr(
            keras.layers.Layer, "__call__", lambda layer, x: calls.append(layer.name) or real(layer, x), raising=True
        )
        again = keras_graph.build(backwards)
    assert sorted(calls) == sorted([first.name, second.name] * 5)
    samples = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(again(samples)), np.asarray(model(samples)))


def test_an_open_input_gets_a_fixed_shape(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((None, None, 3))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, strides=2)(image))
    model = networks.randomized(keras.Model(image, layers.GlobalAveragePooling2D()(x)))
    fixed = keras_graph.with_input_shape(model, (12, 12, 3))
    assert fixed.input_shape == (None, 12, 12, 3)
    assert fixed.layers[1].output.shape == (None, 5, 5, 4)
    np.testing.assert_array_equal(np.asarray(fixed(images())), np.asarray(model(images())))
    with pytest.raises(ModelError, match="cannot be built"):
        keras_graph.with_input_shape(model, (2, 2, 3))


def test_operators_and_keyword_arguments_survive(keras: Any) -> None:
    left, right = keras.Input((4,)), keras.Input((4,))
    x = keras.layers.Dense(3)(keras.ops.relu(left * 2.0 - right))
    model = keras.Model([left, right], [x, keras.ops.mean(x, axis=-1, keepdims=True)])
    again = keras_graph.build(keras_graph.read(model))
    inputs = [np.random.default_rng(i).random((2, 4), np.float32) for i in range(2)]
    for mine, theirs in zip(again(inputs), model(inputs), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def test_a_subclassed_model_is_refused_with_what_to_do(keras: Any) -> None:
    class Hidden(keras.Model):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    with pytest.raises(ModelError, match=r"written as a class.*functional or sequential"):
        keras_graph.read(Hidden())


@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_a_nested_model_takes_the_items_of_a_map_by_name(keras: Any) -> None:
    b, a = (keras.Input((3,), name=name) for name in "ba")
    inner = keras.Model({"b": b, "a": a}, {"z": b - 2.0 * a, "y": a * 5.0})
    first, second = keras.Input((3,), name="first"), keras.Input((3,), name="second")
    results = inner({"a": first, "b": second})
    model = keras.Model([first, second], [results["y"], results["z"]])
    again = keras_graph.build(keras_graph.read(model))
    inputs = [np.ones((2, 3), np.float32), np.full((2, 3), 10, np.float32)]
    assert [np.asarray(output)[0, 0] for output in again(inputs)] == [5, 8]


def test_an_output_that_is_an_input_stays(keras: Any) -> None:
    image = keras.Input((8, 8, 3), name="image")
    model = keras.Model(image, [image, image - keras.layers.Conv2D(3, 3, padding="same")(image)])
    network = keras_graph.without_unused_calls(keras_graph.read(model))
    assert network.layers["image"].inputs() == []
    inputs = images()[:, :8, :8]
    np.testing.assert_array_equal(np.asarray(keras_graph.build(network)(inputs)[0]), inputs)
