"""docs/tasks.md: every task is in the table, and the examples are valid."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import tiny
from paths import ROOT

from compress.pipeline.schema import load
from compress.tasks import TASKS

TEXT = (ROOT / "docs" / "tasks.md").read_text()


def test_every_task_is_in_the_table() -> None:
    shown = re.findall(r"^\| `(\w+)`", TEXT, re.MULTILINE)
    assert shown == list(TASKS)


def test_the_example_without_labels_is_read(tmp_path: Path) -> None:
    example = next(text for text in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL) if "labels: none" in text)
    (tmp_path / "model.tflite").write_bytes(tiny.classifier(int8=False))
    (tmp_path / "photos").mkdir()
    text = example.replace("model.onnx", "model.tflite")
    text = re.sub(r"  - prune:.*\n", "", text)  # the file of this test has no layers to prune
    (tmp_path / "p.yaml").write_text("schema_version: 1\nname: example\n" + text)
    assert load(tmp_path / "p.yaml").data.task == "outputs"


def test_the_variants_of_the_source_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "samples.npz", x=np.zeros((8, 4, 4), np.float32))
    (tmp_path / "model.tflite").write_bytes(tiny.classifier(int8=False))
    variants = re.findall(r"# or +(\{.*?\}\})", TEXT)
    assert len(variants) == 3
    for variant in variants:
        head = "schema_version: 1\nname: example\nmodel: {file: model.tflite}\nstages: []\n"
        text = f"{head}data: {{source: {variant}}}\n"
        (tmp_path / "p.yaml").write_text(text)
        assert load(tmp_path / "p.yaml").data.task == "outputs"
