"""A very small detector with anchors (Liu et al., SSD, 2016): plain convolutions, boxes and scores from three maps.

For objects of an eighth of the image's dimensions and larger; anchor_free is more accurate. Boxes and scores are two
outputs, so that in the 8-bit file each has its own scale. Copy and edit it: a builder for detection is a Python file
with two functions. `build(input_shape, classes)` returns a Keras model with the outputs boxes [anchors, 4] and scores
[anchors, classes], and `detector(input_shape)` describes the anchors (docs/detection.md).
"""

import math

import keras

BLOCKS = [(16, 2), (24, 2), (48, 2), (48, 1), (80, 2), (80, 1), (128, 2), (128, 1)]
"""Filters and stride of each 3x3 convolution."""
MAPS = [3, 5, 7]
"""The blocks whose outputs have anchors: at 1/8, 1/16 and 1/32 of the image's dimensions."""
SCALES = [0.2, 0.35, 0.6]
"""The size of the anchors of each map, as a fraction of the image's dimensions."""
RATIOS = [1.0, 2.0, 0.5]
"""Width over height of the anchors; one more is square, with a size between those of this map and of the next."""


def detector(input_shape):
    """Return the anchors and the encoding of the outputs, as `deploy.contract.detection` reads them.

    Args:
        input_shape: (height, width, channels) of a preprocessed sample.
    """
    maps = []
    for block, scale, larger in zip(MAPS, SCALES, [*SCALES[1:], 1.0], strict=True):
        cells = [-(-side // math.prod(stride for _, stride in BLOCKS[: block + 1])) for side in input_shape[:2]]
        boxes = [[scale / math.sqrt(ratio), scale * math.sqrt(ratio)] for ratio in RATIOS]
        boxes.append([math.sqrt(scale * larger)] * 2)
        maps.append({"cells": cells, "boxes": boxes})
    return {"maps": maps, "scores": "logits"}


def build(input_shape, classes):
    """Return the untrained model: eight 3x3 convolutions, and two 1x1 convolutions on each of the three maps.

    Args:
        input_shape: (height, width, channels) of a preprocessed sample.
        classes: number of classes.
    """
    layers = keras.layers
    image = keras.Input(input_shape, name="image")
    x = image
    boxes = []
    scores = []
    anchors = len(RATIOS) + 1
    # Few anchors have an object: all scores start at 0.01, so that the others do not dominate the loss (Lin et al.,
    # Focal Loss for Dense Object Detection, 2017).
    bias = keras.initializers.Constant(-math.log((1 - 0.01) / 0.01))
    for block, (filters, stride) in enumerate(BLOCKS):
        x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False, name=f"conv{block}")(x)
        # 0.9, not Keras' 0.99: the averages must settle within a short training.
        x = layers.BatchNormalization(momentum=0.9, name=f"norm{block}")(x)
        x = layers.ReLU(name=f"relu{block}")(x)
        if block in MAPS:
            box = layers.Conv2D(4 * anchors, 1, name=f"boxes{block}")(x)
            score = layers.Conv2D(classes * anchors, 1, bias_initializer=bias, name=f"scores{block}")(x)
            boxes.append(layers.Reshape((-1, 4), name=f"boxes{block}_rows")(box))
            scores.append(layers.Reshape((-1, classes), name=f"scores{block}_rows")(score))
    outputs = [layers.Concatenate(1, name="boxes")(boxes), layers.Concatenate(1, name="scores")(scores)]
    return keras.Model(image, outputs, name="ssd_small")
