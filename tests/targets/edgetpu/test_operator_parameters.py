"""Parameters that the compiler adds itself, on models built by hand."""

from __future__ import annotations

import one_op
import pytest
from one_op import Op, Tensor

from compress.targets import load
from compress.targets.edgetpu import operator_parameters
from compress.tflite.graph import Graph

TARGET = load("edgetpu")


def sizes(graph: Graph) -> list[int]:
    return [operator_parameters.count(operator, graph, TARGET).size_bytes for operator in graph.operators]


def joined(*shapes: tuple[int, ...]) -> Graph:
    """Return a concatenation along the innermost axis."""
    names = [f"in{index}" for index in range(len(shapes))]
    out = Tensor((*shapes[0][:-1], sum(shape[-1] for shape in shapes)))
    tensors = {name: Tensor(shape) for name, shape in zip(names, shapes, strict=True)} | {"out": out}
    return one_op.read(tensors, [Op("CONCATENATION", names, ["out"], 2, {"axis": -1})], names, ["out"])


@pytest.mark.parametrize(
    ("graph", "size"),
    [
        (joined((1, 1), (1, 1)), 16 * (4 + 4 + 4)),
        (joined((1, 5), (1, 16)), 32 * (8 + 16 + 4)),
        (joined((1, 8), (1, 4)), 0),
        (joined((1, 8, 8, 32), (1, 8, 8, 32)), 0),
        (joined((1, 8, 8, 8), (1, 8, 8, 3)), 0),
        (joined((1, 8, 8, 3), (1, 8, 8, 8)), 16 * (4 + 8 + 4)),
        (joined((1, 8, 8, 1), (1, 8, 8, 2)), 64),
    ],
)
def test_joining_channels(graph: Graph, size: int) -> None:
    assert sizes(graph) == [size]


def test_what_is_joined_only_to_be_taken_apart() -> None:
    """As in a published model: parts come straight from the inputs, and those that begin a block of 4 cost nothing."""
    parts = [f"part{index}" for index in range(6)]
    tensors = {name: Tensor((1, 8, 8, count)) for name, count in {"a": 3, "b": 1, "c": 2, "abc": 6, "two": 2}.items()}
    tensors |= {"axis": Tensor((), "INT32", 3, ())} | {name: Tensor((1, 8, 8, 1)) for name in parts}
    operators = [
        Op("CONCATENATION", ["a", "b", "c"], ["abc"], 1, {"axis": 3}),
        Op("SPLIT", ["axis", "abc"], parts, 1),
        Op("CONCATENATION", ["part3", "part5"], ["two"], 1, {"axis": 3}),
    ]
    outputs = ["part0", "part1", "part2", "part4", "two"]
    assert sizes(one_op.read(tensors, operators, ["a", "b", "c"], outputs)) == [0, 128, 64]


def test_a_long_chain_of_concatenations_takes_no_time() -> None:
    tensors, operators = {"t0": Tensor((1, 2, 2, 3))}, []
    for index in range(60):
        tensors[f"t{index + 1}"] = Tensor((1, 2, 2, 3))
        operators.append(Op("CONCATENATION", [f"t{index}"] * 2, [f"t{index + 1}"], 1, {"axis": 3}))
    assert sizes(one_op.read(tensors, operators, ["t0"], ["t60"]))[:-1] == [0] * 59


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((1, 20, 20, 144), 64 + 128 * 80 + 32 * 80),
        ((1, 20, 20, 65), 320 * (68 + 4) + 128 * 80 + 32 * 80),
        ((1, 10, 13, 66), 320 * (68 + 4) + 48 * 40 + 16 * 52),  # height first, then width
    ],
)
def test_channels_first(shape: tuple[int, ...], size: int) -> None:
    """The sizes of these matrices were seen in compiled detectors."""
    out = Tensor((1, shape[3], shape[1], shape[2]))
    assert sizes(one_op.one("TRANSPOSE", [Tensor(shape), one_op.integers(0, 3, 1, 2)], out, 2)) == [size]


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((1, 144, 20, 20), 0),
        ((1, 144, 10, 10), 128 * (120 + 4)),
        ((1, 66, 20, 26), 576 * (560 + 4)),
        ((1, 71, 26, 26), 512 * (552 + 4) + 192 * (180 + 4)),  # in two parts, which read what they need
    ],
)
def test_joining_height_and_width(shape: tuple[int, ...], size: int) -> None:
    """The sizes of these matrices were seen in compiled detectors."""
    out = Tensor((1, shape[1], shape[2] * shape[3]))
    assert sizes(one_op.one("RESHAPE", [Tensor(shape), one_op.integers(*out.shape)], out)) == [size]


@pytest.mark.parametrize(("runtime", "size"), [(None, 48 * 12), (14, 48 * 12), (12, 48 * 12 + 64)])
def test_the_softmax_of_a_uint8_model(runtime: int | None, size: int) -> None:
    graph = one_op.one("SOFTMAX", [Tensor((1, 10), "UINT8")], Tensor((1, 10), "UINT8"), beta=1.0)
    target = TARGET.compiled_by("16.0", runtime)
    assert operator_parameters.count(graph.operators[0], graph, target).size_bytes == size
