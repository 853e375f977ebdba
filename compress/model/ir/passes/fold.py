"""The canonical form for quantization: batch norms folded, activations as separate layers, one step per layer.

The way back is `with_restored_norms`, for networks whose batch norms were folded, as in every .tflite file. Inference
needs no batch norms, training does: without them, a learning rate that teaches the layers anything makes them diverge.
A restored batch norm computes what the bias did, so the network stays the same function; its statistics come from
samples (`compress.learning.training.bn_recalibration`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.keras_graph import Layer, LayerOutput, Network, Weights, tensors_in
from compress.model.ir.layer_specs import (
    ACTIVATION,
    BATCH_NORM,
    DENSE,
    DIVIDE,
    MULTIPLY,
    RSQRT,
    SQRT,
    TIME_DISTRIBUTED,
    TRUE_DIVIDE,
    LayerSpec,
    spec_of,
)
from compress.model.ir.layer_specs.families import SeparableConvolutionSpec
from compress.model.ir.passes.decompose import decomposed, gamma_and_beta, scale_and_shift


def canonical(network: Network) -> Network:
    """Return the same function in canonical form: one step per layer, and batch norms folded where possible."""
    return _everywhere(_by_inverse_root, _everywhere(decomposed, _everywhere(_fold_batch_norms, unfolded(network))))


def unfolded(network: Network) -> Network:
    """Return the same function in single steps, with all batch norms still there."""
    network = _everywhere(_without_time_distributed, network)
    return _everywhere(_in_steps, split_activations(_everywhere(_split_separable, network)))


def folded(network: Network) -> Network:
    """Return the same function with batch norms folded where possible, and activations as separate layers."""
    return _everywhere(_fold_batch_norms, split_activations(_everywhere(_split_separable, network)))


def split_activations(network: Network) -> Network:
    """Return the same function with activations as separate layers."""
    return _everywhere(_split_activations, network)


def folded_dense(network: Network) -> Network:
    """Return the same function with batch norms folded into dense layers only."""

    def fold(network: Network, name: str) -> Network:
        inputs = network.layers[name].inputs() if network.layers[name].calls else []
        follows_dense = bool(inputs) and spec_of(network.layers[inputs[0].layer]) == DENSE
        return _fold_batch_norms(network, name) if follows_dense else network

    return _everywhere(fold, network)


def _everywhere(step: Callable[[Network, str], Network], network: Network) -> Network:
    for name in list(network.layers):
        network = step(network, name)
    return network


def folded_norms(network: Network) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Return gamma and beta of the batch norms that `canonical` folds, by the layer that each is folded into."""
    network = unfolded(network)
    parameters = {}
    for norm in network.layers.values():
        layer = _source(network, norm)
        if layer is not None:
            gamma, beta = gamma_and_beta(norm)
            channels = norm.weights[-1].shape
            parameters[layer.name] = np.broadcast_to(gamma, channels), np.broadcast_to(beta, channels)
    return parameters


def _without_time_distributed(network: Network, name: str) -> Network:
    """Call the layer inside a `TimeDistributed` at each step: it may have an activation, or be separable."""
    return decomposed(network, name) if spec_of(network.layers[name]) == TIME_DISTRIBUTED else network


def _in_steps(network: Network, name: str) -> Network:
    """Decompose a layer, unless it is a batch norm: most of them can be folded later."""
    return network if spec_of(network.layers[name]).is_batch_norm else decomposed(network, name)


def appended(network: Network, layer: Layer, spec: LayerSpec, config: dict[str, Any], weights: Any = ()) -> Network:
    """Replace `layer`, and append a new layer after each of its calls; all readers read the new layer instead."""
    name = config["name"]
    calls = tuple({"args": [LayerOutput(layer.name, call)], "kwargs": {}} for call in range(len(layer.calls)))
    moved = {LayerOutput(layer.name, call): LayerOutput(name, call) for call in range(len(layer.calls))}
    network = network.edited({layer.name: layer}, moved)
    shapes = {new: network.shapes[old] for old, new in moved.items()}
    network = replace(network, shapes={**network.shapes, **shapes})
    return network.edited({name: spec.layer(calls=calls, weights=weights, **config)}, {})


def _split_activations(network: Network, name: str) -> Network:
    """Split `Conv2D(activation="relu")` into a linear convolution and an activation."""
    layer = network.layers[name]
    activation = layer.config.get("activation", "linear")
    if spec_of(layer).kernel is None or activation in ("linear", None):
        return network
    new = network.free_name(f"{name}_activation")
    config = {"name": new, "activation": activation}
    return appended(network, layer.configured(activation="linear"), ACTIVATION, config)


def _by_inverse_root(network: Network, name: str) -> Network:
    """Multiply by an inverse square root instead of dividing by a square root, as in normalizations.

    TensorFlow Lite has no 8-bit division or square root, and the Edge TPU has the inverse square root.
    """
    quotient = network.layers[name]
    inputs = quotient.inputs() if len(quotient.calls) == 1 else []
    if spec_of(quotient) not in (DIVIDE, TRUE_DIVIDE) or len(inputs) != 2:
        return network
    root = network.layers[inputs[1].layer]
    if spec_of(root) != SQRT or len(root.calls) != 1:
        return network
    (squared,) = root.inputs()
    is_integer = squared.output in network.layers[squared.layer].integers  # Keras casts integers for a root alone
    is_private = network.consumers()[inputs[1]] == [(name, 0)] and inputs[1] not in tensors_in(network.outputs)
    if is_integer or not is_private:
        return network
    product, inverse = _as_operation(quotient, "numpy", MULTIPLY), _as_operation(root, "math", RSQRT)
    return replace(network, layers={**network.layers, name: product, root.name: inverse})


def _as_operation(layer: Layer, module: str, spec: LayerSpec) -> Layer:
    """Return a Keras operation with the name and the inputs of another one."""
    names = {"module": f"keras.src.ops.{module}", "class_name": spec.kind, "registered_name": spec.kind}
    return replace(layer, kind=spec.kind, entry={**layer.entry, **names})


def _split_separable(network: Network, name: str) -> Network:
    """Split `SeparableConv1D` and 2D into a depthwise and a pointwise convolution."""
    layer = network.layers[name]
    spec, config = spec_of(layer), dict(layer.config)
    if not isinstance(spec, SeparableConvolutionSpec) or config["padding"] == "causal":
        return network
    depthwise, pointwise, *bias = layer.weights
    first_spec, second_spec = spec.parts
    shared = {key: config[key] for key in ("kernel_size", "strides", "padding", "dilation_rate", "data_format")}
    multiplier = config["depth_multiplier"]
    first = first_spec.layer(name, layer.calls, (depthwise,), depth_multiplier=multiplier, use_bias=False, **shared)
    new = network.free_name(f"{name}_pointwise")
    second = {
        "name": new,
        "filters": config["filters"],
        "kernel_size": 1,
        "use_bias": config["use_bias"],
        "activation": config["activation"],
    }
    network = appended(network, first, second_spec, second, (pointwise, *bias))
    middle = {
        LayerOutput(name, call): (*network.shapes[LayerOutput(name, call)][:-1], prod(depthwise.shape[-2:]))
        for call in range(len(layer.calls))
    }
    return replace(network, shapes={**network.shapes, **middle})


def _fold_batch_norms(network: Network, name: str) -> Network:
    """Fold a batch norm into the layer before it, if that is possible."""
    norm = network.layers[name]
    layer = _source(network, norm)
    if layer is None:
        return network
    moved = {LayerOutput(name, call): norm.inputs(call)[0] for call in range(len(norm.calls))}
    return network.edited({layer.name: _folded(layer, norm), name: None}, moved)


def _source(network: Network, norm: Layer) -> Layer | None:
    """Return the layer that a batch norm can be folded into: linear, with a kernel, and no other reader."""
    if not spec_of(norm).is_batch_norm or not norm.calls:
        return None
    sources = [norm.inputs(call)[0] for call in range(len(norm.calls))]
    layer = network.layers[sources[0].layer]
    is_linear = layer.config.get("activation", "linear") in ("linear", None)
    if spec_of(layer).kernel is None or not is_linear:
        return None
    if not norm.normalizes_last_axis(len(network.shapes[sources[0]])):
        return None
    consumers = network.consumers()
    outputs = set(tensors_in(network.outputs))
    has_other_readers = any(len(consumers[source]) > 1 or source in outputs for source in sources)
    calls = {(layer.name, call) for call in range(len(layer.calls))}  # of a shared layer all must be normalized
    normalizes_all = {(source.layer, source.call) for source in sources} == calls
    return layer if normalizes_all and not has_other_readers else None


def _folded(layer: Layer, norm: Layer) -> Layer:
    """Return a layer with the scale of a batch norm in its kernel and the shift in its bias, in double precision."""
    factor, offset = scale_and_shift(norm)
    bias = layer.weights[1].astype(np.float64) if layer.config.get("use_bias", True) else np.float64(0)
    scaled = spec_of(layer).kernels[0].times_outputs(layer.weights[0], factor)
    shifted = bias * factor + offset
    return replace(
        layer.configured(use_bias=True),
        weights=(scaled.astype(np.float32), np.broadcast_to(shifted, factor.shape).astype(np.float32)),
    )


NORM_MOMENTUM = 0.9
"""Keras' 0.99 is too slow for a short training."""
NORM_EPSILON = 1e-3
"""The default of Keras' BatchNormalization."""


def with_restored_norms(network: Network) -> tuple[Network, tuple[str, ...]]:
    """Return the same function with a batch norm after every convolution, and the names of the batch norms.

    Nothing is changed in a network that has batch norms. The new ones have mean 0 and variance 1.
    """
    if any(spec_of(layer).is_batch_norm for layer in network.layers.values()):
        return network, ()
    network = split_activations(network)
    names = []
    for layer, call in list(network.in_order()):
        kernel = spec_of(layer).kernel
        if call or kernel is None or kernel.transposed or not spec_of(layer).rank or len(layer.calls) != 1:
            continue
        channels = network.shapes[LayerOutput(layer.name)][-1]
        bias = layer.weights[1] if layer.config.get("use_bias", True) else np.zeros(channels or 0, np.float32)
        name = network.free_name(f"{layer.name}_norm")
        config = {"name": name, "momentum": NORM_MOMENTUM, "epsilon": NORM_EPSILON}
        linear = replace(network.layers[layer.name].configured(use_bias=False), weights=layer.weights[:1])
        network = appended(network, linear, BATCH_NORM, config, bias_only(bias, NORM_EPSILON))
        names.append(name)
    return network, tuple(names)


def bias_only(bias: NDArray[Any], epsilon: float) -> Weights:
    """Return gamma, beta, mean and variance of a batch norm that only adds a bias."""
    return (np.ones_like(bias), bias, np.zeros_like(bias), np.full_like(bias, 1 - epsilon))


def with_statistics(norm: Layer, mean: NDArray[Any], variance: NDArray[Any]) -> Layer:
    """Return a batch norm, which has beta and gamma, with other statistics; its results in inference stay the same."""
    factor, offset = scale_and_shift(norm)
    gamma = factor * np.sqrt(variance + norm.config["epsilon"])
    weights = (gamma, offset + factor * mean, mean, variance)
    return replace(norm, weights=tuple(np.asarray(weight, np.float32) for weight in weights))
