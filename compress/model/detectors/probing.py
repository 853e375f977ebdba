"""The tail of a detector, from its last convolutions to its outputs, as a function that is probed with values.

A head is exported in many layouts: transposed, joined over all maps, split by anchor. Probing does not depend on them:
a change at one position of one map changes exactly the output values of that location.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build, tensors_in, without_unused_calls
from compress.model.ir.layer_specs import INPUT, spec_of

Floats = NDArray[np.float32]
BATCH = 8
"""Number of random samples that distinguish functions from each other."""
WIDE = 4.0
"""Factor of the values for maps whose boxes are mostly cut off at the border of the image."""
MORE = 4
"""Times as many samples for a detector with such maps."""
MANY = 0.05
"""Fraction of the values of such maps that are mostly cut off."""
LARGEST = 3.0
"""Largest magnitude of the random values that distinguish functions from each other."""
BYTES_AT_ONCE = 1 << 27
"""Memory of the values that are computed at once: a head with many anchors is computed in parts."""
SPREADS = (1.0, 1.0, 2.0, 4.0, 4.0, 8.0, 8.0, 8.0)
"""Standard deviations of the values of each attempt to find locations. A box that is cut off at the border of the
image does not move with small values."""
PLACES = 64
"""Positions at which dependence is measured; maps with fewer are measured more often."""
MOST_ATTEMPTS = 24
"""Three rounds over SPREADS: a saturated score needs several random inputs until it changes."""
CHANGED = 1e-5
"""Relative difference above which an output value has changed."""


@dataclass(frozen=True)
class HeadMap:
    """One grid of a detector.

    Attributes:
        tensors: the outputs of the last convolutions on this grid.
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
    """The output values of one map, and random values for it.

    Attributes:
        elements: int [positions, values]: the index of each output value of a location among all output values.
        depends: bool [values, channels]: which channels of its location a value depends on.
        raw: float32 [samples, positions, channels]: random values of the channels.
        answers: float32 [samples, positions, values]: the output values that they give.
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
        model: a Keras model from the tensors of all maps to the outputs.
    """

    maps: tuple[HeadMap, ...]
    shapes: tuple[tuple[int, ...], ...]
    model: Any

    def __call__(self, raw: Sequence[Floats]) -> Floats:
        """Return all output values [n, values] of the values [n, positions, channels] of each map."""
        inputs = []
        for head, values in zip(self.maps, raw, strict=True):
            parts = np.split(values, np.cumsum(head.widths)[:-1], axis=2)
            inputs += [part.reshape(len(part), *head.cells, -1) for part in parts]
        outputs = self.model(inputs, training=False)
        flat = outputs if isinstance(outputs, list | tuple) else [outputs]
        return np.concatenate([np.asarray(output).reshape(len(raw[0]), -1) for output in flat], axis=1)


def tail_of(network: Network) -> Tail | None:
    """Return the tail of a network; None if its outputs do not come from convolutions on grids alone.

    The network is in single steps (`compress.model.ir.passes.fold.unfolded`), with fixed shapes.
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
    tail = _from_tensors(network, [tensor for head in maps for tensor in head.tensors])
    if any(tensor.layer in tail.layers for tensor in tensors_in(network.inputs)):
        return None  # an output reads the input of the network past the last convolutions
    return Tail(tuple(maps), fixed, build(tail))


def head_tensors(network: Network) -> list[LayerOutput]:
    """Return the outputs of the last convolutions before the network's outputs, in the order of the layers."""
    tensors, waiting, seen = set(), list(tensors_in(network.outputs)), set()
    while waiting:
        tensor = waiting.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        layer = network.layers[tensor.layer]
        if spec_of(layer).kernels and not _counts_bins(layer):
            tensors.add(tensor)
        else:
            waiting += layer.inputs(tensor.call)
    order = {name: index for index, name in enumerate(network.layers)}
    return sorted(tensors, key=lambda tensor: (order[tensor.layer], tensor.call))


def _counts_bins(layer: Layer) -> bool:
    """Return True for a convolution that computes the mean of a distribution over bins: its weights are 0, 1, 2, ...

    In a file that was quantized, they are rounded to 127 steps.
    """
    kernel = layer.weights[0] if layer.weights else np.zeros(0)
    if kernel.size <= 2 or kernel.shape[-1] != 1:
        return False
    bins = np.arange(kernel.size)
    return bool(np.abs(kernel.ravel() - bins).max() <= 0.51 * bins[-1] / 127)


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
    """Return the output values of each map; None if a value depends on several locations."""
    if _neighbours_share_values(tail, _random_values(tail, 1.0, random)):
        return None
    locations = _locations(tail, random)
    if locations is None:
        return None
    starts = np.cumsum([0] + [head.positions for head in tail.maps])
    raw, answers = _answers(tail, locations, random)
    order = np.argsort(locations, kind="stable")  # values of one location together, in the order of the outputs
    bounds = np.searchsorted(locations[order], np.arange(1, starts[-1] + 2))
    map_probes = []
    for index, head in enumerate(tail.maps):
        elements = np.stack([order[bounds[at] : bounds[at + 1]] for at in range(starts[index], starts[index + 1])])
        depends = np.zeros((elements.shape[1], head.channels), bool)
        for attempt, spread in enumerate(itertools.islice(itertools.cycle(SPREADS), MOST_ATTEMPTS)):
            if attempt * head.positions >= PLACES and depends.any(axis=1).all():
                break
            depends |= _dependence(tail, spread, index, elements, random)
        map_probes.append(MapProbe(head, elements, depends, raw[index], answers[:, elements]))
    return map_probes


def _neighbours_share_values(tail: Tail, base: list[Floats]) -> bool:
    """Return whether a value depends on two neighbours on the finest map: a cheap test for masks that are enlarged."""
    if min(tail.maps[0].cells) < 2:
        return False
    position = tail.maps[0].positions // 2  # the start of a row, or the middle of one
    moved = [np.repeat(part, 3, axis=0) for part in base]
    moved[0][1, position] += 0.7
    moved[0][2, position + 1] += 0.7
    first, second = _changes(_in_chunks(tail, moved))
    return bool((first & second).any())


def _answers(tail: Tail, locations: NDArray[np.int64], random: np.random.Generator) -> tuple[list[Floats], Floats]:
    """Return random values for each map, and the output values that they give."""
    shapes = [(BATCH, head.positions, head.channels) for head in tail.maps]
    raw = [_within(random.normal(0, 1, shape)) for shape in shapes]
    answers = _in_chunks(tail, raw)
    ends = np.cumsum([shape[1] for shape in shapes])
    of_map = [(locations > end - shape[1]) & (locations <= end) for end, shape in zip(ends, shapes, strict=True)]
    factors = [WIDE if _is_mostly_cut_off(answers[:, mask]) else 1.0 for mask in of_map]
    if max(factors) == 1:
        return raw, answers
    more = [(MORE * BATCH, *shape[1:]) for shape in shapes]
    raw = [
        np.float32(factor) * _within(random.normal(0, 1, shape)) for factor, shape in zip(factors, more, strict=True)
    ]
    return raw, _in_chunks(tail, raw)


def _is_mostly_cut_off(answers: Floats) -> bool:
    """Return True if most samples of some output value have the same smallest or largest value."""
    at_border = (answers == answers.min(axis=0)) | (answers == answers.max(axis=0))
    return bool((at_border.mean(axis=0) > 0.5).mean() > MANY)


def _within(values: NDArray[np.float64]) -> Floats:
    """Return values up to `LARGEST` in size: decoders cut off the exponents of outliers, each at its own limit."""
    return np.clip(values, -LARGEST, LARGEST).astype(np.float32)


def _random_values(tail: Tail, spread: float, random: np.random.Generator) -> list[Floats]:
    """Return random values for each map: [1, positions, channels]."""
    return [random.normal(0, spread, (1, head.positions, head.channels)).astype(np.float32) for head in tail.maps]


def _locations(tail: Tail, random: np.random.Generator) -> NDArray[np.int64] | None:
    """Return for each output value the number of its location over all maps, from 1; 0 if it is constant.

    None if the locations of a map do not have equal numbers of values.
    """
    sizes = [head.positions for head in tail.maps]
    numbers = np.arange(1, sum(sizes) + 1)
    bits = len(numbers).bit_length()
    marks = (numbers[None, :] >> np.arange(bits)[:, None]) & 1
    changed = np.zeros((bits, 1), bool)
    for attempt, spread in enumerate(SPREADS):
        moved, start = [], 0
        for part in _random_values(tail, spread, random):
            step = spread * random.uniform(0.4, 0.9, part.shape) * random.choice([-1, 1], part.shape)
            here = marks[:, start : start + part.shape[1], np.newaxis]
            moved.append(np.concatenate([part, (part + here * step).astype(np.float32)]))
            start += part.shape[1]
        changed = changed | _changes(_in_chunks(tail, moved))
        for known in (changed, _filled(changed, tail.shapes)):
            locations = (known.astype(np.int64) << np.arange(bits)[:, None]).sum(axis=0)
            if attempt > 0 and _are_even(locations, sizes):  # by chance, a value may be the same after one change
                return np.asarray(locations)
    return None


def _filled(changed: NDArray[np.bool_], shapes: Sequence[tuple[int, ...]]) -> NDArray[np.bool_]:
    """Return changes where each value also has those of the others of its location, in outputs where a dimension has
    the values of one location: a coordinate that is cut off at the border changes less often than they do."""
    filled = []
    sizes = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    for part, shape in zip(np.split(changed, sizes, axis=1), shapes, strict=True):
        known = part.reshape(-1, *shape)
        for axis in range(1, known.ndim):
            together = np.broadcast_to(known.any(axis=axis, keepdims=True), known.shape)
            if (known == together).all(axis=0).mean() > 0.5:  # else several locations
                known = together
        filled.append(known.reshape(len(changed), -1))
    return np.concatenate(filled, axis=1)


def _are_even(locations: NDArray[np.int64], sizes: Sequence[int]) -> bool:
    """Return True if the locations of each map have equal numbers of values."""
    counts = np.bincount(locations, minlength=sum(sizes) + 1)
    if len(counts) != sum(sizes) + 1:
        return False
    return all(len(set(of_map.tolist())) == 1 for of_map in np.split(counts[1:], np.cumsum(sizes)[:-1]))


def _dependence(
    tail: Tail, spread: float, index: int, elements: NDArray[np.int64], random: np.random.Generator
) -> NDArray[np.bool_]:
    """Return the channels of a location on which each of its values depends, at any of some positions."""
    base = _random_values(tail, spread, random)
    head = tail.maps[index]
    positions = np.unique(np.linspace(0, head.positions - 1, PLACES).astype(np.int64))
    depends = np.zeros((elements.shape[1], head.channels), bool)
    for first in range(0, head.channels, 64):
        channels = range(first, min(first + 64, head.channels))
        moved = [np.repeat(part, len(channels) + 1, axis=0) for part in base]
        for row, channel in enumerate(channels, 1):
            moved[index][row, positions, channel] += spread * random.choice([-0.7, 0.7])
        changed = _changes(_in_chunks(tail, moved))
        depends[:, list(channels)] = changed[:, elements[positions]].any(axis=1).T
    return depends


def _changes(answers: Floats) -> NDArray[np.bool_]:
    """Return the values of rows 1, 2 and so on that differ from the values of row 0."""
    return np.asarray(np.abs(answers[1:] - answers[0]) > CHANGED * (np.abs(answers[0]) + 1e-3))


def _in_chunks(tail: Tail, raw: Sequence[Floats]) -> Floats:
    values = sum(int(np.prod(shape)) for shape in tail.shapes) + sum(part[0].size for part in raw)
    rows = max(1, BYTES_AT_ONCE // (8 * values))
    parts = [tail([part[at : at + rows] for part in raw]) for at in range(0, len(raw[0]), rows)]
    return np.concatenate(parts)
