"""The recognition of float graphs, and their plain form."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from one_op import Op, Tensor, integers, one, read

from compress.model.tflite import comparison, float_graph, graph


@pytest.mark.parametrize(
    ("dtype", "scales", "expected"),
    [("FLOAT32", (), True), ("INT8", (0.5,), False), ("UINT8", (0.5,), False), ("INT32", (), False)],
)
def test_what_is_computed_makes_a_graph_float(dtype: str, scales: tuple[float, ...], expected: bool) -> None:
    tensor = Tensor((1, 4), dtype, None, scales)
    assert float_graph.is_float(one("ABS", [tensor], tensor)) is expected


def test_a_graph_with_float_ends_and_8_bits_inside_is_quantized() -> None:
    tensors = {"in": Tensor((1, 4), "FLOAT32"), "q": Tensor((1, 4)), "out": Tensor((1, 4), "FLOAT32")}
    ops = [Op("QUANTIZE", ["in"], ["q"]), Op("DEQUANTIZE", ["q"], ["out"])]
    assert not float_graph.is_float(read(tensors, ops, ["in"], ["out"]))
    assert float_graph.is_float(graph.parse(tiny.classifier(int8=False)))
    assert not float_graph.is_float(graph.parse(tiny.classifier()))


def test_weights_behind_dequantize_become_constants() -> None:
    tensors = {
        "in": Tensor((1, 2), "FLOAT32"),
        "stored": Tensor((3, 2), "INT8", [[1, -2], [3, 4], [5, 6]], (0.5, 0.25, 2.0), 1),
        "weights": Tensor((3, 2), "FLOAT32"),
        "out": Tensor((1, 3), "FLOAT32"),
    }
    ops = [Op("DEQUANTIZE", ["stored"], ["weights"]), Op("FULLY_CONNECTED", ["in", "weights", ""], ["out"])]
    plain = float_graph.plain(read(tensors, ops, ["in"], ["out"]))
    assert [operator.name for operator in plain.graph.operators] == ["FULLY_CONNECTED"]
    assert plain.numbers == (1,)
    assert plain.notes == ("1 constants of INT8 are taken as float32",)
    tensor = plain.graph.tensors[2]
    assert (tensor.dtype, tensor.quantization) == ("FLOAT32", None)
    np.testing.assert_allclose(tensor.array(), np.array([[0, -3], [2, 3], [4, 5]]) * [[0.5], [0.25], [2.0]])


def test_shapes_that_are_computed_become_constants() -> None:
    tensors = {
        "in": Tensor((1, 6, 4), "FLOAT32", signature=(-1, 6, 4)),
        "shape": Tensor((3,), "INT32", None, ()),
        "zero": integers(0),
        "one": integers(1),
        "batch": Tensor((), "INT32", None, ()),
        "rows": Tensor((), "INT32", 24, ()),
        "wanted": Tensor((2,), "INT32", None, ()),
        "out": Tensor((1, 1), "FLOAT32", signature=(-1, -1)),
    }
    ops = [
        Op("SHAPE", ["in"], ["shape"], 1, {"outType": 2}),
        Op("STRIDED_SLICE", ["shape", "zero", "one", "one"], ["batch"], 1, {"shrinkAxisMask": 1}),
        Op("PACK", ["batch", "rows"], ["wanted"], 1, {"valuesCount": 2, "axis": 0}),
        Op("RESHAPE", ["in", "wanted"], ["out"]),
    ]
    plain = float_graph.plain(read(tensors, ops, ["in"], ["out"]))
    assert [operator.name for operator in plain.graph.operators] == ["RESHAPE"]
    assert plain.graph.tensors[6].array().tolist() == [1, 24]
    assert plain.graph.tensors[7].shape == (1, 24)
    values = np.arange(24, dtype=np.float32).reshape(1, 6, 4)
    (output,) = comparison.Runner(plain.graph).run([values])
    assert output.tolist() == values.reshape(1, 24).tolist()
