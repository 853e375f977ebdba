"""Sparse constants are expanded to the values that the TFLite runtime computes with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import one_op
import pytest
from one_op import Op, Tensor

from compress.errors import ModelError
from compress.tflite import graph
from compress.tflite.comparison import Runner
from compress.tflite.runtime import IsolatedInterpreter

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


def runtime_output(file: bytes, x: np.ndarray) -> np.ndarray:
    """Return the output of the unchanged file."""
    interpreter = IsolatedInterpreter(file)
    return interpreter.run({interpreter.inputs[0]["index"]: x}, [interpreter.outputs[0]["index"]])[0]


@pytest.mark.parametrize("vector", ["Int32Vector", "Uint16Vector", "Uint8Vector"])
@pytest.mark.parametrize(
    ("order", "blocks", "sparse"),
    [
        ((0, 1), {}, {1}),
        ((1, 0), {}, {0}),
        ((0, 1, 2), {1: 4}, {1}),
        ((0, 1, 2, 3), {0: 2, 1: 4}, {1}),
        ((1, 0, 3, 2), {0: 2, 1: 4}, {0}),
    ],
)
def test_an_expanded_constant_has_the_values_of_the_runtime(
    order: tuple[int, ...], blocks: dict[int, int], sparse: set[int], vector: str
) -> None:
    dense = sparse_values()
    file = content(*encoded(dense, order, blocks, sparse, vector), densify=True)
    parsed = graph.parse(file)
    assert [operator.name for operator in parsed.operators] == ["ADD"]
    (matrix,) = (tensor for tensor in parsed.tensors if tensor.name == "dense")
    np.testing.assert_array_equal(matrix.array(), dense)
    x = np.ones(SHAPE, np.float32)
    np.testing.assert_array_equal(Runner(parsed).run([x])[0], runtime_output(file, x))


def test_sparse_weights_of_an_operator() -> None:
    dense = sparse_values()
    file = content(*encoded(dense, (0, 1, 2), {1: 4}, {1}, "Int32Vector"), densify=False)
    x = np.random.default_rng(1).standard_normal((1, SHAPE[1])).astype(np.float32)
    (output,) = Runner(graph.parse(file)).run([x])
    np.testing.assert_allclose(output, x @ dense.T, atol=1e-6)
    np.testing.assert_allclose(output, runtime_output(file, x), atol=1e-6)


def fewer_values(values: np.ndarray, parameters: Any) -> np.ndarray:
    return values[:-1]


def outside(values: np.ndarray, parameters: Any) -> np.ndarray:
    parameters.dimMetadata[1].arrayIndices.values[0] = SHAPE[1]
    return values


def falling(values: np.ndarray, parameters: Any) -> np.ndarray:
    parameters.dimMetadata[1].arraySegments.values[1:3] = [9, 0]
    return values


def negative(values: np.ndarray, parameters: Any) -> np.ndarray:
    parameters.dimMetadata[1].arrayIndices.values[0] = -1
    return values


def larger(values: np.ndarray, parameters: Any) -> np.ndarray:
    parameters.dimMetadata[0].denseSize = 2**30
    return values


def twice(values: np.ndarray, parameters: Any) -> np.ndarray:
    parameters.traversalOrder = [0, 0]
    return values


def no_levels(values: np.ndarray, parameters: Any) -> np.ndarray:
    parameters.dimMetadata = None
    return values


def no_indices(values: np.ndarray, parameters: Any) -> np.ndarray:
    parameters.dimMetadata[1].arrayIndices = None
    return values


@pytest.mark.parametrize("damage", [fewer_values, outside, falling, negative, larger, twice, no_levels, no_indices])
def test_damaged_parameters_are_refused(damage: Callable[[np.ndarray, Any], np.ndarray]) -> None:
    values, parameters = encoded(sparse_values(), (0, 1), {}, {1}, "Int32Vector")
    file = content(damage(values, parameters), parameters, densify=True)
    with pytest.raises(ModelError, match=r"damaged \.tflite file: .*sparse constant"):
        graph.parse(file)


def test_a_small_file_does_not_expand_to_gigabytes() -> None:
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(
        bytearray(content(*encoded(sparse_values(), (0, 1), {}, {1}, "Int32Vector"), densify=True)), 0
    )
    model.subgraphs[0].tensors[1].shape = [2**14, 2**14]
    with pytest.raises(ModelError, match="unpacks to far more than it holds"):
        graph.parse(graph.serialize(SimpleNamespace(source=model)))
