"""A small detector in the manner of SSD: plain convolutions, and boxes and scores from their last three maps.

For objects of an eighth of the image's side and larger. Boxes and scores are two outputs and are never joined, so that
in the 8-bit file each has a scale of its own. Copy and edit it: a builder for detection is a Python file with two
functions, `build(input_shape, classes)` that gives a Keras model with the outputs boxes [anchors, 4] and scores
[anchors, classes], and `detector(input_shape)` that says where the anchors stand (docs/detection.md).
"""

import math

import keras

BLOCKS = [(16, 2), (24, 2), (48, 2), (48, 1), (80, 2), (80, 1), (128, 2), (128, 1)]
"""Filters and stride of each 3x3 convolution."""
TAKEN = [3, 5, 7]
"""The blocks whose outputs are looked at for objects: at 1/8, 1/16 and 1/32 of the image's sides."""
SCALES = [0.2, 0.35, 0.6]
"""The size of the objects that each of them is for, as a fraction of the image's side."""
RATIOS = [1.0, 2.0, 0.5]
"""Width over height of the anchors; one more square is between this map's size and the next one's."""


def detector(input_shape):
    """Where the anchors stand, as `deploy.contract.detection` reads it.

    Args:
        input_shape: (height, width, channels) of a preprocessed sample.
    """
    maps = []
    for block, scale, larger in zip(TAKEN, SCALES, [*SCALES[1:], 1.0], strict=True):
        sides = [-(-side // math.prod(stride for _, stride in BLOCKS[: block + 1])) for side in input_shape[:2]]
        boxes = [[scale / math.sqrt(ratio), scale * math.sqrt(ratio)] for ratio in RATIOS]
        boxes.append([math.sqrt(scale * larger)] * 2)
        maps.append({"cells": sides, "boxes": boxes})
    return {"maps": maps, "scores": "logits"}


def build(input_shape, classes):
    """Eight 3x3 convolutions with batch norm and ReLU; two 1x1 convolutions on each of the three maps.

    Args:
        input_shape: (height, width, channels) of a preprocessed sample.
        classes: number of classes.
    """
    layers = keras.layers
    image = keras.Input(input_shape, name="image")
    x, boxes, scores = image, [], []
    each = len(RATIOS) + 1
    # Few anchors are on an object: scores begin where a sigmoid says so, or those without one drown all else
    # (Lin et al., Focal Loss for Dense Object Detection, 2017).
    rare = keras.initializers.Constant(-math.log((1 - 0.01) / 0.01))
    for block, (filters, stride) in enumerate(BLOCKS):
        x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False, name=f"conv{block}")(x)
        # 0.9, not Keras' 0.99: the averages must settle within a short training.
        x = layers.BatchNormalization(momentum=0.9, name=f"norm{block}")(x)
        x = layers.ReLU(name=f"relu{block}")(x)
        if block in TAKEN:
            box = layers.Conv2D(4 * each, 1, name=f"boxes{block}")(x)
            score = layers.Conv2D(classes * each, 1, bias_initializer=rare, name=f"scores{block}")(x)
            boxes.append(layers.Reshape((-1, 4), name=f"boxes{block}_rows")(box))
            scores.append(layers.Reshape((-1, classes), name=f"scores{block}_rows")(score))
    found = [layers.Concatenate(1, name="boxes")(boxes), layers.Concatenate(1, name="scores")(scores)]
    return keras.Model(image, found, name="ssd_small")
