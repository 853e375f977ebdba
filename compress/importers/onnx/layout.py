"""How the network has a tensor of an ONNX graph: the same numbers, in another order and in other sides.

ONNX computes channel-first, Keras channel-last. So no shape of the graph is taken over as it is: a
`Value` says for each number of the network's tensor which of the graph's it is. A reshape, a
transpose, a squeeze or a flatten of the graph then only changes what is said, and no layer comes
of it; one comes when an operator needs the numbers in an order that they are not in.

The graph is one of a batch of 1, and the network does for each sample what the graph does for
its only one. Which of the graph's sides is that of the batch is therefore of no importance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.ir.keras_graph import LayerOutput

Order = tuple[int, ...]
"""Axes of a tensor of the graph, as they follow each other in the network."""


@dataclass(frozen=True)
class OnnxValue:
    """A tensor of the graph as the network has it.

    Attributes:
        tensor: which of the network's.
        shape: in the graph.
        sides: in the network, without the batch.
        parts: the graph's numbers, counted row by row, seen as an array of these sides, each above 1.
        order: the network's numbers, counted likewise, are that array with its sides in this order.
    """

    tensor: LayerOutput
    shape: tuple[int, ...]
    sides: tuple[int, ...]
    parts: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def straight(self) -> bool:
        """Whether the numbers are in the graph's order."""
        return len(self.parts) <= 1

    @property
    def positions(self) -> NDArray[np.int64]:
        """For each number of the network's tensor, the place that it has in the graph's."""
        places = np.arange(prod(self.shape), dtype=np.int64).reshape(self.parts)
        return places.transpose(self.order).reshape(-1)

    def placed(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Numbers of the graph's tensor as the network has them: [...] as `shape` becomes [...] as `sides`."""
        placed: NDArray[Any] = np.broadcast_to(numbers, self.shape).reshape(self.parts).transpose(self.order)
        return placed.reshape(self.sides)


def simplest(parts: Sequence[int], order: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same with as few parts as possible: neighbours that stay neighbours become one."""
    order = [part for part in order if parts[part] > 1]
    starts = [part for at, part in enumerate(order) if at == 0 or not _follows(parts, order[at - 1], part)]
    sizes = {}
    for start, end in pairwise([*(order.index(start) for start in starts), len(order)]):
        sizes[order[start]] = prod(parts[part] for part in order[start:end])
    ranked = sorted(starts)
    return tuple(sizes[start] for start in ranked), tuple(ranked.index(start) for start in starts)


def _follows(parts: Sequence[int], before: int, part: int) -> bool:
    """Whether one part comes right behind another, but for those of 1."""
    return part > before and all(parts[between] == 1 for between in range(before + 1, part))


def laid(tensor: LayerOutput, shape: Sequence[int], order: Order, sides: Sequence[int] | None = None) -> OnnxValue:
    """A value whose axes follow each other in the network in this order."""
    shape = tuple(int(side) for side in shape)
    sides = sides_of(shape, order) if sides is None else tuple(int(side) for side in sides)
    return OnnxValue(tensor, shape, sides, *simplest(shape, order))


def sides_of(shape: Sequence[int], order: Order, *, whole: bool = False) -> tuple[int, ...]:
    """The network's sides for an order: without the first, which is the batch, unless it is more than 1 or `whole`."""
    sides = tuple(shape[axis] for axis in order)
    return sides if whole or len(sides) < 2 or sides[0] != 1 else sides[1:]


def in_shape(value: OnnxValue, shape: Sequence[int]) -> OnnxValue:
    """The same numbers in another shape of the graph."""
    assert prod(shape) == prod(value.shape)
    return replace(value, shape=tuple(int(side) for side in shape))


def _cut(value: OnnxValue) -> tuple[list[int], list[int], list[int]] | None:
    """Parts that lie within one axis each, their order, and the axis of each; None where there are none such."""
    axes = [(axis, side) for axis, side in enumerate(value.shape) if side > 1]
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
    """The graph's axes in another order; None where the numbers have to be moved first."""
    found = _cut(value)
    if found is None:
        return None
    parts, places, owners = found
    ranked = [part for axis in order for part in range(len(parts)) if owners[part] == axis]
    sizes = [parts[part] for part in ranked]
    shape = tuple(value.shape[axis] for axis in order)
    return OnnxValue(value.tensor, shape, value.sides, *simplest(sizes, [ranked.index(part) for part in places]))


def axes_in_network(value: OnnxValue) -> Order | None:
    """The axes above 1 as they follow each other in the network; None where one is spread or mixed."""
    found = _cut(value)
    if found is None:
        return None
    _, places, owners = found
    met: list[int] = []
    last = -1
    for part in places:
        if not met or met[-1] != owners[part]:
            if owners[part] in met:
                return None
            met.append(owners[part])
        elif part < last:
            return None
        last = part
    return tuple(met)


def channel_last(rank: int) -> Order:
    """The order that Keras has images and sequences in: batch, places, channels."""
    return (0, *range(2, rank), 1) if rank > 2 else tuple(range(rank))


def natural(value: OnnxValue) -> Order | None:
    """The order of all axes that the network has them in, or could have without moving a number.

    Axes of 1 may be anywhere: the order is the one that needs no other sides, or else channel-last
    for images and as in the graph for everything else, where these are possible. None as in
    `axes_in_network`.
    """
    met = axes_in_network(value)
    if met is None:
        return None
    rank = len(value.shape)
    usual = [channel_last(rank), tuple(range(rank))]
    fitting = [order for order in usual if tuple(axis for axis in order if value.shape[axis] > 1) == met]
    same = [order for order in fitting if sides_of(value.shape, order) == value.sides]
    if same or fitting:
        return (same or (fitting if rank > 3 else fitting[::-1]))[0]
    ones = [axis for axis in range(rank) if value.shape[axis] == 1]
    return (*ones, *met)


def directly(before: Sequence[int], after: Sequence[int], moved: OnnxValue) -> list[int] | None:
    """How sides are exchanged so that `before` becomes `after`, counted from 1; None where it takes more than that.

    Args:
        before: sides of the network's tensor.
        after: those that it is to have.
        moved: the numbers as they are to be, and in `order` as they are.
    """
    met = [place for place, side in enumerate(before) if side > 1]
    ones = [place for place, side in enumerate(before) if side == 1]
    if [before[place] for place in met] != [moved.parts[part] for part in moved.order]:
        return None
    if len(before) != len(after) or [side for side in after if side > 1] != list(moved.parts):
        return None
    wanted = iter([met[moved.order.index(part)] for part in range(len(moved.parts))])
    free = iter(ones)
    return [1 + (next(wanted) if side > 1 else next(free)) for side in after]
