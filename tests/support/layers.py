"""Models with each kind of layer between two convolutions, for the tests of training and quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networks

Place = Callable[[Any, Any], Any]
"""(keras, tensor [batch, 12, 12, 8]) -> tensor."""


def _gated(keras: Any, x: Any) -> Any:
    layers = keras.layers
    gate = layers.Dense(4, activation="relu")(layers.GlobalAveragePooling2D()(x))
    gate = layers.Reshape((1, 1, 8))(layers.Dense(8, activation="hard_sigmoid")(gate))
    return layers.Multiply()([x, gate])


def _three(name: str) -> Place:
    def place(keras: Any, x: Any) -> Any:
        others = [keras.layers.Conv2D(8, 1)(x) for _ in range(2)]
        return getattr(keras.layers, name)()([x, *others])

    return place


def _sequence(place: Place) -> Place:
    """Return a `Place` that applies another one to the tensor as a sequence [batch, 144, 8]."""
    return lambda keras, x: keras.layers.Reshape((12, 12, -1))(place(keras, keras.layers.Reshape((144, 8))(x)))


def _activation(name: str) -> Place:
    return lambda keras, x: keras.layers.Activation(name)(x)


def _layer(name: str, *values: Any, **settings: Any) -> Place:
    return lambda keras, x: getattr(keras.layers, name)(*values, **settings)(x)


#: Layers that are split into single operations.
IN_STEPS: dict[str, Place] = {
    "Rescaling": _layer("Rescaling", 2.0, -1.0),
    "Rescaling by channel": _layer("Rescaling", [2.0, 1, 3, 0, 1, 1, 1, 1], [0.0, 0, 1, 1, 0, 0, 0, 0]),
    "Normalization": _layer("Normalization", mean=[0.1] * 8, variance=[0.5] * 8),
    "inverted Normalization": _layer("Normalization", mean=[0.1] * 8, variance=[0.5] * 8, invert=True),
    "BatchNormalization": lambda keras, x: keras.layers.BatchNormalization()(keras.layers.MaxPooling2D()(x)),
    "BatchNormalization of a sequence": _sequence(_layer("BatchNormalization")),
    "LayerNormalization": _layer("LayerNormalization"),
    "GroupNormalization": _layer("GroupNormalization", 2),
    "UnitNormalization": _layer("UnitNormalization"),
    "EinsumDense": _sequence(_layer("EinsumDense", "abc,cd->abd", output_shape=(144, 6), activation="relu")),
    "SeparableConv1D": _sequence(_layer("SeparableConv1D", 6, 3, padding="same", activation="relu")),
    "hard_sigmoid": _activation("hard_sigmoid"),
    "ELU": _layer("ELU", alpha=0.5),
    "elu": _activation("elu"),
    "selu": _activation("selu"),
    "softplus": _activation("softplus"),
    "mish": _activation("mish"),
    "softsign": _activation("softsign"),
    "ReLU up to 1": _layer("ReLU", max_value=1.0),
    "LeakyReLU up to 1": _layer("ReLU", max_value=1.0, negative_slope=0.1),
    "Add of three": _three("Add"),
    "Average of three": _three("Average"),
    "Maximum of three": _three("Maximum"),
    "Multiply of three": _three("Multiply"),
    "squeeze and excite": _gated,
}


def _shuffled(keras: Any, x: Any) -> Any:
    """Swap the halves of the channels, and pool one of them, as in ShuffleNet."""
    first, second = keras.ops.split(x, 2, axis=-1)
    pooled = keras.layers.MaxPooling2D(3, 1, padding="same")(second)
    return keras.layers.Concatenate()([pooled, first])


def _custom(keras: Any, x: Any) -> Any:
    @keras.saving.register_keras_serializable("tests")  # type: ignore[misc]
    def bump(x: Any) -> Any:
        return keras.ops.tanh(x) * x

    return keras.layers.Conv2D(8, 1, activation=bump)(x)


#: Layers that TFLite supports as they are.
AS_THEY_ARE: dict[str, Place] = {
    "ReLU6": _layer("ReLU", 6.0),
    "LeakyReLU": _layer("LeakyReLU", 0.1),
    "PReLU": _layer("PReLU", shared_axes=[1, 2]),
    "hard_silu": _activation("hard_silu"),
    "swish": _activation("swish"),
    "gelu": _activation("gelu"),
    "tanh": _activation("tanh"),
    "Softmax": _layer("Softmax"),
    "custom activation": _custom,
    "Conv2DTranspose": _layer("Conv2DTranspose", 6, 2, 2, activation="relu"),
    "DepthwiseConv2D": _layer("DepthwiseConv2D", 3, padding="same", activation="relu6"),
    "SeparableConv2D": _layer("SeparableConv2D", 6, 3, padding="same", activation="relu"),
    "Conv1D": _sequence(_layer("Conv1D", 6, 3, padding="causal", dilation_rate=2, activation="relu")),
    "DepthwiseConv1D": _sequence(_layer("DepthwiseConv1D", 3, padding="same", activation="relu")),
    "Conv1DTranspose": _sequence(_layer("Conv1DTranspose", 6, 1, activation="relu")),
    "UpSampling2D": _layer("UpSampling2D"),
    "bilinear UpSampling2D": _layer("UpSampling2D", interpolation="bilinear"),
    "Dropout": _layer("Dropout", 0.2),
    "Concatenate": lambda keras, x: keras.layers.Concatenate()([x, keras.layers.Conv2D(4, 1)(x)]),
    "Split": _shuffled,
    "the second of a Split": lambda keras, x: keras.ops.split(x, 2, axis=-1)[1] * 2.0,
    "where": lambda keras, x: keras.ops.where(x > 0.0, x, x * 0.3),
    "operators": lambda keras, x: keras.ops.relu6(x * 0.5 + 3.0)[:, 1:9, 1:9] * 0.2,
}
ALL = {**IN_STEPS, **AS_THEY_ARE}


def model(keras: Any, place: Place) -> Any:
    """Return a model of two convolutions with a layer between them: images [12, 12, 3] in, 5 scores out."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = place(keras, layers.Conv2D(8, 3, padding="same")(image))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    network = keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))
    return networks.randomized(network)
