"""Activations are recognised under every name and in every form, and become ReLUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from compress.learning.replacement import squeeze_excite
from compress.learning.replacement.activations import Replacements, replace_by_relu
from compress.model.ir import keras_graph
from compress.model.ir.layer_specs.functions import POINTS, Activation, recognize

pytestmark = pytest.mark.tensorflow

ALL: tuple[Activation, ...] = get_args(Activation)


def images(count: int = 3) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 8, 8, 4)).astype(np.float32)


def around(keras: Any, middle: Callable[[Any], Any]) -> Any:
    """Return a network with `middle` between two convolutions."""
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 4))
    x = keras.layers.Conv2D(4, 3, padding="same", name="before")(image)
    x = keras.layers.Conv2D(4, 3, name="after")(middle(x))
    return keras.Model(image, keras.layers.GlobalAveragePooling2D(name="pool")(x))


def replaced(model: Any, kinds: tuple[Activation, ...] = ALL, by: str = "relu") -> tuple[Any, Replacements]:
    network, replacements = replace_by_relu(keras_graph.read(model), kinds, by)
    return keras_graph.build(network), replacements


def counts(replacements: Replacements) -> dict[str, int]:
    """Return the number of replaced layers of each kind."""
    return {kind: len(layers) for kind, layers in replacements.replaced.items()}


def same(model: Any, other: Any, inputs: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(model(inputs)), np.asarray(other(inputs)), rtol=1e-5, atol=1e-5)


#: The kind that must be recognised, and the code of the activation.
SPELLINGS: dict[str, tuple[Activation, Callable[[Any, Any], Any]]] = {
    "silu by name": ("silu", lambda k, x: k.layers.Activation("swish")(x)),
    "gelu by function": ("gelu", lambda k, x: k.layers.Activation(k.activations.gelu)(x)),
    "hard_silu by name": ("hard_silu", lambda k, x: k.layers.Activation("hard_swish")(x)),
    "object as activation": ("elu", lambda k, x: k.layers.Activation(k.layers.ELU(0.5))(x)),
    "ReLU as activation": ("leaky_relu", lambda k, x: k.layers.Activation(k.layers.ReLU(negative_slope=0.1))(x)),
    "LeakyReLU": ("leaky_relu", lambda k, x: k.layers.LeakyReLU(0.2)(x)),
    "ELU": ("elu", lambda k, x: k.layers.ELU(0.3)(x)),
    "ReLU with a slope": ("leaky_relu", lambda k, x: k.layers.ReLU(negative_slope=0.1)(x)),
    "ReLU with a threshold": ("threshold", lambda k, x: k.layers.ReLU(threshold=0.3)(x)),
    "operation silu": ("silu", lambda k, x: k.ops.silu(x)),
    "operation gelu": ("gelu", lambda k, x: k.ops.gelu(x, approximate=False)),
    "operation leaky_relu": ("leaky_relu", lambda k, x: k.ops.leaky_relu(x, 0.3)),
    "operation celu": ("celu", lambda k, x: k.ops.celu(x)),
    "operation softplus": ("softplus", lambda k, x: k.ops.softplus(x)),
    "x sigmoid(x)": ("silu", lambda k, x: x * k.ops.sigmoid(x)),
    "x sigmoid(x) of layers": ("silu", lambda k, x: k.layers.Multiply()([k.layers.Activation("sigmoid")(x), x])),
    "x sigmoid(1.702 x)": ("tailed", lambda k, x: x * k.ops.sigmoid(1.702 * x)),
    "MobileNetV3's": ("hard_silu", lambda k, x: k.layers.Multiply()([x, k.layers.ReLU(6.0)(x + 3.0) * (1 / 6)])),
    "hard_silu divided late": ("hard_silu", lambda k, x: x * k.ops.relu6(x + 3) / 6),
    "hard_silu by Rescaling": (
        "hard_silu",
        lambda k, x: k.layers.Multiply()([x, k.layers.Rescaling(1 / 6)(k.layers.ReLU(6.0)(x + 3.0))]),
    ),
    "gelu with erf": ("gelu", lambda k, x: 0.5 * x * (1 + k.ops.erf(x / 2**0.5))),
    "gelu with tanh": ("gelu", lambda k, x: 0.5 * x * (1 + k.ops.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))),
    "max(x, 0.1 x)": ("leaky_relu", lambda k, x: k.ops.maximum(x, 0.1 * x)),
    "relu(x) - 0.2 relu(-x)": ("leaky_relu", lambda k, x: k.ops.relu(x) - 0.2 * k.ops.relu(-x)),
    "x tanh(softplus(x))": ("mish", lambda k, x: x * k.ops.tanh(k.ops.softplus(x))),
    "log(1 + exp(x))": ("softplus", lambda k, x: k.ops.log(1.0 + k.ops.exp(x))),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_recognised_and_becomes_a_relu(keras: Any, spelling: str) -> None:
    kind, middle = SPELLINGS[spelling]
    model = around(keras, lambda x: middle(keras, x))
    new_model, replacements = replaced(model)
    assert counts(replacements) == {kind: 1}
    expected = around(keras, keras.layers.ReLU())
    expected.set_weights(model.get_weights())
    same(new_model, expected, images())
    assert len(new_model.layers) == len(expected.layers)  # nothing of the old activation is left
    assert replaced(model, tuple(activation for activation in ALL if activation != kind))[1] == Replacements()


@pytest.mark.parametrize("activation", ["relu", "relu6", "sigmoid", "tanh", "hard_sigmoid"])
def test_what_is_free_stays(keras: Any, activation: str) -> None:
    model = around(keras, keras.layers.Activation(activation))
    new_model, replacements = replaced(model)
    assert replacements == Replacements()
    same(new_model, model, images())


@pytest.mark.parametrize(
    "middle",
    [
        lambda k, x: x * 2.0 + 1.0,
        lambda k, x: x * k.ops.sigmoid(x) * 1.7,
        lambda k, x: x * k.ops.sigmoid(x + np.arange(4, dtype=np.float32)),
        lambda k, x: x * k.ops.sigmoid(k.layers.Conv2D(4, 1)(x)),
        lambda k, x: x * x,
    ],
)
def test_what_only_looks_like_one_is_not_taken_for_one(keras: Any, middle: Any) -> None:
    keras.utils.set_random_seed(0)
    model = around(keras, lambda x: middle(keras, x))
    new_model, replacements = replaced(model, tuple(activation for activation in ALL if activation != "silu"))
    assert replacements == Replacements()
    same(new_model, model, images())


def test_a_scaled_silu_becomes_a_scaled_relu(keras: Any) -> None:
    new_model, replacements = replaced(around(keras, lambda x: x * keras.ops.sigmoid(x) * 1.7))
    assert counts(replacements) == {"silu": 1}
    same(new_model, around(keras, lambda x: keras.ops.relu(x) * 1.7), images())


def test_activations_inside_layers_are_replaced(keras: Any) -> None:
    layers = keras.layers

    def net(first: Any, second: Any, third: Any, fourth: Any) -> Any:
        keras.utils.set_random_seed(0)
        image = keras.Input((8, 8, 4))
        x = layers.Conv2D(4, 3, activation=first)(image)
        x = layers.SeparableConv2D(4, 3, activation=second)(x)
        x = layers.Reshape((16, 4))(x)
        x = layers.TimeDistributed(layers.Dense(3, activation=third))(x)
        return keras.Model(image, layers.Dense(2)(layers.Dense(4, activation=fourth)(layers.Flatten()(x))))

    new_model, replacements = replaced(net("silu", "leaky_relu", "gelu", layers.LeakyReLU(0.1)), by="relu6")
    assert counts(replacements) == {"silu": 1, "leaky_relu": 2, "gelu": 1}
    same(new_model, net("relu6", "relu6", "relu6", "relu6"), images() * 20)


def test_activations_that_are_wrapped_are_replaced(keras: Any) -> None:
    layers = keras.layers

    def net(*activations: Any) -> Any:
        def all_of_them(x: Any) -> Any:
            for activation in activations:
                x = layers.TimeDistributed(activation)(x)
            return x

        return around(keras, all_of_them)

    new_model, replacements = replaced(net(layers.LeakyReLU(), layers.ELU(), layers.ReLU(4.0, negative_slope=0.1)))
    assert counts(replacements) == {"leaky_relu": 2, "elu": 1}
    same(new_model, net(layers.ReLU(), layers.ReLU(), layers.ReLU(4.0)), images())


def test_what_no_relu_is_put_in_the_place_of_is_named_however_it_is_written(keras: Any) -> None:
    layers = keras.layers

    def net(x: Any) -> Any:
        x = keras.ops.softsign(layers.Activation("softsign")(x))
        return layers.TimeDistributed(layers.Conv1D(4, 3, padding="same", activation="softsign"))(x)

    model = around(keras, net)
    new_model, replacements = replaced(model)
    assert not replacements.replaced
    assert [*replacements.skipped.values()] == ["softsign is not an activation that a ReLU can replace"] * 3
    same(new_model, model, images())


def test_activations_further_inside_are_named(keras: Any) -> None:
    layers = keras.layers

    def net(x: Any) -> Any:
        _, height, width, channels = x.shape
        body = keras.Sequential([keras.Input((width, channels)), layers.Dense(channels, activation="silu")])
        x = layers.Reshape((height * width, channels))(layers.TimeDistributed(body)(x))
        x = layers.RNN(layers.LSTMCell(channels, activation="silu"), return_sequences=True, unroll=True)(x)
        return layers.Reshape((height, width, channels))(x)

    _, replacements = replaced(around(keras, net))
    assert not replacements.replaced
    assert [*replacements.skipped.values()] == [
        "silu is inside a Sequential, which is not searched",
        "silu is inside a recurrent layer",
    ]


def test_activations_in_a_row_are_each_replaced(keras: Any) -> None:
    def hard(x: Any) -> Any:
        return x * keras.ops.relu6(x + 3) / 6

    new_model, replacements = replaced(
        around(keras, lambda x: keras.ops.gelu(hard(hard(keras.layers.Activation("silu")(x)))))
    )
    assert counts(replacements) == {"silu": 1, "hard_silu": 2, "gelu": 1}
    same(new_model, around(keras, keras.layers.ReLU()), images())


def test_shared_layers_nested_models_and_several_outputs(keras: Any) -> None:
    layers = keras.layers
    relu6, times = layers.ReLU(6.0), layers.Multiply()

    def hard(x: Any) -> Any:
        return times([x, relu6(x + 3.0) * (1 / 6)])

    def net(activation: Callable[[Any], Any], inside: str) -> Any:
        keras.utils.set_random_seed(0)
        body = keras.Sequential([keras.Input((8, 8, 4)), layers.Conv2D(4, 1, activation=inside)], name="body")
        image, other = keras.Input((8, 8, 4)), keras.Input((8, 8, 4))
        x = body(activation(layers.Conv2D(4, 1)(image)))
        y = activation(body(other))
        z = relu6(x - y)  # a call of the shared ReLU that must stay
        return keras.Model([image, other], {"sum": layers.Flatten()(x + y), "other": layers.Flatten()(z)})

    new_model, replacements = replaced(net(hard, "silu"))
    assert counts(replacements) == {"hard_silu": 1, "silu": 1}  # both shared
    inputs = [images(), images() + 1]
    expected, actual = (each(inputs) for each in (net(keras.layers.ReLU(), "relu"), new_model))
    assert actual.keys() == {"sum", "other"}
    for name in expected:
        np.testing.assert_allclose(np.asarray(actual[name]), np.asarray(expected[name]), atol=1e-5)


def test_slopes_for_every_position_become_one_for_each_channel(keras: Any) -> None:
    slopes = keras.initializers.RandomUniform(0.1, 0.4, seed=0)
    new_model, replacements = replaced(around(keras, keras.layers.PReLU(name="slopes", alpha_initializer=slopes)))
    assert replacements.replaced == {"prelu": ("slopes",)}
    assert new_model.get_layer("slopes").get_weights()[0].shape == (1, 1, 4)
    flat = keras.initializers.Constant(0.3)
    model = around(keras, keras.layers.PReLU(alpha_initializer=flat))
    same(replaced(model)[0], model, images())
    shared = around(keras, keras.layers.PReLU(shared_axes=[1, 2]))
    assert replaced(shared)[1] == Replacements()
    across = around(keras, keras.layers.PReLU(alpha_initializer=flat, shared_axes=[3]))  # one slope for each position
    same(replaced(across)[0], across, images())


def test_what_must_stay_is_named_with_the_reason(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((8, 4))
    x = layers.GRU(4, activation="silu", return_sequences=True, name="recurrent")(image)
    x = layers.Dense(4, activation="squareplus", name="rare")(x)
    end = layers.Dense(2, activation="softplus", name="end")(x)
    model = keras.Model(image, [end, x * keras.ops.sigmoid(x)])
    new_model, replacements = replaced(model)
    assert not replacements.replaced
    assert "inside a recurrent layer" in replacements.skipped["recurrent"]
    assert "squareplus is not an activation that" in replacements.skipped["rare"]
    assert "an output of the model" in replacements.skipped["end"]
    assert len(replacements.skipped) == 4
    inputs = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
    for a, b in zip(new_model(inputs), model(inputs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)


def test_a_function_is_recognised_by_its_values() -> None:
    assert recognize(np.where(POINTS > 0, POINTS, 0.25 * POINTS)) == "leaky_relu"
    assert recognize(POINTS / (1 + np.exp(-1.5 * POINTS))) == "tailed"
    for values in (POINTS, np.maximum(POINTS, 0), np.abs(POINTS), np.full_like(POINTS, np.nan), np.tanh(POINTS)):
        assert recognize(values) is None


def test_mobilenet_v3_has_nothing_left_to_replace(keras: Any) -> None:
    model = keras.applications.MobileNetV3Small((64, 64, 3), alpha=0.35, weights=None, classes=3)
    net = keras_graph.read(model)
    inputs = np.random.default_rng(0).random((4, 64, 64, 3), np.float32) * 255
    gates, others = squeeze_excite.find(net)
    assert (len(gates), others) == (9, {})
    net, without = squeeze_excite.remove_gates(net, squeeze_excite.measure(net, gates, inputs))
    net, replacements = replace_by_relu(net, ALL, "relu")
    assert counts(replacements) == {"hard_silu": 19}
    assert all(note.startswith("folded into") for note in without.notes.values())
    new_model = keras_graph.build(net)
    assert new_model.output_shape == (None, 3)
    assert "Multiply" not in {layer.kind for layer in net.layers.values()}
