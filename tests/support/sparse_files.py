"""Small .tflite files with a sparse constant."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import one_op
from one_op import Op, Tensor

from compress.model.tflite import graph

SHAPE = (8, 12)
INDEX_TYPES = {"Int32Vector": np.int32, "Uint16Vector": np.uint16, "Uint8Vector": np.uint8}


def sparse_values() -> np.ndarray:
    """Return values in blocks of 1x4, of which a quarter is not 0."""
    random = np.random.default_rng(0)
    kept = np.repeat(random.random((8, 3)) < 0.25, 4, axis=1)
    return (kept * random.standard_normal(SHAPE)).astype(np.float32)


def encoded(
    dense: np.ndarray, order: Sequence[int], blocks: dict[int, int], sparse: set[int], vector: str
) -> tuple[np.ndarray, Any]:
    """Return the stored values of a matrix and its SparsityParameters.

    Args:
        dense: the matrix.
        order: the dimensions from the outermost level on: those of the matrix, then those of its blocks.
        blocks: the size of the blocks, by dimension of the matrix.
        sparse: the dimensions whose level lists its indices.
        vector: the type of these lists.
    """
    from ai_edge_litert import schema_py_generated as schema

    outer = [size // blocks.get(axis, 1) for axis, size in enumerate(dense.shape)]
    shape = [part for axis, size in enumerate(outer) for part in (size, blocks.get(axis, 1))]
    split = dense.reshape(shape).transpose(
        *range(0, 2 * dense.ndim, 2),
        *(2 * axis + 1 for axis in blocks),
        *(2 * axis + 1 for axis in range(dense.ndim) if axis not in blocks),
    )
    levels = split.reshape(split.shape[: dense.ndim + len(blocks)]).transpose(order)
    parameters = schema.SparsityParametersT()
    parameters.traversalOrder, parameters.blockMap, parameters.dimMetadata = list(order), list(blocks), []
    parts = [levels]
    for dimension in order:
        level = schema.DimensionMetadataT()
        parameters.dimMetadata.append(level)
        if dimension not in sparse:
            level.format, level.denseSize = schema.DimensionType.DENSE, len(parts[0])
            parts = [inside for part in parts for inside in part]
            continue
        kept = [[index for index, inside in enumerate(part) if inside.any()] for part in parts]
        level.format = schema.DimensionType.SPARSE_CSR
        lists = [np.cumsum([0, *map(len, kept)]), [index for indices in kept for index in indices]]
        for field, values in zip(("arraySegments", "arrayIndices"), lists, strict=True):
            stored = getattr(schema, f"{vector}T")()
            stored.values = np.asarray(values, INDEX_TYPES[vector])
            setattr(level, field, stored)
            setattr(level, f"{field}Type", getattr(schema.SparseIndexVector, vector))
        parts = [part[index] for part, indices in zip(parts, kept, strict=True) for index in indices]
    return np.array(parts, dense.dtype).reshape(-1), parameters


def content(values: np.ndarray, parameters: Any, *, densify: bool) -> bytes:
    """Return a file that adds a sparse matrix to its input, or multiplies its input by the matrix."""
    tensors = {
        "x": Tensor(SHAPE if densify else (1, SHAPE[1]), "FLOAT32", None, ()),
        "w": Tensor(SHAPE, "FLOAT32", 0, ()),
        "dense": Tensor(SHAPE, "FLOAT32", None, ()),
        "y": Tensor(SHAPE if densify else (1, SHAPE[0]), "FLOAT32", None, ()),
    }
    operators = [Op("DENSIFY", ["w"], ["dense"]), Op("ADD", ["x", "dense"], ["y"])]
    if not densify:
        operators = [Op("FULLY_CONNECTED", ["x", "w", ""], ["y"], 8)]
    model = one_op.model(tensors, operators, ["x"], ["y"])
    weight = model.subgraphs[0].tensors[1]
    weight.sparsity = parameters
    model.buffers[weight.buffer].data = values.view(np.uint8)
    return graph.serialize(SimpleNamespace(source=model))
