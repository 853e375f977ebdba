"""Pipeline files: a complete one, its lines and keys, values that a key refuses, and the files in the repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from paths import ROOT

from compress.core import resources

COMPLETE = """\
schema_version: 1
name: digits
seed: 0
target: edgetpu
model:
  builder: digits_cnn
data:
  source:
    digits: {}
  split:
    test: 0.2
  preprocess:
    - resize:
        size: [32, 32]
        filter: bilinear
    - scale:
        from: [0, 16]
        to: [0, 1]
stages:
  - train:
      epochs: 4
      augment:
        shift: 0.1
  - prune:
      keep_macs: 0.5
  - distill: {}
  - quantize:
      method: ptq
  - compile: {}
  - package:
      golden: 2
measure:
  latency:
    runs: 10
budget:
  accuracy_drop: 0.02
"""
LINES = COMPLETE.splitlines()
KEYED = [(number, match[1]) for number, line in enumerate(LINES, 1) if (match := re.match(r"[ -]*(\w+):", line))]


def stages(*names: str) -> str:
    """Return COMPLETE with other stages."""
    before, _, rest = COMPLETE.partition("stages:\n")
    return f"{before}stages:\n" + "".join(f"  - {name}\n" for name in names) + rest[rest.index("measure:") :]


SHIPPED = [ROOT / "pipeline.yaml", *sorted(resources.shipped("models").glob("*.yaml"))]


def documented() -> Iterator[Any]:
    """Yield the complete pipelines in README and docs."""
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, block in enumerate(re.findall(r"```ya?ml\n(.*?)```", path.read_text(), re.DOTALL)):
            if "schema_version:" in block:
                yield pytest.param(block, id=f"{path.name}-{number}")


NUMBERS = {
    "schema_version: 1": ["2", "0"],
    "seed: 0": ["-1", "2147483648", "0.5"],
    "test: 0.2": ["0", "1", "-0.1"],
    "epochs: 4": ["0", "-1", "4.0", "4e0", "10001"],
    "shift: 0.1": ["-0.1", "0.51"],
    "keep_macs: 0.5": ["0", "1", "-1"],
    "golden: 2": ["0", "101", "2.5"],
    "runs: 10": ["0", "1000001", "10.0"],
    "accuracy_drop: 0.02": ["-1.5", "1.5"],
}
NO_NUMBERS = ['"12"', "'1'", "true", "no", "[1]", "{a: 1}", "2001-01-01"]
