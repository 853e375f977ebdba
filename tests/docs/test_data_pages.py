"""docs/data.md: every example is a valid data section."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
from paths import ROOT

from compress.data.sources import SOURCES
from compress.pipeline.schema import load

TEXT = (ROOT / "docs" / "data.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_read(tmp_path: Path, example: str) -> None:
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
    shown = {name for name in SOURCES for example in EXAMPLES if re.search(rf"\b{name}:", example)}
    assert shown == SOURCES.keys() - {"digits"}
