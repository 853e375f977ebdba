"""The file for Model Explorer: every operator with its placement and reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from paths import EDGETPU
from run_records import HOSTILE

from compress.model.tflite import graph
from compress.pipeline.probes.contents import placement_of
from compress.report.node_data import node_data
from compress.report.record import OperatorRecord, PlacementRecord
from compress.surface import api


def results_of(model: graph.Graph, *kinds: str, **more: Any) -> dict[str, Any]:
    operators = [
        OperatorRecord(operator.index, operator.name, kind, 1000, **more)
        for operator, kind in zip(model.operators, kinds, strict=True)
    ]
    content = json.loads(node_data(model, PlacementRecord("", tuple(operators))))
    assert content["name"] == "Placement (predicted)"
    results: dict[str, Any] = content["results"]
    return results


def test_node_data_finds_nodes_by_tensor_or_by_index() -> None:
    model = graph.parse(tiny.classifier())
    results = results_of(model, "tpu", "cpu", status="Not supported", reason="3 dimensions")
    assert results == {
        "hidden": {"value": "Edge TPU", "bgColor": "#9fd8de"},
        "scores": {"value": "CPU: Not supported 3 dimensions", "bgColor": "#f2b766"},
    }
    for name in (b"same", HOSTILE.encode("utf-8", "replace")):
        for tensor in model.source.subgraphs[0].tensors:
            tensor.name = name
        same = graph.from_source(model.source)
        assert list(results_of(same, "tpu", "cpu", status=HOSTILE, reason=HOSTILE, advice=HOSTILE)) == ["0", "1"]


@pytest.mark.parametrize("name", ["movenet_single_pose_lightning_ptq", "deeplabv3_mnv2_dm05_pascal_quant"])
def test_a_real_model(name: str) -> None:
    path = EDGETPU / "pairs" / name / "model.tflite"
    if not path.exists():
        pytest.skip("the shared models are not here")
    model = graph.read(path)
    placement = placement_of(api.check(path).to_json())
    results = json.loads(node_data(model, placement))["results"]
    assert len(results) == len(model.operators)
    on_cpu = sum(not operator.on_tpu for operator in placement.ops)
    assert sum(row["value"].startswith("CPU") for row in results.values()) == on_cpu > 0


def test_check_writes_the_file(coralline: tiny.Coralline, tmp_path: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(tiny.classifier())
    plain = coralline("check", "m.tflite", "--json")
    done = coralline("check", "m.tflite", "--json", "--node-data", "g.json")
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert set(json.loads((tmp_path / "g.json").read_text())["results"]) == {"hidden", "scores"}
    done = coralline("check", "m.tflite", "--node-data", "none/g.json")
    assert (done.returncode, done.stdout) == (6, "")
    assert "none/g.json" in done.stderr
    done = coralline("check", "m.tflite", "--sizes", "--node-data", "g.json")
    assert done.returncode == 2
    assert "not for --sizes" in done.stderr
