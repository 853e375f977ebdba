"""The tail of a detector, from its last convolutions to its outputs, as a function that is probed with numbers.

A head is exported in many layouts: transposed, joined over all maps, split by anchor. Probing does not depend on them:
a change at one position of one map changes exactly the output values of that location.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.ir.keras_graph import Layer, LayerOutput, Network, build, tensors_in, without_unused_calls
from compress.ir.layer_specs import INPUT, spec_of

Floats = NDArray[np.float32]
BATCH = 8
"""Samples of random numbers by which functions are told apart."""
BYTES_AT_ONCE = 1 << 27
CHANGED = 1e-5
"""Relative difference above which an output value has changed."""


@dataclass(frozen=True)
class HeadMap:
    """One grid of a detector.

    Attributes:
        cells: rows and columns.
        tensors: the outputs of the last convolutions on this grid.
        widths: their channels.
    """

    cells: tuple[int, int]
    tensors: tuple[LayerOutput, ...]
    widths: tuple[int, ...]

    @property
    def positions(self) -> int:
        """The number of cells."""
        return self.cells[0] * self.cells[1]

    @property
    def channels(self) -> int:
        """The channels of all tensors together."""
        return sum(self.widths)


@dataclass(frozen=True)
class MapProbe:
    """The output values of one map, and random numbers for it.

    Attributes:
        head: the map.
        elements: int [positions, values]: the index of each output value of a location among all output values.
        depends: bool [values, channels]: which channels of its location a value depends on.
        raw: float32 [BATCH, positions, channels]: random numbers of the channels.
        answers: float32 [BATCH, positions, values]: the output values that they give.
    """

    head: HeadMap
    elements: NDArray[np.int64]
    depends: NDArray[np.bool_]
    raw: Floats
    answers: Floats


@dataclass(frozen=True)
class Tail:
    """The tail of a detector.

    Attributes:
        maps: its grids, the finest first.
        shapes: the shapes of the outputs, without the batch.
        model: a Keras model from the tensors of all maps to the outputs.
    """

    maps: tuple[HeadMap, ...]
    shapes: tuple[tuple[int, ...], ...]
    model: Any

    def __call__(self, raw: Sequence[Floats]) -> Floats:
        """Return all output values of a batch, flattened and joined: [n, values].

        Args:
            raw: for each map [n, positions, channels].
        """
        inputs = []
        for head, numbers in zip(self.maps, raw, strict=True):
            parts = np.split(numbers, np.cumsum(head.widths)[:-1], axis=2)
            inputs += [part.reshape(len(part), *head.cells, -1) for part in parts]
        outputs = self.model(inputs, training=False)
        flat = outputs if isinstance(outputs, list | tuple) else [outputs]
        return np.concatenate([np.asarray(each).reshape(len(raw[0]), -1) for each in flat], axis=1)


def tail_of(network: Network) -> Tail | None:
    """Return the tail of a network; None if its outputs do not come from convolutions on grids.

    Args:
        network: in single steps (`compress.ir.passes.fold.unfolded`), with fixed shapes.
    """
    tensors = head_tensors(network)
    shapes = [network.shapes[tensor] for tensor in tensors]
    if not tensors or any(len(shape) != 3 or None in shape for shape in shapes):
        return None
    outputs = [network.shapes[tensor] for tensor in tensors_in(network.outputs)]
    if any(None in shape for shape in outputs):
        return None
    grids = sorted({(int(shape[0] or 0), int(shape[1] or 0)) for shape in shapes}, reverse=True)
    maps = []
    for cells in grids:
        on_grid = [tensor for tensor, shape in zip(tensors, shapes, strict=True) if shape[:2] == cells]
        widths = tuple(int(network.shapes[tensor][2] or 0) for tensor in on_grid)
        maps.append(HeadMap(cells, tuple(on_grid), widths))
    fixed = tuple(tuple(int(side or 0) for side in shape) for shape in outputs)
    return Tail(tuple(maps), fixed, build(_from_tensors(network, [each for head in maps for each in head.tensors])))


def head_tensors(network: Network) -> list[LayerOutput]:
    """Return the outputs of the last convolutions before the network's outputs, in the order of the layers."""
    found, waiting, seen = set(), list(tensors_in(network.outputs)), set()
    while waiting:
        tensor = waiting.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        layer = network.layers[tensor.layer]
        if spec_of(layer).kernels and not _counts_bins(layer):
            found.add(tensor)
        elif layer.calls:
            waiting += layer.inputs(tensor.call)
    order = {name: index for index, name in enumerate(network.layers)}
    return sorted(found, key=lambda tensor: (order[tensor.layer], tensor.call))


def _counts_bins(layer: Layer) -> bool:
    """Return True for a convolution that computes the mean of a distribution over bins: its weights are 0, 1, 2, ..."""
    kernel = layer.weights[0] if layer.weights else np.zeros(0)
    return kernel.size > 2 and np.array_equal(kernel.ravel(), np.arange(kernel.size)) and kernel.shape[-1] == 1


def _from_tensors(network: Network, tensors: Sequence[LayerOutput]) -> Network:
    """Return the part of a network from some tensors, which become its inputs, to its outputs."""
    inputs, moved, added, shapes = [], {}, {}, dict(network.shapes)
    for index, tensor in enumerate(tensors):
        source = LayerOutput(network.free_name(f"head_{index}"))
        shape = network.shapes[tensor]
        added[source.layer] = INPUT.layer(source.layer, (), batch_shape=[None, *shape], dtype="float32")
        shapes[source] = shape
        moved[tensor] = source
        inputs.append(source)
    edited = network.edited(added, moved)
    return without_unused_calls(replace(edited, inputs=inputs, shapes={**shapes, **edited.shapes}))


def probes(tail: Tail, random: np.random.Generator) -> list[MapProbe] | None:
    """Return what each map gives; None if a value depends on several locations.

    Args:
        tail: the tail.
        random: the source of the numbers.
    """
    base = [random.normal(0, 1, (1, head.positions, head.channels)).astype(np.float32) for head in tail.maps]
    if _neighbours_share_values(tail, base):
        return None
    locations = _locations(tail, base, random)
    raw = [random.normal(0, 1, (BATCH, *part.shape[1:])).astype(np.float32) for part in base]
    answers = _in_chunks(tail, raw)
    starts = np.cumsum([0] + [head.positions for head in tail.maps])
    order = np.argsort(locations, kind="stable")  # values of one location together, in the order of the outputs
    bounds = np.searchsorted(locations[order], np.arange(1, starts[-1] + 2))
    found = []
    for index, head in enumerate(tail.maps):
        of_map = [order[bounds[at] : bounds[at + 1]] for at in range(starts[index], starts[index + 1])]
        if len({len(values) for values in of_map}) != 1:
            return None
        elements = np.stack(of_map)
        depends = _dependence(tail, base, index, elements, random)
        found.append(MapProbe(head, elements, depends, raw[index], answers[:, elements]))
    return found


def _neighbours_share_values(tail: Tail, base: list[Floats]) -> bool:
    """Return whether a value depends on two neighbours on the finest map: a cheap test for masks that are enlarged."""
    if min(tail.maps[0].cells) < 2:
        return False
    place = tail.maps[0].positions // 2  # the start of a row, or the middle of one
    moved = [np.repeat(part, 3, axis=0) for part in base]
    moved[0][1, place] += 0.7
    moved[0][2, place + 1] += 0.7
    first, second = _changes(_in_chunks(tail, moved))
    return bool((first & second).any())


def _locations(tail: Tail, base: list[Floats], random: np.random.Generator) -> NDArray[np.int64]:
    """Return for each output value the number of its location over all maps, from 1; 0 if it is constant."""
    count = sum(head.positions for head in tail.maps)
    numbers = np.arange(1, count + 1)
    bits = int(count).bit_length()
    marks = (numbers[None, :] >> np.arange(bits)[:, None]) & 1
    changed = np.zeros((bits, 1), bool)
    for _ in range(2):  # by chance, a value may be the same after one change
        moved, start = [], 0
        for head, part in zip(tail.maps, base, strict=True):
            step = random.uniform(0.4, 0.9, part.shape) * random.choice([-1, 1], part.shape)
            here = marks[:, start : start + head.positions, np.newaxis]
            moved.append(np.concatenate([part, (part + here * step).astype(np.float32)]))
            start += head.positions
        changed = changed | _changes(_in_chunks(tail, moved))
    return np.asarray((changed.astype(np.int64) << np.arange(bits)[:, None]).sum(axis=0))


def _dependence(
    tail: Tail, base: list[Floats], index: int, elements: NDArray[np.int64], random: np.random.Generator
) -> NDArray[np.bool_]:
    """Return which channels of a location each of its values depends on, measured at three positions."""
    head = tail.maps[index]
    places = sorted({0, head.positions // 2, head.positions - 1})
    depends = np.zeros((elements.shape[1], head.channels), bool)
    for first in range(0, head.channels, 64):
        channels = range(first, min(first + 64, head.channels))
        moved = [np.repeat(part, len(channels) + 1, axis=0) for part in base]
        for row, channel in enumerate(channels, 1):
            moved[index][row, places, channel] += random.choice([-0.7, 0.7])
        changed = _changes(_in_chunks(tail, moved))
        for place in places:
            depends[:, list(channels)] |= changed[:, elements[place]].T
    return depends


def _changes(answers: Floats) -> NDArray[np.bool_]:
    """Return which values of rows 1, 2, ... differ from those of row 0."""
    return np.asarray(np.abs(answers[1:] - answers[0]) > CHANGED * (np.abs(answers[0]) + 1e-3))


def _in_chunks(tail: Tail, raw: Sequence[Floats]) -> Floats:
    values = sum(int(np.prod(shape)) for shape in tail.shapes) + sum(part[0].size for part in raw)
    rows = max(1, BYTES_AT_ONCE // (8 * values))
    parts = [tail([part[at : at + rows] for part in raw]) for at in range(0, len(raw[0]), rows)]
    return np.concatenate(parts)
