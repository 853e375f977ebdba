"""The file of a plan that follows from the file of another plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import networks
import numpy as np
import pytest
from numpy.typing import NDArray

from compress.learning.quantization import calibration, equalization, export
from compress.learning.quantization.conversion import ConvertedNetwork
from compress.learning.quantization.plan import QuantizationPlan, edited, packed
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import LayerOutput, Network
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.passes.fold import canonical
from compress.model.tflite import graph

pytestmark = pytest.mark.tensorflow


def images(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((count, 12, 12, 3), np.float32)


def edited_plan(network: Network, plan: QuantizationPlan) -> QuantizationPlan:
    """Return a plan with factors, bias shifts, rounding, and the ranges that belong to them."""
    generator = np.random.default_rng(0)
    channels = equalization.follow(network, relu6=True)
    factors = equalization.by_layer(network, channels, equalization.from_weights(network, channels))
    ranges = calibration.calibrate(edited(network, replace(plan, factors=factors)), images(20), "mse").ranges
    shifts, rounding = {}, {}
    for name, layer in network.layers.items():
        if spec_of(layer).kernel is not None:
            shifts[name] = tuple(generator.normal(0, 0.01, network.shapes[LayerOutput(name)][-1]).tolist())
            rounding[name] = packed(generator.random(layer.weights[0].shape) < 0.5)
    return replace(plan, ranges=ranges, factors=factors, bias_shifts=shifts, rounding=rounding)


def constants(content: bytes) -> list[Any]:
    """Return the quantization and the values of the tensors in a file, without their names and order."""
    tensors = graph.parse(content).tensors
    values = [tensor.array().tolist() if tensor.is_constant else None for tensor in tensors]
    return sorted(
        (
            (tensor.dtype, tensor.shape, tensor.quantization, value)
            for tensor, value in zip(tensors, values, strict=True)
        ),
        key=str,
    )


@pytest.mark.parametrize("io", ["int8", "uint8"])
@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_the_file_is_that_of_the_converter(keras: Any, builder: networks.Builder, io: export.InputType) -> None:
    network = canonical(keras_graph.read(networks.randomized(builder(keras))))
    plan = calibration.calibrate(network, images(20))
    converted = ConvertedNetwork.of(network, plan, io)
    assert converted is not None
    for another in (plan, edited_plan(network, plan)):
        content = converted.file(another)
        assert content is not None
        assert constants(content) == constants(export.convert(network, another, io))


@pytest.mark.parametrize("bias", [0.0, 1.0, 1e4])
def test_channels_with_small_weights_or_large_biases(keras: Any, bias: float) -> None:
    """The converter gives these channels larger steps than their weights need."""
    image = keras.Input((12, 12, 3))
    model = keras.Model(image, keras.layers.Conv2D(8, 3, name="convolution")(image))
    kernel, _ = model.get_layer("convolution").get_weights()
    largest = np.array([0, 1e-12, 4e-7, 6e-7, 1e-5, 1e-3, 1, 1])
    kernel *= largest / np.abs(kernel).max(axis=(0, 1, 2))
    model.get_layer("convolution").set_weights([kernel, bias * np.linspace(0.9, 1.1, 8)])
    network = canonical(keras_graph.read(model))
    plan = calibration.calibrate(network, images(20))
    converted = ConvertedNetwork.of(network, plan, "int8")
    assert converted is not None
    content = export.convert(network, plan)
    assert constants(converted.file(plan) or b"") == constants(content)
    (stored,) = (tensor for tensor in graph.parse(content).tensors if tensor.is_constant and tensor.dtype == "INT8")
    assert np.abs(stored.array()[2]).max() < 127


def test_equal_layers_cannot_be_told_apart(keras: Any) -> None:
    image = keras.Input((12, 12, 3))
    layers = [keras.layers.Conv2D(4, 3) for _ in range(2)]
    model = keras.Model(image, keras.layers.Concatenate()([layers[0](image), layers[1](image * 2.0)]))
    layers[1].set_weights(layers[0].get_weights())
    network = canonical(keras_graph.read(model))
    assert ConvertedNetwork.of(network, calibration.calibrate(network, images(20)), "int8") is None
