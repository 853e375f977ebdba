"""Outputs of a Keras 2 model and of its Keras 3 rebuild for the same inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from compress.model.ir import tensorflow

if TYPE_CHECKING:
    import keras
    import tf_keras


def output_pairs(old: tf_keras.Model, new: keras.Model, samples: Any) -> tuple[list[tuple[Any, Any]], int]:
    """Return each output of both models for random inputs and for the samples, and the number of samples."""
    import tensorflow as tf

    for size in (32, 96, 224):  # used for every open dimension of the inputs
        inputs = _random_inputs(old, size)
        try:
            expected = tf.nest.flatten(old(inputs, training=False))
            break
        except (ValueError, tf.errors.InvalidArgumentError):
            if size == 224 or all(None not in tensor.shape[1:] for tensor in old.inputs):
                raise
    pairs = list(zip(map(np.asarray, expected), _outputs(new, inputs), strict=True))
    count = len(tf.nest.flatten(inputs)[0])
    if samples is not None and len(old.inputs) == 1 and old.inputs[0].shape.is_compatible_with(samples.shape):
        real = tf.nest.pack_sequence_as(old._nested_inputs, [tf.cast(samples, old.inputs[0].dtype)])
        pairs += zip(map(np.asarray, tf.nest.flatten(old(real, training=False))), _outputs(new, real), strict=True)
        count += len(samples)
    return pairs, count


def _outputs(new: keras.Model, inputs: Any) -> list[Any]:
    """Return the outputs of a rebuild, whose inputs are in a structure of their own."""
    tree = tensorflow.keras().tree
    packed = tree.pack_sequence_as(new.input, tree.flatten(inputs))
    return [np.asarray(output) for output in tree.flatten(new(packed, training=False))]


def _random_inputs(old: tf_keras.Model, size: int) -> Any:
    """Return standard normal values, or integers for an embedding or an integer input."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    limits = [getattr(layer, "input_dim", getattr(layer, "num_tokens", None)) for layer in old._flatten_layers()]
    bound = min((limit for limit in limits if limit), default=0)
    values = []
    value: Any
    for tensor in old.inputs:
        batch, *dimensions = tensor.shape
        shape = [2 if batch is None else batch, *(size if dimension is None else dimension for dimension in dimensions)]
        if bound or not tensor.dtype.is_floating:
            value = random.integers(0, bound or 2, shape)
        else:
            value = random.standard_normal(shape)
        values.append(tf.constant(value.astype(tensor.dtype.as_numpy_dtype)))
    return tf.nest.pack_sequence_as(old._nested_inputs, values)
