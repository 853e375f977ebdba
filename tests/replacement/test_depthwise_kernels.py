"""A 3x3 kernel with zeros around it is found again exactly; any other is fitted to what the layer is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.ir import keras_graph
from compress.replacement import depthwise_kernels

pytestmark = pytest.mark.tensorflow


def images(side: int, count: int = 4) -> np.ndarray:
    """Smooth images: neighbouring pixels are alike."""
    rough = np.random.default_rng(0).random((count, side + 4, side + 4, 3), np.float32)
    return sum(rough[:, i : i + side, j : j + side] for i in range(5) for j in range(5)) / 25


def framed(model: Any, name: str = "wide") -> Any:
    """The model with zeros around the inner 3x3 taps of a kernel."""
    layer = model.get_layer(name)
    kernel, *rest = layer.get_weights()
    frame = np.zeros_like(kernel)
    frame[1:4, 1:4] = kernel[1:4, 1:4]
    layer.set_weights([frame, *rest])
    return model


def net(keras: Any, side: int, layer: Any, padding: Any = None) -> Any:
    keras.utils.set_random_seed(0)
    image = keras.Input((side, side, 3))
    x = image if padding is None else keras.layers.ZeroPadding2D(padding)(image)
    return keras.Model(image, layer(x))


def narrowed(model: Any, samples: np.ndarray) -> tuple[keras_graph.Network, depthwise_kernels.Swaps]:
    given = keras_graph.read(model)
    names, left = depthwise_kernels.find(given)
    assert not left
    return depthwise_kernels.narrowed(given, depthwise_kernels.measure(given, names, samples))


def check_same(model: Any, made: keras_graph.Network, samples: np.ndarray) -> None:
    assert all(each.weights[0].shape[:2] == (3, 3) for each in made.layers.values() if each.kind in KINDS)
    found, expected = (np.asarray(each(samples)) for each in (keras_graph.build(made), model))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for tensor, shape in made.shapes.items():
        if tensor.layer == "wide":
            assert shape == expected.shape[1:]


KINDS = ("DepthwiseConv2D", "SeparableConv2D")


@pytest.mark.parametrize("side", [9, 10, 11])
@pytest.mark.parametrize("strides", [1, 2, 3])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_a_framed_3x3_kernel_is_replaced_exactly(keras: Any, side: int, strides: int, padding: str) -> None:
    layer = keras.layers.DepthwiseConv2D(5, strides, padding=padding, depth_multiplier=2, name="wide")
    model, samples = framed(net(keras, side, layer)), images(side)
    made, swaps = narrowed(model, samples)
    check_same(model, made, samples)
    assert swaps.done == {"depthwise_5x5": ("wide",)}
    assert "0.0% of the variance" in swaps.notes["wide"]


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dilation", [1, 2])
def test_separable_and_dilated_kernels_too(keras: Any, use_bias: bool, dilation: int) -> None:
    layer = keras.layers.SeparableConv2D(
        4, 5, padding="same", dilation_rate=dilation, use_bias=use_bias, bias_initializer="random_normal", name="wide"
    )
    model, samples = framed(net(keras, 12, layer)), images(12)
    made, _ = narrowed(model, samples)
    check_same(model, made, samples)
    assert made.layers["wide"].config["use_bias"] is use_bias


@pytest.mark.parametrize("padding", [2, ((1, 2), (1, 2)), 1, ((0, 2), (1, 1))])
def test_a_padding_in_front_gets_smaller(keras: Any, padding: Any) -> None:
    layer = keras.layers.DepthwiseConv2D(5, 2, padding="valid", name="wide")
    model, samples = framed(net(keras, 12, layer, padding)), images(12)
    made, _ = narrowed(model, samples)
    check_same(model, made, samples)
    kinds = [each.kind for each in made.layers.values()]
    assert ("Cropping2D" in kinds) is (padding == ((0, 2), (1, 1)))
    assert ("ZeroPadding2D" in kinds) is (padding != 1)


def test_a_padding_that_others_need_stays(keras: Any) -> None:
    layers = keras.layers
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 3))
    padded = layers.ZeroPadding2D(2)(image)
    wide = layers.DepthwiseConv2D(5, name="wide")(padded)
    model = framed(keras.Model(image, layers.Add()([wide, layers.DepthwiseConv2D(5, name="other")(padded)])))
    framed(model, "other")
    made, swaps = narrowed(model, images(8))
    assert swaps.done == {"depthwise_5x5": ("wide", "other")}
    check_same(model, made, images(8))


def test_a_layer_that_is_called_twice_keeps_one_kernel(keras: Any) -> None:
    layers = keras.layers
    keras.utils.set_random_seed(0)
    image = keras.Input((12, 12, 3))
    wide = layers.DepthwiseConv2D(5, name="wide")
    model = framed(keras.Model(image, layers.Flatten()(wide(wide(image)))))
    made, _ = narrowed(model, images(12))
    found, expected = (np.asarray(each(images(12))) for each in (keras_graph.build(made), model))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert [layer.kind for layer in made.layers.values() if layer.weights] == ["DepthwiseConv2D"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_fit_is_the_best_there_is(keras: Any, kind: str) -> None:
    """The outputs of the inner taps, with the best offset, are further away; so are those of kernels beside it."""
    layer = keras.layers.DepthwiseConv2D(5, name="wide", use_bias=False)
    if kind == "SeparableConv2D":
        layer = keras.layers.SeparableConv2D(4, 5, name="wide", use_bias=False)
    samples = images(12, 40)
    model = net(keras, 12, layer)
    made, _ = narrowed(model, samples)
    wanted = np.asarray(model(samples), np.float64)

    def error(kernel: np.ndarray, bias: np.ndarray) -> float:
        fitted = keras_graph.build(made)
        fitted.get_layer("wide").set_weights([kernel, *made.layers["wide"].weights[1:-1], bias])
        return float(((np.asarray(fitted(samples), np.float64) - wanted) ** 2).mean())

    kernel, bias = made.layers["wide"].weights[0], made.layers["wide"].weights[-1]
    least = error(kernel, bias)
    assert least < 0.5 * wanted.var()
    inner = np.asarray(model.get_layer("wide").get_weights()[0])[1:4, 1:4]
    assert error(inner, bias) > 2 * least
    assert error(kernel, bias + 0.02) > least
    if kind == "DepthwiseConv2D":  # the other is fitted in front of its pointwise part
        for step in (0.97, 1.03):
            assert error(kernel * np.float32(step), bias) > least


def test_channels_that_never_change_keep_their_inner_taps(keras: Any) -> None:
    layer = keras.layers.DepthwiseConv2D(5, padding="valid", name="wide")
    model, samples = net(keras, 9, layer), np.full((3, 9, 9, 3), 0.5, np.float32)
    made, _ = narrowed(model, samples)
    inner = model.get_layer("wide").get_weights()[0][1:4, 1:4]
    np.testing.assert_allclose(made.layers["wide"].weights[0], inner, atol=1e-4)
    np.testing.assert_allclose(np.asarray(keras_graph.build(made)(samples)), np.asarray(model(samples)), atol=1e-5)


def test_a_stride_that_moves_the_middle_is_refused_with_the_reason(keras: Any) -> None:
    layer = keras.layers.DepthwiseConv2D(5, 4, padding="same", name="wide")
    names, left = depthwise_kernels.find(keras_graph.read(net(keras, 12, layer)))
    assert names == []
    assert "stride of 4 on 12 positions" in left["wide"]
    other = keras.layers.DepthwiseConv2D(3, padding="same")
    assert depthwise_kernels.find(keras_graph.read(net(keras, 12, other))) == ([], {})
