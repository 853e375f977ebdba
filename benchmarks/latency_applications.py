"""Predicted latency of networks that nothing was fitted to: `python benchmarks/latency_applications.py`.

The latencies of networks of keras.applications are predicted from the shapes of their layers, and compared with the
latencies that the vendor published for networks of the same names (coral.ai/docs/edgetpu/benchmarks, 2020; ms on USB 3
and on the Dev Board). It is not known whether the published networks had exactly these layers. Prints a Markdown table;
no result is checked.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import keras

from compress.targets.edgetpu import latency, parameter_memory
from compress.targets.edgetpu.constants import CONSTANTS
from compress.targets.edgetpu.latency import ArrayLayer, BusTraffic

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


PUBLISHED = {
    "VGG19": (224, 308, 357),
    "ResNet50V2": (299, 50, 59),
    "ResNet152V2": (299, 128, 151),
    "InceptionResNetV2": (299, 57, 69),
    "MobileNetV2": (224, 2.6, 2.6),
    "DenseNet121": (224, 20, 25),
}
"""Height and width of the input, and the published latency in ms on each of HOSTS."""
HOSTS = ("usb3", "devboard")
WEIGHTED = {"Conv2D": "conv", "DepthwiseConv2D": "dw", "Dense": "fc", "Conv2DTranspose": "tconv"}
POOLS = ("MaxPooling2D", "AveragePooling2D", "GlobalAveragePooling2D")


def shape(tensor: Any) -> tuple[int, int, int]:
    height, width, channels = (1, 1, *tensor.shape[1:])[-3:]
    return height, width, channels


def layers(model: Any) -> tuple[ArrayLayer, ...]:
    """Return the layers of the quantized model; a batch norm that cannot be folded becomes two element-wise layers."""
    array_layers: list[ArrayLayer] = []
    for layer in model.layers:
        kind = type(layer).__name__
        if kind == "InputLayer":
            continue
        source = layer.input[0] if isinstance(layer.input, list) else layer.input
        output_shape, input_shape = shape(layer.output), shape(source)
        if kind in WEIGHTED:
            plain = ArrayLayer(WEIGHTED[kind], output_shape, input_shape, tuple(getattr(layer, "kernel_size", (1, 1))))
            array_layers.append(replace(plain, parameters=latency.layer_parameters(plain)))
        elif kind in POOLS:
            array_layers.append(
                ArrayLayer("pool", output_shape, input_shape, tuple(getattr(layer, "pool_size", input_shape[:2])))
            )
        elif kind in ("Add", "Multiply"):
            array_layers.append(ArrayLayer("elt", output_shape, input_shape))
        elif kind == "BatchNormalization" and type(source._keras_history.operation).__name__ not in WEIGHTED:
            array_layers += [
                ArrayLayer(
                    "elt", output_shape, input_shape, parameters=parameter_memory.constant_vector(output_shape[2])
                )
            ] * 2
    return tuple(array_layers)


def predicted(model: Any, host: str) -> float:
    """Return the predicted latency of a model on a host, in milliseconds."""
    network = layers(model)
    streamed = latency.streamed_bytes(network)
    inputs, outputs = math.prod(shape(model.inputs[0])), latency.padded_map_bytes(shape(model.outputs[0]))
    sent = BusTraffic(inputs, outputs, latency.instruction_bytes(network), streamed)
    return latency.predict(network, sent, CONSTANTS.latency, host).total


def main() -> None:
    print("| network | host | published, ms | predicted, ms | |\n|---|---|---|---|---|")
    for name, (side, *published) in PUBLISHED.items():
        model = getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3))
        for host, measured in zip(HOSTS, published, strict=True):
            latency_ms = predicted(model, host)
            print(
                f"| {name} | {host} | {measured:g} | {latency_ms:.3g} | {latency_ms / measured - 1:+.1%} |", flush=True
            )
        keras.backend.clear_session()


if __name__ == "__main__":
    main()
