"""EfficientNet-Lite: EfficientNet (Tan and Le, 2019) without squeeze-and-excitation, and with ReLU6 for swish.

Every operator runs on the Edge TPU. `version` is 0 to 4: width, depth and the usual size of the image grow together
(224, 240, 260, 280, 300 pixels); smaller images work, too. Version 0 has 3.4 million parameters without the head.

Copy and edit it. `arguments` under `model:` sets the arguments of `build`.
"""

import math

import keras

STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
"""Expansion, channels, number of blocks, stride of the first block, and kernel, of each stage of version 0."""
VERSIONS = ((1.0, 1.0), (1.0, 1.1), (1.1, 1.2), (1.2, 1.4), (1.4, 1.8))
"""Factors of width and depth of each version. Stem, last convolution, first and last stage keep their size."""


def build(input_shape, classes, version=0, width=None, dropout=0.2):
    """Return the model.

    Args:
        input_shape: (height, width, channels) of a preprocessed sample.
        classes: number of classes.
        version: 0 to 4.
        width: factor for the number of channels, instead of that of the version.
        dropout: fraction of the features that the training sets to 0.
    """
    layers = keras.layers
    factor, depth = VERSIONS[version]
    factor = factor if width is None else width
    fixed = min(factor, 1.0)
    image = keras.Input(input_shape, name="image")
    x = layers.Conv2D(channels(32, fixed), 3, 2, "same", use_bias=False, name="stem")(image)
    x = normalized(x, "stem")
    for index, (expansion, filters, blocks, stride, kernel) in enumerate(STAGES):
        repeats = blocks if index in (0, len(STAGES) - 1) else math.ceil(depth * blocks)
        for block in range(repeats):
            name = f"stage{index}_block{block}"
            x = inverted_residual(x, channels(filters, factor), expansion, kernel, 1 if block else stride, name)
    x = layers.Conv2D(channels(1280, fixed), 1, use_bias=False, name="last")(x)
    x = normalized(x, "last")
    x = layers.GlobalAveragePooling2D(name="pooling")(x)
    x = layers.Dropout(dropout, name="dropout")(x)
    return keras.Model(image, layers.Dense(classes, activation="softmax", name="scores")(x), name="efficientnet_lite")


def inverted_residual(x, filters, expansion, kernel, stride, name):
    """Return a wide depthwise convolution between two 1x1 convolutions, with the input added."""
    layers = keras.layers
    start = x
    if expansion != 1:
        x = layers.Conv2D(x.shape[-1] * expansion, 1, use_bias=False, name=f"{name}_expand")(x)
        x = normalized(x, f"{name}_expand")
    x = layers.DepthwiseConv2D(kernel, stride, "same", use_bias=False, name=f"{name}_depthwise")(x)
    x = normalized(x, f"{name}_depthwise")
    x = layers.Conv2D(filters, 1, use_bias=False, name=f"{name}_project")(x)
    x = normalized(x, f"{name}_project", relu=False)
    if stride == 1 and start.shape[-1] == filters:
        x = layers.Add(name=f"{name}_sum")([start, x])
    return x


def normalized(x, name, relu=True):
    """Return batch norm of a tensor, and ReLU6."""
    # 0.9, not Keras' 0.99: the averages must settle within a short training.
    x = keras.layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
    return keras.layers.ReLU(6.0, name=f"{name}_relu")(x) if relu else x


def channels(count, width):
    """Return a number of channels times the width, as in the paper: a multiple of 8, at most 10% below."""
    rounded = max(8, int(count * width + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * count * width else rounded
