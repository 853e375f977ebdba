"""docs/streaming.md: its example, from a stateful layer to the state that the device feeds back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT

pytestmark = pytest.mark.tensorflow
PAGE = ROOT / "docs" / "streaming.md"


def test_the_example_of_a_stream(keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(0)
    values: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(block, str(PAGE), "exec"), values)
    assert [tensor.name for tensor in values["model"].inputs] == ["frame", "gru_state_0_in"]
    outputs = values["result"].facts["outputs"]
    assert [output["name"] for output in outputs] == ["mask", "gru_state_0_out"]
    masks, expected = np.stack(values["masks"]), np.stack(values["expected"])
    assert masks.shape == (300, 1, 16)
    assert np.linalg.norm(masks - expected) < 0.05 * np.linalg.norm(expected)
    assert len(np.unique(masks[:, 0, 0])) > 20
    assert min(output["sqnr_db"] for output in outputs) > 20
