"""graph.html and the file for Model Explorer: every operator with its placement and reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tiny
from operator_pages import classifier, example_page, placed
from paths import EDGETPU
from run_records import HOSTILE

from compress.model.tflite import graph
from compress.pipeline.probes.operator_graph import graph_node_data, graph_page, placement_of
from compress.report import operator_graph
from compress.report.operator_graph import GraphSubject
from compress.report.record import PlacementRecord
from compress.surface import api

SVG = "{http://www.w3.org/2000/svg}"


def drawing(page: str) -> ElementTree.Element:
    match = re.search(r"<svg.*?</svg>", page, re.DOTALL)
    assert match is not None
    return ElementTree.fromstring(match[0])


def test_every_operator_has_a_box_with_its_placement_and_reason() -> None:
    root = drawing(example_page())
    boxes = {box.attrib["id"]: box for box in root.iter(f"{SVG}g") if box.get("id")}
    assert list(boxes) == ["op-0", "op-1"]
    assert boxes["op-0"].get("class") == "node tpu"
    assert boxes["op-1"].get("class") == "node cpu"
    words = [text.text for text in boxes["op-1"].iter(f"{SVG}text")]
    assert words == ["1 FULLY_CONNECTED", "1×3 int8", "CPU"]  # noqa: RUF001
    title = boxes["op-1"].find(f"{SVG}title")
    assert title is not None
    assert "Operation not supported It has 3 dimensions." in (title.text or "")
    ends = [box for box in root.iter(f"{SVG}g") if box.get("class") == "node end"]
    assert len(ends) == 2
    assert len([path for path in root.iter(f"{SVG}path") if path.get("class") == "edge"]) == 3


def test_the_page_has_the_tables_and_reaches_for_nothing() -> None:
    page = example_page()
    assert "Operators on the CPU" in page
    assert page.count("It has 3 dimensions.") == 1 + 2 * 2 + 0  # in the drawing, and in both tables
    assert not re.search(r"<script|@import|url\((?!#)|src=", page)
    assert not re.search("https?://", page.replace("http://www.w3.org/2000/svg", ""))
    assert all(href.startswith("#") for href in re.findall(r'href="([^"]*)"', page))


def test_an_unknown_placement_is_not_shown_as_cpu() -> None:
    model = classifier()
    page = operator_graph.page(model, placed(model, "dsp"), GraphSubject("m", "other", "unknown"))
    assert 'class="node unknown"' in page
    assert "unknown</strong>: 2 operators" in page.replace("\xa0", " ")


def test_a_rejected_model_says_so() -> None:
    model = classifier()
    subject = GraphSubject("m", "edgetpu", "rejected", "CONV_2D version 9 is too new")
    page = operator_graph.page(model, placed(model, "tpu"), subject)
    assert "The compiler rejects this model" in page
    assert "CONV_2D version 9 is too new. Nothing runs on the Edge TPU" in page.replace("\xa0", " ")


def test_the_operators_of_another_model_are_refused() -> None:
    model = classifier()
    with pytest.raises(ValueError, match="another model"):
        operator_graph.page(model, placed(model, "tpu")[:1], GraphSubject("m", "edgetpu", ""))


def test_hostile_names_stay_text() -> None:
    model = classifier()
    for tensor in model.source.subgraphs[0].tensors:
        tensor.name = HOSTILE.encode("utf-8", "replace")
    hostile = graph.from_source(model.source)
    operators = placed(hostile, "cpu", status=HOSTILE, reason=HOSTILE, advice=HOSTILE)
    page = operator_graph.page(hostile, operators, GraphSubject(HOSTILE, HOSTILE, HOSTILE, HOSTILE))
    assert "<script" not in page
    assert "<img" not in page
    drawing(page)
    json.loads(graph_node_data(hostile, PlacementRecord("", tuple(operators))))


def test_very_large_models_have_the_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_graph, "MOST_DRAWN", 1)
    page = example_page()
    assert "<svg" not in page
    assert "more than 1 operators" in page
    assert "1 FULLY_CONNECTED" in page


def test_a_tensor_that_is_read_before_it_is_written_draws_no_edge() -> None:
    model = classifier()
    first, second = model.source.subgraphs[0].operators
    first.inputs = [*first.inputs, second.outputs[0]]
    damaged = graph.from_source(model.source)
    page = operator_graph.page(damaged, placed(damaged, "tpu"), GraphSubject("m", "edgetpu", ""))
    assert page.count('class="edge"') == 3


def test_node_data_finds_nodes_by_tensor_or_by_index() -> None:
    model = classifier()
    operators = placed(model, "tpu", "cpu", status="Not supported", reason="3 dimensions")
    node_data = json.loads(graph_node_data(model, PlacementRecord("", tuple(operators))))
    assert node_data["name"] == "Placement (predicted)"
    assert node_data["results"]["hidden"] == {"value": "Edge TPU", "bgColor": "#9fd8de"}
    assert node_data["results"]["scores"] == {"value": "CPU: Not supported 3 dimensions", "bgColor": "#f2b766"}
    for tensor in model.source.subgraphs[0].tensors:
        tensor.name = b"same"
    same = graph.from_source(model.source)
    assert list(json.loads(graph_node_data(same, PlacementRecord("", tuple(operators))))["results"]) == ["0", "1"]


@pytest.mark.parametrize("name", ["movenet_single_pose_lightning_ptq", "deeplabv3_mnv2_dm05_pascal_quant"])
def test_a_real_model(name: str) -> None:
    path = EDGETPU / "pairs" / name / "model.tflite"
    if not path.exists():
        pytest.skip("the shared models are not here")
    model = graph.read(path)
    placement = placement_of(api.check(path).to_json())
    page = graph_page(model, placement, name, "edgetpu")
    root = drawing(page)
    assert len([box for box in root.iter(f"{SVG}g") if box.get("id")]) == len(model.operators)
    on_cpu = sum(not operator.on_tpu for operator in placement.ops)
    assert page.count('class="node cpu"') == on_cpu > 0


def test_check_writes_both_files(coralline: tiny.Coralline, tmp_path: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(tiny.classifier())
    plain = coralline("check", "m.tflite", "--json")
    done = coralline("check", "m.tflite", "--json", "--graph", "g.html", "--node-data", "g.json")
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert "m.tflite" in (tmp_path / "g.html").read_text()
    assert set(json.loads((tmp_path / "g.json").read_text())["results"]) == {"hidden", "scores"}


def test_check_for_the_cpu_draws_too(coralline: tiny.Coralline, tmp_path: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(tiny.classifier(int8=False))
    done = coralline("check", "m.tflite", "--target", "cpu", "--graph", "g.html")
    assert done.returncode == 0, done.stderr
    assert "All 2 operators run on the CPU" in (tmp_path / "g.html").read_text()


def test_a_graph_that_cannot_be_written(coralline: tiny.Coralline, tmp_path: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(tiny.classifier())
    done = coralline("check", "m.tflite", "--graph", "none/g.html")
    assert (done.returncode, done.stdout) == (6, "")
    assert "none/g.html" in done.stderr


def test_the_graph_is_for_one_file(coralline: tiny.Coralline) -> None:
    done = coralline("check", "m.tflite", "--sizes", "--graph", "g.html")
    assert done.returncode == 2
    assert "not for --sizes" in done.stderr
