"""A small classifier of fused inverted bottlenecks, made for the Edge TPU.

A fused bottleneck expands with a full 3x3 convolution instead of a 1x1 and a depthwise one. It computes more, and is
faster: the chip multiplies 64 output channels with 4 input channels at a time, and a depthwise convolution cannot use
them (Gupta and Akin, Accelerator-aware Neural Network Design using AutoML, 2020). Late stages, with many channels and
few positions, keep the depthwise form, whose weights are much smaller.

Copy and edit it. `arguments` under `model:` sets the arguments of `build`.
"""

import keras

CHANNELS = (24, 32, 48, 80, 112)
BLOCKS = (1, 2, 2, 3, 2)
STRIDES = (2, 2, 2, 2, 1)
"""Channels, number of blocks, and stride of the first block, of each stage."""
FUSED = 3
"""Number of stages whose blocks are fused, from the first."""
EXPANSION = 4
SMALL = 128
"""Images up to this size are not halved by the first stage: their last maps would have 4x4 positions or less."""


def build(
    input_shape,
    classes,
    width=1.0,
    channels=CHANNELS,
    blocks=BLOCKS,
    strides=None,
    expansion=EXPANSION,
    fused=FUSED,
    last=192,
    dropout=0.2,
):
    """Return the model.

    Args:
        input_shape: (height, width, channels) of a preprocessed sample.
        classes: number of classes.
        width: factor for the number of channels.
        channels: number of channels of each stage.
        blocks: number of blocks of each stage.
        strides: stride of the first block of each stage; None for 2, 2, 2, 2, 1 (small images: 1, 2, 2, 2, 1).
        expansion: factor from the channels of a block's input to those inside of it; one, or one for each stage.
        fused: number of stages whose blocks are fused; fewer have fewer weights.
        last: channels of the last convolution.
        dropout: fraction of the features that the training sets to 0.

    Raises:
        ValueError: channels, blocks, strides and expansion are not of the same number of stages.
    """
    if strides is None:
        strides = (1, *STRIDES[1:]) if max(input_shape[:2]) <= SMALL else STRIDES
    if not isinstance(expansion, (tuple, list)):
        expansion = (expansion,) * len(channels)
    if not len(channels) == len(blocks) == len(strides) == len(expansion):
        raise ValueError("channels, blocks, strides and expansion need a number for each stage")
    layers = keras.layers
    image = keras.Input(input_shape, name="image")
    x = normalized(layers.Conv2D(scaled(16, width), 3, 2, "same", use_bias=False, name="stem")(image), "stem")
    for index, filters in enumerate(channels):
        for block in range(blocks[index]):
            stride = 1 if block else strides[index]
            name = f"stage{index}_block{block}"
            x = bottleneck(x, scaled(filters, width), expansion[index], stride, index < fused, name)
    x = normalized(layers.Conv2D(scaled(last, width), 1, use_bias=False, name="last")(x), "last")
    x = layers.GlobalAveragePooling2D(name="pooling")(x)
    x = layers.Dropout(dropout, name="dropout")(x)
    return keras.Model(image, layers.Dense(classes, activation="softmax", name="scores")(x), name="fused_bottleneck")


def bottleneck(x, filters, expansion, stride, fused, name):
    """Return a wide convolution and a 1x1 convolution, with the input added."""
    layers = keras.layers
    start = x
    wide = x.shape[-1] * expansion
    if fused:
        x = layers.Conv2D(wide, 3, stride, "same", use_bias=False, name=f"{name}_fused")(x)
        x = normalized(x, f"{name}_fused")
    else:
        x = normalized(layers.Conv2D(wide, 1, use_bias=False, name=f"{name}_expand")(x), f"{name}_expand")
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


def scaled(count, width):
    """Return a number of channels times the width, as a multiple of 8."""
    return max(8, round(count * width / 8) * 8)
