"""The placement of operators on graphs made for the tests; test_check.py has real models."""

from __future__ import annotations

import json

import one_op
import pytest
import tiny
from one_op import Op, Tensor

from compress.model.tflite import graph
from compress.targets import load
from compress.targets.edgetpu.placement import AFTER_CPU_OPERATOR, MAPPED, Placement, place

TARGET = load("edgetpu")


def placed(operators: list[Op], inputs: str = "x", floats: str = "", dynamic: str = "") -> Placement:
    """Return the placement of a graph of tensors of one shape, named by letters; the last operator gives the output."""
    names = sorted({letter for op in operators for letter in (*op.inputs, *op.outputs)})
    shape = (1, 4)
    tensors = {
        letter: Tensor(
            shape, "FLOAT32" if letter in floats else "INT8", signature=(1, -1) if letter in dynamic else None
        )
        for letter in names
    }
    return place(one_op.read(tensors, operators, inputs, operators[-1].outputs), TARGET)


def tpu(inputs: str, output: str) -> Op:
    return Op("RELU" if len(inputs) == 1 else "ADD", inputs, output)


def cpu(inputs: str, output: str) -> Op:
    return Op("ABS", inputs, output)


def sides(placement: Placement) -> str:
    return "".join(op.placement[0] for op in placement.ops)


def test_what_comes_after_a_cpu_operator_is_late() -> None:
    placement = placed([tpu("x", "a"), cpu("a", "b"), tpu("b", "c"), tpu("c", "d")])
    assert sides(placement) == "tccc"
    assert [op.status for op in placement.ops] == [
        MAPPED,
        "Operation not supported",
        AFTER_CPU_OPERATOR,
        AFTER_CPU_OPERATOR,
    ]
    assert placement.ops[2].reason == "comes after an operator that stays on the CPU"
    assert placement.summary == "1 of 4 operators would run on the Edge TPU"


@pytest.mark.parametrize(
    ("operators", "inputs", "expected"),
    [
        ([tpu("x", "a"), cpu("a", "b"), tpu("x", "c"), tpu("c", "d"), tpu("bd", "e")], "x", "tcttc"),
        ([tpu("x", "a"), cpu("a", "b"), tpu("a", "c"), tpu("c", "d"), cpu("bd", "e")], "x", "tcttc"),
        ([tpu("x", "a"), cpu("a", "b"), cpu("b", "c"), tpu("c", "d")], "x", "tccc"),
        ([tpu("x", "a"), cpu("a", "b"), tpu("y", "c"), tpu("cb", "d")], "xy", "tctc"),
        ([cpu("x", "a"), cpu("a", "b"), tpu("b", "c"), tpu("c", "d")], "x", "cctt"),
        ([Op("CAST", "x", "f"), Op("QUANTIZE", "f", "a"), tpu("a", "b")], "x", "cct"),
    ],
    ids=["a branch", "a branch that ends", "two on the CPU", "a late second input", "in front", "CAST and QUANTIZE"],
)
def test_only_what_depends_on_a_late_cpu_operator_is_late(operators: list[Op], inputs: str, expected: str) -> None:
    placement = placed(operators, inputs, floats="f")
    assert sides(placement) == expected
    late = [op for op in placement.ops if op.status == AFTER_CPU_OPERATOR]
    assert all(op.op in ("RELU", "ADD") for op in late)


def test_a_leading_float_quantize() -> None:
    placement = placed([Op("QUANTIZE", "x", "a"), tpu("a", "b"), Op("DEQUANTIZE", "b", "y", 2)], floats="xy")
    assert sides(placement) == "ctc"
    assert placement.ops[0].status == "Operation is working on an unsupported data type"
    assert placement.ops[2].status == "Operation not supported"
    assert placement.failure is None


def test_nothing_for_the_tpu() -> None:
    placement = placed([tpu("x", "a"), tpu("a", "b")], floats="xab")
    assert sides(placement) == "cc"
    assert placement.failure == "no operator can run on the Edge TPU; is the model quantized to full integer?"
    assert placement.summary.startswith("the compiler will reject this model: no operator")
    assert placement.to_json()["compiles"] is False


@pytest.mark.parametrize(
    ("op", "failure"),
    [
        (Op("ADD", "xx", "a", 4), None),
        (
            Op("ADD", "xx", "a", 5),
            "ADD version 5 (operator 0) is newer than its TFLite parser; the newest supported version is 4",
        ),
        (Op("GELU", "x", "a"), "GELU version 1 (operator 0) is newer than its TFLite parser"),
        (Op("MyOp", "x", "a", custom=True), "its TFLite parser does not know the custom operator MyOp"),
        (Op("TFLite_Detection_PostProcess", "x", "a", custom=True), None),
        (Op("edgetpu-custom-op", "x", "a", custom=True), "it is already compiled"),
    ],
)
def test_what_the_parser_refuses(op: Op, failure: str | None) -> None:
    placement = placed([op, tpu("x", "b")])
    assert placement.failure == failure
    assert sides(placement)[1] == "t"


def test_a_dynamic_input() -> None:
    placement = placed([tpu("x", "a"), tpu("a", "b")], dynamic="x")
    assert placement.failure == "the input x has a dynamic shape"
    assert sides(placement) == "ct"


def test_macs_on_each_side_and_json() -> None:
    placement = place(graph.parse(tiny.classifier()), TARGET)
    macs = [4 * 4 * 4 * 9, 64 * 3]
    assert [op.macs for op in placement.ops] == macs
    assert placement.macs == {"tpu": sum(macs), "cpu": 0}
    report = json.loads(json.dumps(placement.to_json()))
    assert set(report) == {"summary", "compiles", "failure", "macs", "ops"}
    assert report["compiles"] is True
    assert report["ops"][1] == {
        "index": 1,
        "op": "FULLY_CONNECTED",
        "version": 3,
        "output": "scores",
        "placement": "tpu",
        "status": MAPPED,
        "reason": "",
        "advice": "",
        "macs": 192,
        "risk": "",
    }
    floats = place(graph.parse(tiny.classifier(int8=False)), TARGET)
    assert floats.macs == {"tpu": 0, "cpu": sum(macs)}
