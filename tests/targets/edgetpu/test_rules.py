"""Every rule on a model of one operator that keeps it, and on one that breaks it."""

from __future__ import annotations

import re
from typing import Any

import one_op
import pytest
from one_op import Tensor, integers

from compress.model.tflite.graph import Graph
from compress.targets import load
from compress.targets.edgetpu import rules
from compress.targets.edgetpu.check import check
from compress.targets.edgetpu.constants import CONSTANTS
from compress.targets.edgetpu.placement import MAPPED, place
from compress.targets.edgetpu.rewrites import REWRITES

TARGET = load("edgetpu")
IMAGE = Tensor((1, 8, 8, 4))
FLOAT = Tensor((1, 8, 8, 4), "FLOAT32")
VECTOR = Tensor((1, 4))
FOUR = (0.1, 0.2, 0.3, 0.4)
BIAS = Tensor((4,), "INT32", 1, ())


def kernel(*shape: int, **more: Any) -> Tensor:
    return Tensor(shape, data=1, **more)


def conv(input_tensor: Tensor = IMAGE, weights: Tensor | None = None, bias: Tensor = BIAS, **options: Any) -> Graph:
    return one_op.one("CONV_2D", [input_tensor, weights or kernel(4, 1, 1, 4), bias], IMAGE, 3, **options)


def dense(output_shape: tuple[int, ...] = (1, 4), scales: tuple[float, ...] = (0.5,), **options: Any) -> Graph:
    input_tensor = Tensor((*output_shape[:-1], 8))
    weights = kernel(output_shape[-1], 8, scales=scales)
    return one_op.one("FULLY_CONNECTED", [input_tensor, weights, None], Tensor(output_shape), 4, **options)


def pool(name: str = "MAX_POOL_2D", **options: Any) -> Graph:
    return one_op.one(name, [IMAGE], Tensor((1, 4, 4, 4)), 2, **options)


def resize(shape: tuple[int, ...]) -> Graph:
    return one_op.one("RESIZE_BILINEAR", [Tensor(shape), integers(8, 8)], IMAGE, 3)


def softmax(*shape: int) -> Graph:
    return one_op.one("SOFTMAX", [Tensor(shape)], Tensor(shape), 2)


def mean(*axes: int, shape: tuple[int, ...] = (1, 8, 8, 4)) -> Graph:
    return one_op.one("MEAN", [Tensor(shape), integers(*axes)], Tensor((1, 4)), 2)


def pad(*amounts: int) -> Graph:
    paddings = Tensor((4, 2), "INT32", [[amount, amount] for amount in amounts], ())
    larger = tuple(side + 2 * amount for side, amount in zip(IMAGE.shape, amounts, strict=True))
    return one_op.one("PAD", [IMAGE, paddings], Tensor(larger), 2)


def relu(*shape: int, dtype: str = "INT8", **more: Any) -> Graph:
    return one_op.one("RELU", [Tensor(shape, dtype)], Tensor(shape, dtype), **more)


def strided_slice(*strides: int, **masks: int) -> Graph:
    inputs = [IMAGE, integers(0, 0, 0, 0), integers(1, 4, 4, 4), integers(*strides)]
    return one_op.one("STRIDED_SLICE", inputs, Tensor((1, 4, 4, 4)), 2, **masks)


def split(axis: int, parts: int) -> Graph:
    full_shape = (parts if axis == 0 else 1, 8, 8, 4)
    shape = tuple(side // parts if place == axis else side for place, side in enumerate(full_shape))
    names = [f"part{index}" for index in range(parts)]
    inputs = {"axis": Tensor((), "INT32", axis, ()), "in": Tensor(full_shape)}
    tensors = inputs | {name: Tensor(shape) for name in names}
    return one_op.read(tensors, [one_op.Op("SPLIT", ["axis", "in"], names, 2)], ["in"], names)


def pack(axis: int) -> Graph:
    output = Tensor((2, 8, 4) if axis == 0 else (8, 2, 4))
    return one_op.one("PACK", [Tensor((8, 4)), Tensor((8, 4))], output, 2, axis=axis, valuesCount=2)


def prelu(*slopes: int) -> Graph:
    return one_op.one("PRELU", [IMAGE, kernel(*slopes)], IMAGE)


def concatenation(constant: int | None, more: int = 0) -> Graph:
    inputs = [IMAGE, Tensor((1, 8, 8, 4), data=constant), *[IMAGE] * more]
    return one_op.one("CONCATENATION", inputs, Tensor((1, 8, 8, 4 * len(inputs))), 2, axis=3)


def transpose(*shape: int) -> Graph:
    output_shape = tuple(shape[axis] for axis in (0, 3, 1, 2))
    return one_op.one("TRANSPOSE", [Tensor(shape), integers(0, 3, 1, 2)], Tensor(output_shape), 2)


def flatten(*shape: int) -> Graph:
    size = shape[1] * shape[2] * shape[3]
    return one_op.one("RESHAPE", [Tensor(shape), integers(1, size)], Tensor((1, size)))


def computed(name: str, input_tensor: Tensor, output: Tensor) -> Graph:
    """Return a graph with an operator whose second input is not a constant."""
    return one_op.one(name, [input_tensor, VECTOR], output)


KEPT: list[tuple[rules.Rule, str, Graph]] = [
    (rules.supported_operator, "a convolution", conv()),
    (rules.operator_version, "the newest that is known", one_op.one("ADD", [IMAGE, IMAGE], IMAGE, 3)),
    (rules.eight_bit_tensors, "int8, with an int32 bias", conv()),
    (rules.eight_bit_tensors, "uint8", relu(1, 4, dtype="UINT8")),
    (rules.eight_bit_tensors, "int32 structure", mean(1, 2)),
    (
        rules.eight_bit_tensors,
        "int16 state",
        one_op.one("LSTM", [IMAGE, Tensor((1, 4), "INT16", variable=True)], IMAGE),
    ),
    (rules.static_shapes, "a batch that may change", conv(Tensor((1, 8, 8, 4), signature=(-1, 8, 8, 4)))),
    (rules.three_dimensions, "a batch of 1", conv()),
    (rules.three_dimensions, "five, two of them 1", relu(1, 1, 8, 8, 4)),
    (rules.three_dimensions, "filters of four", conv(weights=kernel(4, 3, 3, 4))),
    (rules.constant_parameters, "constant weights", conv()),
    (rules.constant_parameters, "no bias", dense()),
    (rules.no_fused_activation, "a plain pool", pool()),
    (rules.no_fused_activation, "a convolution may", conv(fusedActivationFunction=1)),
    (rules.equal_dilation, "2 by 2", conv(weights=kernel(4, 3, 3, 4), dilationWFactor=2, dilationHFactor=2)),
    (rules.equal_dilation, "one tap along the other axis", conv(weights=kernel(4, 3, 1, 4), dilationHFactor=2)),
    (rules.dense_layer_format, "per tensor", dense()),
    (rules.dense_layer_format, "per channel", dense(scales=FOUR)),
    (rules.bilinear_resize_input, "of a map", resize((1, 4, 4, 4))),
    (rules.bilinear_resize_input, "something else of one position", relu(1, 1, 1, 4)),
    (rules.softmax_size, "as long as it may be", softmax(1, 16384)),
    (rules.softmax_size, "many short ones", softmax(4420, 2)),
    (rules.batch_axis_unchanged, "mean over height and width", mean(1, 2)),
    (rules.batch_axis_unchanged, "from behind", mean(-2, -3)),
    (rules.batch_axis_unchanged, "of a vector", one_op.one("SUM", [Tensor((4,)), integers(0)], Tensor((1,)))),
    (rules.batch_axis_unchanged, "padding height and width", pad(0, 1, 1, 0)),
    (rules.batch_axis_unchanged, "one part", split(0, 1)),
    (rules.batch_axis_unchanged, "splitting channels", split(3, 2)),
    (rules.batch_axis_unchanged, "packing elsewhere", pack(1)),
    (rules.mean_over_channels, "over height", mean(1, shape=(1, 8, 8, 6))),
    (rules.mean_over_channels, "over 8 channels", mean(3, shape=(1, 8, 8, 8))),
    (rules.prelu_slopes, "one each", prelu(1, 1, 4)),
    (rules.concatenation_inputs, "computed", concatenation(None)),
    (rules.concatenation_inputs, "zeros", concatenation(0)),
    (rules.transpose_size, "22 wide", transpose(1, 22, 22, 144)),
    (rules.transpose_size, "a vector", transpose(1, 1, 1, 100_000)),
    (rules.flatten_size, "94,400 bytes", flatten(1, 59, 50, 32)),
    (rules.flatten_size, "another shape", one_op.one("RESHAPE", [IMAGE, integers(1, 64, 4)], Tensor((1, 64, 4)))),
    (rules.mean_positions, "of a part of it", mean(1, 2, shape=(1, 64, 128, 3))),
    (rules.mean_positions, "many channels", mean(1, 2, shape=(1, 10, 10, 2048))),
    (rules.mean_positions, "over channels", mean(3, shape=(1, 256, 256, 4))),
    (rules.strided_slice, "strides of 1", strided_slice(1, 1, 1, 1)),
    (rules.strided_slice, "another operator's strides", conv(strideW=2, strideH=2)),
]
BROKEN: list[tuple[rules.Rule, str, Graph, str]] = [
    (rules.supported_operator, "a new one", one_op.one("GELU", [IMAGE], IMAGE), "GELU is not supported"),
    (
        rules.supported_operator,
        "a custom one",
        one_op.one("MyOp", [IMAGE], IMAGE, custom=True),
        "MyOp is not supported",
    ),
    (rules.supported_operator, "a custom one by that name", relu(1, 4, custom=True), "RELU is not"),
    (
        rules.operator_version,
        "of 2023",
        one_op.one("ADD", [IMAGE, IMAGE], IMAGE, 4),
        "version 4; the newest supported version is 3",
    ),
    (
        rules.operator_version,
        "grouped",
        one_op.one("CONV_2D", [IMAGE, kernel(4, 1, 1, 2), BIAS], IMAGE, 6),
        "version 6",
    ),
    (rules.eight_bit_tensors, "float", relu(1, 4, dtype="FLOAT32"), "in0 is FLOAT32"),
    (rules.eight_bit_tensors, "float weights", conv(weights=Tensor((4, 1, 1, 4), "FLOAT32", 1.0)), "in1 is FLOAT32"),
    (rules.eight_bit_tensors, "float output", one_op.one("QUANTIZE", [IMAGE], FLOAT), "out is FLOAT32"),
    (rules.eight_bit_tensors, "int16", relu(1, 4, dtype="INT16"), "in0 is INT16"),
    (rules.eight_bit_tensors, "computed int32", relu(1, 4, dtype="INT32"), "in0 is INT32"),
    (rules.static_shapes, "input", conv(Tensor((1, 8, 8, 4), signature=(1, -1, 8, 4))), "in0 has a dynamic shape"),
    (rules.three_dimensions, "a batch", conv(Tensor((2, 8, 8, 4))), r"in0 has the shape \[2, 8, 8, 4\]"),
    (
        rules.three_dimensions,
        "output",
        one_op.one("RESHAPE", [IMAGE, integers(2, 2, 8, 2, 4)], Tensor((2, 2, 8, 2, 4))),
        r"out has the shape \[2, 2, 8, 2, 4\]",
    ),
    (rules.constant_parameters, "weights", computed("CONV_2D", IMAGE, IMAGE), "in1 is computed"),
    (rules.constant_parameters, "dense weights", computed("FULLY_CONNECTED", VECTOR, VECTOR), "in1 is computed"),
    (rules.constant_parameters, "axes", computed("MEAN", IMAGE, VECTOR), "in1 is computed"),
    (rules.no_fused_activation, "max pool", pool(fusedActivationFunction=1), "has a fused activation"),
    (
        rules.no_fused_activation,
        "mean pool",
        pool("AVERAGE_POOL_2D", fusedActivationFunction=3),
        "has a fused activation",
    ),
    (
        rules.no_fused_activation,
        "concatenation",
        one_op.one("CONCATENATION", [IMAGE, IMAGE], Tensor((1, 8, 8, 8)), 2, fusedActivationFunction=1),
        "has a fused activation",
    ),
    (rules.equal_dilation, "2 by 1", conv(weights=kernel(4, 3, 3, 4), dilationHFactor=2), "dilation 2 by 1"),
    (rules.dense_layer_format, "shuffled", dense(weightsFormat=1), "has shuffled weights"),
    (rules.bilinear_resize_input, "of one position", resize((1, 1, 1, 4)), "resizes a 1x1 map"),
    (rules.dense_layer_format, "rows", dense((1, 3, 4)), r"has the output shape \[1, 3, 4\]"),
    (rules.softmax_size, "too long", softmax(1, 16385), r"works on \[1, 16385\]; at most 16384 elements"),
    (rules.batch_axis_unchanged, "mean over all", mean(0, 1, 2), "reduces over the batch"),
    (rules.batch_axis_unchanged, "from behind", mean(-4), "reduces over the batch"),
    (rules.batch_axis_unchanged, "padding", pad(1, 0, 0, 0), "pads the batch"),
    (rules.batch_axis_unchanged, "splitting", split(0, 2), "splits the batch"),
    (rules.batch_axis_unchanged, "packing", pack(0), "packs along the batch"),
    (rules.mean_over_channels, "over 6 channels", mean(-1, shape=(1, 8, 8, 6)), "is over 6 channels"),
    (
        rules.mean_positions,
        "of a large map",
        mean(1, 2, shape=(1, 256, 128, 3)),
        r"is over 32,768 positions; 32,768 are not mapped \(edgetpu#461\)",
    ),
    (rules.prelu_slopes, "one for each place", prelu(8, 8, 4), r"slopes of the shape \[8, 8, 4\]"),
    (rules.concatenation_inputs, "ones", concatenation(1), "in1 is a constant"),
    (rules.concatenation_inputs, "zeros and two others", concatenation(0, more=1), "in1 is a constant"),
    (rules.transpose_size, "28 wide", transpose(1, 28, 28, 144), "moves 112,896 elements; at most 73,728"),
    (rules.flatten_size, "a large map", flatten(1, 128, 128, 13), "flattens 262,144 bytes; a tile has 196,608"),
    (rules.strided_slice, "strides", strided_slice(1, 2, 1, 1), "has strides other than 1"),
    (rules.strided_slice, "ellipsis", strided_slice(1, 1, 1, 1, ellipsisMask=1), "has an ellipsis or a new axis"),
    (rules.strided_slice, "new axis", strided_slice(1, 1, 1, 1, newAxisMask=2), "has an ellipsis or a new axis"),
]


def name(value: Any) -> str:
    return value.__name__ if callable(value) else str(value) if isinstance(value, str) else ""


@pytest.mark.parametrize(("rule", "what", "graph"), KEPT, ids=name)
def test_kept(rule: rules.Rule, what: str, graph: Graph) -> None:
    """What keeps one rule keeps them all."""
    assert rule(graph.operators[0], graph) is None
    assert [op.status for op in place(graph, TARGET).ops] == [MAPPED]


@pytest.mark.parametrize(("rule", "what", "graph", "pattern"), BROKEN, ids=name)
def test_broken(rule: rules.Rule, what: str, graph: Graph, pattern: str) -> None:
    """Every broken rule keeps its operator on the CPU, and gives a reason, a requirement and advice."""
    assert re.search(pattern, rule(graph.operators[0], graph) or "")
    (op,) = place(graph, TARGET).ops
    assert op.placement == "cpu"
    broken = rules.first_violation(graph.operators[0], graph, TARGET)
    assert broken
    assert op.status == rules.RULES[broken[0]]
    if broken[0] is rule:
        requirement, advice = rules.documentation(rule)
        assert op.reason == f"{rule(graph.operators[0], graph)}. {requirement}"
        assert op.advice == CONSTANTS.advice.get(op.op, advice)


@pytest.mark.parametrize(("version", "mapped"), [("16.0", True), ("15.0", False), ("2.1", False), ("1.0", False)])
def test_an_operator_needs_a_compiler_that_has_it(version: str, mapped: bool) -> None:
    graph = one_op.one("SQUARED_DIFFERENCE", [VECTOR, VECTOR], VECTOR)
    (op,) = place(graph, TARGET.compiled_by(version)).ops
    assert (op.placement == "tpu") is mapped
    assert mapped or "SQUARED_DIFFERENCE needs runtime 14, newer than compiler" in op.reason


def test_what_is_advised_is_done() -> None:
    """If the advice names `legalize`, there is a rewrite for that operator."""
    advice = CONSTANTS.advice
    rewritten = {name for entry in REWRITES for name in entry.operators} | {"SHAPE", "DEQUANTIZE", "BATCH_TO_SPACE_ND"}
    assert {name for name, text in advice.items() if "legalize" in text} <= rewritten
    assert not set(advice) & set(CONSTANTS.operators)


def test_a_dense_layer_with_many_scales_is_mapped_with_a_caution() -> None:
    (op,) = place(dense(scales=FOUR), TARGET).ops
    assert op.status == MAPPED
    assert "wrong results" in op.reason
    (plain,) = place(dense(), TARGET).ops
    assert (plain.reason, plain.advice) == ("", "")


LARGE, SMALL = Tensor((1, 128, 128, 4)), Tensor((1, 1, 1, 4))


@pytest.mark.parametrize(
    ("graph", "risk"),
    [
        (mean(1, 2, shape=(1, 64, 128, 3)), ""),
        (mean(1, 2, shape=(1, 112, 112, 4)), r"reduces 12,544 positions; up to 8,192 .* \(edgetpu#461"),
        (one_op.one("REDUCE_MAX", [LARGE, integers(1, 2)], VECTOR), "reduces 16,384 positions"),
        (
            one_op.one("AVERAGE_POOL_2D", [LARGE], SMALL, filterHeight=128, filterWidth=128, padding=1),
            "reduces 16,384 positions",
        ),
        (one_op.one("RESIZE_BILINEAR", [Tensor((1, 64, 64, 32)), integers(128, 128)], Tensor((1, 128, 128, 32))), ""),
        (
            one_op.one("RESIZE_BILINEAR", [Tensor((1, 64, 64, 64)), integers(128, 128)], Tensor((1, 128, 128, 64))),
            r"writes 1,048,576 values; up to 524,288 .* \(edgetpu#31",
        ),
        (
            one_op.one("RESIZE_NEAREST_NEIGHBOR", [LARGE, integers(512, 512)], Tensor((1, 512, 512, 4))),
            "up to 819,200 are known",
        ),
    ],
)
def test_a_size_larger_than_any_known_one_is_a_risk_with_its_source(graph: Graph, risk: str) -> None:
    """No limit that is known must not read as no limit."""
    result = check(graph, TARGET)
    (op,) = result.ops
    assert op.placement == "tpu"
    assert bool(op.risk) is bool(risk)
    assert re.search(risk, op.risk)
    assert op.risk in result.describe()
    assert result.risk.startswith("low" if not risk else ("medium", "high"))


def test_every_rule_is_tried_both_ways() -> None:
    tried = set(rules.RULES) - {rules.compiler_version}  # it is about the compiler, not the operator: above
    assert {rule for rule, *_ in KEPT} == tried
    assert {rule for rule, *_ in BROKEN} == tried
    first = [rules.first_violation(graph.operators[0], graph, TARGET) for _, _, graph, _ in BROKEN]
    assert {broken[0] for broken in first if broken} == tried  # no rule is hidden by an earlier one


@pytest.mark.parametrize("rule", rules.RULES, ids=name)
def test_a_docstring_is_a_requirement_and_an_advice(rule: rules.Rule) -> None:
    requirement, advice = rules.documentation(rule)
    for text in (requirement, advice):
        assert 20 < len(text) < 200
        assert text[0].isupper()
        assert text.endswith(".")
        assert "\n" not in text
    assert rules.RULES[rule]


def test_every_rule_is_in_the_table() -> None:
    """A function with the signature of a rule is a rule."""
    signature = {"operator": "Operator", "graph": "Graph", "return": "str | None"}
    ours = [value for name, value in vars(rules).items() if not name.startswith("_")]
    found = {value for value in ours if getattr(value, "__annotations__", {}) == signature}
    assert found | {rules.compiler_version} == set(rules.RULES)
