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


DAMAGES: dict[str, Callable[[Any], None]] = {
    "an index outside": lambda p: p.dimMetadata[1].arrayIndices.values.__setitem__(0, SHAPE[1]),
    "a negative index": lambda p: p.dimMetadata[1].arrayIndices.values.__setitem__(0, -1),
    "falling segments": lambda p: p.dimMetadata[1].arraySegments.values.__setitem__(slice(1, 3), [9, 0]),
    "a larger dimension": lambda p: setattr(p.dimMetadata[0], "denseSize", 2**30),
    "a dimension twice": lambda p: setattr(p, "traversalOrder", [0, 0]),
    "no levels": lambda p: setattr(p, "dimMetadata", None),
    "no indices": lambda p: setattr(p.dimMetadata[1], "arrayIndices", None),
    "fewer values": lambda p: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_parameters_are_refused(damage: str) -> None:
    values, parameters = encoded(sparse_values(), (0, 1), {}, {1}, "Int32Vector")
    DAMAGES[damage](parameters)
    file = content(values[:-1] if damage == "fewer values" else values, parameters, densify=True)
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
