"""Small .tflite models whose outputs are not one score for each class."""

from __future__ import annotations

import numpy as np
from tiny import TfliteBuilder

STATE = (2, 3)
"""The shape of the second input of `two_inputs`."""


def two_inputs(*, int8: bool = True) -> bytes:
    """Return a model with two inputs, an image [4, 4, 1] and a state, and with three outputs.

    "scores" [3], "next" (the state plus itself) and "mask" [4, 4, 2]. In the int8 model they have different scales, and
    the mask is dequantized to float32.
    """
    random = np.random.default_rng(3)
    model = TfliteBuilder(int8=int8)
    image = model.activation("image", [1, 4, 4, 1], (0.0, 1.0))
    state = model.activation("state", [1, *STATE], (-4.0, 4.0))
    hidden = model.activation("hidden", [1, 4, 4, 2], (0.0, 4.0))
    scores = model.activation("scores", [1, 3], (-20.0, 20.0))
    following = model.activation("next", [1, *STATE], (-8.0, 8.0))
    model.convolution(image, random.uniform(-1, 1, (2, 3, 3, 1)), random.uniform(-0.1, 0.1, 2), hidden)
    model.dense(hidden, random.uniform(-1, 1, (3, 32)), random.uniform(-1, 1, 3), scores)
    model.operator("ADD", [state, state], following, model.schema.AddOptionsT())
    mask = hidden
    if int8:
        mask = model.tensor("mask", [1, 4, 4, 2], "FLOAT32")
        model.operator("DEQUANTIZE", [hidden], mask, model.schema.DequantizeOptionsT())
    return model.finish([image, state], [scores, following, mask])


def binary(*, int8: bool = True, sigmoid: bool = True) -> bytes:
    """Return a classifier of images [4, 4, 1] with one output: a probability, or its logit."""
    random = np.random.default_rng(5)
    model = TfliteBuilder(int8=int8)
    image = model.activation("image", [1, 4, 4, 1], (0.0, 1.0))
    hidden = model.activation("hidden", [1, 4, 4, 2], (0.0, 4.0))
    logit = model.activation("logit", [1, 1], (-8.0, 8.0))
    weights = random.uniform(-1, 1, (1, 32))
    model.convolution(image, random.uniform(-1, 1, (2, 3, 3, 1)), np.zeros(2), hidden)
    model.dense(hidden, weights - weights.mean(), np.array([0.3]), logit)
    if not sigmoid:
        return model.finish([image], [logit])
    likely = (
        model.tensor("likely", [1, 1], "INT8", scale=1 / 256, zero=-128)
        if int8
        else model.activation("likely", [1, 1], (0.0, 1.0))
    )
    model.operator("LOGISTIC", [logit], likely)
    return model.finish([image], [likely])


def segmenter(*, int8: bool = True, classes: int = 3) -> bytes:
    """Return a model of images [4, 4, 1] with a score for each class at each pixel."""
    random = np.random.default_rng(7)
    model = TfliteBuilder(int8=int8)
    image = model.activation("image", [1, 4, 4, 1], (0.0, 1.0))
    scores = model.activation("mask", [1, 4, 4, classes], (0.0, 4.0))
    model.convolution(image, random.uniform(-1, 1, (classes, 3, 3, 1)), random.uniform(-0.1, 0.1, classes), scores)
    return model.finish([image], [scores])
