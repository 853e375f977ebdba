"""A small network of the form that YOLO exporters give to TFLite: one output of decoded boxes and probabilities.

Boxes are centre and size as fractions of the image, so that 8 bits with one scale can hold them together with scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SIDE = 96
CLASSES = 3
STRIDES = (8, 16, 32)
LOCATIONS = sum((SIDE // stride) ** 2 for stride in STRIDES)


def network(keras: Any, *, channels_first: bool = True) -> Any:
    """Return a model from an image [96, 96, 3] to [7, 189], or [189, 7]: x, y, width, height, and the scores."""
    layers, ops = keras.layers, keras.ops
    keras.utils.set_random_seed(1)
    spread = keras.initializers.RandomNormal(0, 0.5)
    image = keras.Input((SIDE, SIDE, 3), name="images")
    x = layers.Conv2D(8, 3, 4, padding="same", activation="relu")(image)
    rows, points, strides = [], [], []
    for stride in STRIDES:
        x = layers.Conv2D(12, 3, 2, padding="same", activation="silu")(x)
        boxes = layers.Conv2D(64, 1, kernel_initializer=spread, bias_initializer=spread, name=f"boxes_{stride}")(x)
        scores = layers.Conv2D(
            CLASSES, 1, kernel_initializer=keras.initializers.RandomNormal(0, 1.5), name=f"scores_{stride}"
        )(x)
        cells = SIDE // stride
        rows.append(layers.Reshape((cells * cells, 64 + CLASSES))(layers.Concatenate()([boxes, scores])))
        row, column = np.divmod(np.arange(cells * cells), cells)
        points.append((np.stack([column, row], axis=1) + 0.5) * stride / SIDE)
        strides.append(np.full((cells * cells, 1), stride / SIDE))
    joined = layers.Concatenate(axis=1)(rows)
    shares = ops.softmax(layers.Reshape((LOCATIONS, 4, 16))(joined[..., :64]), axis=-1)
    bins = keras.initializers.Constant(np.arange(16, dtype=np.float32).reshape(1, 1, 16, 1))
    mean = layers.Conv2D(1, 1, use_bias=False, kernel_initializer=bins, name="mean")(shares)
    distances = layers.Reshape((LOCATIONS, 4))(mean) * np.concatenate(strides).astype(np.float32)
    centres = np.concatenate(points).astype(np.float32)
    low, high = ops.subtract(centres, distances[..., :2]), distances[..., 2:] + centres
    boxes = ops.concatenate([(low + high) / 2, high - low, ops.sigmoid(joined[..., 64:])], axis=-1)
    return keras.Model(image, layers.Permute((2, 1))(boxes) if channels_first else boxes)


def quantized(
    model: Any, *, limits: tuple[float, float] = (0.0, 1.0), dtype: str = "int8", float_ends: bool = False
) -> bytes:
    """Return the model as a .tflite file in 8 bits, calibrated with noise between these limits."""
    import tensorflow as tf

    signature = [tf.TensorSpec((1, SIDE, SIDE, 3), tf.float32, name="images")]
    function = tf.function(lambda images: model(images, training=False), input_signature=signature)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function.get_concrete_function()])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    random = np.random.default_rng(0)
    samples = [random.uniform(*limits, (1, SIDE, SIDE, 3)).astype(np.float32) for _ in range(20)]
    samples += [np.full((1, SIDE, SIDE, 3), limit, np.float32) for limit in limits]
    converter.representative_dataset = lambda: ([sample] for sample in samples)
    if not float_ends:
        converter.inference_input_type = converter.inference_output_type = tf.as_dtype(dtype)
    return bytes(converter.convert())
