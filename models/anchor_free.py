"""An anchor-free detector for the Edge TPU: a small residual network, a feature pyramid, and separate heads.

Each cell of three maps, at 1/8, 1/16 and 1/32 of the image's dimensions, predicts one box and a score for each class.
A box is four distances from the centre of the cell to its sides; each distance is a distribution over 16 bins (Li et
al., Generalized Focal Loss, 2020). Boxes and scores have separate convolutions (Ge et al., YOLOX, 2021), and every map
has output tensors of its own, so that in the 8-bit file each has its own scale.

The Edge TPU computes 64 output channels and 4 input channels at a time, and a 3x3 depthwise convolution costs it as
much as a full one of 64 channels. Hence all convolutions are full ones with a multiple of 16 channels. Every operator
runs on the Edge TPU; the outputs have no activation, no reshape and no concatenation.

Copy and edit it. The dimensions of the input should be multiples of 32. With `backbone` in the pipeline, the feature
maps are those of a trained model (docs/detection.md).
"""

import math

import keras

WIDTH = 1.0
"""Factor for the number of channels of the backbone and the neck."""
STEM = (16, 32)
"""Channels of the first two convolutions, which halve the image twice."""
STAGES = ((64, 1), (128, 1), (128, 1))
"""Channels and residual blocks of the three stages whose maps have cells for objects."""
NECK = 64
"""Channels of the feature pyramid and of the heads."""
BINS = 16
"""Bins of each distance: the longest is 15 cells. Boxes have 4 * 16 = 64 channels, one step of the Edge TPU."""
RARE = 0.01
"""Score at the start of the training: few cells have an object (Lin et al., Focal Loss, 2017)."""


def detector(input_shape):
    """Return the locations and the encoding of the outputs, as `deploy.contract.detection` reads them.

    Args:
        input_shape: (height, width, channels) of a preprocessed sample.
    """
    maps = [{"cells": [math.ceil(side / stride) for side in input_shape[:2]]} for stride in strides()]
    tensors = [{"part": part, "map": index} for index in range(len(maps)) for part in ("boxes", "scores")]
    return {"maps": maps, "code": "dfl", "bins": BINS, "scores": "logits", "tensors": tensors}


def build(input_shape, classes, trained=None):
    """Return the model; its outputs are boxes [rows, columns, 64] and scores [rows, columns, classes] of each map.

    Args:
        input_shape: (height, width, channels) of a preprocessed sample.
        classes: number of classes.
        trained: a trained model whose feature maps are used; None for an untrained backbone.
    """
    image = keras.Input(input_shape, name="image")
    pyramid = neck(backbone(image) if trained is None else feature_maps(trained, image))
    outputs = []
    for index, features in enumerate(pyramid):
        outputs += head(features, classes, f"head{index}")
    return keras.Model(image, outputs, name="anchor_free")


def backbone(image):
    """Return the feature maps of the stages, the largest first."""
    x = image
    for index, filters in enumerate(STEM):
        x = convolution(x, channels(filters), 3, f"stem{index}", stride=2)
    maps = []
    for index, (filters, blocks) in enumerate(STAGES):
        x = convolution(x, channels(filters), 3, f"stage{index}", stride=2)
        for block in range(blocks):
            x = residual(x, f"stage{index}_block{block}")
        maps.append(x)
    return maps


def feature_maps(trained, image):
    """Return the last maps of a trained model at 1/8, 1/16 and 1/32 of its image, for another image."""
    height, width = trained.input_shape[1:3]
    last = {}
    for layer in trained.layers:
        shape = tuple(layer.output.shape)
        for stride in strides():
            if len(shape) == 4 and shape[1:3] == (math.ceil(height / stride), math.ceil(width / stride)):
                last[stride] = layer.output
    missing = [f"1/{stride}" for stride in strides() if stride not in last]
    if missing:
        raise ValueError(f"the backbone has no feature map at {', '.join(missing)} of its image")
    maps = keras.Model(trained.input, [last[stride] for stride in strides()])
    copy = keras.models.clone_model(maps, input_tensors=image)
    copy.set_weights(maps.get_weights())
    return copy.outputs


def strides():
    """Return the steps of the maps, in pixels."""
    return [2 ** (len(STEM) + 1 + index) for index in range(len(STAGES))]


def neck(maps):
    """Return a map for each feature map, with the smaller maps added to the larger ones (Lin et al., FPN, 2017)."""
    width = channels(NECK)
    merged = [convolution(x, width, 1, f"lateral{index}") for index, x in enumerate(maps)]
    for index in reversed(range(len(maps) - 1)):
        larger = keras.layers.UpSampling2D(2, interpolation="nearest", name=f"upsampled{index}")(merged[index + 1])
        merged[index] = keras.layers.Add(name=f"merged{index}")([merged[index], larger])
    return [convolution(x, width, 3, f"neck{index}") for index, x in enumerate(merged)]


def head(x, classes, name):
    """Return the boxes and the scores of a map, as raw numbers."""
    layers = keras.layers
    width = channels(NECK)
    boxes = convolution(x, width, 3, f"{name}_boxes_features")
    scores = convolution(x, width, 3, f"{name}_scores_features")
    bias = keras.initializers.Constant(-math.log((1 - RARE) / RARE))
    return [
        layers.Conv2D(4 * BINS, 1, name=f"{name}_boxes")(boxes),
        layers.Conv2D(classes, 1, bias_initializer=bias, name=f"{name}_scores")(scores),
    ]


def residual(x, name):
    """Return the sum of a map and of the result of two 3x3 convolutions on it."""
    y = convolution(x, x.shape[-1], 3, f"{name}_conv0")
    y = convolution(y, x.shape[-1], 3, f"{name}_conv1", relu=False)
    x = keras.layers.Add(name=f"{name}_sum")([x, y])
    return keras.layers.ReLU(name=f"{name}_relu")(x)


def convolution(x, filters, kernel, name, stride=1, relu=True):
    """Return a convolution with batch norm, and ReLU."""
    x = keras.layers.Conv2D(filters, kernel, stride, padding="same", use_bias=False, name=name)(x)
    # 0.9, not Keras' 0.99: the averages must settle within a short training.
    x = keras.layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
    return keras.layers.ReLU(name=f"{name}_relu")(x) if relu else x


def channels(count):
    """Return a number of channels times WIDTH, as a multiple of 16."""
    return max(16, round(count * WIDTH / 16) * 16)
