"""Every task from data to an int8 file: train, prune, distill, quantize, and the report."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from blobs import bars

from compress.pipeline.runner import run
from compress.pipeline.schema import load

BUILDER = """
import keras

layers = keras.layers


def body(image):
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(image)
    return layers.Conv2D(16, 3, padding="same", activation="relu")(x)


def dense(input_shape, classes, activation=None):
    image = keras.Input(input_shape)
    x = layers.MaxPooling2D(2)(body(image))
    return keras.Model(image, layers.Dense(classes, activation=activation)(layers.Flatten()(x)))


def sigmoids(input_shape, classes):
    return dense(input_shape, classes, "sigmoid")


def one_sigmoid(input_shape, classes):
    return dense(input_shape, 1, "sigmoid")


def corners(input_shape, classes):
    return dense(input_shape, 4)


def vectors(input_shape, classes):
    return dense(input_shape, 12)


def pixels(input_shape, classes):
    image = keras.Input(input_shape)
    return keras.Model(image, layers.Conv2D(classes, 1, activation="softmax")(body(image)))


def autoencoder(input_shape, classes):
    image = keras.Input(input_shape)
    x = layers.MaxPooling2D(2)(body(image))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    x = layers.UpSampling2D(2)(x)
    return keras.Model(image, layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x))
"""
PIPELINE = """
schema_version: 1
name: any
target: cpu
model: {{builder: "net.py:{builder}", trust: true}}
data: {{source: {{npz: {{file: data.npz{source}}}}}, task: {task}}}
stages:
  - train: {{epochs: 8, learning_rate: 0.01, batch_size: 16}}
  - prune: {{keep_macs: 0.6, epochs: 2, samples: 48}}
  - distill: {{epochs: 2}}
  - quantize: {{method: qat, epochs: 1, calibration_samples: 32}}
measure: {{latency: {{runs: 3}}, sensitivity: {{samples: 32}}}}
"""


@dataclass(frozen=True)
class Case:
    """A task, a function of BUILDER, and a function from images and sizes of bars to labels.

    Attributes:
        least: the value that the first metric of the int8 file must exceed.
        drawn: whether the report has examples with drawn answers.
    """

    task: str
    builder: str
    labels: Any
    least: float
    source: str = ""
    drawn: bool = False


CASES = [
    Case("classification", "one_sigmoid", lambda images, sizes: (sizes[:, 0] > 4).astype(int), 0.9),
    Case("regression", "dense", lambda images, sizes: sizes.astype(np.float32), 0.6, ", targets: [height, width]"),
    Case("multi_label", "sigmoids", lambda images, sizes: (sizes > 4).astype(np.uint8), 0.9, ", classes: [high, wide]"),
    Case("segmentation", "pixels", lambda images, sizes: (images[..., 0] > 0.5).astype(np.uint8), 0.9, drawn=True),
    Case(
        "keypoints",
        "corners",
        lambda images, sizes: np.stack([np.zeros_like(sizes), sizes[:, ::-1]], axis=1).astype(np.float32),
        0.6,
        ", classes: [origin, corner]",
        drawn=True,
    ),
    Case("reconstruction", "autoencoder", lambda images, sizes: images, -0.02, ", classes: [image]"),
    Case("embeddings", "vectors", lambda images, sizes: (sizes[:, 0] > 4) * 2 + (sizes[:, 1] > 4), 0.8),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.task}-{case.builder}")
@pytest.mark.essential
def test_a_task_goes_from_training_to_an_int8_file(tmp_path: Path, case: Case) -> None:
    images, sizes = bars(240)
    np.savez(tmp_path / "data.npz", x=images, y=case.labels(images, sizes))
    (tmp_path / "net.py").write_text(BUILDER)
    (tmp_path / "p.yaml").write_text(PIPELINE.format(builder=case.builder, task=case.task, source=case.source))
    record = run(load(tmp_path / "p.yaml"), tmp_path / "runs", tiny.Notes()).to_json()
    assert record["status"] == "ok"
    metric = record["metrics"][0]
    before, after = (record["models"][name]["measurements"][metric["name"]]["value"] for name in ("original", "result"))
    sign = 1 if metric["change"].endswith("_drop") else -1
    assert sign * after > case.least, (before, after)
    assert record["comparison"]["measurements"]["agreement"]["value"] > 0.5
    assert record["comparison"]["measurements"][metric["change"]]["how"] == "measured"
    quantized = record["stages"][-1]["facts"]
    assert any(scores.keys() == {"ptq", "qat"} for scores in quantized.values() if isinstance(scores, dict))
    folder = tmp_path / "runs" / "any"
    assert metric["label"] in (folder / "report.md").read_text()
    if case.task == "regression":
        assert "<dt>2 targets</dt><dd>height · width</dd>" in (folder / "report.html").read_text()
        assert "2 targets" in (folder / "report.md").read_text()
    assert (record["examples"] is not None) == case.drawn
    if case.drawn:
        _has_examples(record["examples"], folder)
        (folder / "examples" / "9-result.jpg").write_bytes(b"of an earlier run")
        (folder / "examples" / "notes.txt").write_text("of the user")
        run(load(tmp_path / "p.yaml"), tmp_path / "runs", tiny.Notes())
        assert not (folder / "examples" / "9-result.jpg").exists()
        assert (folder / "examples" / "notes.txt").exists()
        _has_examples(record["examples"], folder)


def _has_examples(examples: dict[str, Any], folder: Path) -> None:
    """Check that all pictures are files of the run and parts of its page."""
    page = (folder / "report.html").read_text()
    assert 2 <= len(examples["examples"]) <= 6
    for example in examples["examples"]:
        assert [picture["shows"] for picture in example["pictures"]] == ["label", "original", "result"]
        for picture in example["pictures"]:
            content = (folder / "examples" / picture["file"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == picture["sha256"]
            assert base64.b64encode(content).decode() in page
