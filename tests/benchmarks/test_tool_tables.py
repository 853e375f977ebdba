"""The tables of benchmarks/other_tools.py show every result, including those without a file."""

from __future__ import annotations

from typing import Any

import pytest
import tool_tables

TOOLS = ("coralline", "other")


def judgement(**changes: Any) -> dict[str, Any]:
    return {
        "size_bytes": 12_345,
        "full_integer": True,
        "mapped": 30,
        "operators": 31,
        "rejected": None,
        "remarks": [],
        "latency_ms": [1.234, 1.0, 2.0],
        "mean_sqnr_db": 31.26,
        **changes,
    }


def made(**changes: Any) -> dict[str, Any]:
    return {"status": "made", "error": "", "cpu_seconds": 41.6, "cpu_ratio": 1.0, "judgement": judgement(**changes)}


def results(other: dict[str, Any] | None, **ours: Any) -> dict[str, Any]:
    pairs = {"net/coralline": made(**ours)} | ({} if other is None else {"net/other": other})
    return {"subjects": {"net": {"what": "a net"}}, "pairs": pairs, "versions": {"other": "2.6"}}


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize(
    ("changes", "label", "cell"),
    [
        ({}, "net", "31.3 dB"),
        ({"agreement": 0.9876}, "net", "0.988, 31.3 dB"),
        ({"agreement": 0.9, "accuracy": 0.75, "float_accuracy": 0.8}, "net (float accuracy 0.800)", "0.750, 31.3 dB"),
        ({"ap50": 0.41, "float_ap50": 0.5}, "net (float AP50 0.500)", "0.410, 31.3 dB"),
        ({"error": "the outputs differ"}, "net", "not comparable"),
    ],
)
def test_quality(changes: dict[str, Any], label: str, cell: str) -> None:
    assert rows(tool_tables.quality_table(results(None, **changes), TOOLS)) == [[label, cell, ""]]


def test_tools_without_a_file() -> None:
    for status in ("cannot", "failed"):
        tool_results = results({"status": status, "error": "does not read ONNX"})
        assert rows(tool_tables.quality_table(tool_results, TOOLS))[0][2] == status
        assert rows(tool_tables.cost_table(tool_results, TOOLS))[0][2] == status


def test_cost() -> None:
    tool_results = results(made(rejected="FULLY_CONNECTED has scales per channel", full_integer=False))
    expected = ["net", "30 of 31; 12 kB; 42 s", "rejected, not full integer; 12 kB; 42 s"]
    assert rows(tool_tables.cost_table(tool_results, TOOLS)) == [expected]


def test_latency() -> None:
    other = made(rejected="an INT16 tensor") | {"cpu_ratio": 1.5}
    assert rows(tool_tables.latency_table(results(other), TOOLS)) == [["net", "1.23 ms; 1.00", "rejected; 1.50"]]


def test_what_a_tool_cannot_do_has_its_version_and_reason() -> None:
    tool_results = results({"status": "failed", "error": "RuntimeError:\n a | b " + "x" * 500})
    table = tool_tables.cannot_table(tool_results, TOOLS, [("third", "1.0", "writes ONNX files")])
    first, second = rows(table)
    assert first[:3] == ["other", "2.6", "net"]
    assert first[3].startswith("RuntimeError: a / b xxx")
    assert len(first[3]) == tool_tables.LONGEST
    assert second == ["third", "1.0", "all", "writes ONNX files"]


def test_models_with_the_same_reason_are_one_row() -> None:
    refused = {"status": "cannot", "error": "does not read ONNX"}
    tool_results = results(refused)
    tool_results["subjects"]["second"] = {"what": "another"}
    tool_results["pairs"]["second/other"] = refused
    assert rows(tool_tables.cannot_table(tool_results, TOOLS, []))[0][2] == "net, second"


def test_a_rejected_file_is_listed() -> None:
    table = tool_tables.cannot_table(results(made(rejected="an INT16 tensor")), TOOLS, [])
    assert rows(table)[0][3] == "the Edge TPU compiler rejects the file: an INT16 tensor"


def test_a_remark_about_a_mapped_operator_is_listed() -> None:
    table = tool_tables.cannot_table(results(made(remarks=["FULLY_CONNECTED: scales per channel"])), TOOLS, [])
    assert rows(table)[0][2:] == ["net", "FULLY_CONNECTED: scales per channel"]
