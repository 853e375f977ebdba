"""Import of TensorFlow and Keras: late, quiet, and with all seeds set."""

from __future__ import annotations

import functools
import os
import random
from typing import Any

import numpy as np


def keras(seed: int | None = None) -> Any:
    """Return the Keras module; with a seed, set all random generators and make operations deterministic."""
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
    """Set the weights of a model or layer, and update its `Normalization` layers.

    An adapted `Normalization` computes with values derived from its weights; Keras' `set_weights` does not update them.
    """
    model.set_weights(weights)
    for layer in model._flatten_layers():
        if isinstance(layer, keras().layers.Normalization):
            layer.finalize_state()


@functools.cache  # AutoGraph does not convert cached functions: without it, `keras()` in a loss would warn
def _set_environment() -> None:
    """Set the environment variables that TensorFlow and Keras read when they are imported."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    # TensorFlow 2.21's oneDNN kernels crash in the gradient of a 1x1 convolution with stride 2 on some CPUs
    # (seen on a Xeon with AMX), and round differently on each kind of CPU; without them it is as fast here.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
