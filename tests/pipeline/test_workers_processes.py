"""A run on several worker processes of this machine: the same model as from one, also after a worker was killed."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import worker_processes

from compress.surface import api

pytestmark = pytest.mark.tensorflow

PROGRAM = """
import os, signal, sys
from compress.learning.training import checkpoint, strategies

checkpoint.EVERY_S = -1.0  # after every epoch
dies_after = int(sys.argv[1])
average, calls = strategies.Devices.average, []

def averaged(self, variables):  # before the training, and before the validation of every epoch
    calls.append(variables)
    if len(calls) == dies_after + 2:
        os.kill(os.getpid(), signal.SIGKILL)
    average(self, variables)

strategies.Devices.average = averaged
from compress.surface.cli.main import main

sys.exit(main(sys.argv[2:]))
"""
EPOCHS, LOST_AFTER = 4, 2
LIVES = ("-c", PROGRAM, "-2")
DIES = ("-c", PROGRAM, str(LOST_AFTER))
BUILDER = """
import keras

def build(input_shape, classes):
    layers = keras.layers
    stack = [layers.Conv2D(8, 3, 2), layers.ReLU(), layers.Flatten(), layers.Dense(classes, "softmax")]
    return keras.Sequential([keras.Input(input_shape), *stack])
"""
"""The network has no batch norms, because the statistics of a part of a batch differ from those of the batch."""


def project(folder: Path, **keys: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(BUILDER)
    content = {
        "schema_version": 1,
        "name": "digits",
        "target": "cpu",
        "model": {"builder": "net.py", "trust": True},
        "data": {"source": {"digits": {}}},
        "stages": [{"train": {"epochs": EPOCHS, "batch_size": 300, "learning_rate": 0.01}}],
    }
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps({**content, **keys}))
    return path


def history(folder: Path) -> list[dict[str, float]]:
    report = json.loads((folder / "runs" / "digits" / "report.json").read_text())
    rows: list[dict[str, float]] = next(row["facts"]["history"] for row in report["stages"] if row["id"] == "train")
    return rows


def test_a_lost_worker_ends_the_run_which_continues_on_fewer_with_the_same_result(tmp_path: Path) -> None:
    together = project(tmp_path / "together", execution={"strategy": "multi_worker"})
    chief, other, killed = worker_processes.run(together, [LIVES, LIVES, DIES])
    assert killed.code == -signal.SIGKILL
    assert (chief.code, other.code) == (5, 5), (chief.message, other.message)
    for worker in (chief, other):
        assert re.search("train: another worker was lost: .*continues after its last checkpoint", worker.message)
    assert (tmp_path / "together" / "runs" / "digits" / "report.html").exists()

    chief, other = worker_processes.run(together, [LIVES, LIVES])
    assert (chief.code, other.code) == (0, 0), chief.message
    assert f"continues after epoch {LOST_AFTER} of {EPOCHS}" in chief.message
    assert "worker 1 is done; the chief writes the results" in other.message

    alone = tmp_path / "alone"
    api.run(project(alone), out=alone / "runs")
    for row, expected in zip(history(tmp_path / "together"), history(alone), strict=True):
        # Keras does not weight the parts of the last validation batch quite equally.
        assert row.pop("val_loss") == pytest.approx(expected.pop("val_loss"), rel=0.05)
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)
