"""Batch norm folded into the layer before it, and fused activations taken out: the form that is quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from compress.training.network import Layer, Network, Tensor, tensors_in

#: Layers that a batch norm can be folded into, and the axis of their kernel that it scales.
#: For a depthwise kernel [h, w, in, multiplier] the last two axes together are the output.
WEIGHTED = {"Conv1D": -1, "Conv2D": -1, "Dense": -1, "Conv2DTranspose": 2, "DepthwiseConv2D": None}


def canonical(network: Network) -> Network:
    """The same function with separable layers split, activations as layers of their own, batch norm folded."""
    return _everywhere(_fold_batch_norms, unfolded(network))


def unfolded(network: Network) -> Network:
    """The same function with separable layers split and activations as layers of their own."""
    return split_activations(_everywhere(_split_separable, network))


def split_activations(network: Network) -> Network:
    """The same function with activations as layers of their own."""
    return _everywhere(_split_activations, network)


def folded_dense(network: Network) -> Network:
    """The same function with batch norm folded into dense layers, and nowhere else."""

    def fold(network: Network, name: str) -> Network:
        given = network.layers[name].given() if network.layers[name].calls else []
        dense = bool(given) and network.layers[given[0].layer].kind == "Dense"
        return _fold_batch_norms(network, name) if dense else network

    return _everywhere(fold, network)


def _everywhere(step: Callable[[Network, str], Network], network: Network) -> Network:
    for name in list(network.layers):
        network = step(network, name)
    return network


def _shapes(network: Network, new: str, like: Tensor, calls: int) -> Network:
    """The network with shapes for the tensors of a new layer, those of `like`."""
    added = {Tensor(new, call): network.shapes[replace(like, call=call)] for call in range(calls)}
    return replace(network, shapes={**network.shapes, **added})


def _appended(network: Network, layer: Layer, name: str, entry: dict[str, Any], weights: Any = ()) -> Network:
    """`layer`, with a new layer after each of its calls that everyone else takes instead."""
    calls = tuple({"args": [Tensor(layer.name, call)], "kwargs": {}} for call in range(len(layer.calls)))
    moved = {Tensor(layer.name, call): Tensor(name, call) for call in range(len(layer.calls))}
    network = _shapes(network.edited({layer.name: layer}, moved), name, Tensor(layer.name), len(calls))
    return network.edited({name: Layer(name, entry["class_name"], entry, calls, weights)}, {})


def _entry(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"module": "keras.layers", "class_name": kind, "config": config, "registered_name": None}


def _free(network: Network, name: str) -> str:
    while name in network.layers:
        name += "_"
    return name


def _split_activations(network: Network, name: str) -> Network:
    """`Conv2D(activation="relu")` as a linear convolution and an activation."""
    layer = network.layers[name]
    activation = layer.config.get("activation", "linear")
    if layer.kind not in WEIGHTED or activation in ("linear", None):
        return network
    new = _free(network, f"{name}_activation")
    entry = _entry("Activation", {"name": new, "activation": activation})
    return _appended(network, layer.configured(activation="linear"), new, entry)


def _split_separable(network: Network, name: str) -> Network:
    """`SeparableConv2D` as a depthwise and a pointwise convolution."""
    layer = network.layers[name]
    if layer.kind != "SeparableConv2D":
        return network
    depthwise, pointwise, *bias = layer.weights
    config = dict(layer.config)
    shared = {key: config[key] for key in ("kernel_size", "strides", "padding", "dilation_rate", "data_format")}
    first = replace(
        layer,
        kind="DepthwiseConv2D",
        entry=_entry(
            "DepthwiseConv2D",
            {"name": name, "depth_multiplier": config["depth_multiplier"], "use_bias": False, **shared},
        ),
        weights=(depthwise,),
    )
    new = _free(network, f"{name}_pointwise")
    second = {
        "name": new,
        "filters": config["filters"],
        "kernel_size": 1,
        "use_bias": config["use_bias"],
        "activation": config["activation"],
    }
    network = _appended(network, first, new, _entry("Conv2D", second), (pointwise, *bias))
    middle = {
        Tensor(name, call): (*network.shapes[Tensor(name, call)][:-1], depthwise.shape[2] * depthwise.shape[3])
        for call in range(len(layer.calls))
    }
    return replace(network, shapes={**network.shapes, **middle})


def _fold_batch_norms(network: Network, name: str) -> Network:
    """A batch norm whose only source is a weighted linear layer that nobody else looks at."""
    norm = network.layers[name]
    if norm.kind != "BatchNormalization" or len(norm.calls) != 1:
        return network
    source = norm.given()[0]
    layer = network.layers[source.layer]
    alone = len(network.consumers()[source]) == 1 and source not in list(tensors_in(network.outputs))
    rank = len(network.shapes[source])
    axis = norm.config.get("axis", -1)
    last = (axis[0] if isinstance(axis, list) else axis) in (-1, rank)
    linear = layer.config.get("activation", "linear") in ("linear", None)
    if layer.kind not in WEIGHTED or len(layer.calls) != 1 or not (alone and last and linear):
        return network
    folded = _folded(layer, norm)
    return network.edited({layer.name: folded, name: None}, {Tensor(name): source})


def _folded(layer: Layer, norm: Layer) -> Layer:
    """Kernel times scale, bias moved along. Computed in double precision."""
    weights = [w.astype(np.float64) for w in norm.weights]
    gamma = weights.pop(0) if norm.config.get("scale", True) else np.float64(1)
    beta = weights.pop(0) if norm.config.get("center", True) else np.float64(0)
    mean, variance = weights
    factor = gamma / np.sqrt(variance + norm.config.get("epsilon", 1e-3))
    kernel = layer.weights[0].astype(np.float64)
    bias = layer.weights[1].astype(np.float64) if layer.config.get("use_bias", True) else np.float64(0)
    axis = WEIGHTED[layer.kind]
    if axis is None:
        scaled = kernel * factor.reshape(kernel.shape[2:])
    else:
        scaled = np.moveaxis(np.moveaxis(kernel, axis, -1) * factor, -1, axis)
    shifted = (bias - mean) * factor + beta
    return replace(
        layer.configured(use_bias=True),
        weights=(scaled.astype(np.float32), np.broadcast_to(shifted, factor.shape).astype(np.float32)),
    )
