"""Sparse constants are expanded to the values that the TFLite runtime computes with."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sparse_files import SHAPE, content, encoded, sparse_values

from compress.core.errors import ModelError
from compress.model.tflite import graph
from compress.model.tflite.comparison import Runner
from compress.model.tflite.runtime import IsolatedInterpreter


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
