"""Sparse constants of a .tflite file, expanded when the file is read: no operator of the Edge TPU takes them.

The values are stored level by level: a level is a dimension of the tensor, or of the blocks that it is divided into. A
dense level has every index, a sparse one (compressed sparse rows) lists the indices of each entry of the level before.

Source: tensorflow/lite/schema/schema.fbs, SparsityParameters and DimensionMetadata.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.tflite.verifier import Allowance


def expand(source: Any, schema: Any, dtypes: dict[int, str], allowance: Allowance) -> None:
    """Replace the sparse constants of a file, and remove the operators that expand them when the model runs.

    `source` is the schema's `ModelT`, and `dtypes` has the numpy types by the schema's numbers.

    Raises:
        ValueError: the parameters of a constant do not fit its shape or its data.
    """
    for subgraph in source.subgraphs:
        for index, tensor in enumerate(subgraph.tensors):
            if tensor.sparsity is not None and tensor.buffer:
                _expand_tensor(source, schema, tensor, index, dtypes, allowance)
        _remove_densify(source, schema, subgraph)


def _expand_tensor(
    source: Any, schema: Any, tensor: Any, index: int, dtypes: dict[int, str], allowance: Allowance
) -> None:
    if tensor.type not in dtypes:
        raise ValueError(f"tensor {index} is sparse, and of an unknown type")
    kind = np.dtype(dtypes[tensor.type])
    stored = source.buffers[tensor.buffer].data
    values = np.asarray([] if stored is None else stored, np.uint8)
    shape = [int(size) for size in ([] if tensor.shape is None else tensor.shape)]
    allowance.spend(prod(shape) * kind.itemsize)
    if len(values) % kind.itemsize:
        raise ValueError(f"tensor {index} has {len(values):,} bytes")
    dense = _dense(values.view(kind), shape, tensor.sparsity, schema)
    buffer = schema.BufferT()
    buffer.data = dense.reshape(-1).view(np.uint8)
    tensor.buffer, tensor.sparsity = len(source.buffers), None
    source.buffers.append(buffer)


def _dense(values: NDArray[Any], shape: list[int], sparsity: Any, schema: Any) -> NDArray[Any]:
    order, block_map = (integers(numbers) for numbers in (sparsity.traversalOrder, sparsity.blockMap))
    levels = list(sparsity.dimMetadata or [])
    rank = len(shape)
    if sorted(order) != [*range(rank + len(block_map))] or len(levels) != len(order):
        raise ValueError("the order of the dimensions of a sparse constant is not complete")
    if len(set(block_map)) != len(block_map) or not {*block_map} <= {*range(rank)}:
        raise ValueError("the blocks of a sparse constant are not along its dimensions")
    sizes = _sizes(shape, order, block_map, levels, schema)
    count, coordinates = 1, dict[int, NDArray[np.int64]]()
    for dimension, level in zip(order, levels, strict=True):
        parents, indices = _entries(level, count, sizes[dimension], prod(shape), schema)
        coordinates = {known: entries[parents] for known, entries in coordinates.items()}
        coordinates[dimension], count = indices, len(indices)
    if count != len(values):
        raise ValueError(f"a sparse constant has {len(values):,} values, and positions for {count:,}")
    for number, dimension in enumerate(block_map):
        coordinates[dimension] = coordinates[dimension] * sizes[rank + number] + coordinates[rank + number]
    dense = np.zeros(shape, values.dtype)
    dense[tuple(coordinates[dimension] for dimension in range(rank))] = values
    return dense


def _sizes(shape: list[int], order: list[int], block_map: list[int], levels: list[Any], schema: Any) -> list[int]:
    """Return the sizes of all dimensions: the dimensions of the tensor in blocks, then the dimensions of a block."""
    sizes = [*shape, *([0] * len(block_map))]
    for dimension, level in zip(order, levels, strict=True):
        if dimension >= len(shape):
            size, outer = int(level.denseSize), block_map[dimension - len(shape)]
            if level.format != schema.DimensionType.DENSE or size < 1 or shape[outer] % size:
                raise ValueError("the size of a block of a sparse constant does not divide its dimension")
            sizes[dimension], sizes[outer] = size, shape[outer] // size
    return sizes


def _entries(level: Any, count: int, size: int, most: int, schema: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each entry of a level the number of its entry in the level before, and its index.

    The level before has `count` entries, the dimension `size` indices, and no level more than `most` entries: the
    elements of the tensor.
    """
    if level.format == schema.DimensionType.DENSE:
        if level.denseSize != size or count * size > most:
            raise ValueError(f"a dense dimension of a sparse constant has the size {level.denseSize}, and needs {size}")
        return np.repeat(np.arange(count), size), np.tile(np.arange(size), count)
    segments, indices = (
        np.asarray(integers(getattr(vector, "values", None)), np.int64)
        for vector in (level.arraySegments, level.arrayIndices)
    )
    lengths = np.diff(segments)
    is_complete = len(segments) == count + 1 and segments[0] == 0 and segments[-1] == len(indices)
    if not is_complete or (lengths < 0).any() or ((indices < 0) | (indices >= size)).any() or len(indices) > most:
        raise ValueError("the indices of a sparse constant do not fit its shape")
    return np.repeat(np.arange(count), lengths), indices


def integers(numbers: Any) -> list[int]:
    """Return a list of integers in the schema, which is an array, a list or None."""
    return [] if numbers is None else np.asarray(numbers).tolist()


def _remove_densify(source: Any, schema: Any, subgraph: Any) -> None:
    """Remove the operators DENSIFY, whose constants are expanded: their outputs become the constants."""
    kept = []
    for operator in subgraph.operators:
        code = source.operatorCodes[operator.opcodeIndex]
        inputs, outputs = integers(operator.inputs), integers(operator.outputs)
        if code.builtinCode != schema.BuiltinOperator.DENSIFY or len(inputs) != 1 or len(outputs) != 1:
            kept.append(operator)
            continue
        constant, output = (subgraph.tensors[index] for index in (*inputs, *outputs))
        if not constant.buffer:
            kept.append(operator)
            continue
        output.buffer = constant.buffer
    subgraph.operators = kept
