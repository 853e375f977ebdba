"""The report's section on channels."""

from __future__ import annotations

from typing import Any

from run_records import Record, html_of, markdown_of, pruning_step, with_stages

from compress.report import pruning
from compress.report.blocks import Figure
from compress.results.run import RunRecord

CURVE = {"layers": ["conv", "other"], "kept": [16, 8, 4], "divergence": [0.0, 0.1, 0.9], "accuracy": [0.9, 0.8, 0.3]}
FLAT = {"layers": ["flat"], "kept": [8, 4], "divergence": [0.0, 0.01], "accuracy": [0.9, 0.9]}


def record(**step: Any) -> Record:
    facts = {"objective": {"name": "compute"}, "steps": [pruning_step(**step)]}
    return with_stages({"stage": "prune", "facts": facts})


def drawing(content: Record) -> str:
    (section,) = pruning.sections(RunRecord.from_json(content))
    (figure,) = [block for block in section.blocks if isinstance(block, Figure)]
    return figure.svg


def test_no_section_without_pruning() -> None:
    for stage in ("train", "prune"):  # a stage without facts has failed
        assert [*pruning.sections(RunRecord.from_json(with_stages({"stage": stage})))] == []


def test_what_a_step_did() -> None:
    content = record(trials={"balanced": 0.9, "uniform": 0.8}, unsupported=["norm"])
    text, page = markdown_of(content), html_of(content)
    assert "### prune, step 1" in text
    assert (
        "Objective: compute. Allocation: balanced. "
        "Validation accuracy after one epoch: balanced 0.900, uniform 0.800. "
        "Unchanged, because their channels cannot be followed: norm."
    ) in text
    assert "| multiply-accumulates | 2,000 | 500 | 0.250 |" in text
    assert "| parameters sent at every inference | 0 bytes | 0 bytes | none |" in text  # a share of 0
    assert "Layers with fewer channels: 1" in page
    assert "<polyline" not in page[page.index('id="pruning"') : page.index('id="where-operators-run"')]


def test_the_set_that_means_most_is_drawn_first() -> None:
    svg = drawing({**record(), "sensitivity": {"curves": [FLAT, CURVE]}})
    assert svg.index("conv and 1 more") < svg.index("flat")
    assert "conv and 1 more: 8 of 16 kept, accuracy 0.800" in svg
    assert svg.count("<polyline") == 2
    assert svg.count("<circle") == 5


def test_curves_of_a_stage_are_drawn_where_none_were_measured_before() -> None:
    assert drawing(record(sensitivity=[CURVE])).count("<polyline") == 1
