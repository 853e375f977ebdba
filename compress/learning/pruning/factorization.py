"""Low-rank factorization as pruning: the rank of a layer is the width of a layer group.

With `expanded`, every layer that may be factorized is in factors of full rank, which compute the same. The channels
between the factors are ranked by importance and removed like all others. A rank that is not reduced costs nothing:
that layer stays whole (`Factorization.form`).

Bases are chosen on samples, so that a rank changes the outputs of the layer least, not its weights. Output channels
count by the factor of the batch norm that follows. Bases are about orthonormal, not scaled by power: then a step of
training moves the outputs about as far as in the whole layer, and `quantize` equalizes the channels between factors.

Sources: Zhang et al., Accelerating Very Deep Convolutional Networks, PAMI 2016 (bases from outputs on samples); Yuan et
al., ASVD, 2023 (weights times the inputs' second moments).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.progress import SILENT, Progress
from compress.learning.pruning.importance import batch_norm_factor
from compress.learning.pruning.layer_groups import MIN_WIDTH
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build, subnetwork
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.passes import factorize
from compress.model.ir.passes.factorize import Projection, Side
from compress.model.ir.passes.fold import split_activations
from compress.model.ir.tensorflow import batch_signature, keras, run

MAX_CHANNELS = 4096
"""Layers with more channels on the side of a rank stay whole: its basis would take minutes."""
REGULARIZATION = 1e-3
"""Share of the outputs' power that directions without samples are taken to have."""
SMALLEST_FACTOR = 1e-3
"""The least that an output channel counts, as a share of the one that counts most."""
_BATCH_BYTES = 1 << 27
_BATCH = 64
Moments = NDArray[np.float64]
"""Mean product of each pair of channels [channels, channels]."""


@dataclass(frozen=True, eq=False)
class Rank:
    """The rank of one side of a layer.

    Attributes:
        layer: the name of the layer.
        side: the side.
        factor: the name of the layer that makes the channels that are counted.
        projection: to those channels, all of them, the most important first.
        energy: the mean square that each of them adds to the outputs of the layer.
        largest: the largest rank with fewer weights than the whole layer.
        of_window: whether the layer reads several positions: then each side has its own rank.
    """

    layer: str
    side: Side
    factor: str
    projection: Projection
    energy: NDArray[np.float64]
    largest: int
    of_window: bool


@dataclass(frozen=True)
class Factorization:
    """A network, and the ranks that can be reduced in it.

    Attributes:
        network: the network with all layers whole.
        ranks: the ranks.
    """

    network: Network
    ranks: tuple[Rank, ...] = ()

    @cached_property
    def expanded(self) -> Network:
        """The network with all ranks, at their full sizes."""
        return self.form(self.ranks)

    def form(self, ranks: Collection[Rank]) -> Network:
        """Return the network with these ranks, at their full sizes, and all other layers whole."""
        network = self.network
        names = {(rank.layer, rank.side): rank.factor for rank in self.ranks}
        for layer in dict.fromkeys(rank.layer for rank in ranks):
            projections = {rank.side: rank.projection for rank in ranks if rank.layer == layer}
            side_names: dict[Side, str] = {side: names[layer, side] for side in projections}
            network = factorize.factorized(network, layer, projections, side_names)
        return network

    def of_layer(self, layer: str) -> tuple[Rank, ...]:
        """Return the ranks of a layer."""
        return tuple(rank for rank in self.ranks if rank.layer == layer)


def find(network: Network, inputs: NDArray[np.float32], progress: Progress = SILENT) -> Factorization:
    """Return the ranks of a network that could be reduced.

    Args:
        network: the network.
        inputs: samples [n, ...].
        progress: receives the number of samples that are done.
    """
    layers = [layer for layer in network.layers.values() if _is_candidate(layer, network)]
    narrow = [layer for layer in layers if _has_window(layer)]
    moments = _second_moments(network, layers, narrow, inputs, progress)
    ranks: list[Rank] = []
    for layer in layers:
        names = factorize.factor_names(network, layer.name)
        factors = _output_factors(layer, network)
        before, after = moments.get((layer.name, "inputs")), moments[layer.name, "outputs"]
        bases: dict[Side, tuple[Projection, NDArray[Any]]] = {"outputs": _output_basis(layer, after, factors)}
        if before is not None:
            bases["inputs"] = _input_basis(layer, before, factors)
        for side, basis in bases.items():
            if (limit := _largest(layer, side)) > MIN_WIDTH:
                ranks.append(Rank(layer.name, side, names[side], *basis, limit, before is not None))
    return Factorization(network, tuple(ranks))


def _is_candidate(layer: Layer, network: Network) -> bool:
    """Whether a layer can be factorized, and is not a factor already."""
    if not layer.calls or factorize.refusal(layer) is not None:
        return False
    *_, channels, outputs = layer.weights[0].shape
    if max(outputs, channels if _has_window(layer) else 0) > MAX_CHANNELS:
        return False
    source = layer.inputs()[0]
    consumers = network.consumers()
    readers = [network.layers[name] for name, _ in consumers.get(LayerOutput(layer.name), [])]
    makes_factor = factorize.is_linear(layer) and [reader for reader in readers if spec_of(reader).channels == "mixes"]
    reads_factor = factorize.is_linear(network.layers[source.layer]) and len(consumers[source]) == 1
    return not makes_factor and not reads_factor and max(_largest(layer, side) for side in _sides(layer)) > MIN_WIDTH


def _sides(layer: Layer) -> tuple[Side, ...]:
    return ("inputs", "outputs") if _has_window(layer) else ("outputs",)


def _has_window(layer: Layer) -> bool:
    """Whether a layer reads several positions: then the ranks of its inputs and outputs are two."""
    return prod(layer.weights[0].shape[:-2]) > 1


def _largest(layer: Layer, side: Side) -> int:
    """Return the largest rank with which a layer has fewer weights than whole."""
    *window, channels, outputs = map(int, layer.weights[0].shape)
    rows = prod(window) * channels
    columns = outputs
    if side == "inputs":
        rows, columns = channels, prod(window) * outputs
    return (rows * columns - 1) // (rows + columns)


def _output_factors(layer: Layer, network: Network) -> NDArray[np.float64]:
    """Return how much each output channel of a layer counts: the factor of the batch norm after it, or 1."""
    readers = network.consumers().get(LayerOutput(layer.name), [])
    norms = [network.layers[name] for name, _ in readers if spec_of(network.layers[name]).is_batch_norm]
    channels = layer.weights[0].shape[-1]
    if len(norms) != 1 or len(readers) != 1:
        return np.ones(channels)
    factors = np.broadcast_to(np.abs(batch_norm_factor(norms[0])), (channels,))
    bounded = np.maximum(factors, SMALLEST_FACTOR * max(float(factors.max()), 1e-12))
    relative: NDArray[np.float64] = bounded / bounded.mean()
    return relative


def _output_basis(layer: Layer, moments: Moments, factors: NDArray[np.float64]) -> tuple[Projection, NDArray[Any]]:
    """Return the projection of a layer's outputs that keeps most of their power, and the power of each channel.

    Args:
        layer: the layer.
        moments: of its outputs without bias.
        factors: how much each output channel counts.
    """
    kernel = layer.weights[0].astype(np.float64).reshape(-1, len(factors)) * factors
    weights = kernel.T @ kernel
    power = moments * np.outer(factors, factors)
    unseen = REGULARIZATION * max(float(np.trace(power)), 1e-12) / max(float(np.trace(weights)), 1e-12)
    values, vectors = _eigen(power + unseen * weights)
    count = min(kernel.shape)
    values, vectors = values[:count], vectors[:, :count]
    return Projection(factors[:, np.newaxis] * vectors, vectors.T / factors), values


def _input_basis(layer: Layer, moments: Moments, factors: NDArray[np.float64]) -> tuple[Projection, NDArray[Any]]:
    """Return the projection of a convolution's inputs that keeps most of its outputs' power; see `_output_basis`.

    `moments` are those of the inputs; positions of a window count as independent.
    """
    channels = len(moments)
    regular = moments + REGULARIZATION * max(float(np.trace(moments)), 1e-12) / channels * np.eye(channels)
    values, vectors = _eigen(regular)
    root = vectors * np.sqrt(values) @ vectors.T
    inverse = vectors / np.sqrt(values) @ vectors.T
    kernel = layer.weights[0].astype(np.float64) * factors
    rows = np.moveaxis(kernel, -2, 0).reshape(channels, -1)
    values, vectors = _eigen(root @ (rows @ rows.T) @ root)
    into = inverse @ vectors
    lengths = np.linalg.norm(into, axis=0)
    return Projection(into / lengths, lengths[:, np.newaxis] * (vectors.T @ root)), values


def _eigen(matrix: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return eigenvalues of a symmetric matrix, the largest first and none below 0, and the eigenvectors."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return np.maximum(values[::-1], 0.0), vectors[:, ::-1]


def _second_moments(
    network: Network,
    layers: Sequence[Layer],
    narrow: Sequence[Layer],
    inputs: NDArray[np.float32],
    progress: Progress,
) -> Mapping[tuple[str, Side], Moments]:
    """Return the second moments of the outputs, without bias, of some layers, and of the inputs of others."""
    import tensorflow

    if not layers:
        return {}
    split = split_activations(network)
    keys: list[tuple[str, Side]] = [(layer.name, "outputs") for layer in layers]
    keys += [(layer.name, "inputs") for layer in narrow]
    tensors = [split.layers[name].inputs()[0] if side == "inputs" else LayerOutput(name) for name, side in keys]
    biases = [np.float32(0) if side == "inputs" else _bias(split.layers[name]) for name, side in keys]
    model = build(subnetwork(split, tensors))

    @tensorflow.function(input_signature=[batch_signature(model)])  # type: ignore[untyped-decorator]
    def products(batch: Any) -> list[Any]:
        values = keras().tree.flatten(run(model, batch))
        rows = [
            tensorflow.reshape(value - bias, (-1, value.shape[-1])) for value, bias in zip(values, biases, strict=True)
        ]
        samples = tensorflow.cast(tensorflow.shape(batch)[0], "float32")
        counts = [tensorflow.cast(tensorflow.shape(matrix)[0], "float32") for matrix in rows]
        return [
            tensorflow.matmul(matrix, matrix, transpose_a=True) * samples / count
            for matrix, count in zip(rows, counts, strict=True)
        ]

    totals: list[Any] = [0.0] * len(keys)
    size = _batch_size(network)
    for start in range(0, len(inputs), size):
        moments = products(tensorflow.constant(inputs[start : start + size]))
        totals = [total + moment.numpy().astype(np.float64) for total, moment in zip(totals, moments, strict=True)]
        progress.update(min(start + size, len(inputs)), len(inputs))
    return {key: total / max(len(inputs), 1) for key, total in zip(keys, totals, strict=True)}


def _bias(layer: Layer) -> Any:
    return layer.weights[1] if layer.config.get("use_bias", True) else np.float32(0)


def _batch_size(network: Network) -> int:
    """Return how many samples are run at once, so that all activations stay within _BATCH_BYTES."""
    values = sum(prod(size or 1 for size in shape) for shape in network.shapes.values())
    return int(np.clip(_BATCH_BYTES // (4 * max(values, 1)), 1, _BATCH))
