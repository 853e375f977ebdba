"""Results with one answer for nearly all samples, on the command line: exit code 7, record, report, streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from compress.model.tflite.interpreter import LoadedModel

Record = dict[str, Any]
CLASSES = 3
TRAIN_MORE = (
    "train the model longer or with a smaller learning rate, and check the labels, data.preprocess and the statistics "
    "of batch norms"
)
OTHER_MODEL = (
    "check the labels, the order of `classes` and data.preprocess; if the model was trained for other classes, set "
    "`model: {head: new}` and add `train`, or choose another model"
)
"""The advice about a model from a file, which is not trained."""


def report(folder: Path, name: str = "tiny") -> Record:
    record: Record = json.loads((folder / "runs" / name / "report.json").read_text())
    return record


def verdicts(record: Record) -> dict[str, str]:
    return {name: entry["verdict"] for name, entry in record["degeneracy"].items()}


def answers(model: Path, samples: np.ndarray) -> np.ndarray:
    return LoadedModel(model, reproducible=True).scores(samples).argmax(axis=1)


def project(folder: Path, test: int, stages: list[Any], favourite: int | None = None) -> tuple[Path, np.ndarray]:
    """Write a project; return its pipeline and test samples. Without a favourite, the classifier is always right."""
    path = tiny.project(folder / "project", stages)
    x = np.random.default_rng(1).random((test + 40, 4, 4, 1), np.float32)
    sound = folder / "sound.tflite"
    sound.write_bytes(tiny.classifier())
    (path.parent / "model.tflite").write_bytes(tiny.classifier(favourite=favourite))
    source = {"npz": {"file": "data.npz", "split": "split"}}
    content = json.loads(path.read_text()) | {"data": {"source": source}}
    path.write_text(json.dumps(content))
    save(path, x, answers(sound, x))
    return path, x[40:]


def save(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    """Write the samples: 24 for training, 16 for validation, the others for the test."""
    y = y.copy()
    y[:40] = np.arange(40) % CLASSES
    split = np.array(["train"] * 24 + ["validation"] * 16 + ["test"] * (len(x) - 40))
    np.savez(path.parent / "data.npz", x=x, y=y, split=split)


def test_an_original_and_a_result_with_one_answer(coralline: tiny.Coralline, tmp_path: Path) -> None:
    path, _ = project(tmp_path, 60, ["compile", "package"], favourite=1)
    done = coralline(path)
    assert done.returncode == 7
    what = "the result answers '1' to 60 of 60 test samples, and so does the original"
    assert done.stderr.splitlines()[-1] == f"coralline: {what}; {OTHER_MODEL}"
    assert f"verdict: not usable\n- {what}\n" in done.stdout
    record = report(tmp_path)
    assert record["status"] == "not usable"
    assert record["error"] == {"stage": None, "message": f"{what}; {OTHER_MODEL}", "exit_code": 7}
    assert verdicts(record) == {"original": "degenerate", "result": "degenerate"}
    assert record["degeneracy"]["result"]["spread"]["same"] == 60
    assert (tmp_path / "runs" / "tiny" / "tiny.coralline").exists()  # as with a budget that is not met
    page = (tmp_path / "runs" / "tiny" / "report.html").read_text()
    assert "<li>The result answers &#39;1&#39; to 60 of 60 test samples, and so does the original.</li>" in page
    assert "The result cannot be used" in page
    assert "Do not use the result for the reason above." in page
    assert "drop and agreement show nothing" in page
    markdown = (tmp_path / "runs" / "tiny" / "report.md").read_text()
    assert markdown.startswith("# tiny: not usable\n\nNot usable. ")
    assert "- The result answers '1' to 60 of 60 test samples, and so does the original." in markdown
    assert "> **The result cannot be used**, exit code 7: " in markdown


def test_a_result_that_lost_what_the_original_knew(coralline: tiny.Coralline, tmp_path: Path) -> None:
    (tmp_path / "broken.tflite").write_bytes(tiny.classifier(favourite=2))
    path, _ = project(tmp_path, 60, [{"stamp": {"text": "a"}}, {"exchange": {"file": str(tmp_path / "broken.tflite")}}])
    done = coralline(path)
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1].startswith(
        "coralline: the result answers '2' to 60 of 60 test samples, and the original does not "
        "(first seen on the validation split after `exchange`)"
    )
    assert verdicts(report(tmp_path)) == {"original": "varied", "result": "degenerate"}


def test_an_original_with_one_answer_that_was_repaired(coralline: tiny.Coralline, tmp_path: Path) -> None:
    path, _ = project(tmp_path, 60, [{"exchange": {"file": str(tmp_path / "sound.tflite")}}], favourite=1)
    done = coralline(path)
    assert done.returncode == 0, done.stderr
    what = "the original answers '1' to 60 of 60 test samples, so a comparison with it shows little"
    assert f"verdict: usable with warnings\n- {what}\n" in done.stdout
    assert verdicts(report(tmp_path)) == {"original": "degenerate", "result": "varied"}
    assert f"- {what[0].upper()}{what[1:]}." in (tmp_path / "runs" / "tiny" / "report.md").read_text()


def test_a_result_that_also_breaks_the_budget(coralline: tiny.Coralline, tmp_path: Path) -> None:
    path, _ = project(tmp_path, 60, [], favourite=0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"budget": {"size_bytes": 1}}))
    for state in ("done", "cached"):
        done = coralline(path, "--json")
        record = json.loads(done.stdout)  # one document
        assert (done.returncode, record["status"], record["error"]["exit_code"]) == (7, "not usable", 7)
        assert record["budget"][0]["holds"] is False
        assert set(tiny.statuses(record).values()) == {state}
    assert record == report(tmp_path)


# --- real training and quantization -----------------------------------------------------

BUILDER = """
import keras

def build(input_shape, classes):
    layers = keras.layers
    image = keras.Input(input_shape)
    x = layers.ReLU()(layers.Conv2D(4, 3, name="conv")(image))
    return keras.Model(image, layers.Dense(classes, name="scores")(layers.Flatten()(x)))
"""


def halves(folder: Path, model: dict[str, Any], stages: list[Any]) -> Path:
    """Write a project whose samples are bright in the upper or in the lower half; their first pixel is always 0."""
    labels = np.arange(240) % 2
    x = np.random.default_rng(0).random((240, 8, 8, 1), np.float32) * 0.5
    x[labels == 0, :4] += 0.5
    x[labels == 1, 4:] += 0.5
    x[:, 0, 0] = 0
    np.savez(folder / "data.npz", x=x, y=labels)
    content = {
        "schema_version": 1, "name": "halves", "seed": 0, "model": model,
        "data": {"source": {"npz": {"file": "data.npz"}}}, "stages": stages, "measure": {"latency": {"runs": 3}},
    }  # fmt: skip
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps(content))
    return path


def compress(path: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line without turning the warnings of Keras into errors."""
    arguments = [sys.executable, "-m", "compress", str(path)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    return subprocess.run(arguments, cwd=path.parent, env=tiny.environment(), **options)


@pytest.mark.tensorflow
def test_a_training_that_diverges(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(BUILDER)
    train = {"train": {"epochs": 1, "batch_size": 8, "learning_rate": 1.0}}
    done = compress(halves(tmp_path, {"builder": "net.py", "trust": True}, [train, "quantize"]))
    assert done.returncode == 7, done.stderr
    assert f"samples, and the original gives the same output for all 48 test samples; {TRAIN_MORE}" in done.stderr
    record = report(tmp_path, "halves")
    assert record["status"] == "not usable"
    latency = record["models"]["result"]["measurements"]["latency_ms"]
    assert latency["how"] == "measured" or "the TFLite runtime refuses it" in latency["note"]
