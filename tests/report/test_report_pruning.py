"""The report's section on channels."""

from __future__ import annotations

from typing import Any

from compress.report import pruning

CURVE = {"layers": ["conv", "other"], "kept": [16, 8, 4], "divergence": [0.0, 0.1, 0.9], "accuracy": [0.9, 0.8, 0.3]}
FLAT = {"layers": ["flat"], "kept": [8, 4], "divergence": [0.0, 0.01], "accuracy": [0.9, 0.9]}


def record(**step: Any) -> dict[str, Any]:
    figures = {
        "before": {"macs": 2000, "compute_ms": 0.002, "streamed_bytes": 0},
        "after": {"macs": 500, "compute_ms": 0.001, "streamed_bytes": 0},
    }
    plain = {
        "figures": figures,
        "layers": {"conv": {"before": 16, "after": 8}},
        "unsupported": [],
        "allocation": "balanced",
    }
    facts = {"objective": {"name": "compute"}, "steps": [{**plain, **step}]}
    return {"stages": [{"stage": "prune", "id": "prune", "facts": facts}]}


def test_no_section_without_pruning() -> None:
    assert pruning.section({"stages": [{"stage": "train", "facts": {}}]}) is None
    assert pruning.section({"stages": None}) is None
    assert pruning.section({"stages": [{"stage": "prune", "facts": None}]}) is None  # it failed


def test_what_a_step_did() -> None:
    found = pruning.section(record(trials={"balanced": 0.9, "uniform": 0.8}, unsupported=["norm"]))
    assert found is not None
    (step,) = found["steps"]
    assert step["title"] == "prune, step 1"
    assert step["objective"] == "compute"
    assert step["figures"][0] == ("multiply-accumulates", "2,000", "500", "0.250")
    assert step["figures"][2][3] == ""  # a share of nothing
    assert step["layers"] == [("conv", "16", "8")]
    assert step["unsupported"] == ["norm"]
    assert step["trials"] == "balanced 0.900, uniform 0.800"
    assert found["svg"] == ""


def test_the_set_that_means_most_is_drawn_first() -> None:
    found = pruning.section({**record(), "sensitivity": {"curves": [FLAT, CURVE]}})
    assert found is not None
    svg = found["svg"]
    assert svg.index("conv and 1 more") < svg.index("flat")
    assert "conv and 1 more: 8 of 16 kept, accuracy 0.800" in svg
    assert svg.count("<polyline") == 2
    assert svg.count("<circle") == 5


def test_curves_of_a_stage_are_drawn_where_none_were_measured_before() -> None:
    found = pruning.section(record(sensitivity=[CURVE]))
    assert found is not None
    assert found["svg"].count("<polyline") == 1
