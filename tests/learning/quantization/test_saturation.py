"""Tensors that only saturating functions read: their ranges end where the functions are constant."""

from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest

from compress.learning.quantization import calibration, export, quantizer_placement
from compress.learning.quantization.plan import QuantizationPlan
from compress.learning.quantization.search import file_outputs
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import LayerOutput
from compress.model.ir.layer_specs.functions import SATURATION
from compress.model.ir.passes.fold import canonical

pytestmark = pytest.mark.tensorflow
ROWS = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)


@pytest.mark.parametrize("name", SATURATION)
def test_a_function_is_constant_beyond_its_limits(keras: Any, name: str) -> None:
    inputs = np.linspace(-60, 60, 24001, dtype=np.float32)
    function = keras.activations.get(name)
    difference = np.abs(np.asarray(function(inputs)) - np.asarray(function(np.clip(inputs, *SATURATION[name]))))
    assert difference.max() < 1 / 512


def network_of(keras: Any, *, with_another_reader: bool = False) -> keras_graph.Network:
    """A dense layer with large values in front of a SiLU."""
    inputs = keras.Input((8,))
    dense = keras.layers.Dense(16, name="wide")
    x = dense(inputs)
    y = keras.layers.Dense(4, name="end")(keras.layers.Activation("silu")(x))
    model = networks.randomized(keras.Model(inputs, [y, keras.layers.Dense(2)(x)] if with_another_reader else y))
    kernel, bias = dense.get_weights()
    dense.set_weights([kernel * 40 / np.abs(kernel).max(), bias - 40])
    return canonical(keras_graph.read(model))


def test_the_range_in_front_of_a_silu_ends_at_its_limit(keras: Any) -> None:
    network = network_of(keras)
    plan = calibration.calibrate(network, ROWS)
    low, high = plan.ranges["wide"]
    assert -9 < low < -8  # a step is 0.25 here, and zero is a multiple of it
    assert high > 20
    reached = {}
    for name, ranges in (("limited", plan.ranges), ("whole", {**plan.ranges, "wide": (-high * 5, high)})):
        rows = file_outputs(export.convert(network, QuantizationPlan(ranges, name)), ROWS)
        reached[name] = np.square(rows - np.asarray(keras_graph.build(network)(ROWS))).mean()
    assert reached["limited"] < 0.7 * reached["whole"]


def test_another_reader_needs_all_values(keras: Any) -> None:
    network = network_of(keras, with_another_reader=True)
    assert calibration.calibrate(network, ROWS).ranges["wide"][0] < -60


def test_outputs_of_the_model_are_kept_whole(keras: Any) -> None:
    inputs = keras.Input((8,))
    x = keras.layers.Dense(3, name="logits")(inputs)
    model = keras.Model(inputs, [x, keras.layers.Activation("sigmoid")(x)])
    network = canonical(keras_graph.read(model))
    points = quantizer_placement.find(network)
    assert LayerOutput("logits") in points
    assert LayerOutput("logits") not in quantizer_placement.saturating(network, points)
