"""Parsed logs of the compiler: every line of the recorded logs is recognized or kept."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import compiler_evidence
import one_op
import pytest
import tiny
from one_op import Op, Tensor
from packages import compiled
from paths import EDGETPU
from stand_in import FAILED, LOG, VERSION

from compress.model.tflite import graph
from compress.targets import load
from compress.targets.edgetpu.check import check
from compress.targets.edgetpu.compiler.log import (
    CompilerReport,
    StatusRow,
    actual_placement,
    differences,
    expected_report,
    parse,
)
from compress.targets.edgetpu.placement import AFTER_CPU_OPERATOR, MAPPED, place

TARGET = load("edgetpu")
LOGS = sorted(EDGETPU.glob("pairs/*/compiler.log"))
shared = pytest.mark.skipif(not LOGS, reason=f"no recorded logs in {EDGETPU}; see CORALLINE_SHARED")

MIXED = """\
Edge TPU Compiler version 2.0.267685300
INFO: Initialized TensorFlow Lite runtime.

Model compiled successfully in 231 ms.

Input model: blur.tflite
Input size: 3.03KiB
Output model: blur_edgetpu.tflite
Output size: 296.85KiB
On-chip memory available for caching model parameters: 1.73MiB
On-chip memory used for caching model parameters: 10.00KiB
Off-chip memory used for streaming uncached model parameters: 0.00B
Number of Edge TPU subgraphs: 1
Total number of operations: 3
Operation log: blur_edgetpu.log

Model successfully compiled but not all operations are supported by the Edge TPU. A percentage of the model will \
instead run on the CPU, which is slower. For details, visit g.co/coral/model-reqs.
Number of operations that will run on Edge TPU: 1
Number of operations that will run on CPU: 2

Operator                       Count      Status

DEPTHWISE_CONV_2D              1          Mapped to Edge TPU
DEQUANTIZE                     1          Operation is working on an unsupported data type
CUSTOM                         1          A status of tomorrow
Something that no version has said before: 3
"""
SEGMENTS = """\
Edge TPU Compiler version 16.0.384591198
Searching for valid delegate with step 10
Try to compile segment with 84 ops
Intermediate tensors: a/b,c
Started a compilation timeout timer of 180 seconds.
Compilation timeout. This is usually caused by large activations.
Compilation failed!
Try to compile segment with 74 ops
Started a compilation timeout timer of 180 seconds.

Model compiled successfully in 1857 ms.

Input model: m_segment_0_of_2.tflite
Input size: 5.20MiB
Output model: m_segment_0_of_2_edgetpu.tflite
Output size: 6.51MiB
On-chip memory used for caching model parameters: 6.02MiB
On-chip memory remaining for caching model parameters: 1.02MiB
Off-chip memory used for streaming uncached model parameters: 0.00B
Number of Edge TPU subgraphs: 1
Total number of operations: 84
Operation log: m_segment_0_of_2_edgetpu.log
See the operation log file for individual operation details.
Compilation child process completed within timeout period.
Compilation succeeded!
Started a compilation timeout timer of 180 seconds.

Model compiled successfully in 5 ms.

Input model: m_segment_1_of_2.tflite
Input size: 1.00MiB
Output model: m_segment_1_of_2_edgetpu.tflite
Output size: 1.51MiB
On-chip memory used for caching model parameters: 12.00KiB
Off-chip memory used for streaming uncached model parameters: 1.00GiB
Number of Edge TPU subgraphs: 2
Total number of operations: 3
Operation log: m_segment_1_of_2_edgetpu.log
Number of operations that will run on Edge TPU: 2
Number of operations that will run on CPU: 1
Compilation child process completed within timeout period.
Compilation succeeded!
"""


def test_a_log_of_version_16() -> None:
    (report,) = parse(LOG)
    assert report == CompilerReport(
        VERSION,
        (StatusRow("CONV_2D", MAPPED, 1), StatusRow("FULLY_CONNECTED", MAPPED, 1)),
        subgraphs=1,
        total=2,
        on_chip_bytes=1280,
        on_chip_remaining_bytes=7.87 * 2**20,
        off_chip_bytes=0,
    )
    assert report.mapped == 2
    json.dumps(report.to_json(), allow_nan=False)


def test_a_log_of_version_2_and_what_is_unknown() -> None:
    (report,) = parse(MIXED)
    assert report.on_chip_available_bytes == 1.73 * 2**20
    assert (report.on_chip_bytes, report.on_chip_remaining_bytes, report.off_chip_bytes) == (10240, None, 0)
    assert (report.total, report.on_tpu, report.on_cpu, report.mapped) == (3, 1, 2, 1)
    assert StatusRow("CUSTOM", "A status of tomorrow", 1) in report.operations
    assert report.unknown == (
        "INFO: Initialized TensorFlow Lite runtime.",
        "Something that no version has said before: 3",
    )


def test_segments() -> None:
    one, other = parse(SEGMENTS)
    assert one.errors == (
        "Compilation timeout. This is usually caused by large activations.",
        "Compilation failed!",
    )
    assert (one.unknown, other.unknown) == ((), ())
    assert (one.on_chip_bytes, other.on_chip_bytes) == (6.02 * 2**20, 12 * 1024)
    assert (one.subgraphs, other.subgraphs, other.off_chip_bytes) == (1, 2, 2**30)
    assert (one.mapped, other.mapped) == (None, 2)
    assert one.version == other.version == VERSION


def test_a_failure() -> None:
    (report,) = parse(FAILED % "ERROR: first\nand what it means\n")
    assert (report.errors, report.unknown) == (("ERROR: first", "Compilation failed!"), ("and what it means",))
    assert report.operations == ()
    assert report.mapped is None
    assert parse("") == parse("\n \n\t\r\n") == (CompilerReport(),)


@shared
def test_recorded_tables_agree_with_the_compiled_models_and_with_the_prediction() -> None:
    """For every log, its table agrees with the compiled model and with the prediction for that compiler."""
    rows = {row["name"]: row for row in json.loads((EDGETPU / "pairs" / "index.json").read_text())}
    differ: dict[str, Any] = {}
    assert len(LOGS) >= 3
    for path in LOGS:
        name = path.parent.name
        (report,) = parse(path.read_text())
        assert report.unknown == ()
        original = graph.read(path.with_name("model.tflite"))
        sides = zip(original.operators, rows[name]["placement"], strict=True)
        real = Counter(op.name for op, side in sides if side == "tpu")
        assert Counter({row.op: row.count for row in report.operations if row.status == MAPPED}) == real
        version = compiler_evidence.VERSIONS[rows[name]["behaves_like"]]
        target = TARGET.compiled_by(version)
        mismatches = differences(expected_report(check(original, target), original, version), report)
        if mismatches:
            differ[name] = mismatches
    assert differ == {}


@shared
def test_placements_read_from_real_compiled_models() -> None:
    for row in json.loads((EDGETPU / "pairs" / "index.json").read_text()):
        folder = EDGETPU / "pairs" / row["name"]
        original, real = graph.read(folder / "model.tflite"), graph.read(folder / "compiled.tflite")
        placement = actual_placement(place(original, TARGET), original, [real], [])
        assert [op.placement for op in placement.ops] == row["placement"], row["name"]


# --- the memory lines -------------------------------------------------------------------

ON = "On-chip memory used for caching model parameters"


def test_memory() -> None:
    """What cannot be read is kept as an unknown line."""
    sizes = {"0.00B": 0, "768.00B": 768, "66.00KiB": 66 * 1024, " 2.00KiB  ": 2048}
    sizes |= {"7.67MiB": 7.67 * 2**20, "64MiB": 64 * 2**20, "1.50GiB": 1.5 * 2**30}
    for shown, expected in sizes.items():
        (report,) = parse(f"first line\n{ON}: {shown}\nlast line\n")
        assert (report.on_chip_bytes, report.off_chip_bytes) == (expected, None)
        assert report.unknown == ("first line", "last line")
    for shown in ("?", "MiB", "1.2.3MiB", ".MiB", "1,5MiB", "1.5MB", "1.5", "nanB", "1.0B (?)", "٣B"):
        (report,) = parse(f"{ON}: {shown}\n")
        assert (report.on_chip_bytes, report.unknown) == (None, (f"{ON}: {shown}",))


# --- against the prediction -------------------------------------------------------------


def predicted(content: bytes) -> CompilerReport:
    parsed = graph.parse(content)
    return expected_report(check(parsed, TARGET), parsed, "16.0")


def test_what_is_expected_of_a_model() -> None:
    report = predicted(tiny.classifier())
    assert report.operations == parse(LOG)[0].operations
    assert (report.subgraphs, report.total, report.on_tpu, report.on_cpu) == (1, 2, 2, 0)
    assert predicted(tiny.classifier(int8=False)).on_chip_bytes is None


def test_a_custom_operator_is_called_custom() -> None:
    tensors = {letter: Tensor((1, 4)) for letter in "abcd"}
    chain = [Op("RELU", "a", "b"), Op("Mine", "b", "c", custom=True), Op("RELU", "c", "d")]
    report = predicted(one_op.content(tensors, chain, "a", "d"))
    rows = [
        StatusRow("CUSTOM", "Operation not supported", 1),
        StatusRow("RELU", AFTER_CPU_OPERATOR, 1),
        StatusRow("RELU", MAPPED, 1),
    ]
    assert report.operations == tuple(sorted(rows))


def test_differences() -> None:
    (real,) = parse(LOG)
    assert differences(replace(real, version="16.0"), real) == []
    other = replace(
        real,
        operations=(StatusRow("CONV_2D", AFTER_CPU_OPERATOR, 1), StatusRow("FULLY_CONNECTED", MAPPED, 1)),
        subgraphs=2,
    )
    assert differences(real, other) == [
        {"name": f"CONV_2D: {MAPPED}", "predicted": 1, "real": 0},
        {"name": f"CONV_2D: {AFTER_CPU_OPERATOR}", "predicted": 0, "real": 1},
        {"name": "subgraphs", "predicted": 1, "real": 2},
    ]
    assert differences(real, CompilerReport()) == []  # a value that was not printed does not differ


def test_sizes_differ_by_more_than_the_printed_digits() -> None:
    same = [(3_491_758, "3.33MiB"), (3_491_000, "3.33MiB"), (1285, "1.25KiB"), (0, "0.00B"), (1023, "1.00KiB")]
    other = [(3_470_000, "3.33MiB"), (1300, "1.25KiB"), (1, "0.00B")]
    for size, shown in same + other:
        (real,) = parse(f"{ON}: {shown}\n")
        difference = [{"name": "on_chip_bytes", "predicted": size, "real": real.on_chip_bytes}]
        assert differences(CompilerReport(on_chip_bytes=size), real) == (difference if (size, shown) in other else [])


def test_the_placement_that_the_compiled_model_has() -> None:
    content = tiny.classifier()
    original = graph.parse(content)
    placement = place(original, TARGET)
    assert actual_placement(placement, original, [graph.parse(compiled(content))], parse(LOG)) == placement
    real = LOG.replace(
        "FULLY_CONNECTED                1          Mapped to Edge TPU", f"FULLY_CONNECTED 1 {AFTER_CPU_OPERATOR}"
    )
    half = actual_placement(placement, original, [graph.parse(compiled(content, on_cpu=1))], parse(real))
    assert [(op.placement, op.status) for op in half.ops] == [("tpu", MAPPED), ("cpu", AFTER_CPU_OPERATOR)]
    assert half.ops[1].reason == "the compiler did not map it; no known rule explains this"
