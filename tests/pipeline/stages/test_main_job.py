"""The main job on a small scale, on the command line: real training, real quantization, real files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.essential]

SMALL = """
schema_version: 1
name: small
seed: 3
model: {{{model}}}
data:
  source: {{digits: {{}}}}
  preprocess: [{{resize: {{size: [32, 32]}}}}, {{scale: {{from: [0, 16], to: [0, 1]}}}}]
stages: {stages}
measure: {{latency: {{runs: 5}}}}
"""


def compress(folder: Path, model: str, stages: str, *arguments: str, before: str = "") -> tuple[int, Any, str]:
    """Run the command line; return exit code, record and stderr."""
    pipeline = folder / "small.yaml"
    pipeline.write_text(SMALL.format(model=model, stages=stages))
    program = f"{before}\nimport sys\nfrom compress.surface.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(pipeline), "--out", str(folder / "runs"), "--json", *arguments],
        capture_output=True,
        text=True,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One run with every stage."""
    folder = tmp_path_factory.mktemp("whole")
    code, record, errors = compress(folder, "builder: digits_cnn", STAGES)
    assert code == 0, errors
    return folder, record


STAGES = """
  - train: {epochs: 4, learning_rate: 0.01}
  - prune: {keep_macs: 0.6, epochs: 1}
  - distill: {epochs: 1}
  - quantize: {method: qat, epochs: 1}
  - compile
  - package
"""


def test_every_stage_runs_and_the_record_says_what_it_cost(full_run: tuple[Path, dict[str, Any]]) -> None:
    _, record = full_run
    assert [row["status"] for row in record["stages"]] == ["done"] * 7
    assert record["status"] == "ok"
    assert record["models"]["original"]["stage"] == "train"
    original, result = (record["models"][side]["measurements"] for side in ("original", "result"))
    assert original["accuracy"]["value"] > 0.8
    assert result["macs"]["value"] <= 0.6 * original["macs"]["value"]
    assert result["size_bytes"]["value"] < 0.4 * original["size_bytes"]["value"]
    assert record["data"]["samples"]["test"] >= 600
    assert record["comparison"]["measurements"]["agreement"]["value"] > 0.7
    assert set(record["stages"][4]["facts"]["validation_accuracy"]) == {"ptq", "qat"}
    assert {"model.tflite", "quantization.json", "runner.pyz", "small.coralline"} <= record["outputs"].keys()
    assert {op["placement"] for op in record["placement"]["ops"]} == {"tpu"}


def test_the_same_again_keeps_everything_and_never_imports_tensorflow(full_run: tuple[Path, dict[str, Any]]) -> None:
    blocked = "import sys\nfor name in ('tensorflow', 'keras', 'tf_keras'): sys.modules[name] = None"
    code, record, errors = compress(full_run[0], "builder: digits_cnn", STAGES, before=blocked)
    assert code == 0, errors
    assert {row["status"] for row in record["stages"]} == {"cached"}
    first = {key: value for key, value in full_run[1].items() if key in ("models", "comparison", "outputs", "latency")}
    assert first == {key: record[key] for key in first}


def test_zeros_and_shared_weights_survive_and_every_step_says_what_its_file_packs_to(
    full_run: tuple[Path, dict[str, Any]],
) -> None:
    stages = """
  - train: {epochs: 4, learning_rate: 0.01}
  - sparsify: {epochs: 1}
  - cluster: {clusters: 8, epochs: 1}
  - quantize: {method: qat, engine: tfmot, epochs: 1}
"""
    code, record, errors = compress(full_run[0], "builder: digits_cnn", stages)
    assert code == 0, errors
    rows = {row["stage"]: row for row in record["stages"]}
    assert rows["train"]["status"] == "cached"
    for stage in ("sparsify", "cluster", "quantize"):
        assert 0.49 < rows[stage]["facts"]["zeros"] < 0.55, stage
    assert max(kernel["distinct"] for kernel in rows["cluster"]["facts"]["kernels"].values()) <= 8
    assert set(rows["quantize"]["facts"]["preserved"].values()) == {"zeros and clusters"}
    packed = [rows[stage]["measurements"]["compressed_bytes"] for stage in ("train", "sparsify", "cluster", "quantize")]
    assert {measurement["how"] for measurement in packed} == {"measured"}
    sizes = [measurement["value"] for measurement in packed]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < 0.3 * sizes[0]
    assert rows["cluster"]["facts"]["compressed_bytes"] == {"before": sizes[1], "after": sizes[2]}
    for text in (errors, json.dumps(rows["sparsify"]["facts"])):
        assert "no memory or time is saved there" in text


def test_a_builder_that_fails_is_told_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build(input_shape, classes):\n    raise RuntimeError('no\\nway')\n")
    code, _, errors = compress(tmp_path, "builder: own.py, trust: true", "[train]")
    assert code == 4
    assert "RuntimeError: no" in errors
    assert "Traceback" not in errors
