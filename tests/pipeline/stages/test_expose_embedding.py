"""The stage `expose_embedding` in a pipeline, and tasks without an embedding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny

from deploy import Model
from deploy.contract import bundle

STAGES = ["expose_embedding", "compile", "package"]


@pytest.mark.essential
def test_a_pipeline(tmp_path: Path, coralline: tiny.Coralline) -> None:
    """Scores are measured as before, and the bundle has the embedding, its head and references."""
    path = tiny.project(tmp_path, STAGES)
    assert coralline(path).returncode == 0
    record = json.loads((tmp_path / "runs" / "tiny" / "report.json").read_text())
    facts = {row["id"]: row["facts"] for row in record["stages"]}
    assert facts["expose_embedding"] == {"values": 64, "shape": [1, 4, 4, 4], "dtype": "int8"}
    plain = tiny.project(tmp_path / "plain", ["compile", "package"], name="plain")
    assert coralline(plain).returncode == 0
    other = json.loads((tmp_path / "runs" / "plain" / "report.json").read_text())
    for model in ("original", "result"):
        measured = [report["models"][model]["measurements"]["accuracy"] for report in (record, other)]
        assert measured[0] == measured[1]
    opened = bundle.read(str(tmp_path / "runs" / "tiny" / "tiny.coralline"))
    assert [tensor.name for tensor in opened.models["int8"].outputs] == ["scores", "embedding"]
    assert len(opened.models["original"].outputs) == 1
    assert opened.embedding is not None
    assert opened.embedding.head is not None
    assert opened.embedding.head.weights.shape == (3, 64)
    assert set(opened.embedding.references) == {"training", "validation"}
    assert len(opened.embedding.references["training"].labels) == 15
    with Model(opened, "int8", device="cpu") as model:
        answer = model(np.zeros((4, 4, 1), np.float32))
    assert answer.scores.shape == (3,)
    text = (tmp_path / "runs" / "tiny" / "report.html").read_text()
    assert "False rejects" in text
    assert "package.recognition.unknown" in text


def test_other_tasks_have_none(tmp_path: Path, coralline: tiny.Coralline) -> None:
    path = tiny.project(tmp_path, STAGES, data={"source": {"npz": {"file": "data.npz"}}, "task": "embeddings"})
    done = coralline(path)
    assert done.returncode == 2
    assert "the output of the model is the embedding already" in done.stderr
