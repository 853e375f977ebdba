from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.core.errors import ModelError
from compress.model.importers.keras import keras2
from compress.model.importers.keras.keras_file import load, scan

pytestmark = pytest.mark.tensorflow
Save = Callable[[Any, str], Path]


def chain(*layers: Callable[[Any], Any], shape: tuple[int | None, ...] = (12, 12, 4), **input_options: Any) -> Any:
    """Return a function that builds a model with one layer after the other."""

    def build(keras: Any) -> Any:
        values = inputs = keras.Input(shape, **input_options)
        for make in layers:
            values = make(keras.layers)(values)
        return keras.Model(inputs, values)

    return build


def normalization(keras: Any) -> Any:
    adapted = keras.layers.Normalization()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.adapt(np.random.default_rng(0).normal(1, 3, (20, 5, 4)).astype("float32"))
    inputs = keras.Input((5, 4))
    fixed = keras.layers.Normalization(mean=[1.0, 2, 3, 4], variance=[1.0, 2, 3, 4])
    return keras.Model(inputs, fixed(adapted(inputs)))


def initializer(keras: Any) -> Any:
    """Return a model with an initializer that is not from Keras, as EfficientNetV2 of Keras 2 has it."""
    import tensorflow

    return chain(lambda k: k.Dense(3, bias_initializer=tensorflow.constant_initializer(0.5)))(keras)


def attention(keras: Any) -> Any:
    layers, first, second = keras.layers, keras.Input((8, 6)), keras.Input((5, 6))
    outputs, scores = layers.MultiHeadAttention(2, 3)(first, second, return_attention_scores=True)
    named = layers.MultiHeadAttention(2, 3, value_dim=4)(first, second, key=second)
    more = [layers.Attention(use_scale=True)([first, second]), layers.AdditiveAttention()([first, second])]
    return keras.Model([first, second], [outputs, scores, named, *more])


def merging(keras: Any) -> Any:
    layers, pair = keras.layers, [keras.Input((8, 6)), keras.Input((8, 6))]
    kinds = (layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Maximum, layers.Minimum)
    outputs = [kind()(pair) for kind in kinds]
    return keras.Model(pair, [*outputs, layers.Concatenate(axis=1)(pair), layers.Dot((2, 2), normalize=True)(pair)])


def nested(keras: Any) -> Any:
    """Two calls of a model with two outputs, and of one without an input shape; results as a dictionary."""
    layers, inputs = keras.layers, keras.Input((6,))
    base = keras.Model(inputs, [layers.Dense(3, name="x")(inputs), layers.Dense(2)(inputs)], name="base")
    late = keras.Sequential([layers.Dense(4, name="x"), layers.BatchNormalization()], name="late")
    left, right = keras.Input((6,)), keras.Input((6,))
    (first, second), (third, fourth) = base(left, training=False), base(right)
    outputs = {"one": late(first), "two": layers.Add()([second, fourth]), "three": late(third)}
    return keras.Model({"left": left, "right": right}, outputs)


def swapped(keras: Any) -> Any:
    """Models of two inputs, one called with a list and one with a dictionary."""
    layers, first, second = keras.layers, keras.Input((3,), name="a"), keras.Input((4,), name="b")
    listed = keras.Model([first, second], layers.Concatenate()([layers.Dense(2)(second), first]))
    named = keras.Model({"a": first, "b": second}, layers.Concatenate()([layers.Dense(2)(second), first]))
    four, three = keras.Input((4,)), keras.Input((3,))
    return keras.Model([four, three], [listed([three, four]), named({"b": four, "a": three})])


def repeated_model(keras: Any) -> Any:
    """A model with frozen and free layers, applied to each step of a sequence."""
    layers = keras.layers
    inner = keras.Sequential(
        [
            keras.Input((9, 9, 2)),
            layers.Conv2D(3, 3),
            layers.BatchNormalization(),
            layers.Conv2D(2, 3),
            layers.Flatten(),
        ]
    )
    inner.layers[0].trainable = False
    inputs = keras.Input((4, 9, 9, 2))
    return keras.Model(inputs, layers.TimeDistributed(inner)(inputs))


def states(keras: Any) -> Any:
    """Decoders that start from the state of an encoder, forward and bidirectional."""
    layers, first, second = keras.layers, keras.Input((8, 5)), keras.Input((8, 5))
    _, *state = layers.LSTM(4, return_state=True)(first)
    _, *both = layers.Bidirectional(layers.LSTM(4, return_state=True))(first)
    decoder = layers.Bidirectional(layers.LSTM(4))
    return keras.Model(
        [first, second], [layers.LSTM(4)(second, initial_state=state), decoder(second, initial_state=both)]
    )


def partly_used(keras: Any) -> Any:
    first, second = keras.Input((3,)), keras.Input((3,))
    return keras.Model([first, second], [first, keras.layers.Dense(2)(first)])


def deferred(keras: Any) -> Any:
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
    model.build((None, 5))
    return model


SEQUENCE = {"shape": (8, 5)}
MODELS: dict[str, Callable[[Any], Any]] = {
    "dense": chain(lambda k: k.Dense(3, "relu", kernel_regularizer="l2", kernel_constraint="max_norm")),
    "initializer of TensorFlow": initializer,
    "relu": chain(lambda k: k.ReLU(6.0, 0.1, 0.0), lambda k: k.LeakyReLU(0.2), lambda k: k.ELU(0.7)),
    "thresholded": chain(lambda k: k.ThresholdedReLU(0.5), lambda k: k.Softmax(axis=2)),
    "prelu": chain(lambda k: k.PReLU(shared_axes=[1, 2])),
    "activations": chain(
        *(lambda k, name=name: k.Conv2D(3, 1, activation=name) for name in ("elu", "gelu", "selu", "swish", "mish")),
        *(lambda k, name=name: k.Activation(name) for name in ("softplus", "softsign", "tanh", "exponential", "relu6")),
    ),
    "activation layer": chain(lambda k: k.Conv2D(3, 3, activation=k.LeakyReLU(0.3))),
    "convolutions": chain(
        lambda k: k.Conv2D(8, 3, groups=2, dilation_rate=2),
        lambda k: k.SeparableConv2D(6, 3, padding="same"),
        lambda k: k.DepthwiseConv2D(3, strides=2, depth_multiplier=2),
        lambda k: k.Conv2DTranspose(3, 3, strides=2, output_padding=1),
    ),
    "convolutions 1d": chain(
        lambda k: k.Conv1D(6, 3, padding="causal"),
        lambda k: k.SeparableConv1D(4, 3),
        lambda k: k.DepthwiseConv1D(3),
        lambda k: k.Conv1DTranspose(3, 3),
        **SEQUENCE,
    ),
    "convolutions 3d": chain(
        lambda k: k.ZeroPadding3D(1), lambda k: k.Conv3D(3, 3), lambda k: k.MaxPooling3D(), shape=(8, 8, 8, 2)
    ),
    "normalizations": chain(
        lambda k: k.BatchNormalization(axis=[3], scale=False),
        lambda k: k.experimental.SyncBatchNormalization(),
        lambda k: k.BatchNormalization(axis=1, center=False),
        lambda k: k.LayerNormalization(axis=[1, 2]),
        lambda k: k.GroupNormalization(2),
        lambda k: k.UnitNormalization(),
    ),
    "adapted": normalization,
    "pooling": chain(
        lambda k: k.MaxPooling2D(3, 2, "same"),
        lambda k: k.AveragePooling2D(2, padding="same"),
        lambda k: k.ZeroPadding2D(((1, 2), (3, 4))),
        lambda k: k.Cropping2D(((1, 0), (0, 1))),
        lambda k: k.UpSampling2D(2, interpolation="bilinear"),
        lambda k: k.GlobalAveragePooling2D(keepdims=True),
        lambda k: k.Flatten(data_format="channels_first"),
        lambda k: k.RepeatVector(3),
        lambda k: k.Permute((2, 1)),
        lambda k: k.Reshape((-1, 3)),
        lambda k: k.GlobalMaxPooling1D(),
    ),
    "noise": chain(
        lambda k: k.SpatialDropout2D(0.3),
        lambda k: k.Dropout(0.2, noise_shape=(None, 1, 1, 4)),
        lambda k: k.GaussianDropout(0.1),
        lambda k: k.GaussianNoise(0.1),
        lambda k: k.AlphaDropout(0.1),
        lambda k: k.ActivityRegularization(0.1),
    ),
    "images": chain(
        lambda k: k.Rescaling(1 / 3, -1.0),
        lambda k: k.Resizing(7, 9),
        lambda k: k.CenterCrop(5, 5),
        lambda k: k.RandomFlip(),
        lambda k: k.RandomRotation(0.1),
        lambda k: k.RandomZoom(0.1),
        lambda k: k.RandomContrast(0.1),
    ),
    "bytes": chain(lambda k: k.Rescaling(1 / 255), lambda k: k.Conv2D(3, 3), dtype="uint8"),
    "lstm": chain(lambda k: k.Masking(), lambda k: k.LSTM(4, return_sequences=True), lambda k: k.LSTM(3), **SEQUENCE),
    "gru": chain(
        lambda k: k.GRU(4, return_sequences=True, reset_after=False), lambda k: k.GRU(3, go_backwards=True), **SEQUENCE
    ),
    "cells": chain(
        lambda k: k.RNN([k.LSTMCell(4), k.GRUCell(3)], return_sequences=True), lambda k: k.SimpleRNN(3), **SEQUENCE
    ),
    "bidirectional": chain(
        lambda k: k.Bidirectional(k.LSTM(4, return_sequences=True), merge_mode="sum"),
        lambda k: k.Bidirectional(k.LSTM(4), backward_layer=k.GRU(4, go_backwards=True)),
        **SEQUENCE,
    ),
    "recurrent convolution": chain(lambda k: k.ConvLSTM2D(3, 3, recurrent_activation="sigmoid"), shape=(4, 9, 9, 2)),
    "hard gates": chain(
        lambda k: k.LSTM(4, recurrent_activation="hard_sigmoid", return_sequences=True),
        lambda k: k.Bidirectional(k.GRU(3, recurrent_activation="hard_sigmoid", return_sequences=True)),
        lambda k: k.GRU(3, recurrent_activation="hard_sigmoid", reset_after=False, use_bias=False),
        **SEQUENCE,
    ),
    "hard gates of a convolution": chain(
        lambda k: k.ConvLSTM2D(3, 3, recurrent_activation="hard_sigmoid"), shape=(4, 9, 9, 2)
    ),
    "states": states,
    "embedding": chain(lambda k: k.Embedding(10, 4, input_length=7, mask_zero=True), lambda k: k.LSTM(3), shape=(7,)),
    "whole numbers": chain(lambda k: k.Embedding(10, 4), lambda k: k.Flatten(), shape=(7,), dtype="int32"),
    "categories": chain(lambda k: k.CategoryEncoding(5), shape=(3,)),
    "einsum": chain(lambda k: k.EinsumDense("abc,cd->abd", (None, 5), bias_axes="d"), **SEQUENCE),
    "attention": attention,
    "merging": merging,
    "nested": nested,
    "swapped": swapped,
    "time distributed": chain(lambda k: k.TimeDistributed(k.TimeDistributed(k.Dense(2)))),
    "time distributed model": repeated_model,
    "partly used": partly_used,
    "deferred": deferred,
    "open size": chain(lambda k: k.Conv2D(3, 3), lambda k: k.GlobalMaxPooling2D(), shape=(None, None, 3)),
    "large open size": chain(lambda k: k.Conv2D(3, 50), lambda k: k.GlobalMaxPooling2D(), shape=(None, None, 3)),
    "fixed batch": chain(lambda k: k.Conv2D(3, 3), batch_size=1),
    "double": chain(lambda k: k.Dense(3, dtype="float64")),
    "mixed precision": chain(
        lambda k: k.Conv2D(3, 3, dtype="mixed_float16"),
        lambda k: k.BatchNormalization(dtype="mixed_float16"),
        lambda k: k.Activation("softmax", dtype="float32"),
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_rebuilt_models_answer_alike(keras: Any, tf_keras: Any, saved: Save, tmp_path: Path, case: str) -> None:
    model = MODELS[case](tf_keras)
    name = "m.keras" if case in ("adapted", "nested", "cells", "pooling") else "m.h5"
    old_path = saved(model, name)
    new = load(old_path)
    assert not any("float16" in layer.dtype_policy.name for layer in new.layers)
    new.save(tmp_path / "new.keras")  # Keras 3 can write the rebuilt model, and read it again
    again = load(tmp_path / "new.keras")
    assert scan(tmp_path / "new.keras").keras_version.startswith("3.")
    reference = tf_keras.models.load_model(old_path, compile=False)
    assert len(new.inputs) == len(reference.inputs)
    if case != "mixed precision":  # its outputs differ from float32
        assert keras2.difference(reference, again) <= keras2.TOLERANCE


def test_layers_keep_their_names_and_weights(tf_keras: Any, saved: Save) -> None:
    layers, inputs = tf_keras.layers, tf_keras.Input((6,), name="in/put")
    values = layers.Dense(4, name="tower_dense", trainable=False)(inputs)
    values = layers.Dense(4, name="tower/dense")(values)
    model = tf_keras.Model(inputs, layers.BatchNormalization(name="bn")(values), name="net/1")
    new = load(saved(model, "m.h5"))
    assert new.name == "net_1"
    assert [layer.name for layer in new.layers] == ["in_put", "tower_dense", "tower_dense_1", "bn"]
    assert [layer.trainable for layer in new.layers[1:]] == [False, True, True]
    for old, loaded_layer in zip(model.layers[1:], new.layers[1:], strict=True):
        for expected, actual in zip(old.get_weights(), loaded_layer.get_weights(), strict=True):
            np.testing.assert_array_equal(expected, actual)


PROBLEMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "in a cell": (
        chain(lambda k: k.RNN(k.LSTMCell(3, recurrent_activation="hard_sigmoid"), name="rnn"), **SEQUENCE),
        "RNN 'rnn': its LSTMCell uses hard_sigmoid",
    ),
    "at the end of a recurrent layer": (
        chain(lambda k: k.LSTM(3, activation="hard_sigmoid", name="lstm"), **SEQUENCE),
        "LSTM 'lstm': uses hard_sigmoid",
    ),
    "always training": (
        lambda keras: (lambda inputs: keras.Model(inputs, keras.layers.Dropout(0.5)(inputs, training=True)))(
            keras.Input((3,))
        ),
        "is called with training=True",
    ),
    "several axes": (chain(lambda k: k.BatchNormalization(axis=[1, 2])), "works over several axes"),
    "sparse input": (chain(lambda k: k.Dense(2), shape=(3,), sparse=True), "is sparse, ragged or text"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_everything_that_cannot_be_expressed_is_listed(tf_keras: Any, saved: Save, case: str) -> None:
    build, expected = PROBLEMS[case]
    with pytest.raises(ModelError, match="Keras 3 has no counterpart for") as caught:
        load(saved(build(tf_keras), "m.h5"))
    assert expected in caught.value.what


def test_a_rebuild_that_answers_in_another_shape_is_refused(tf_keras: Any, saved: Save) -> None:
    model = chain(lambda k: k.RandomCrop(4, 4))(tf_keras)  # Keras 3 does not change the size outside of training
    with pytest.raises(ModelError, match="differ in shape"):
        load(saved(model, "m.h5"))


def test_a_rebuild_that_answers_otherwise_is_refused(
    tf_keras: Any, saved: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keras2._Rebuilding, "copy_weights", lambda self: None)
    with pytest.raises(ModelError, match=r"differ by .* allowed: 1e-05"):
        load(saved(MODELS["dense"](tf_keras), "m.h5"))


def test_custom_layers_of_keras2_need_a_counterpart(keras: Any, tf_keras: Any, saved: Save) -> None:
    def twice(base: Any) -> Any:
        return type("Twice", (base,), {"call": lambda self, inputs: inputs * 2})

    try:
        old = tf_keras.saving.register_keras_serializable("nets")(twice(tf_keras.layers.Layer))
        path = saved(chain(lambda k: old(name="twice"))(tf_keras), "m.h5")
        with pytest.raises(ModelError, match="no counterpart for: Twice 'twice'"):
            load(path, trust=True)
        keras.saving.register_keras_serializable("nets")(twice(keras.layers.Layer))
        assert type(load(path, trust=True).layers[-1]).__name__ == "Twice"
    finally:
        keras.saving.get_custom_objects().pop("nets>Twice", None)  # keeps the custom objects of Coralline
        tf_keras.saving.get_custom_objects().pop("nets>Twice", None)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "parameters"),
    [
        ("vww_96.h5", (None, 96, 96, 3), (None, 2), 221_794),
        ("stm_yamnet_256_f32.h5", (None, 96, 64, 1), (None, 256), 135_104),
        ("fer2013_mini_XCEPTION.102-0.66.hdf5", (None, 64, 64, 1), (None, 7), 58_423),
    ],
)
def test_real_models(
    real_model: Callable[[str], Path], name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], parameters: int
) -> None:
    path = real_model(name)
    scan_result = scan(path)
    assert scan_result.from_keras2
    assert not scan_result.untrusted
    model = load(path)
    assert (model.input_shape, model.output_shape, model.count_params()) == (inputs, outputs, parameters)
