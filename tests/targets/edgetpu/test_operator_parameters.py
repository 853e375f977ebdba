"""Parameters that the compiler adds itself, on models built by hand."""

from __future__ import annotations

import one_op
import pytest
from one_op import Op, Tensor

from compress.model.tflite import macs as arithmetic
from compress.model.tflite.graph import Graph
from compress.targets import load
from compress.targets.edgetpu import operator_parameters, rules
from compress.targets.edgetpu.check import check
from compress.targets.edgetpu.constants import CONSTANTS
from compress.targets.edgetpu.estimate import array_layers, estimate

TARGET = load("edgetpu")


def sizes(graph: Graph) -> list[int]:
    return [operator_parameters.count(operator, graph, TARGET).size_bytes for operator in graph.operators]


def joined(*shapes: tuple[int, ...]) -> Graph:
    """Return a concatenation along the innermost axis."""
    names = [f"in{index}" for index in range(len(shapes))]
    out = Tensor((*shapes[0][:-1], sum(shape[-1] for shape in shapes)))
    tensors = {name: Tensor(shape) for name, shape in zip(names, shapes, strict=True)} | {"out": out}
    return one_op.read(tensors, [Op("CONCATENATION", names, ["out"], 2, {"axis": -1})], names, ["out"])


def test_joining_channels() -> None:
    expected = {
        ((1, 1), (1, 1)): 16 * (4 + 4 + 4),
        ((1, 5), (1, 16)): 32 * (8 + 16 + 4),
        ((1, 8), (1, 4)): 0,
        ((1, 8, 8, 32), (1, 8, 8, 32)): 0,
        ((1, 8, 8, 8), (1, 8, 8, 3)): 0,
        ((1, 8, 8, 3), (1, 8, 8, 8)): 16 * (4 + 8 + 4),
        ((1, 8, 8, 1), (1, 8, 8, 2)): 64,
    }
    assert {shapes: sizes(joined(*shapes)) for shapes in expected} == {key: [size] for key, size in expected.items()}


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


def test_moved_channels() -> None:
    """The sizes of these matrices were seen in compiled detectors."""
    channels_first = {
        (1, 20, 20, 144): 64 + 128 * 80 + 32 * 80,
        (1, 20, 20, 65): 320 * (68 + 4) + 128 * 80 + 32 * 80,
        (1, 10, 13, 66): 320 * (68 + 4) + 48 * 40 + 16 * 52,  # height first, then width
    }
    for shape, size in channels_first.items():
        out = Tensor((1, shape[3], shape[1], shape[2]))
        assert sizes(one_op.one("TRANSPOSE", [Tensor(shape), one_op.integers(0, 3, 1, 2)], out, 2)) == [size]
    height_and_width_joined = {
        (1, 144, 20, 20): 0,
        (1, 144, 10, 10): 128 * (120 + 4),
        (1, 66, 20, 26): 576 * (560 + 4),
        (1, 71, 26, 26): 512 * (552 + 4) + 192 * (180 + 4),  # in two parts, which read what they need
    }
    for shape, size in height_and_width_joined.items():
        out = Tensor((1, shape[1], shape[2] * shape[3]))
        assert sizes(one_op.one("RESHAPE", [Tensor(shape), one_op.integers(*out.shape)], out)) == [size]


def test_the_softmax_of_a_uint8_model() -> None:
    graph = one_op.one("SOFTMAX", [Tensor((1, 10), "UINT8")], Tensor((1, 10), "UINT8"), beta=1.0)
    for runtime, more in ((None, 0), (14, 0), (12, 64)):
        target = TARGET.compiled_by("16.0", runtime)
        assert operator_parameters.count(graph.operators[0], graph, target).size_bytes == 48 * 12 + more


IMAGE, WEIGHTS = Tensor((1, 8, 8, 64)), (0.5,) * 32
LSTM_TENSORS = [
    Tensor((1, 28, 28)),
    *(Tensor((20, 28), data=1) for _ in range(4)),
    *(Tensor((20, 20), data=1) for _ in range(4)),
    *(None for _ in range(3)),
    *(Tensor((20,), "INT32", 1, ()) for _ in range(4)),
    None,
    None,
    *(Tensor((1, 20), dtype, variable=True) for dtype in ("INT8", "INT16")),
]
WEIGHTED = {
    "CONV_2D": one_op.one("CONV_2D", [IMAGE, Tensor((32, 2, 2, 64), data=1, scales=WEIGHTS)], Tensor((1, 7, 7, 32))),
    "DEPTHWISE_CONV_2D": one_op.one("DEPTHWISE_CONV_2D", [IMAGE, Tensor((1, 3, 3, 64), data=1)], IMAGE, padding=0),
    "FULLY_CONNECTED": one_op.one("FULLY_CONNECTED", [Tensor((1, 64)), Tensor((8, 64), data=1)], Tensor((1, 8))),
    "TRANSPOSE_CONV": one_op.one(
        "TRANSPOSE_CONV",
        [one_op.integers(1, 16, 16, 32), Tensor((32, 2, 2, 64), data=1, scales=WEIGHTS), IMAGE],
        Tensor((1, 16, 16, 32)),
        strideH=2,
        strideW=2,
    ),
    **{name: one_op.one(name, LSTM_TENSORS, Tensor((1, 28, 20))) for name in ("LSTM", "UNIDIRECTIONAL_SEQUENCE_LSTM")},
}
"""Every operator with weights that the rules can map."""


def test_every_operator_that_can_be_mapped_has_a_count() -> None:
    """A new operator in the table without a function that counts its parameters would read as one without weights."""
    assert set(operator_parameters.COUNTS) == set(CONSTANTS.operators)
    assert set(rules.BIAS_POSITIONS) <= WEIGHTED.keys()


@pytest.mark.parametrize("name", WEIGHTED)
def test_every_operator_with_weights_has_costs(name: str) -> None:
    graph = WEIGHTED[name]
    (operator,) = graph.operators
    weights = sum(
        tensor.elements for tensor in graph.input_tensors(operator) if tensor.dtype == "INT8" and tensor.is_constant
    )
    result = check(graph, TARGET)
    assert result.complete
    assert result.parameters is not None
    assert result.parameters.cached_bytes >= weights
    assert arithmetic.macs(graph, operator) >= weights
    assert result.activation_bytes
    predicted = estimate(graph, TARGET, "usb3")
    (layer,) = array_layers(graph, TARGET)
    assert layer.kind in ("conv", "dw", "fc", "tconv") or predicted.uncounted == (f"{name} 0",)
    assert all(line in predicted.describe() for line in predicted.uncounted)


def test_a_transposed_convolution_has_the_parameters_of_a_convolution_and_says_that_no_file_confirms_it() -> None:
    transposed, convolution = (check(WEIGHTED[name], TARGET) for name in ("TRANSPOSE_CONV", "CONV_2D"))
    assert transposed.parameters is not None
    assert convolution.parameters is not None
    assert transposed.parameters.cached_bytes == convolution.parameters.cached_bytes == 32 * (4 * 64 + 4)
    assert "TRANSPOSE_CONV: no known compiled model" in transposed.parameter_warning
    assert convolution.parameter_warning == ""


def test_the_parameters_of_an_operator_that_no_compiled_model_has_are_unknown_and_not_zero() -> None:
    """A mean over channels is in no compiled model; those over positions have no parameters."""
    image = Tensor((1, 8, 8, 64))
    others = {"SQUARED_DIFFERENCE": [image], **{key: [one_op.integers(2)] for key in rules.REDUCTIONS}}
    for name, count in operator_parameters.COUNTS.items():
        if count is operator_parameters._unconfirmed:
            graph = one_op.one(name, [image, *others.get(name, [])], image)
            assert not operator_parameters.count(graph.operators[0], graph, TARGET).is_confirmed
    confirmed = []
    for axes, shape in (((1, 2), (1, 64)), ((3,), (1, 8, 8))):
        graph = one_op.one("MEAN", [image, one_op.integers(*axes)], Tensor(shape))
        confirmed.append(operator_parameters.count(graph.operators[0], graph, TARGET).is_confirmed)
    assert confirmed == [True, False]
