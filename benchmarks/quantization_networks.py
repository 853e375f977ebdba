"""The networks that benchmarks/quantization.py trains. Each takes the library: Keras 3, or tf-keras for tfmot."""

from __future__ import annotations

from typing import Any

Shape = tuple[int, int, int]
MOMENTUM = 0.9
"""Of batch norm; Keras' 0.99 is too slow for short trainings."""


def _conv(keras: Any, x: Any, filters: int, size: int, stride: int = 1, activation: str | None = "relu") -> Any:
    x = keras.layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization(momentum=MOMENTUM)(x)
    return _activated(keras, x, activation)


def _depthwise(keras: Any, x: Any, size: int = 3, stride: int = 1, activation: str | None = "relu") -> Any:
    x = keras.layers.DepthwiseConv2D(size, stride, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization(momentum=MOMENTUM)(x)
    return _activated(keras, x, activation)


def _activated(keras: Any, x: Any, activation: str | None) -> Any:
    if activation is None:
        return x
    if activation == "relu6":
        return keras.layers.ReLU(6.0)(x)
    return keras.layers.ReLU()(x) if activation == "relu" else keras.layers.Activation(activation)(x)


def _classified(keras: Any, image: Any, x: Any, classes: int, name: str) -> Any:
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dense(classes)(x)
    return keras.Model(image, keras.layers.Softmax()(x), name=name)


def small(keras: Any, shape: Shape, classes: int) -> Any:
    """Three convolutions for small pictures."""
    image = keras.Input(shape)
    x = _conv(keras, image, 12, 3, 2)
    x = _conv(keras, x, 24, 3, 2)
    x = _conv(keras, x, 32, 3)
    return _classified(keras, image, x, classes, "small")


def separable(keras: Any, shape: Shape, classes: int, width: float = 1.0) -> Any:
    """Depthwise-separable blocks with ReLU, as MobileNetV1 and DS-CNN have them; 19,000 to 50,000 parameters."""
    image = keras.Input(shape)
    x = _conv(keras, image, int(24 * width), 3, 2)
    large = classes > 10
    for filters, stride in (
        ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (128, 1)) if large else ((48, 2), (64, 1), (96, 2), (96, 1))
    ):
        x = _conv(keras, _depthwise(keras, x, stride=stride), int(filters * width), 1)
    return _classified(keras, image, x, classes, "separable")


def residual(keras: Any, shape: Shape, classes: int) -> Any:
    """ResNet-8: three stages of one residual block each."""
    image = keras.Input(shape)
    x = _conv(keras, image, 16, 3)
    for filters, stride in ((16, 1), (32, 2), (64, 2)):
        y = _conv(keras, x, filters, 3, stride)
        y = _conv(keras, y, filters, 3, activation=None)
        if stride != 1:
            x = keras.layers.Conv2D(filters, 1, stride, padding="same")(x)
        x = keras.layers.ReLU()(keras.layers.Add()([x, y]))
    return _classified(keras, image, x, classes, "residual")


def inverted(keras: Any, shape: Shape, classes: int) -> Any:
    """MobileNetV2 in small: linear bottlenecks, ReLU6, additions."""
    image = keras.Input(shape)
    x = _conv(keras, image, 16, 3, 2, "relu6")
    channels = 16
    for filters, stride in ((16, 1), (24, 2), (24, 1), (40, 2), (40, 1)):
        y = _conv(keras, x, 4 * channels, 1, activation="relu6")
        y = _depthwise(keras, y, stride=stride, activation="relu6")
        y = _conv(keras, y, filters, 1, activation=None)
        x = keras.layers.Add()([x, y]) if stride == 1 and filters == channels else y
        channels = filters
    x = _conv(keras, x, 128, 1, activation="relu6")
    return _classified(keras, image, x, classes, "inverted")


def gated(keras: Any, shape: Shape, classes: int) -> Any:
    """MobileNetV3 in small: hard-swish, and gates that weigh the channels."""
    image = keras.Input(shape)
    x = _conv(keras, image, 16, 3, 2, "hard_silu")
    channels = 16
    for filters, stride, activation in ((16, 1, "relu"), (24, 2, "relu"), (40, 2, "hard_silu"), (40, 1, "hard_silu")):
        wide = 4 * channels
        y = _conv(keras, x, wide, 1, activation=activation)
        y = _depthwise(keras, y, 5, stride, activation)
        gate = keras.layers.GlobalAveragePooling2D(keepdims=True)(y)
        gate = keras.layers.Conv2D(wide // 4, 1, activation="relu")(gate)
        gate = keras.layers.Conv2D(wide, 1, activation="sigmoid")(gate)
        y = keras.layers.Multiply()([y, gate])
        y = _conv(keras, y, filters, 1, activation=None)
        x = keras.layers.Add()([x, y]) if stride == 1 and filters == channels else y
        channels = filters
    x = _conv(keras, x, 128, 1, activation="hard_silu")
    return _classified(keras, image, x, classes, "gated")
