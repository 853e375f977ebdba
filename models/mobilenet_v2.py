"""MobileNetV2 with ReLU6, of any width (Sandler et al., 2018): inverted residuals with linear bottlenecks.

At 96 pixels, width 0.35 has 0.4 million parameters without the head and 11 million multiply-accumulates; width 1.0 has
2.2 and 56 million. `weights: FILE` under `model:` copies the weights of a trained MobileNetV2 of the same width.

Copy and edit it. `arguments` under `model:` sets the arguments of `build`.
"""

import keras

STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, number of blocks, and stride of the first block, of each stage."""
LAST = 1280
"""Channels of the last convolution; a width above 1 also multiplies these."""


def build(input_shape, classes, width=1.0, stages=7, last=LAST, dropout=0.2):
    """Return the model.

    Args:
        input_shape: (height, width, channels) of a preprocessed sample.
        classes: number of classes.
        width: factor for the number of channels.
        stages: number of stages, from the first; fewer make a smaller model.
        last: channels of the last convolution, which has most of the parameters of a narrow model.
        dropout: fraction of the features that the training sets to 0.
    """
    layers = keras.layers
    image = keras.Input(input_shape, name="image")
    x = normalized(layers.Conv2D(channels(32, width), 3, 2, "same", use_bias=False, name="stem")(image), "stem")
    for index, (expansion, filters, blocks, stride) in enumerate(STAGES[:stages]):
        for block in range(blocks):
            x = bottleneck(x, channels(filters, width), expansion, 1 if block else stride, f"stage{index}_block{block}")
    x = layers.Conv2D(channels(last, max(width, 1.0)), 1, use_bias=False, name="last")(x)
    x = normalized(x, "last")
    x = layers.GlobalAveragePooling2D(name="pooling")(x)
    x = layers.Dropout(dropout, name="dropout")(x)
    return keras.Model(image, layers.Dense(classes, activation="softmax", name="scores")(x), name="mobilenet_v2")


def bottleneck(x, filters, expansion, stride, name):
    """Return an inverted residual: a wide depthwise convolution between two 1x1 convolutions."""
    layers = keras.layers
    start = x
    if expansion != 1:
        x = layers.Conv2D(x.shape[-1] * expansion, 1, use_bias=False, name=f"{name}_expand")(x)
        x = normalized(x, f"{name}_expand")
    x = layers.DepthwiseConv2D(3, stride, "same", use_bias=False, name=f"{name}_depthwise")(x)
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
