"""Decomposition of layers that work in several steps: every inner tensor gets a name, and so a quantization range.

The steps of a layer are written as a small Keras model, which replaces the layer as a nested model would. A factor and
an offset for each channel become a depthwise 1x1 convolution: one operator, whose int8 weights hold any factor exactly.
The function stays the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.ir import layer_specs as specs
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, inlined, map_tensors, read
from compress.model.ir.layer_specs import LayerSpec, spec_of
from compress.model.ir.layer_specs.functions import SELU_ALPHA, SELU_SCALE
from compress.model.ir.passes import unroll
from compress.model.ir.passes.by_channel import by_channel
from compress.model.ir.tensorflow import keras

Steps = Callable[[Layer, list[Any]], Any]
"""(layer, its symbolic inputs) -> its symbolic output in single steps; None if the layer has to stay."""
EXACT_RELUS = (None, 6.0)
"""Limits of a ReLU for which TFLite has an operator."""


def decomposed(network: Network, name: str) -> Network:
    """Return the network with one layer replaced by single steps, if the steps are known."""
    try:
        return _decomposed(network, name)
    except unroll.NotUnrolledError:
        return network


def reason_to_stay(network: Network, name: str) -> str:
    """Return why a recurrent layer is not replaced by single steps; empty if it would be, or is of another kind."""
    try:
        _decomposed(network, name)
    except unroll.NotUnrolledError as error:
        return str(error)
    return ""


def _decomposed(network: Network, name: str) -> Network:
    layer = network.layers[name]
    spec = spec_of(layer)
    steps = STEPS_BY_FUNCTION.get(spec.activation(layer) or "") or STEPS_BY_KIND.get(spec)
    if steps is None or not layer.calls:
        return network
    library = keras()
    shapes = [[network.shapes[tensor] for tensor in layer.inputs(call)] for call in range(len(layer.calls))]
    if spec.reads_masks:
        # Keras passes masks on without a tensor: they depend on the values of the input, and so do the steps.
        for other in network.layers.values():
            if spec_of(other).masks(other.config):
                raise unroll.NotUnrolledError(f"it skips the time steps that {other.kind} {other.name!r} masks")
        if None in shapes[0][0]:
            raise unroll.NotUnrolledError(f"its input has the open shape {list(shapes[0][0])}")
    if any(others != shapes[0] for others in shapes) or any(None in shape for shape in shapes[0]):
        return network
    inputs = [library.Input(shape) for shape in shapes[0]]
    output = steps(layer, inputs)
    if output is None:
        return network
    return inlined(network, name, _named(read(library.Model(inputs, output))))


def scale_and_shift(norm: Layer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the factor and offset of each channel that a batch norm applies in inference."""
    gamma, beta = gamma_and_beta(norm)
    mean, variance = (weight.astype(np.float64) for weight in norm.weights[-2:])
    factor = gamma / np.sqrt(variance + norm.config.get("epsilon", 1e-3))
    return factor, beta - mean * factor


def gamma_and_beta(norm: Layer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the scale and offset parameters of a normalization; 1 and 0 if it has none."""
    weights = [weight.astype(np.float64) for weight in norm.weights]
    gamma = weights.pop(0) if norm.config.get("scale", True) else np.ones(1)
    beta = weights.pop(0) if norm.config.get("center", True) else np.zeros(1)
    return gamma, beta


def _named(network: Network) -> Network:
    """Return the network with layers named after their kinds; the names that Keras gives depend on earlier models."""
    names: dict[str, str] = {}
    for layer, _ in network.in_order():
        same = sum(network.layers[name].kind == layer.kind for name in names)
        names.setdefault(layer.name, layer.kind.lower() + (f"_{same}" if same else ""))

    def moved(tensor: LayerOutput) -> LayerOutput:
        return replace(tensor, layer=names[tensor.layer])

    layers = {
        names[layer.name]: replace(
            layer.configured(name=names[layer.name]), name=names[layer.name], calls=map_tensors(layer.calls, moved)
        )
        for layer in network.layers.values()
    }
    shapes = {moved(tensor): shape for tensor, shape in network.shapes.items()}
    inputs, outputs = map_tensors(network.inputs, moved), map_tensors(network.outputs, moved)
    return Network(network.name, layers, inputs, outputs, shapes)


def _normalization(layer: Layer, inputs: list[Any]) -> Any:
    axis, rank = layer.config["axis"], len(inputs[0].shape)
    if axis is not None and list(axis) not in ([-1], [rank - 1]):
        return None
    stored = layer.weights[:2] or (layer.config["mean"], layer.config["variance"])
    mean, variance = (np.asarray(values, np.float64) for values in stored)
    deviation = np.maximum(np.sqrt(variance), keras().config.epsilon())
    if layer.config["invert"]:
        return by_channel(inputs[0], deviation, mean)
    return by_channel(inputs[0], 1 / deviation, -mean / deviation)


def _batch_norm(layer: Layer, inputs: list[Any]) -> Any:
    if not layer.normalizes_last_axis(len(inputs[0].shape) - 1):
        return None
    return by_channel(inputs[0], *scale_and_shift(layer))


def _einsum_dense(layer: Layer, inputs: list[Any]) -> Any:
    """Replace an equation that is a dense layer ("abc,cd->abd"); other equations stay."""
    layers, config = keras().layers, layer.config
    source, kernel, output = config["equation"].replace("...", ".").replace("->", ",").split(",")
    if len(kernel) != 2 or output != source[:-1] + kernel[1] or source[-1] != kernel[0]:
        return None
    if config["bias_axes"] not in (None, kernel[1]):
        return None
    dense = layers.Dense(layer.weights[0].shape[1], use_bias=len(layer.weights) > 1)
    y = dense(inputs[0])
    dense.set_weights(list(layer.weights))
    activation = config.get("activation")
    return y if activation in (None, "linear") else layers.Activation(activation)(y)


def _exponential_below(x: Any, above: float, below: float) -> Any:
    """Return above * x for x > 0, else below * (exp(x) - 1)."""
    ops = keras().ops
    positive = ops.relu(x) if above == 1 else ops.relu(x) * above
    curve = ops.exp(ops.minimum(x, 0.0))
    return positive + (curve * below if below != 1 else curve) - below


def _softplus(x: Any) -> Any:
    """Return log(1 + exp(x)) as relu(x) + log(1 + exp(-|x|)): no inner tensor is larger than x."""
    ops = keras().ops
    return ops.relu(x) + ops.log(ops.exp(ops.minimum(x, x * -1.0)) + 1.0)


def _softsign(x: Any) -> Any:
    """Return x / (1 + |x|) without a division, which TFLite does not have in 8 bits."""
    ops = keras().ops
    root = ops.rsqrt(ops.maximum(x, x * -1.0) + 1.0)
    return x * (root * root)


def _relu(layer: Layer, inputs: list[Any]) -> Any:
    """Replace a ReLU with a limit other than 6."""
    ops, limit = keras().ops, layer.config.get("max_value")
    if limit in EXACT_RELUS or layer.config.get("threshold"):
        return None
    slope = layer.config.get("negative_slope") or 0.0
    y = ops.leaky_relu(inputs[0], slope) if slope else ops.relu(inputs[0])
    return ops.minimum(y, float(limit))


def _in_pairs(layer: Layer, inputs: list[Any]) -> Any:
    """Replace an elementwise layer by one operator for each further input, as TFLite operators take two."""
    return _joined_in_pairs(spec_of(layer), inputs) if len(inputs) > 2 else None


def _joined_in_pairs(spec: LayerSpec, inputs: list[Any]) -> Any:
    join = getattr(keras().layers, spec.kind)
    return functools.reduce(lambda total, other: join()([total, other]), inputs)


def _flip(layer: Layer, inputs: list[Any]) -> Any:
    """Replace a reversal by slices, which have known forms; a reversal of the batch stays."""
    (x,), axis = inputs, layer.config.get("axis")
    rank = len(x.shape)
    axes = {dimension % rank for dimension in ([axis] if isinstance(axis, int) else axis or range(rank))}
    if 0 in axes:
        return None
    return x[tuple(slice(None, None, -1 if dimension in axes else 1) for dimension in range(rank))]


def _layer_norm(layer: Layer, inputs: list[Any]) -> Any:
    x, axis = inputs[0], layer.config["axis"]
    if (list(axis) if isinstance(axis, list | tuple) else [axis]) not in ([-1], [len(x.shape) - 1]):
        return None
    return by_channel(_standardized(x, [-1], layer.config["epsilon"]), *gamma_and_beta(layer))


def _group_norm(layer: Layer, inputs: list[Any]) -> Any:
    x, groups = inputs[0], layer.config["groups"]
    if layer.config.get("axis", -1) not in (-1, len(x.shape) - 1):
        return None
    channels, layers = x.shape[-1], keras().layers
    groups = channels if groups == -1 else groups
    y = layers.Reshape((prod(x.shape[1:-1]), groups, channels // groups))(x)
    y = layers.Reshape(x.shape[1:])(_standardized(y, [1, 3], layer.config["epsilon"]))
    return by_channel(y, *gamma_and_beta(layer))


def _unit_norm(layer: Layer, inputs: list[Any]) -> Any:
    ops, x = keras().ops, inputs[0]
    axis = layer.config["axis"]
    squares = ops.sum(x * x, axis=axis if isinstance(axis, int) else list(axis), keepdims=True)
    return x * ops.rsqrt(ops.maximum(squares, 1e-12))


def _standardized(x: Any, axes: list[int], epsilon: float) -> Any:
    """Return the values with mean 0 and variance 1 along some axes."""
    ops = keras().ops
    centered = x - ops.mean(x, axis=axes, keepdims=True)
    variance = ops.mean(centered * centered, axis=axes, keepdims=True)
    return centered * ops.rsqrt(variance + epsilon)


STEPS_BY_KIND: Mapping[LayerSpec, Steps] = {
    specs.RESCALING: lambda layer, inputs: by_channel(inputs[0], layer.config["scale"], layer.config["offset"]),
    specs.NORMALIZATION: _normalization,
    specs.BATCH_NORM: _batch_norm,
    specs.LAYER_NORM: _layer_norm,
    specs.GROUP_NORM: _group_norm,
    specs.UNIT_NORM: _unit_norm,
    specs.EINSUM_DENSE: _einsum_dense,
    specs.RELU: _relu,
    specs.AVERAGE: lambda layer, inputs: _joined_in_pairs(specs.ADD, inputs) * (1 / len(inputs)),
    **dict.fromkeys(unroll.CELLS, unroll.unrolled),
    specs.FLIP: _flip,
    specs.BIDIRECTIONAL: unroll.bidirectional,
    specs.RNN: unroll.with_cells,
    specs.TIME_DISTRIBUTED: unroll.time_distributed,
    **dict.fromkeys((specs.ADD, specs.MULTIPLY, specs.MAXIMUM, specs.MINIMUM), _in_pairs),
}
STEPS_BY_FUNCTION: Mapping[str, Steps] = {
    "hard_sigmoid": lambda layer, inputs: keras().ops.relu6(inputs[0] + 3.0) * (1 / 6),
    "elu": lambda layer, inputs: _exponential_below(inputs[0], 1.0, float(layer.config.get("alpha", 1.0))),
    "selu": lambda layer, inputs: _exponential_below(inputs[0], SELU_SCALE, SELU_SCALE * SELU_ALPHA),
    "softplus": lambda layer, inputs: _softplus(inputs[0]),
    "mish": lambda layer, inputs: inputs[0] * keras().ops.tanh(_softplus(inputs[0])),
    "softsign": lambda layer, inputs: _softsign(inputs[0]),
}
"""For layers that apply an activation function and nothing else, by its name in Keras."""
