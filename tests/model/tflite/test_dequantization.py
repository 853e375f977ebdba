"""Quantized graphs in float: one operator at a time, and real files of several converters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_op import Op, Tensor, one, read
from paths import EDGETPU

from compress.core.errors import ModelError
from compress.model.tflite import comparison, dequantization, graph
from compress.model.tflite.dequantization import RELU, RELU6

PAIRS = sorted((EDGETPU / "pairs").glob("*/model.tflite"))
UNRUNNABLE = ("keras_lstm_mnist_ptq", "posenet_mobilenet_v1_075_353_481_16_quant_decoder")
"""Pairs with an operator that has no float form with these inputs, or that the runtime does not have."""


def convolution(
    out: Tensor, *, bias_scale: float = 0.5 * 0.01, dtype: str = "INT8", weights_zero: int = 0, **options: Any
) -> graph.Graph:
    draw = np.random.default_rng(0)
    kernel = draw.integers(-100, 100, (4, 3, 3, 2)) + weights_zero
    scales = (0.01,) if dtype == "UINT8" else (0.01, 0.02, 0.03, 0.04)
    return one(
        "CONV_2D",
        [
            Tensor((1, 6, 6, 2), dtype, scales=(0.5,), zero_point=3 + 128 * (dtype == "UINT8")),
            Tensor((4, 3, 3, 2), dtype, kernel, scales, weights_zero),
            Tensor((4,), "INT32", draw.integers(-900, 900, 4), (bias_scale,)),
        ],
        out,
        3,
        strideH=1,
        strideW=1,
        **options,
    )


def worst(quantized: graph.Graph, feeds: int = 3) -> float:
    both = dequantization.dequantize(quantized)
    generator = np.random.default_rng(1)
    differences = dequantization.operator_differences(
        both, [comparison.random_feed(quantized, generator) for _ in range(feeds)]
    )
    assert len(differences) == len([op for op in quantized.operators if op.name not in dequantization.CONVERSIONS])
    return max(difference.largest for difference in differences)


@pytest.mark.parametrize("bias_scale", [0.005, 7.0])
def test_a_convolution_differs_by_its_rounding_whatever_scale_the_file_gives_its_bias(bias_scale: float) -> None:
    quantized = convolution(Tensor((1, 6, 6, 4), scales=(2.0,), zero_point=-5), bias_scale=bias_scale)
    assert 0.3 < worst(quantized) < 0.6
    float_graph = dequantization.dequantize(quantized).graph
    assert {tensor.dtype for tensor in float_graph.tensors} == {"FLOAT32"}
    bias = float_graph.tensors[2].array()
    np.testing.assert_allclose(bias, quantized.tensors[2].array() * 0.5 * np.array([0.01, 0.02, 0.03, 0.04]), rtol=1e-6)


def test_weights_of_old_files_have_a_zero_point() -> None:
    quantized = convolution(
        Tensor((1, 6, 6, 4), "UINT8", scales=(2.0,), zero_point=120), dtype="UINT8", weights_zero=128
    )
    assert worst(quantized) < 1
    weights = dequantization.dequantize(quantized).graph.tensors[1].array()
    assert -1.01 < weights.min() < -0.9
    assert 0.9 < weights.max() < 1.01


@pytest.mark.parametrize(
    ("scale", "zero_point", "fused", "expected"),
    [
        (2.0, -128, 0, RELU),
        (6 / 255, -128, 0, RELU6),
        (2.0, -127, 0, 0),
        (2.0, -128, RELU6, RELU6),
        (2.0, 5, RELU, RELU),
    ],
)
def test_a_range_from_0_is_an_activation(scale: float, zero_point: int, fused: int, expected: int) -> None:
    out = Tensor((1, 6, 6, 4), scales=(scale,), zero_point=zero_point)
    quantized = convolution(out, fusedActivationFunction=fused)
    both = dequantization.dequantize(quantized)
    assert both.graph.operators[0].option("fusedActivationFunction") == expected
    assert both.activations == (expected != fused)
    assert worst(quantized) < 0.6


def conversions(out_zero: int) -> graph.Graph:
    """QUANTIZE to int8, ADD, QUANTIZE to another scale, DEQUANTIZE."""
    tensors = {
        "in": Tensor((1, 8), "FLOAT32"),
        "a": Tensor((1, 8), scales=(0.1,), zero_point=0),
        "b": Tensor((1, 8), scales=(0.2,), zero_point=0),
        "c": Tensor((1, 8), scales=(0.2,), zero_point=out_zero),
        "out": Tensor((1, 8), "FLOAT32"),
    }
    ops = [
        Op("QUANTIZE", ["in"], ["a"]),
        Op("ADD", ["a", "a"], ["b"], 2),
        Op("QUANTIZE", ["b"], ["c"], 2),
        Op("DEQUANTIZE", ["c"], ["out"], 2),
    ]
    return read(tensors, ops, ["in"], ["out"])


def test_conversions_disappear_and_one_that_cuts_negative_values_is_a_relu() -> None:
    assert [op.name for op in dequantization.dequantize(conversions(0)).graph.operators] == ["ADD"]
    both = dequantization.dequantize(conversions(-128))
    assert [op.name for op in both.graph.operators] == ["ADD", "RELU"]
    values = np.array([[-5, -1, -0.2, 0, 0.2, 1, 5, 9]], np.float32)
    (actual,) = comparison.Runner(both.graph).run([values])
    (expected,) = comparison.Runner(conversions(-128)).run([values])
    np.testing.assert_allclose(actual, np.maximum(2 * values, 0), atol=1e-6)
    np.testing.assert_allclose(actual, expected, atol=0.11)


def test_an_integer_input_that_is_cast_becomes_float() -> None:
    tensors = {
        "photo": Tensor((1, 4), "UINT8", scales=()),
        "x": Tensor((1, 4), "FLOAT32"),
        "q": Tensor((1, 4), scales=(1.0,), zero_point=-128),
        "out": Tensor((1, 4), scales=(2.0,), zero_point=-128),
    }
    ops = [Op("CAST", ["photo"], ["x"]), Op("QUANTIZE", ["x"], ["q"]), Op("ADD", ["q", "q"], ["out"], 2)]
    both = dequantization.dequantize(read(tensors, ops, ["photo"], ["out"]))
    assert [op.name for op in both.graph.operators] == ["ADD"]
    assert both.graph.tensors[both.graph.inputs[0]].dtype == "FLOAT32"
    assert both.ranges == ()


def test_the_range_of_an_input_is_that_of_its_codes() -> None:
    quantized = convolution(Tensor((1, 6, 6, 4), scales=(2.0,)))
    (values,) = dequantization.dequantize(quantized).ranges
    assert (values.low, values.high, values.step) == (-65.5, 62.0, 0.5)


def test_codes_are_rounded_and_limited() -> None:
    quantized = convolution(Tensor((1, 6, 6, 4), scales=(0.5,), zero_point=10))
    codes = dequantization.codes(np.array([0, 0.24, 0.26, 900, -900]), quantized.tensors[3])
    assert codes.tolist() == [10, 10, 11, 127, -128]
    assert codes.dtype == np.int8


@pytest.mark.parametrize(
    ("scales", "message"),
    [((0.1, 0.2), "2 scales, and the shape"), ((), "the weights .* of a quantized CONV_2D are INT8")],
)
def test_scales_that_do_not_fit_are_refused(scales: tuple[float, ...], message: str) -> None:
    tensors = [Tensor((1, 6, 6, 2)), Tensor((4, 3, 3, 2), data=1, scales=scales), Tensor((4,), "INT32", 1)]
    with pytest.raises(ModelError, match=message):
        dequantization.dequantize(one("CONV_2D", tensors, Tensor((1, 6, 6, 4)), 3))


@pytest.mark.skipif(not PAIRS, reason="the shared models are absent")
@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.parent.name)
def test_every_operator_of_real_files_differs_by_its_rounding(path: Any) -> None:
    if path.parent.name in UNRUNNABLE:
        pytest.skip("it has an operator that has no float form here")
    quantized = graph.read(path)
    both = dequantization.dequantize(quantized)
    feeds = [comparison.random_feed(quantized, np.random.default_rng(0))]
    differences = dequantization.operator_differences(both, feeds)
    assert max(difference.largest for difference in differences) <= 1.0
