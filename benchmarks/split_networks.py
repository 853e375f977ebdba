"""Large networks for benchmarks/split.py: Keras applications with random weights, quantized on one random image.

`python benchmarks/split_networks.py FOLDER`. The weights do not matter for placement, sizes and predicted latency.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIDES = {"ResNet50": 224, "ResNet101": 224, "DenseNet121": 224, "DenseNet201": 224, "InceptionV3": 299, "Xception": 299}
"""The networks, with the size of their images."""


def quantized(name: str) -> bytes:
    """Return a network as an int8 .tflite file with dense weights per tensor, as the compiler needs them."""
    import keras
    import tensorflow

    side = SIDES[name]
    model = getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3))
    shape = tensorflow.TensorSpec((1, side, side, 3), tensorflow.float32)
    function = tensorflow.function(lambda image: model(image, training=False)).get_concrete_function(shape)
    converter = tensorflow.lite.TFLiteConverter.from_concrete_functions([function])

    def images() -> Iterator[list[Any]]:
        yield [np.random.default_rng(0).random((1, side, side, 3), np.float32)]

    converter.optimizations = [tensorflow.lite.Optimize.DEFAULT]
    converter.representative_dataset = images
    converter.target_spec.supported_ops = [tensorflow.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tensorflow.int8
    converter._experimental_disable_per_channel_quantization_for_dense_layers = True
    content: bytes = converter.convert()
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in SIDES:
        path = options.folder / f"{name}.tflite"
        if not path.exists():
            path.write_bytes(quantized(name))
            print(path, path.stat().st_size, flush=True)


if __name__ == "__main__":
    main()
