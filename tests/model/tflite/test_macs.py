"""Multiply-accumulates and parameters, against numbers counted by hand."""

from __future__ import annotations

import one_op
import pytest
from one_op import Op, Tensor, integers

from compress.model.tflite import macs as arithmetic


def weights(*shape: int, dtype: str = "INT8") -> Tensor:
    return Tensor(shape, dtype, data=1)


def bias(count: int, dtype: str = "INT32") -> Tensor:
    return Tensor((count,), dtype, 1, ())


def counted(name: str, inputs: list[Tensor | None], output: Tensor, **options: int) -> tuple[int, int]:
    """Return the MACs and parameters of a graph with one operator."""
    parsed = one_op.one(name, inputs, output, **options)
    assert arithmetic.macs(parsed, parsed.operators[0]) == arithmetic.total_macs(parsed)
    return arithmetic.total_macs(parsed), arithmetic.parameters(parsed)


CASES = {
    # 8x8 outputs, 16 filters of 3x3x3
    "conv": (
        counted("CONV_2D", [Tensor((1, 8, 8, 3)), weights(16, 3, 3, 3), bias(16)], Tensor((1, 8, 8, 16))),
        (8 * 8 * 16 * 27, 16 * 27 + 16),
    ),
    # stride 2: 4x4 outputs, 5x3 kernels
    "strided conv": (
        counted("CONV_2D", [Tensor((1, 8, 8, 4)), weights(6, 5, 3, 4), None], Tensor((1, 4, 4, 6)), strideH=2),
        (4 * 4 * 6 * 60, 6 * 60),
    ),
    # two groups: a filter sees 2 of the 4 channels
    "grouped conv": (
        counted("CONV_2D", [Tensor((1, 8, 8, 4)), weights(6, 3, 3, 2), bias(6)], Tensor((1, 8, 8, 6))),
        (8 * 8 * 6 * 18, 6 * 18 + 6),
    ),
    "depthwise": (
        counted("DEPTHWISE_CONV_2D", [Tensor((1, 8, 8, 5)), weights(1, 3, 3, 5), bias(5)], Tensor((1, 6, 6, 5))),
        (6 * 6 * 5 * 9, 5 * 9 + 5),
    ),
    "depthwise with multiplier": (
        counted("DEPTHWISE_CONV_2D", [Tensor((1, 8, 8, 5)), weights(1, 3, 1, 10), bias(10)], Tensor((1, 6, 8, 10))),
        (6 * 8 * 10 * 3, 10 * 3 + 10),
    ),
    "dense": (counted("FULLY_CONNECTED", [Tensor((1, 64)), weights(10, 64), bias(10)], Tensor((1, 10))), (640, 650)),
    "dense on rows": (
        counted("FULLY_CONNECTED", [Tensor((1, 7, 64)), weights(10, 64), None], Tensor((1, 7, 10))),
        (7 * 640, 640),
    ),
    # every one of the 4x4x6 inputs is multiplied with 3x3 weights for each of the 5 outputs
    "transposed conv": (
        counted(
            "TRANSPOSE_CONV",
            [integers(1, 8, 8, 5), weights(5, 3, 3, 6), Tensor((1, 4, 4, 6)), bias(5)],
            Tensor((1, 8, 8, 5)),
        ),
        (4 * 4 * 6 * 9 * 5, 5 * 9 * 6 + 5),
    ),
    "product": (counted("BATCH_MATMUL", [Tensor((1, 4, 7)), Tensor((1, 7, 5))], Tensor((1, 4, 5))), (4 * 7 * 5, 0)),
    "transposed product": (
        counted("BATCH_MATMUL", [Tensor((1, 7, 4)), Tensor((1, 7, 5))], Tensor((1, 4, 5)), adjX=True),
        (4 * 7 * 5, 0),
    ),
    "add": (counted("ADD", [Tensor((1, 8, 8, 3)), Tensor((1, 8, 8, 3))], Tensor((1, 8, 8, 3))), (0, 0)),
    "add of a constant": (counted("ADD", [Tensor((1, 8, 8, 3)), weights(3)], Tensor((1, 8, 8, 3))), (0, 3)),
    "reshape": (counted("RESHAPE", [Tensor((1, 64)), integers(1, 8, 8)], Tensor((1, 8, 8))), (0, 0)),
    "mean": (counted("MEAN", [Tensor((1, 8, 8, 3)), integers(1, 2)], Tensor((1, 3))), (0, 0)),
    "float dense": (
        counted(
            "FULLY_CONNECTED",
            [Tensor((1, 64), "FLOAT32"), weights(10, 64, dtype="FLOAT32"), bias(10, "FLOAT32")],
            Tensor((1, 10), "FLOAT32"),
        ),
        (640, 650),
    ),
}


@pytest.mark.parametrize(("actual", "by_hand"), CASES.values(), ids=CASES)
def test_one_operator(actual: tuple[int, int], by_hand: tuple[int, int]) -> None:
    assert actual == by_hand


def test_lstm() -> None:
    """28 steps of 28 inputs to 20 units: four gates, each 20x28 and 20x20 weights."""
    gates = [weights(20, 28)] * 4 + [weights(20, 20)] * 4
    state = [Tensor((1, 20), variable=True), Tensor((1, 20), "INT16", variable=True)]
    inputs = [Tensor((1, 28, 28)), *gates, None, None, None, *[bias(20)] * 4, None, None, *state]
    macs, _ = counted("UNIDIRECTIONAL_SEQUENCE_LSTM", inputs, Tensor((1, 28, 20)))
    assert macs == 28 * 4 * (20 * 28 + 20 * 20)


def test_sums_over_the_graph_and_shared_weights_once() -> None:
    tensors = {"x": Tensor((1, 8)), "w": weights(8, 8), "b": bias(8), "y": Tensor((1, 8)), "z": Tensor((1, 8))}
    parsed = one_op.read(tensors, [Op("FULLY_CONNECTED", "xwb", "y"), Op("FULLY_CONNECTED", "ywb", "z")], "x", "z")
    assert arithmetic.total_macs(parsed) == 2 * 64
    assert arithmetic.parameters(parsed) == 72
