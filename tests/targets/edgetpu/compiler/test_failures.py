"""Explanations of the compiler's failures: every recorded message on a model that it could be about."""

from __future__ import annotations

import json
import re

import one_op
import pytest
import tiny
from one_op import Op, Tensor
from paths import EDGETPU
from stand_in import CHANCE, FAILED, VERSION

from compress.model.tflite import graph
from compress.model.tflite.graph import Graph
from compress.targets.edgetpu.compiler import failures
from compress.targets.edgetpu.compiler.failures import FAILURES, layer, operator_description, recognize
from compress.targets.edgetpu.compiler.host import CompilerRun
from compress.targets.edgetpu.rules import documentation

TENSORS = {
    "input": Tensor((1, 8, 8, 4)),
    "model/stem/Relu;model/stem/BiasAdd": Tensor((1, 8, 8, 4)),
    "model/block/wide/Exp": Tensor((1, 8, 8, 64)),
    "model/cut/strided_slice": Tensor((1, 8, 8, 4), signature=(1, -1, 8, 4)),
    "StatefulPartitionedCall:0": Tensor((1, 8, 8, 4)),
    "out/Gelu": Tensor((1, 8, 8, 4)),
}
NAMES = list(TENSORS)
KINDS = [("RELU", 1, False), ("EXP", 2, False), ("EXP", 1, False), ("Atan", 1, True), ("GELU", 1, False)]
MODEL: Graph = one_op.read(
    TENSORS,
    [
        Op(kind, [input_name], [output_name], version, custom=custom)
        for (kind, version, custom), input_name, output_name in zip(KINDS, NAMES, NAMES[1:], strict=False)
    ],
    [NAMES[0]],
    [NAMES[-1]],
)
PARSER = (
    f"Edge TPU Compiler version {VERSION}\nERROR: Didn't find op for builtin opcode '%s' version '%d'. An older "
    "version of this builtin might be supported. Are you using an old TFLite binary with a newer model?\n\n"
    "ERROR: Registration failed.\n\nInvalid model: model.tflite\nModel could not be parsed\n"
)
LARGE = (
    "ERROR: Restored original execution plan after delegate application failure.\n"
    "Compilation failed: Compilation failed due to large activation tensors in model.\n"
)
INTERPRETER = "Compilation failed: Model failed in Tflite interpreter. Please ensure model can be loaded/run in it.\n"
WIDE = "operator 1 EXP version 2 (layer block/wide, tensor model/block/wide/Exp)"
CASES = {
    "unknown_version": (PARSER % ("EXP", 2), [WIDE]),
    "unknown_operator": (
        "ERROR: Op builtin_code out of range: 150. Are you using old TFLite binary with newer model?\n",
        ["operator 4 GELU version 1 (layer out, tensor out/Gelu)"],
    ),
    "custom_operator": (
        FAILED % ("ERROR: Encountered unresolved custom op: Atan.\nERROR: Node number 3 (Atan) failed to prepare.\n"),
        ["operator 3 Atan version 1 (layer StatefulPartitionedCall:0)"],
    ),
    "not_prepared": (
        FAILED % f"ERROR: kernels/x.cc:1 a != b\nERROR: Node number 0 (RELU) failed to prepare.\n{INTERPRETER}",
        ["operator 0 RELU version 1 (layer stem, tensor model/stem/Relu;model/stem/BiasAdd)"],
    ),
    "dynamic_sizes": (
        FAILED
        % (
            "ERROR: Attempting to use a delegate that only supports static-sized tensors with a graph that has "
            f"dynamic-sized tensors.\n{INTERPRETER}"
        ),
        [
            "operator 2 EXP version 1 (layer cut, tensor model/cut/strided_slice)",
            "operator 3 Atan version 1 (layer StatefulPartitionedCall:0)",
        ],
    ),
    "large_activations": (FAILED % LARGE, [WIDE]),
    "ran_out_of_time": (FAILED % "Compilation timeout. This is usually caused by large activations.\n", [WIDE]),
    "not_quantized": ("Edge TPU Compiler version 15.0.340273435\nInvalid model: m.tflite\nModel not quantized\n", []),
    "not_parsed": ("ERROR: Did not get operators, tensors, or buffers in subgraph 0.\nModel could not be parsed\n", []),
    "internal_error": (CHANCE, [WIDE]),
    "crashed": (FAILED % "libc++abi: terminating with uncaught exception of type std::out_of_range: vector\n", []),
    "silent": (FAILED % "", []),
}
FLAKY = {"ran_out_of_time", "internal_error", "crashed", "silent"}


def test_every_failure_has_a_case() -> None:
    assert {function.__name__ for function in FAILURES} == set(CASES)
    assert {function.__name__ for function, flaky in FAILURES.items() if flaky} == FLAKY


@pytest.mark.parametrize("name", CASES)
def test_translation(name: str) -> None:
    log, operators = CASES[name]
    failure = recognize(CompilerRun(1, log, {}), MODEL)
    assert failure.name == name
    assert list(failure.operators)[: len(operators)] == operators
    assert bool(failure.operators) == bool(operators)
    assert failure.flaky == (name in FLAKY)
    error = failure.error("ssh there")
    assert error.where == "ssh there"
    assert failure.cause.rstrip(".")[1:] in error.what
    assert error.hint[1:] == failure.fix.rstrip(".")[1:] != ""
    assert all(operator in error.what for operator in operators)
    assert error.what.startswith("the compiler failed: ")
    assert "(exit code 1, " in error.what


@pytest.mark.parametrize("function", FAILURES, ids=lambda function: function.__name__)
def test_every_failure_says_cause_and_fix(function: failures.Callable[..., object]) -> None:
    cause, fix = documentation(function)  # type: ignore[arg-type]
    assert re.fullmatch(r"[A-Z][^\n]*\.", cause)
    assert re.fullmatch(r"[A-Z].*\.", fix)
    assert function("nothing of the kind\nERROR: something else\n", MODEL) is None


def test_only_the_operator_of_that_version() -> None:
    failure = recognize(CompilerRun(1, PARSER % ("EXP", 1), {}), MODEL)
    assert [text.split(" (")[0] for text in failure.operators] == ["operator 2 EXP version 1"]
    absent = recognize(CompilerRun(1, PARSER % ("RESHAPE", 9), {}), MODEL)
    assert (absent.name, absent.operators) == ("unknown_version", ())
    assert "look at" not in absent.error("x").what


def test_many_operators_are_not_all_named() -> None:
    tensors = {str(index): Tensor((1, 4)) for index in range(7)}
    chain = [Op("EXP", [str(index)], [str(index + 1)], 2) for index in range(6)]
    failure = recognize(CompilerRun(1, PARSER % ("EXP", 2), {}), one_op.read(tensors, chain, ["0"], ["6"]))
    assert len(failure.operators) == 6
    assert failure.error("x").what.endswith("operator 2 EXP version 2 (layer 3) and 3 more")


def test_what_is_not_known_is_said_as_it_is() -> None:
    """A log with an unknown line is not reported as silent."""
    silent = ("silent", "exit code 0, no error message and no compiled model", True, False)
    expected = {
        "": silent,
        "Edge TPU Compiler version 15.0.340273435\n": silent,
        "something of tomorrow\nCompilation failed! \n": ("unknown", "exit code 0, Compilation failed!", False, False),
        "cannot open libc.so.6\n": ("unknown", "exit code 0, cannot open libc.so.6", False, False),
    }
    found = {log: recognize(CompilerRun(0, log, {}), MODEL) for log in expected}
    assert {log: (one.name, one.what, one.flaky, one.certain) for log, one in found.items()} == expected


def test_a_compiler_that_the_system_killed() -> None:
    for exit_code in (-9, 137):
        failure = recognize(CompilerRun(exit_code, "", {}), MODEL)
        assert (failure.name, failure.what, failure.flaky) == ("killed", f"exit code {exit_code}", False)
        assert "most likely memory was short" in str(failure.error("x"))
        assert failure.error("x").exit_code == 5


def test_a_long_line_takes_no_long_time() -> None:
    """A log is untrusted input."""
    recognize(CompilerRun(1, "a" * 3_000_000 + "\n" + ": " * 1_000_000, {}), MODEL)


def test_a_described_operator() -> None:
    layers = {
        "model/block_1/conv2d_3/Relu;model/block_1/conv2d_3/BiasAdd": "block_1/conv2d_3",
        "sequential/dense/MatMul;sequential/dense/BiasAdd": "dense",
        "dense/MatMul": "dense",
        "StatefulPartitionedCall:0": "StatefulPartitionedCall:0",
        "": "",
    }
    assert {tensor: layer(tensor) for tensor in layers} == layers
    parsed = graph.parse(tiny.classifier())
    assert operator_description(parsed.operators[1], parsed) == "operator 1 FULLY_CONNECTED version 3 (layer scores)"


@pytest.mark.skipif(not EDGETPU.exists(), reason=f"{EDGETPU} is not there; see CORALLINE_SHARED")
def test_every_recorded_message_is_known() -> None:
    """The messages are used as recorded: some are shortened, and some have several lines in one."""
    known = 0
    for row in json.loads((EDGETPU / "issue_logs.json").read_text()):
        if "msg" in row:
            failure = recognize(CompilerRun(1, row["msg"].replace("'X' version 'N'", "'EXP' version '2'"), {}), MODEL)
            assert failure.name != "unknown" or "no reason" in row["msg"], row
            known += failure.name != "unknown"
    assert known >= 6
