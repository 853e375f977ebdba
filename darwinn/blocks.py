"""The blocks that the array computes with, and the channels of tensors in them.

Source of the figures: models compared with what the compiler made of them, 2026-11.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from compress.model.tflite.graph import Graph, Operator, Tensor

INPUT_BLOCK = 4
"""Input channels that a tile of the array reads at once."""
ROW_BLOCK = 64
"""Rows (output channels) that the array computes at once: 16 tiles of 4."""
ROW_STEP = 16
"""Up to one block of outputs, rows come in steps of one row for each tile."""
FEW_ROWS = 4
"""A convolution with at most this number of outputs, and more than one input position, takes 4 rows."""
FLATTENED_MAP_BYTES = 1088
"""A large map of one channel is flattened 16 positions at a time, by a 16x16 identity: 16 * (64 + 4) bytes."""
MAX_JOINED = 256
"""The most concatenations and splits that are followed from one tensor, and the most outputs of a split."""

ChannelSource = tuple[int, int, int]
"""A tensor's index, the first channel, and the number of channels."""


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not less than `value`."""
    return -(-value // step) * step


def padded_rows(outputs: int) -> int:
    """Return the rows for a layer's outputs: a multiple of 16 up to 64, then of 64."""
    return round_up(outputs, ROW_STEP if outputs <= ROW_BLOCK else ROW_BLOCK)


def position(tensor: Tensor) -> tuple[int, int, int]:
    """Return height, width and channels; missing dimensions are 1."""
    height, width, channels = (1, 1, 1, *tensor.shape)[-3:]
    return height, width, channels


def touching_taps(operator: Operator, graph: Graph, kernel: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return the taps of a window, along height and along width, that read an input value at any position.

    On tiny maps the other taps read only padding, and the compiler does not store their weights.
    """
    inputs, outputs = position(graph.tensors[operator.inputs[0]]), position(graph.output_tensors(operator)[0])
    touching = []
    for length, positions, letter, size in zip(inputs, outputs, "HW", kernel, strict=False):
        stride, dilation = operator.option(f"stride{letter}", 1), operator.option(f"dilation{letter}Factor", 1)
        total = max((positions - 1) * stride + (size - 1) * dilation + 1 - length, 0)
        before = total // 2 if operator.option("padding", 0) == 0 else 0
        starts = np.arange(size, dtype=np.int64) * dilation - before
        first = np.maximum(0, -(starts // stride))
        last = np.minimum(positions - 1, (length - 1 - starts) // stride)
        touching.append(np.flatnonzero(first <= last))
    return touching


def channel_sources(index: int, graph: Graph, steps: Iterator[int] | None = None) -> list[ChannelSource]:
    """Return the sources of a tensor's channels before concatenations and splits: tensor, first channel, count."""
    steps = iter(range(MAX_JOINED)) if steps is None else steps
    operator, channels = graph.producer.get(index), position(graph.tensors[index])[2]
    if operator is None or not _along_channels(operator, graph) or next(steps, None) is None:
        return [(index, 0, channels)]
    if operator.name == "CONCATENATION":
        return [source for source_index in operator.inputs for source in channel_sources(source_index, graph, steps)]
    begin = operator.outputs.index(index) * channels
    sources = []
    for tensor, first, count in channel_sources(operator.inputs[1], graph, steps):
        cut = max(begin, 0), min(begin + channels, count)
        if cut[0] < cut[1]:
            sources.append((tensor, first + cut[0], cut[1] - cut[0]))
        begin -= count
    return sources


def unaligned_joins(operator: Operator, graph: Graph) -> Iterator[tuple[int, list[ChannelSource], int]]:
    """Yield the outputs of a CONCATENATION or SPLIT that the compiler computes with a matrix of zeros and ones.

    Channels in whole blocks of 4 need no matrix, and neither do tensors that are only joined and split again.

    Yields:
        The output, the sources of its channels, and the number of channels that the matrix reads, with padding.
    """
    for index in operator.outputs:
        consumers = graph.consumers.get(index, ())
        if index not in graph.outputs and all(consumer.name in ("CONCATENATION", "SPLIT") for consumer in consumers):
            continue
        sources = channel_sources(index, graph)
        aligned = all(first % INPUT_BLOCK == 0 for _, first, _ in sources)
        if not aligned or any(count % INPUT_BLOCK for _, _, count in sources[:-1]):
            read = sum(round_up(position(graph.tensors[tensor])[2], INPUT_BLOCK) for tensor, _, _ in sources)
            yield index, sources, read


def _along_channels(operator: Operator, graph: Graph) -> bool:
    """Return whether an operator concatenates or splits along channels."""
    rank = len(graph.output_tensors(operator)[0].shape)
    if operator.name == "CONCATENATION":
        return bool(operator.option("axis", 0) % max(rank, 1) == rank - 1)
    parts = len(operator.outputs)
    if operator.name != "SPLIT" or parts > MAX_JOINED or not graph.tensors[operator.inputs[0]].is_constant:
        return False
    return int(graph.tensors[operator.inputs[0]].array().ravel()[0]) % max(rank, 1) == rank - 1
