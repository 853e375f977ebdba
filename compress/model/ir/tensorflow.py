"""Import of TensorFlow and Keras: late, quiet, and with all seeds set."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.contract.tensors import TensorLayout


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


def run(model: Any, samples: Any, training: bool = False) -> Any:
    """Run a functional or sequential Keras model on a batch of samples [n, ...].

    For a model with several inputs, samples are rows [n, values], which are split in the order of its inputs
    (`deploy.contract.tensors`).
    """
    return model(model_inputs(model, samples), training=training)


def flattened(outputs: Any) -> NDArray[Any]:
    """Return the output of a Keras model, or its outputs one after the other, as rows."""
    parts = outputs if isinstance(outputs, list | tuple) else [outputs]
    return np.concatenate([np.asarray(part).reshape(len(part), -1) for part in parts], axis=1)


def model_inputs(model: Any, samples: Any) -> Any:
    """Return a batch of samples as the inputs of a Keras model, see `run`."""
    tensors = split_inputs(model.inputs, samples)
    return tensors[0] if len(tensors) == 1 else tensors


def input_tensors(model: Any) -> Any:
    """Return the inputs of a Keras model, to build another one with: one tensor, or a list of several."""
    return model.inputs[0] if len(model.inputs) == 1 else list(model.inputs)


def sample_shape(model: Any) -> tuple[int | None, ...]:
    """Return the shape of a sample that `run` takes, without the batch; None for an open dimension."""
    shapes = [tuple(tensor.shape[1:]) for tensor in model.inputs]
    return shapes[0] if len(shapes) == 1 else (TensorLayout([], shapes).size,)


def batch_signature(model: Any) -> Any:
    """Return the `tensorflow.TensorSpec` of a batch of samples that `run` takes."""
    import tensorflow

    return tensorflow.TensorSpec((None, *sample_shape(model)), "float32")


def split_inputs(inputs: Sequence[Any], samples: Any) -> list[Any]:
    """Return a batch of samples as one tensor for each of these Keras inputs, see `run`."""
    ops = keras().ops
    if len(inputs) == 1:
        dtype = inputs[0].dtype
        return [samples if dtype in ("float32", "float16", "bfloat16") else ops.cast(samples, dtype)]
    layout = TensorLayout([], [tensor.shape[1:] for tensor in inputs])
    ends = np.cumsum(layout.sizes)[:-1].tolist()
    parts = ops.split(ops.convert_to_tensor(samples), ends, axis=1)
    shaped = [ops.reshape(part, (-1, *shape)) for part, shape in zip(parts, layout.shapes, strict=True)]
    return [ops.cast(part, tensor.dtype) for part, tensor in zip(shaped, inputs, strict=True)]


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
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    # TensorFlow 2.21's oneDNN kernels crash in the gradient of a 1x1 convolution with stride 2 on some CPUs
    # (seen on a Xeon with AMX), and round differently on each kind of CPU; without them it is as fast here.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
