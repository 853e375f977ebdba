"""Manuals: the examples of data, preprocessing and tasks are valid, and what the page of the report says is true."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import tiny
from paths import ROOT
from ruamel.yaml import YAML
from run_records import full

from compress.data.sources import SOURCES
from compress.pipeline.schema import load
from compress.report import run_comparison, sections
from compress.report.placement import NODE_DATA_FILE
from compress.results.run import RunRecord
from compress.surface.cli import data
from compress.surface.cli.main import build_parser
from compress.tasks import TASKS
from deploy.contract.preprocessing import STEPS, Preprocessing

DATA, PREPROCESSING, REPORT, TASKS_PAGE = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("data", "preprocessing", "report", "tasks")
)
DATA_EXAMPLES = re.findall(r"```yaml\n(.*?)```", DATA, re.DOTALL)
STEP_EXAMPLES = re.findall(r"```yaml\n# (\[[\d, ]+\]) becomes (\[[\d, ]+\])\n(.*?)```", PREPROCESSING, re.DOTALL)


@pytest.mark.parametrize("example", DATA_EXAMPLES)
def test_examples_of_data_are_read(tmp_path: Path, example: str) -> None:
    path = tmp_path / "pipeline.yaml"
    builder = "ssd_small" if re.search(r"\b(voc|coco|yolo):", example) else "digits_cnn"
    has_labels = "random:" not in example
    (tmp_path / "model.tflite").write_bytes(tiny.classifier(int8=False))
    model = f"{{builder: {builder}}}" if has_labels else "{file: model.tflite}"
    head = f"schema_version: 1\nname: example\nmodel: {model}\n"
    train = "{train: {epochs: 1}}, " if has_labels else ""
    path.write_text(head + f"stages: [{train}quantize]\n" + example)
    assert load(path).data.source.name in example


def test_every_source_has_an_example() -> None:
    shown = {name for name in SOURCES for example in DATA_EXAMPLES if re.search(rf"\b{name}:", example)}
    assert shown == SOURCES.keys() - {"digits"}


@pytest.mark.parametrize(("input_shape", "becomes", "text"), STEP_EXAMPLES, ids=lambda value: value[:30])
def test_an_example_of_preprocessing(input_shape: str, becomes: str, text: str) -> None:
    steps = YAML(typ="safe", pure=True).load(text)
    sample = np.random.default_rng(0).integers(0, 100, json.loads(input_shape)).astype(np.float32)
    output = Preprocessing(steps)(sample)
    assert list(output.shape) == json.loads(becomes)
    assert np.isfinite(output).all()


def test_every_step_and_every_block_is_tried() -> None:
    assert len(STEP_EXAMPLES) == PREPROCESSING.count("```yaml")
    named = {name for _, _, text in STEP_EXAMPLES for step in YAML(typ="safe", pure=True).load(text) for name in step}
    assert named == {*STEPS}


def test_the_commands_of_the_report_are_parsed() -> None:
    lines = re.findall(r"^python -m compress (.*)$", REPORT, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["compare", "check"]
    parser, _ = build_parser()
    for line in lines:
        assert parser.parse_args(shlex.split(line)).run


def test_the_files_and_numbers_are_those_of_the_code() -> None:
    listed = re.findall(r"^\| `([\w.]+)` \|", REPORT, re.MULTILINE)
    assert listed == ["report.html", "report.md", "report.json", NODE_DATA_FILE]
    assert data.MOST_RUNS == 6
    assert run_comparison.SIGNIFICANT == 0.05


def test_the_address_of_a_section_exists() -> None:
    idents = {section.ident for section in sections(RunRecord.from_json(full()), {})}
    assert set(re.findall(r"report\.html#([\w-]+)", REPORT)) <= idents


def test_every_task_is_in_the_table() -> None:
    shown = re.findall(r"^\| `(\w+)`", TASKS_PAGE, re.MULTILINE)
    assert shown == list(TASKS)


def test_the_example_without_labels_is_read(tmp_path: Path) -> None:
    example = next(text for text in re.findall(r"```yaml\n(.*?)```", TASKS_PAGE, re.DOTALL) if "labels: none" in text)
    (tmp_path / "model.tflite").write_bytes(tiny.classifier(int8=False))
    (tmp_path / "photos").mkdir()
    text = example.replace("model.onnx", "model.tflite")
    text = re.sub(r"  - prune:.*\n", "", text)  # the file of this test has no layers to prune
    (tmp_path / "p.yaml").write_text("schema_version: 1\nname: example\n" + text)
    assert load(tmp_path / "p.yaml").data.task == "outputs"


def test_the_variants_of_the_source_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "samples.npz", x=np.zeros((8, 4, 4), np.float32))
    (tmp_path / "model.tflite").write_bytes(tiny.classifier(int8=False))
    variants = re.findall(r"# or +(\{.*?\}\})", TASKS_PAGE)
    assert len(variants) == 3
    for variant in variants:
        head = "schema_version: 1\nname: example\nmodel: {file: model.tflite}\nstages: []\n"
        text = f"{head}data: {{source: {variant}}}\n"
        (tmp_path / "p.yaml").write_text(text)
        assert load(tmp_path / "p.yaml").data.task == "outputs"
