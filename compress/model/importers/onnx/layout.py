"""Layout of an ONNX tensor in the network: the same values in another order and another shape.

ONNX computes channel-first, Keras channel-last. An `OnnxValue` maps each value of the network's tensor to a value of
the graph's tensor. A reshape, transpose, squeeze or flatten in the graph only changes this mapping and adds no layer.
A layer is added when an operator needs the values in another order.

The graph has a batch of 1, and the network computes for each sample what the graph computes for its single sample. The
position of the batch among the graph's dimensions is therefore not important.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.keras_graph import LayerOutput

Order = tuple[int, ...]
"""Axes of a tensor of the graph, in the order of the network."""


@dataclass(frozen=True)
class OnnxValue:
    """A tensor of the graph, and its layout in the network.

    Attributes:
        shape: the shape in the graph.
        network_shape: the shape in the network, without the batch.
        parts: dimensions, each above 1, of the graph's values as a row-major array.
        order: transposition of that array that gives the network's values in row-major order.
    """

    tensor: LayerOutput
    shape: tuple[int, ...]
    network_shape: tuple[int, ...]
    parts: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def straight(self) -> bool:
        """Whether the values are in the graph's order."""
        return len(self.parts) <= 1

    @property
    def positions(self) -> NDArray[np.int64]:
        """The index in the graph's tensor of each value of the network's tensor."""
        indices = np.arange(prod(self.shape), dtype=np.int64).reshape(self.parts)
        return indices.transpose(self.order).reshape(-1)

    def placed(self, array: NDArray[Any]) -> NDArray[Any]:
        """Rearrange an array from the graph's `shape` to the network's `network_shape`."""
        placed: NDArray[Any] = np.broadcast_to(array, self.shape).reshape(self.parts).transpose(self.order)
        return placed.reshape(self.network_shape)


def simplest(parts: Sequence[int], order: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Merge adjacent parts that stay adjacent, so that the number of parts is minimal."""
    order = [part for part in order if parts[part] > 1]
    starts = [part for at, part in enumerate(order) if at == 0 or not _follows(parts, order[at - 1], part)]
    sizes = {}
    for start, end in pairwise([*(order.index(start) for start in starts), len(order)]):
        sizes[order[start]] = prod(parts[part] for part in order[start:end])
    ranked = sorted(starts)
    return tuple(sizes[start] for start in ranked), tuple(ranked.index(start) for start in starts)


def _follows(parts: Sequence[int], before: int, part: int) -> bool:
    """Whether one part directly follows another, without regard to parts of 1."""
    return part > before and all(parts[between] == 1 for between in range(before + 1, part))


def laid(
    tensor: LayerOutput, shape: Sequence[int], order: Order, network_shape: Sequence[int] | None = None
) -> OnnxValue:
    """Return a value whose axes have this order in the network."""
    shape = tuple(int(size) for size in shape)
    if network_shape is None:
        network_shape = network_shape_of(shape, order)
    return OnnxValue(tensor, shape, tuple(int(size) for size in network_shape), *simplest(shape, order))


def network_shape_of(shape: Sequence[int], order: Order, *, extra_batch: bool = False) -> tuple[int, ...]:
    """Return the network's dimensions for an order of the axes.

    Without `extra_batch` the first axis is the network's batch, if its size is 1, and is left out.
    """
    sizes = tuple(shape[axis] for axis in order)
    return sizes if extra_batch or len(sizes) < 2 or sizes[0] != 1 else sizes[1:]


def in_shape(value: OnnxValue, shape: Sequence[int]) -> OnnxValue:
    """Return the value with another shape in the graph."""
    assert prod(shape) == prod(value.shape)
    return replace(value, shape=tuple(int(size) for size in shape))


def _cut(value: OnnxValue) -> tuple[list[int], list[int], list[int]] | None:
    """Split the parts at axis boundaries; return parts, order and the axis of each part. None if not possible."""
    axes = [(axis, size) for axis, size in enumerate(value.shape) if size > 1]
    parts: list[int] = []
    owners: list[int] = []
    pieces: list[list[int]] = []
    at, left = 0, axes[0][1] if axes else 1
    for part in value.parts:
        pieces.append([])
        while part > 1:
            size = min(part, left)
            if part % size or left % size:
                return None
            pieces[-1].append(len(parts))
            parts.append(size)
            owners.append(axes[at][0])
            part, left = part // size, left // size
            if left == 1 and at + 1 < len(axes):
                at, left = at + 1, axes[at + 1][1]
    return parts, [piece for part in value.order for piece in pieces[part]], owners


def transposed(value: OnnxValue, order: Order) -> OnnxValue | None:
    """Transpose the graph's axes; None if the values have to be moved first."""
    cut = _cut(value)
    if cut is None:
        return None
    parts, piece_order, owners = cut
    ranked = [part for axis in order for part in range(len(parts)) if owners[part] == axis]
    sizes = [parts[part] for part in ranked]
    shape = tuple(value.shape[axis] for axis in order)
    return OnnxValue(
        value.tensor, shape, value.network_shape, *simplest(sizes, [ranked.index(part) for part in piece_order])
    )


def axes_in_network(value: OnnxValue) -> Order | None:
    """Return the axes above 1 in the network's order; None if one is split or mixed with another."""
    cut = _cut(value)
    if cut is None:
        return None
    _, piece_order, owners = cut
    met: list[int] = []
    last = -1
    for part in piece_order:
        if not met or met[-1] != owners[part]:
            if owners[part] in met:
                return None
            met.append(owners[part])
        elif part < last:
            return None
        last = part
    return tuple(met)


def channel_last(rank: int) -> Order:
    """Return the Keras order of images and sequences: batch, spatial dimensions, channels."""
    return (0, *range(2, rank), 1) if rank > 2 else tuple(range(rank))


def natural(value: OnnxValue) -> Order | None:
    """Return the order of all axes in the network that needs no transpose.

    Axes of 1 can have any position. The preferred order needs no reshape; then channel-last for images, and the graph's
    order for other tensors. None as in `axes_in_network`.
    """
    met = axes_in_network(value)
    if met is None:
        return None
    rank = len(value.shape)
    usual = [channel_last(rank), tuple(range(rank))]
    fitting = [order for order in usual if tuple(axis for axis in order if value.shape[axis] > 1) == met]
    same = [order for order in fitting if network_shape_of(value.shape, order) == value.network_shape]
    if same or fitting:
        return (same or (fitting if rank > 3 else fitting[::-1]))[0]
    ones = [axis for axis in range(rank) if value.shape[axis] == 1]
    return (*ones, *met)


def directly(before: Sequence[int], after: Sequence[int], moved: OnnxValue) -> list[int] | None:
    """Return the `dims` of a Permute layer from `before` to `after`; None if one Permute is not sufficient.

    Args:
        before: dimensions of the network's tensor.
        after: its target dimensions.
        moved: the target layout; its `order` is the current one.
    """
    met = [index for index, size in enumerate(before) if size > 1]
    ones = [index for index, size in enumerate(before) if size == 1]
    if [before[index] for index in met] != [moved.parts[part] for part in moved.order]:
        return None
    if len(before) != len(after) or [size for size in after if size > 1] != list(moved.parts):
        return None
    sources = iter([met[moved.order.index(part)] for part in range(len(moved.parts))])
    free = iter(ones)
    return [1 + (next(sources) if size > 1 else next(free)) for size in after]
