"""MobileNetV1 with ReLU6, of any width (Howard et al., 2017).

The vendor's quantized classifiers have this structure, so that their weights fit: `weights: old.tflite` under `model:`
copies them. At 96 pixels, width 0.25 has 0.24 million parameters and 10 million multiply-accumulates; width 1.0 has
3.3 and 104 million.

Copy and edit it. `arguments` under `model:` sets the arguments of `build`.
"""

import keras

BLOCKS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    (512, 1),
    (512, 1),
    (512, 1),
    (512, 1),
    (512, 1),
    (1024, 2),
    (1024, 1),
)
"""Channels and stride of each block: a depthwise 3x3 convolution and a 1x1 convolution."""


def build(input_shape, classes, width=1.0, depth=13, dropout=0.2):
    """Return the model.

    Args:
        input_shape: (height, width, channels) of a preprocessed sample.
        classes: number of classes.
        width: factor for the number of channels.
        depth: number of blocks, from the first; fewer make a smaller model.
        dropout: fraction of the features that the training sets to 0.
    """
    layers = keras.layers
    image = keras.Input(input_shape, name="image")
    x = normalized(layers.Conv2D(channels(32, width), 3, 2, "same", use_bias=False, name="stem")(image), "stem")
    for index, (filters, stride) in enumerate(BLOCKS[:depth]):
        name = f"block{index}"
        x = layers.DepthwiseConv2D(3, stride, "same", use_bias=False, name=f"{name}_depthwise")(x)
        x = normalized(x, f"{name}_depthwise")
        x = layers.Conv2D(channels(filters, width), 1, use_bias=False, name=f"{name}_pointwise")(x)
        x = normalized(x, f"{name}_pointwise")
    x = layers.GlobalAveragePooling2D(name="pooling")(x)
    x = layers.Dropout(dropout, name="dropout")(x)
    return keras.Model(image, layers.Dense(classes, activation="softmax", name="scores")(x), name="mobilenet_v1")


def normalized(x, name):
    """Return batch norm and ReLU6 of a tensor."""
    # 0.9, not Keras' 0.99: the averages must settle within a short training.
    x = keras.layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
    return keras.layers.ReLU(6.0, name=f"{name}_relu")(x)


def channels(count, width):
    """Return a number of channels times the width, as the vendor's models round it: a multiple of 8."""
    return max(8, int(count * width + 4) // 8 * 8)
