"""Copy the weights of a trained model into another model of the same structure, layer by layer.

Names do not matter: the layers with kernels are paired in order of computation, as long as their kernels have the same
shape. So a model with a new head gets all layers before it. Batch norms of the trained model are folded; a batch norm
of the other model gets the bias, and gives the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, Weights
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.passes import fold
from compress.model.ir.passes.fold import bias_only


@dataclass(frozen=True)
class CopiedWeights:
    """A network with copied weights.

    Attributes:
        copied: the layers with kernels that got weights, in order of computation.
        others: the layers with kernels that keep theirs: the head, usually.
        norms: the batch norms after the copied layers. Their statistics do not fit the data yet: mean 0, variance 1.
    """

    network: Network
    copied: tuple[str, ...]
    others: tuple[str, ...]
    norms: tuple[str, ...]


def copy_weights(target: Network, trained: Network) -> CopiedWeights:
    """Return `target` with the weights of `trained`.

    Raises:
        ModelError: not even the first layers have kernels of the same shape.
    """
    ours, theirs = _with_kernels(target), _with_kernels(fold.folded(trained))
    readers = target.consumers()
    layers: dict[str, Layer] = {}
    copied: list[str] = []
    norms: list[str] = []
    for layer, source in zip(ours, theirs, strict=False):
        norm = _norm_after(target, layer, readers.get(LayerOutput(layer.name), []))
        changed = _with_weights(layer, norm, source)
        if changed is None:
            break
        layers.update({changed_layer.name: changed_layer for changed_layer in changed})
        copied.append(layer.name)
        norms += [] if norm is None else [norm.name]
    if not copied:
        shapes = [f"{layers_[0].kind} {list(layers_[0].weights[0].shape)}" for layers_ in (ours, theirs) if layers_]
        raise ModelError(
            f"the weights do not fit: the first layers are {' and '.join(shapes) or 'missing'}",
            allowed="a trained model of the same structure and width",
        )
    network = replace(target, layers={**target.layers, **layers})
    return CopiedWeights(network, tuple(copied), tuple(layer.name for layer in ours[len(copied) :]), tuple(norms))


def _with_kernels(network: Network) -> list[Layer]:
    """Return the layers with exactly one kernel, in order of computation."""
    return [layer for layer, call in network.in_order() if call == 0 and spec_of(layer).kernel is not None]


def _norm_after(network: Network, layer: Layer, readers: Sequence[tuple[str, int]]) -> Layer | None:
    """Return the batch norm that is the only reader of a layer called once."""
    if len(layer.calls) != 1 or len(readers) != 1:
        return None
    reader = network.layers[readers[0][0]]
    return reader if spec_of(reader).is_batch_norm and len(reader.calls) == 1 else None


def _with_weights(layer: Layer, norm: Layer | None, source: Layer) -> list[Layer] | None:
    """Return a layer, and the batch norm after it, with the weights of a trained layer; None if they do not fit."""
    kernel, *biases = source.weights
    if layer.weights[0].shape != kernel.shape or spec_of(layer).kernel != spec_of(source).kernel:
        return None
    channels = np.prod([kernel.shape[axis] for axis in spec_of(source).kernels[0].output_axes])
    bias = biases[0] if biases else np.zeros(int(channels), np.float32)
    has_bias = layer.config.get("use_bias", True)
    if norm is not None:
        own_bias = (np.zeros_like(layer.weights[1]),) if has_bias else ()
        weights = _norm_weights(norm, bias)
        if weights is None:
            return None
        return [replace(layer, weights=(kernel, *own_bias)), replace(norm, weights=weights)]
    if not has_bias:
        return None if bias.any() else [replace(layer, weights=(kernel,))]
    return [replace(layer, weights=(kernel, bias))]


def _norm_weights(norm: Layer, bias: NDArray[Any]) -> Weights | None:
    """Return the weights of a batch norm that only adds a bias; None if it has no beta."""
    if not norm.config.get("center", True) or norm.config.get("renorm"):
        return None
    weights = bias_only(bias, norm.config["epsilon"])
    return weights if norm.config.get("scale", True) else weights[1:]
