"""Small networks that together contain every way to tie channels, for the tests of training and quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Builder = Callable[[Any], Any]


def plain(keras: Any) -> Any:
    """Conv, batch norm, ReLU, pooling, global average."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = image
    for filters in (8, 12, 16):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.ReLU()(x)
    x = layers.MaxPooling2D()(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(5, activation="softmax")(x), name="plain")


def inverted_residual(keras: Any) -> Any:
    """Depthwise blocks with ReLU6, an addition, and a bottleneck whose channels must stay tied."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(image)
    x = layers.BatchNormalization()(x)
    for _ in range(2):
        y = layers.Conv2D(24, 1, use_bias=False)(x)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(y)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(8, 1, use_bias=False)(y))
        x = layers.Add()([x, y])
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(5)(x), name="inverted_residual")


def branches(keras: Any) -> Any:
    """Concatenation, transposed and separable convolutions, PReLU, flatten, an activation inside a layer."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    first = layers.Conv2D(8, 3, padding="same", activation="relu")(image)
    x = layers.MaxPooling2D()(first)
    x = layers.Conv2D(16, 3, padding="same", activation="relu6")(x)
    x = layers.Conv2DTranspose(12, 2, 2)(x)
    x = layers.Concatenate()([x, first])
    x = layers.SeparableConv2D(8, 3, padding="same", depth_multiplier=2)(x)
    x = layers.PReLU(shared_axes=[1, 2])(x)
    x = layers.AveragePooling2D(4)(x)
    x = layers.Flatten()(x)
    x = layers.Dense(16, activation="relu")(x)
    return keras.Model(image, layers.Dense(5)(x), name="branches")


def squeeze_excite(keras: Any) -> Any:
    """A gate that multiplies the channels from which it was computed."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(image)
    gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
    gate = layers.Conv2D(8, 1, activation="relu")(gate)
    gate = layers.Conv2D(16, 1, activation="sigmoid")(gate)
    x = layers.Multiply()([x, gate])
    x = layers.Reshape((-1, 16))(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(image, layers.Dense(5)(x), name="squeeze_excite")


def nested(keras: Any) -> Any:
    """A model inside the model, and a layer used twice."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    body = keras.Sequential([keras.Input((12, 12, 8)), layers.Conv2D(8, 3, padding="same"), layers.ReLU()], name="body")
    x = layers.Conv2D(8, 1, name="stem")(image)
    x = body(body(x))
    shared = layers.Dense(8, activation="relu", name="shared")
    x = layers.GlobalMaxPooling2D()(x)
    once = shared(x)
    x = layers.Add()([once, shared(once)])
    return keras.Model(image, layers.Dense(5)(x), name="nested")


def nested_to_the_end(keras: Any) -> Any:
    """Functional models in functional models, also called again and at the output, where Keras restarts its count."""
    layers = keras.layers
    inputs = keras.Input((12, 12, 3))
    body = keras.Model(inputs, layers.ReLU()(layers.Conv2D(16, 3)(inputs)), name="body")
    inputs = keras.Input((12, 12, 3))
    middle = keras.Model(inputs, body(inputs), name="middle")
    inputs = keras.Input((10, 10, 16))
    head = keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling2D()(inputs)), name="head")
    image = keras.Input((12, 12, 3))
    first = head(middle(image))
    return keras.Model(image, [first, head(layers.Conv2D(16, 3)(image))], name="nested_to_the_end")


def shared_backwards(keras: Any) -> Any:
    """A layer whose second call is nearer to the input than its first one."""
    layers = keras.layers
    image = keras.Input((12, 12, 8))
    shared = layers.Conv2D(8, 3, padding="same", name="shared")
    far = shared(layers.Conv2D(8, 3, padding="same")(layers.Conv2D(12, 3, padding="same")(image)))
    near = layers.Conv2D(8, 3, padding="same")(shared(image))
    x = layers.GlobalAveragePooling2D()(layers.Add()([near, far]))
    return keras.Model(image, layers.Dense(3)(x), name="shared_backwards")


def adapted(keras: Any) -> Any:
    """A Normalization layer that is adapted to data: it computes with values that it derives from its weights."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    norm = layers.Normalization(name="normalization")
    norm.adapt(np.random.default_rng(0).normal(30, 8, (64, 12, 12, 3)).astype(np.float32))
    image = keras.Input((12, 12, 3))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, activation="relu")(norm(image)))
    return keras.Model(image, layers.Dense(3)(x), name="adapted")


ALL: tuple[Builder, ...] = (plain, inverted_residual, branches, squeeze_excite, nested)


def randomized(model: Any) -> Any:
    """Set the weights and batch norm statistics far from their initial values; return the model."""
    random = np.random.default_rng(0)
    for weight in model.weights:
        if weight.path.endswith("moving_variance"):
            weight.assign(random.uniform(0.5, 1.5, weight.shape))
        elif np.prod(weight.shape[:-1]) == 1:
            weight.assign(random.normal(0.3, 0.2, weight.shape))
        else:  # values drawn by Keras would depend on earlier draws
            inputs = weight.shape[:2] if "depthwise" in weight.path else weight.shape[:-1]
            weight.assign(random.normal(0, (2 / np.prod(inputs)) ** 0.5, weight.shape))
    return model


def with_batch_norms(keras: Any, momentum: float = 0.999, *, dropout: float = 0.0) -> Any:
    """A small classifier with two batch norms."""
    layers = keras.layers
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(6, 3, use_bias=False, name="conv")(image)
    x = layers.ReLU()(layers.BatchNormalization(momentum=momentum, name="first")(x))
    x = layers.Dropout(dropout)(x)
    x = layers.Dense(8, use_bias=False, name="hidden")(layers.Flatten()(x))
    x = layers.ReLU()(layers.BatchNormalization(momentum=momentum, name="second")(x))
    return keras.Model(image, layers.Dense(2, activation="softmax")(x))
