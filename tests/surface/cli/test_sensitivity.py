"""`sensitivity` on the command line: it runs the steps before `prune`, measures the model, and writes a report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

PIPELINE = """
schema_version: 1
name: curves
model: {builder: digits_cnn}
data:
  source: {digits: {}}
  preprocess: [{resize: {size: [32, 32]}}, {scale: {from: [0, 16], to: [0, 1]}}]
stages: [train: {epochs: 2}, prune: {objective: compute, epochs: 1}, quantize: {}]
"""


def sensitivity(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the real command, with warnings as users see them."""
    command = [sys.executable, "-m", "compress", "sensitivity", "p.yaml", *arguments]
    return subprocess.run(command, cwd=folder, env=tiny.environment(), capture_output=True, text=True, check=False)


@pytest.mark.tensorflow
def test_curves_of_the_model_before_anything_is_removed(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PIPELINE)
    done = sensitivity(tmp_path, "--samples", "64", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema_version"] == 1
    assert report["samples"] == 64
    assert len(report["curves"]) >= 3
    for curve in report["curves"]:
        assert len(curve["kept"]) == len(curve["accuracy"]) == len(curve["divergence"])
        assert curve["divergence"][0] == 0
        assert curve["kept"] == sorted(curve["kept"], reverse=True)
    record = json.loads((tmp_path / "runs" / "curves-sensitivity" / "report.json").read_bytes())
    assert [stage["stage"] for stage in record["stages"]] == ["load", "train"]
    assert record["sensitivity"]["curves"] == report["curves"]
    assert 'aria-labelledby="sensitivity-title' in (tmp_path / "runs" / "curves-sensitivity" / "report.html").read_text(
        encoding="utf-8"
    )
    again = sensitivity(tmp_path, "--samples", "64")
    assert again.returncode == 0
    assert "cached" in again.stderr
    lines = again.stdout.splitlines()
    assert len(lines) == len(report["curves"]) + 2
    assert lines[-1] == "report: runs/curves-sensitivity/report.html"


def test_a_file_without_layers_is_refused(coralline: tiny.Coralline, tmp_path: Path) -> None:
    (tmp_path / "tiny.tflite").write_bytes(tiny.classifier())
    text = PIPELINE.replace("builder: digits_cnn", "file: tiny.tflite")
    (tmp_path / "p.yaml").write_text(text[: text.index("stages:")] + "stages: [compile: {}]")
    done = coralline("sensitivity", "p.yaml")
    assert done.returncode == 2
    assert "the model has no Keras layers" in done.stderr


def test_a_number_of_samples_that_cannot_be(coralline: tiny.Coralline, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PIPELINE)
    done = coralline("sensitivity", "p.yaml", "--samples", 0)
    assert done.returncode == 2
    assert "--samples 0" in done.stderr
    assert "1 to 1,000,000" in done.stderr
