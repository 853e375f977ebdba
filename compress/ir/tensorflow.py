"""The one door to TensorFlow and Keras: imported late, quietly, and with every seed set."""

from __future__ import annotations

import functools
import os
import random
from typing import Any

import numpy as np


def keras(seed: int | None = None) -> Any:
    """Keras on TensorFlow; with a seed, everything random starts from it and operations are deterministic."""
    _set_environment()
    import keras as library

    if seed is not None:
        import tensorflow

        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - Keras and its users draw from the global state
        library.utils.set_random_seed(seed)
        tensorflow.config.experimental.enable_op_determinism()
    return library


def set_weights(model: Any, weights: list[Any]) -> None:
    """Sets the weights of a model or layer, and what normalizations compute with.

    An adapted `Normalization` derives that from its weights, and `set_weights` alone leaves it as it was.
    """
    model.set_weights(weights)
    for layer in model._flatten_layers():
        if isinstance(layer, keras().layers.Normalization):
            layer.finalize_state()


@functools.cache  # AutoGraph, which meets `keras()` in losses, leaves it alone and does not print the environment
def _set_environment() -> None:
    """What TensorFlow and Keras look at when they are imported."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    # TensorFlow 2.21's oneDNN kernels crash in the gradient of a 1x1 convolution with stride 2 on some CPUs
    # (seen on a Xeon with AMX), and give other roundings on each kind of CPU; without them it is as fast here.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
