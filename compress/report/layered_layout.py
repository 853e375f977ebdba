"""Positions for the nodes of a graph without cycles, in layers from top to bottom, and routes for its edges.

Every edge leads to a lower layer. An edge over several layers gets a bend in each of them, so that it does not cross
nodes. The order in a layer follows the medians of the neighbours, and its positions them, too.

Source of the steps: Sugiyama, Tagawa and Toda, Methods for Visual Understanding of Hierarchical System Structures, IEEE
Transactions on Systems, Man, and Cybernetics 11 (1981).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, median_low

GAP_X = 22.0
"""Space between neighbours of a layer."""
GAP_BEND = 12.0
"""Space next to the bend of an edge."""
GAP_Y = 28.0
"""Space between layers, in which the edges are drawn."""
ORDERING_SWEEPS = 6
BALANCING_SWEEPS = 6
ALIGNING_SWEEPS = 3
HEAVY = 200.0
"""Weight of nodes relative to bends: where there is no space for both, the bend gives way."""

Point = tuple[float, float]
Edge = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A drawing of a graph.

    Attributes:
        centres: the centre of each node.
        routes: the points of each edge, from the lower side of its first node to the upper side of its last one.
        width: the width of the drawing.
        height: its height.
    """

    centres: tuple[Point, ...]
    routes: Mapping[Edge, tuple[Point, ...]]
    width: float
    height: float


@dataclass
class _Layers:
    """Nodes and bends in layers.

    Attributes:
        sizes: width and height of each node; bends follow the nodes.
        rows: the nodes and bends of each layer, from left to right.
        above: the neighbours of each one in the layer above.
        below: those in the layer below.
        chains: the bends of each edge.
        nodes: the number of nodes that are not bends.
    """

    sizes: list[tuple[float, float]]
    rows: list[list[int]]
    above: list[list[int]]
    below: list[list[int]]
    nodes: int
    chains: dict[Edge, list[int]] = field(default_factory=dict)

    def is_bend(self, node: int) -> bool:
        """Whether it is the bend of an edge."""
        return node >= self.nodes


def layout(sizes: Sequence[tuple[float, float]], edges: Sequence[Edge]) -> Layout:
    """Return a drawing of a graph.

    Args:
        sizes: width and height of each node.
        edges: pairs of nodes; no cycle.
    """
    layers = _in_layers(sizes, sorted(set(edges)))
    _order(layers)
    x = _positions(layers)
    left = min((x[node] - layers.sizes[node][0] / 2 for node in range(len(x))), default=0.0)
    x = [position - left for position in x]
    y, heights = _heights(layers)
    width = max((x[node] + layers.sizes[node][0] / 2 for node in range(len(x))), default=0.0)
    centres = tuple((x[node], y[node]) for node in range(layers.nodes))
    routes = {edge: _route(edge, chain, layers, x, y, heights) for edge, chain in layers.chains.items()}
    return Layout(
        centres, routes, width, max((y[n] + layers.sizes[n][1] / 2 for n in range(layers.nodes)), default=0.0)
    )


def _in_layers(sizes: Sequence[tuple[float, float]], edges: Sequence[Edge]) -> _Layers:
    """Return the nodes in layers: each node below all its predecessors, a node without predecessors next to its use."""
    count = len(sizes)
    successors: list[list[int]] = [[] for _ in range(count)]
    predecessors: list[list[int]] = [[] for _ in range(count)]
    for first, last in edges:
        successors[first].append(last)
        predecessors[last].append(first)
    depth = [0] * count
    for node in _topological(successors, predecessors):
        depth[node] = max((depth[before] + 1 for before in predecessors[node]), default=0)
    for node in range(count):
        if not predecessors[node] and successors[node]:
            depth[node] = min(depth[after] for after in successors[node]) - 1
    layers = _Layers(list(sizes), [[] for _ in range(max(depth, default=-1) + 1)], [], [], count)
    layers.above = [[] for _ in range(count)]
    layers.below = [[] for _ in range(count)]
    for node in range(count):
        layers.rows[depth[node]].append(node)
    for first, last in edges:
        _connect(layers, (first, last), depth)
    return layers


def _topological(successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]]) -> list[int]:
    """Return the nodes, each after its predecessors."""
    waiting = [len(before) for before in predecessors]
    ready = [node for node, count in enumerate(waiting) if count == 0]
    for node in ready:  # grows
        for after in successors[node]:
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)
    if len(ready) < len(waiting):
        raise ValueError("the graph has a cycle")
    return ready


def _connect(layers: _Layers, edge: Edge, depth: Sequence[int]) -> None:
    """Add an edge, with a bend in every layer between its nodes."""
    first, last = edge
    chain: list[int] = []
    before = first
    for row in range(depth[first] + 1, depth[last]):
        bend = len(layers.sizes)
        layers.sizes.append((0.0, 0.0))
        layers.above.append([])
        layers.below.append([])
        layers.rows[row].append(bend)
        chain.append(bend)
        layers.below[before].append(bend)
        layers.above[bend].append(before)
        before = bend
    layers.below[before].append(last)
    layers.above[last].append(before)
    layers.chains[edge] = chain


def _order(layers: _Layers) -> None:
    """Order the layers so that few edges cross."""
    positions = [0.0] * len(layers.sizes)
    for row in layers.rows:
        _number(row, positions)
    best = [list(row) for row in layers.rows]
    fewest = _crossings(layers, positions)
    for sweep in range(ORDERING_SWEEPS):
        downwards = sweep % 2 == 0
        neighbours = layers.above if downwards else layers.below
        for row in layers.rows if downwards else reversed(layers.rows):
            middles = {n: median(positions[m] for m in neighbours[n]) if neighbours[n] else positions[n] for n in row}
            row.sort(key=middles.__getitem__)
            _number(row, positions)
        crossings = _crossings(layers, positions)
        if crossings < fewest:
            fewest = crossings
            best = [list(row) for row in layers.rows]
        if fewest == 0:
            break
    layers.rows = best


def _number(row: Sequence[int], positions: list[float]) -> None:
    for index, node in enumerate(row):
        positions[node] = float(index)


def _crossings(layers: _Layers, positions: Sequence[float]) -> int:
    """Return the number of crossings of edges between neighbouring layers."""
    crossings = 0
    for row in layers.rows:
        seen: list[float] = []
        for node in row:
            ends = sorted(positions[after] for after in layers.below[node])
            crossings += sum(len(seen) - bisect_right(seen, end) for end in ends)
            seen = sorted([*seen, *ends])
    return crossings


def _positions(layers: _Layers) -> list[float]:
    """Return the horizontal position of every node and bend."""
    x = [0.0] * len(layers.sizes)
    for row in layers.rows:
        offsets = _offsets(row, layers)
        middle = offsets[-1] / 2 if offsets else 0.0
        for node, offset in zip(row, offsets, strict=True):
            x[node] = offset - middle
    for sweep in range(BALANCING_SWEEPS + ALIGNING_SWEEPS):
        downwards = sweep % 2 == 0
        target = _balanced if sweep < BALANCING_SWEEPS else _aligned
        neighbours = layers.above if downwards else layers.below
        for row in layers.rows if downwards else reversed(layers.rows):
            desired = [target(layers, neighbours[node], x) if neighbours[node] else x[node] for node in row]
            _place(row, layers, desired, x)
    return x


def _balanced(layers: _Layers, neighbours: Sequence[int], x: Sequence[float]) -> float:
    """Return the mean position of neighbours."""
    del layers
    return mean(x[node] for node in neighbours)


def _aligned(layers: _Layers, neighbours: Sequence[int], x: Sequence[float]) -> float:
    """Return the position of the middle neighbour, of nodes rather than of bends, so that chains are straight."""
    nodes = [node for node in neighbours if not layers.is_bend(node)]
    return median_low(x[node] for node in nodes or neighbours)


def _offsets(row: Sequence[int], layers: _Layers) -> list[float]:
    """Return the smallest positions of the nodes of a layer, from 0."""
    offsets: list[float] = []
    for index, node in enumerate(row):
        if index == 0:
            offsets.append(0.0)
            continue
        before = row[index - 1]
        gap = GAP_BEND if layers.is_bend(node) or layers.is_bend(before) else GAP_X
        offsets.append(offsets[-1] + (layers.sizes[before][0] + layers.sizes[node][0]) / 2 + gap)
    return offsets


def _place(row: Sequence[int], layers: _Layers, desired: Sequence[float], x: list[float]) -> None:
    """Move the nodes of a layer to the desired positions, as far as the spaces between them allow.

    The positions minimize the weighted squares of the distances from the desired ones: an isotonic regression.
    """
    blocks: list[tuple[float, float, int]] = []  # mean of (desired position - offset), weight, number of nodes
    offsets = _offsets(row, layers)
    for node, offset, position in zip(row, offsets, desired, strict=True):
        block = (position - offset, 1.0 if layers.is_bend(node) else HEAVY, 1)
        while blocks and blocks[-1][0] > block[0]:
            last = blocks.pop()
            total = last[1] + block[1]
            block = ((last[0] * last[1] + block[0] * block[1]) / total, total, last[2] + block[2])
        blocks.append(block)
    values = [value for value, _, count in blocks for _ in range(count)]
    for node, offset, value in zip(row, offsets, values, strict=True):
        x[node] = value + offset


def _heights(layers: _Layers) -> tuple[list[float], list[float]]:
    """Return the vertical centre of every node and bend, and the height of its layer."""
    y = [0.0] * len(layers.sizes)
    heights = [0.0] * len(layers.sizes)
    top = 0.0
    for row in layers.rows:
        height = max((layers.sizes[node][1] for node in row), default=0.0)
        for node in row:
            y[node] = top + height / 2
            heights[node] = height
        top += height + GAP_Y
    return y, heights


def _route(
    edge: Edge, chain: Sequence[int], layers: _Layers, x: Sequence[float], y: Sequence[float], heights: Sequence[float]
) -> tuple[Point, ...]:
    """Return the points of an edge: it is vertical next to the nodes of the layers that it passes."""
    first, last = edge
    points = [(x[first], y[first] + layers.sizes[first][1] / 2)]
    for bend in chain:
        points += [(x[bend], y[bend] - heights[bend] / 2), (x[bend], y[bend] + heights[bend] / 2)]
    return (*points, (x[last], y[last] - layers.sizes[last][1] / 2))
