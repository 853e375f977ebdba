"""Unrolled recurrent layers compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compress.model.ir import keras_graph
from compress.model.ir.passes import unroll
from compress.model.ir.passes.decompose import reason_to_stay
from compress.model.ir.passes.fold import canonical

pytestmark = pytest.mark.tensorflow
RECURRENT = {"LSTM", "GRU", "SimpleRNN", "ConvLSTM2D", "Bidirectional", "RNN", "TimeDistributed"}
Part = Callable[[Any, Any], Any]


def model(keras: Any, part: Part) -> Any:
    keras.utils.set_random_seed(1)
    sequence = keras.Input((6, 3))
    network = keras.Model(sequence, part(keras.layers, sequence))
    generator = np.random.default_rng(0)
    network.set_weights([weight + 0.2 * generator.standard_normal(weight.shape) for weight in network.get_weights()])
    return network


def maps(layers: Any, x: Any) -> Any:
    """Reshape the 18 values of a sample to three maps."""
    return layers.Reshape((3, 2, 3, 1))(x)


def next_layer(kind: str, both: bool) -> Part:
    """A layer that starts with the states of another one."""

    def part(layers: Any, x: Any) -> Any:
        def layer(**settings: Any) -> Any:
            recurrent_layer = getattr(layers, kind)(4, **settings)
            return layers.Bidirectional(recurrent_layer) if both else recurrent_layer

        _, *states = layer(return_state=True)(x)
        return layer()(x, initial_state=states)

    return part


def twice(layers: Any, x: Any) -> Any:
    layer = layers.LSTM(3, return_sequences=True)
    return layer(layer(x))


def stacked_states(layers: Any, x: Any) -> Any:
    def layer(**settings: Any) -> Any:
        return layers.RNN([layers.LSTMCell(4), layers.GRUCell(3)], **settings)

    _, *states = layer(return_state=True)(x)
    return layer()(x, initial_state=states)


CASES: dict[str, Part] = {
    "lstm": lambda layers, x: layers.LSTM(4)(x),
    "lstm backwards": lambda layers, x: layers.LSTM(4, return_sequences=True, return_state=True, go_backwards=True)(x),
    "lstm without bias": lambda layers, x: layers.LSTM(4, use_bias=False, activation="relu")(x),
    "gru": lambda layers, x: layers.GRU(4, return_sequences=True)(x),
    "gru reset before": lambda layers, x: layers.GRU(4, reset_after=False)(x),
    "gru without bias": lambda layers, x: layers.GRU(4, use_bias=False)(x),
    "hard sigmoid": lambda layers, x: layers.GRU(4, recurrent_activation="hard_sigmoid")(x),
    "rnn": lambda layers, x: layers.SimpleRNN(4, activation="linear")(x),
    "states": next_layer("LSTM", both=False),
    "states of a gru": next_layer("GRU", both=False),
    "states of both directions": next_layer("LSTM", both=True),
    "shared": twice,
    "cell": lambda layers, x: layers.RNN(layers.LSTMCell(4), return_sequences=True, return_state=True)(x),
    "cell without bias": lambda layers, x: layers.RNN(layers.GRUCell(4, use_bias=False, reset_after=False))(x),
    "stacked cells": lambda layers, x: layers.RNN(
        [layers.LSTMCell(4), layers.GRUCell(3), layers.SimpleRNNCell(2)], go_backwards=True, return_state=True
    )(x),
    "states of stacked cells": stacked_states,
    "dense at each step": lambda layers, x: layers.TimeDistributed(layers.Dense(4, activation="relu"))(x),
    "convolution at each step": lambda layers, x: layers.TimeDistributed(layers.Conv1D(4, 2))(
        layers.Reshape((3, 2, 3))(x)
    ),
    "batch norm at each step": lambda layers, x: layers.TimeDistributed(layers.BatchNormalization())(x),
    "convolution of each map": lambda layers, x: layers.TimeDistributed(layers.Conv2D(4, 2, activation="relu"))(
        maps(layers, x)
    ),
    "separable convolution of each map": lambda layers, x: layers.TimeDistributed(
        layers.SeparableConv2D(4, 2, activation="relu")
    )(maps(layers, x)),
    "decisions at each step": lambda layers, x: layers.TimeDistributed(layers.Dense(3, activation="softmax"))(
        layers.Bidirectional(layers.GRU(3, return_sequences=True))(x)
    ),
    "relu backwards": lambda layers, x: layers.SimpleRNN(
        4, activation="relu", go_backwards=True, return_sequences=True, return_state=True
    )(x),
    "convolutions": lambda layers, x: layers.ConvLSTM2D(4, 2, padding="same", return_state=True)(maps(layers, x)),
    "strided convolutions": lambda layers, x: layers.ConvLSTM2D(
        4, 2, strides=(2, 1), use_bias=False, go_backwards=True, return_sequences=True
    )(maps(layers, x)),
    "convolutions in both directions": lambda layers, x: layers.Bidirectional(
        layers.ConvLSTM2D(2, 2, dilation_rate=(1, 2), return_sequences=True)
    )(maps(layers, x)),
    "bidirectional states": lambda layers, x: layers.Bidirectional(layers.GRU(4, return_state=True))(x),
    "other layer backwards": lambda layers, x: layers.Bidirectional(
        layers.LSTM(4), backward_layer=layers.GRU(4, go_backwards=True)
    )(x),
    "bias backwards only": lambda layers, x: layers.Bidirectional(
        layers.LSTM(4, use_bias=False), backward_layer=layers.LSTM(4, go_backwards=True)
    )(x),
    **{
        f"merged by {mode}": lambda layers, x, mode=mode: layers.Bidirectional(
            layers.LSTM(4, return_sequences=True), merge_mode=mode
        )(x)
        for mode in ("concat", "sum", "mul", "ave", None)
    },
}


@pytest.mark.parametrize("name", CASES)
def test_unrolled_layers_compute_the_same(keras: Any, name: str) -> None:
    original = model(keras, CASES[name])
    network = canonical(keras_graph.read(original))
    assert not RECURRENT & {layer.kind for layer in network.layers.values()}
    inputs = np.random.default_rng(1).standard_normal((3, 6, 3)).astype(np.float32)
    outputs = (keras.tree.flatten(keras_model(inputs)) for keras_model in (original, keras_graph.build(network)))
    for expected, actual in zip(*outputs, strict=True):
        np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), atol=1e-5)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (lambda layers, x: layers.LSTM(4, name="r")(layers.Masking(name="m")(x)), "time steps that Masking 'm' masks"),
        (
            lambda layers, x: layers.GRU(4, name="r")(layers.Embedding(9, 2, mask_zero=True, name="e")(x[..., 0])),
            "time steps that Embedding 'e' masks",
        ),
        (
            lambda layers, x: layers.Bidirectional(layers.ConvLSTM1D(2, 1), name="r")(layers.Reshape((6, 3, 1))(x)),
            "a layer of the kind ConvLSTM1D inside",
        ),
        (
            lambda layers, x: layers.ConvLSTM2D(2, 1, name="r", data_format="channels_first")(maps(layers, x)),
            "the channels first",
        ),
        (lambda layers, x: layers.LSTM(4, name="r", stateful=True)(x), "keeps its state between calls"),
    ],
    ids=["masked", "masked words", "another kind", "channels first", "stateful"],
)
def test_layers_that_depend_on_more_than_their_inputs_stay(keras: Any, part: Part, reason: str) -> None:
    sequence = keras.Input((6, 3), batch_size=1)
    network = keras_graph.read(keras.Model(sequence, part(keras.layers, sequence)))
    assert RECURRENT & {layer.kind for layer in canonical(network).layers.values()}
    assert reason in reason_to_stay(network, "r")


def test_a_layer_of_too_many_time_steps_stays(keras: Any) -> None:
    sequence = keras.Input((unroll.MOST_STEPS + 1, 3))
    network = keras_graph.read(keras.Model(sequence, keras.layers.GRU(2, name="gru")(sequence)))
    assert canonical(network) == network
    assert reason_to_stay(network, "gru") == "it has 257 time steps, and at most 256 are unrolled"
