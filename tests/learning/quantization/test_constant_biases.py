"""Biases with one value for all channels: TensorFlow's converter gives all of them the scale of the first channel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.learning.quantization import calibration, constant_biases, export, float_tflite
from compress.learning.quantization.search import file_outputs
from compress.model.ir import keras_graph
from compress.model.ir.passes.fold import canonical
from compress.model.tflite import graph

pytestmark = pytest.mark.tensorflow
IMAGES = np.random.default_rng(1).standard_normal((40, 6, 6, 3)).astype(np.float32)


def model_of(keras: Any, kind: str) -> Any:
    """A model whose channels have very different weights and the same bias."""
    image = keras.Input((6, 6, 3))
    layer = getattr(keras.layers, kind)
    arguments = (3,) if kind == "DepthwiseConv2D" else (4, 3)
    model = keras.Model(image, layer(*arguments, name="layer")(image))
    generator = np.random.default_rng(0)
    kernel, bias = (weight.shape for weight in model.weights)
    by_channel = np.geomspace(0.02, 0.4, bias[0]).reshape((-1, 1) if kind != "Conv2D" else -1)
    model.set_weights([generator.standard_normal(kernel) * by_channel, np.full(bias, -2.5)])
    return model


def check(content: bytes, model: Any) -> None:
    rows = file_outputs(content, IMAGES)
    expected = np.asarray(model(IMAGES)).reshape(rows.shape)
    step = np.ptp(expected) / 255
    assert np.abs(rows - expected).max() < 3 * step


@pytest.mark.parametrize("kind", ["Conv2D", "DepthwiseConv2D", "Conv2DTranspose"])
def test_every_channel_has_its_bias(keras: Any, kind: str) -> None:
    model = model_of(keras, kind)
    network = canonical(keras_graph.read(model))
    check(export.convert(network, calibration.calibrate(network, IMAGES)), model)


def test_every_channel_has_its_bias_after_the_calibration_of_the_converter(keras: Any) -> None:
    model = model_of(keras, "Conv2D")
    check(float_tflite.convert(export.convert_float(model), IMAGES), model)


def test_the_converter_still_needs_the_correction(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, TensorFlow's converter was fixed, and `constant_biases` can be removed."""
    network = canonical(keras_graph.read(model_of(keras, "Conv2D")))
    plan = calibration.calibrate(network, IMAGES)
    right = export.convert(network, plan)
    assert constant_biases.corrected(right) == right
    monkeypatch.setattr(constant_biases, "corrected", lambda content: content)
    stored = [tensor for tensor in graph.parse(export.convert(network, plan)).tensors if tensor.dtype == "INT32"]
    assert len(np.unique(stored[0].array())) == 1
