"""Batch norms for a trained network whose batch norms were folded, as in every .tflite file.

Inference needs no batch norms, training does: without them, a learning rate that teaches the layers anything makes them
diverge. A restored batch norm computes what the bias did, so the network stays the same function; its statistics come
from samples (`compress.learning.training.bn_recalibration`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.keras_graph import Layer, LayerOutput, Network, Weights
from compress.model.ir.layer_specs import BATCH_NORM, spec_of
from compress.model.ir.passes import fold
from compress.model.ir.passes.decompose import scale_and_shift

MOMENTUM = 0.9
"""Keras' 0.99 is too slow for a short training."""
EPSILON = 1e-3
"""The default of Keras' BatchNormalization."""


def restored(network: Network) -> tuple[Network, tuple[str, ...]]:
    """Return the same function with a batch norm after every convolution, and the names of the batch norms.

    Nothing is changed in a network that has batch norms. The new ones have mean 0 and variance 1.
    """
    if any(spec_of(layer).is_batch_norm for layer in network.layers.values()):
        return network, ()
    network = fold.split_activations(network)
    names = []
    for layer, call in list(network.in_order()):
        kernel = spec_of(layer).kernel
        if call or kernel is None or kernel.transposed or not spec_of(layer).rank or len(layer.calls) != 1:
            continue
        channels = network.shapes[LayerOutput(layer.name)][-1]
        bias = layer.weights[1] if layer.config.get("use_bias", True) else np.zeros(channels or 0, np.float32)
        name = network.free_name(f"{layer.name}_norm")
        config = {"name": name, "momentum": MOMENTUM, "epsilon": EPSILON}
        linear = replace(network.layers[layer.name].configured(use_bias=False), weights=layer.weights[:1])
        network = fold.appended(network, linear, BATCH_NORM, config, bias_only(bias, EPSILON))
        names.append(name)
    return network, tuple(names)


def bias_only(bias: NDArray[Any], epsilon: float) -> Weights:
    """Return gamma, beta, mean and variance of a batch norm that only adds a bias."""
    return (np.ones_like(bias), bias, np.zeros_like(bias), np.full_like(bias, 1 - epsilon))


def with_statistics(norm: Layer, mean: NDArray[Any], variance: NDArray[Any]) -> Layer:
    """Return a batch norm with other statistics that computes the same in inference.

    Args:
        norm: a batch norm with beta and gamma.
        mean: the new mean of each channel.
        variance: the new variance of each channel.
    """
    factor, offset = scale_and_shift(norm)
    gamma = factor * np.sqrt(variance + norm.config["epsilon"])
    weights = (gamma, offset + factor * mean, mean, variance)
    return replace(norm, weights=tuple(np.asarray(weight, np.float32) for weight in weights))
