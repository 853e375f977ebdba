"""docs/preprocessing.md: every example runs, and gives the stated shape."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from paths import ROOT
from ruamel.yaml import YAML

from deploy.contract.preprocessing import STEPS, Preprocessing

PAGE = (ROOT / "docs" / "preprocessing.md").read_text()
EXAMPLES = re.findall(r"```yaml\n# (\[[\d, ]+\]) becomes (\[[\d, ]+\])\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("input_shape", "becomes", "text"), EXAMPLES, ids=lambda value: value[:30])
def test_example(input_shape: str, becomes: str, text: str) -> None:
    steps = YAML(typ="safe", pure=True).load(text)
    sample = np.random.default_rng(0).integers(0, 100, json.loads(input_shape)).astype(np.float32)
    output = Preprocessing(steps)(sample)
    assert list(output.shape) == json.loads(becomes)
    assert np.isfinite(output).all()


def test_every_step_and_every_block_is_tried() -> None:
    assert len(EXAMPLES) == PAGE.count("```yaml")
    named = {name for _, _, text in EXAMPLES for step in YAML(typ="safe", pure=True).load(text) for name in step}
    assert named == {*STEPS}
