"""The report's section on architecture search."""

from __future__ import annotations

from typing import Any

from run_records import Record, html_of, markdown_of, with_stages

from compress.report import architecture
from compress.report.record import RunRecord

COSTS = {"macs": 2_000_000, "size_bytes": 40_960, "latency_ms": 0.75, "streamed_bytes": 0}
FACTS = {
    "metric": "accuracy",
    "sub_networks": 1.7e7,
    "evaluated": 300,
    "limits": {"latency_ms": 0.73},
    "largest": {**COSTS, "validation": 0.71},
    "smallest": {**COSTS, "validation": None, "latency_ms": 0.61},
    "chosen": {**COSTS, "validation": 0.7, "latency_ms": 0.72},
    "equal": {"samples": 296, "best": 0.71, "error": 0.026, "sub_networks": 120},
    "front": [{**COSTS, "validation": 0.5}, {**COSTS, "validation": 0.7}],
    "layers": {"stem": {"before": 32, "after": 16}},
    "blocks": {"sum0": True, "sum1": False},
    "kernels": {"depthwise": {"before": 5, "after": 3}},
}


def record(**changes: Any) -> Record:
    return with_stages({"id": "search", "stage": "search_architecture", "facts": {**FACTS, **changes}})


def test_no_section_without_a_search() -> None:
    for stage in ("train", "search_architecture"):  # a stage without facts has failed
        assert [*architecture.sections(RunRecord.from_json(with_stages({"stage": stage})))] == []


def test_what_was_searched_and_chosen() -> None:
    text, page = markdown_of(record()), html_of(record())
    assert "300 of more than 10^7 sub-networks were evaluated. Limits: latency 0.730 ms." in text
    assert "| validation accuracy | 0.710 | not finite | 0.700 |" in text
    assert "accuracy is 0.710, its standard error 0.026 (296 samples). 120 sub-networks are within that" in text
    assert "standard error" not in markdown_of(record(equal={}))
    assert "1 of 2 residual blocks are left out: sum1." in text
    assert "Channels and kernels of the chosen sub-network: 2" in page
    assert "5x5" in page


def test_other_networks() -> None:
    assert "All 1 residual blocks are kept." in markdown_of(record(blocks={"sum": True}))
    assert "No residual block could be left out." in markdown_of(record(blocks={}))
    many = {f"layer{index}": {"before": 8, "after": 8} for index in range(60)}
    assert "21 more are in report.json." in html_of(record(layers=many))
