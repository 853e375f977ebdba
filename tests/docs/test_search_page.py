"""docs/search.md: its example is valid, and runs with few trials."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from paths import ROOT
from ruamel.yaml import YAML

pytest.importorskip("optuna", reason="optuna is not installed: pip install -e '.[search]'")
TEXT = (ROOT / "docs" / "search.md").read_text()


def example() -> str:
    """Return the example of `search`."""
    blocks: list[str] = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
    assert len(blocks) == 1
    return blocks[0]


def search(folder: Path, content: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pipeline.yaml").write_text(content)
    command = [sys.executable, "-m", "compress", "search", "pipeline.yaml", *options]
    return subprocess.run(command, cwd=folder, env=tiny.environment(), check=False, capture_output=True, text=True)


def test_the_example_is_valid(tmp_path: Path) -> None:
    done = search(tmp_path, example(), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    settings = json.loads(done.stdout)["settings"]
    assert settings["model.stages"] == "3 to 7, whole numbers"
    assert settings["train.learning_rate"] == "0.001 to 0.02, logarithmic"
    assert settings["prune.keep_macs"] == "0.3 to 0.9"


@pytest.mark.tensorflow
def test_the_example_runs_and_stops_what_is_too_slow(tmp_path: Path) -> None:
    """A width whose latency is over the limit is not trained."""
    content: dict[str, Any] = YAML(typ="safe").load(example())
    content["model"]["arguments"] = {"width": 0.35, "stages": 3, "last": 32}
    content["stages"] = [{"train": {"epochs": 1, "batch_size": 128}}, {"prune": {"keep_macs": 0.7, "epochs": 1}},
                         {"quantize": {"ranges": "minmax", "held_out_samples": 32}}, "compile"]  # fmt: skip
    content["search"] |= {
        "trials": 3,
        "constraints": {"mapped_whole": True, "latency_ms": 0.75},
        "settings": {"model.width": [0.35, 6.0], "stages": [["train", "quantize", "compile"]]},
    }
    done = search(tmp_path, json.dumps(content), "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    trials = {trial["settings"]["model.width"]: trial for trial in record["trials"] if trial["status"] != "repeated"}
    assert trials[0.35]["status"] == "complete"
    assert trials[0.35]["predicted"]["latency_ms"] == pytest.approx(trials[0.35]["values"]["latency_ms"], rel=0.02)
    assert trials[6.0]["status"] == "stopped"
    assert trials[6.0]["stages"] == {}
    assert trials[6.0]["expected"] == trials[6.0]["predicted"]
    assert trials[6.0]["reason"].startswith("latency_ms is predicted to be ")
    (point,) = record["front"]
    assert (tmp_path / "runs" / "digits" / "search" / point["model"]).is_file()
