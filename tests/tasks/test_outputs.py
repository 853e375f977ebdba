"""Models without labels: the original is the teacher, for one or several inputs and outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from compress.core.errors import StageError
from compress.pipeline.runner import run
from compress.pipeline.schema import load
from compress.tasks.output_forms import OutputForm
from compress.tasks.outputs import ByOutput, OutputsTask

PIPELINE = """
schema_version: 1
name: any
target: cpu
model: {{file: model.keras}}
data: {{source: {source}}}
stages:
  - prune: {{keep_macs: 0.6, epochs: 2, samples: 48, allocation: {allocation}}}
  - distill: {{epochs: 2}}
  - quantize: {quantize}
measure: {{latency: {{runs: 3}}, sensitivity: {{samples: 32}}}}
budget: {{error_increase: 0.9}}
"""


def two_inputs_three_outputs(keras: Any) -> Any:
    """Return a model of an image and a vector: class probabilities, a map, and a sigmoid."""
    layers = keras.layers
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 1), name="image")
    vector = keras.Input((5,), name="vector")
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(image)
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    pooled = layers.GlobalAveragePooling2D()(x)
    joined = layers.Add()([layers.Dense(12)(pooled), layers.Dense(12)(vector)])
    classes = layers.Dense(4, activation="softmax", name="classes")(joined)
    present = layers.Dense(1, activation="sigmoid", name="present")(joined)
    return keras.Model([image, vector], [classes, layers.Conv2D(2, 1, name="map")(x), present])


def one_output(keras: Any) -> Any:
    """Return a classifier."""
    layers = keras.layers
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(image)
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    return keras.Model(image, layers.Dense(4, activation="softmax")(layers.Flatten()(x)))


def write(folder: Path, source: str, quantize: str = "{calibration_samples: 32}", allocation: str = "auto") -> None:
    random = np.random.default_rng(0)
    images = random.random((200, 8, 8, 1), np.float32)
    np.savez(folder / "data.npz", image=images, vector=random.normal(size=(200, 5)).astype(np.float32))
    (folder / "p.yaml").write_text(PIPELINE.format(source=source, quantize=quantize, allocation=allocation))


@pytest.mark.parametrize("quantize", ["{calibration_samples: 32}", "{method: qat, epochs: 2, calibration_samples: 32}"])
def test_several_inputs_and_outputs(keras: Any, tmp_path: Path, quantize: str) -> None:
    two_inputs_three_outputs(keras).save(tmp_path / "model.keras")
    write(tmp_path, "{npz: {file: data.npz, x: [image, vector], y: null}}", quantize, "sensitivity")
    record = run(load(tmp_path / "p.yaml"), tmp_path / "runs", tiny.Notes()).to_json()
    assert record["status"] == "ok"
    assert record["models"]["original"]["measurements"]["error"]["value"] == 0
    assert 0 < record["models"]["result"]["measurements"]["error"]["value"] < 0.9
    before, after = (record["models"][name]["measurements"]["macs"]["value"] for name in ("original", "result"))
    assert after < 0.75 * before
    assert record["sensitivity"]["curves"]
    curve = record["sensitivity"]["curves"][0]
    assert not curve["accuracy"]
    assert max(curve["divergence"]) > 0


def test_features_are_distilled_on_random_samples_with_a_note(keras: Any, tmp_path: Path) -> None:
    one_output(keras).save(tmp_path / "model.keras")
    write(tmp_path, "{random: {shape: [8, 8, 1], count: 80}}")
    path = tmp_path / "p.yaml"
    path.write_text(path.read_text().replace("distill: {epochs: 2}", "distill: {epochs: 2, features: {}}"))
    record = run(load(path), tmp_path / "runs", tiny.Notes()).to_json()
    assert record["status"] == "ok"
    assert "random numbers" in " ".join(record["data"]["notes"])
    (facts,) = [stage["facts"] for stage in record["stages"] if stage["stage"] == "distill"]
    assert facts["features"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stages:", "stages:\n  - train: {}", "the model came trained"),
        ("error_increase: 0.9", "accuracy_drop: 0.1", "accuracy_drop limits classifiers"),
        ("samples: 48", "samples: 48, augment: {flip: true}", "augment changes samples after the original's outputs"),
    ],
)
def test_what_cannot_be_used_without_labels(
    keras: Any, tmp_path: Path, coralline: tiny.Coralline, old: str, new: str, message: str
) -> None:
    one_output(keras).save(tmp_path / "model.keras")
    write(tmp_path, "{random: {shape: [8, 8, 1]}}")
    text = (tmp_path / "p.yaml").read_text()
    (tmp_path / "p.yaml").write_text(text.replace(old, new))
    done = coralline("p.yaml", "--dry-run")
    assert message in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("form", "shape", "names", "manifest"),
    [
        ("softmax", [3], 3, {"task": "classification"}),
        ("values", [3], 3, {"task": "classification"}),
        ("sigmoid", [3], 3, {"task": "multi_label", "binary": "probability"}),
        ("sigmoid", [1], 2, {"task": "classification", "binary": "probability"}),
        ("values", [1], 2, {"task": "classification", "binary": "logit"}),
        ("softmax", [3], 0, {}),
    ],
)
def test_names_of_classes_give_the_device_a_task(
    form: str, shape: list[int], names: int, manifest: dict[str, str]
) -> None:
    specification = {"outputs": [{"name": "out", "shape": shape, "form": form, "deviation": 1.0}]}
    assert OutputsTask().manifest(specification, [str(index) for index in range(names)]) == manifest


@pytest.mark.parametrize(("shape", "count"), [([4], 1), ([3, 3], 1), ([3], 2)])
def test_names_that_do_not_fit_the_outputs(shape: list[int], count: int) -> None:
    output = {"name": "out", "shape": shape, "form": "values", "deviation": 1.0}
    with pytest.raises(StageError, match=r"package.labels has 3 names, and the outputs are out \["):
        OutputsTask().manifest({"outputs": [output] * count}, ["a", "b", "c"])


def test_the_energy_of_errors_is_that_of_the_outputs_themselves() -> None:
    forms = tuple(OutputForm(form, (2,), form, 2.0) for form in ("softmax", "sigmoid", "values"))
    logits = np.array([[1.0, 3.0, -2.0, 0.5, 4.0, 5.0]])
    other = logits + np.array([[0.0, 1.0, 0.0, 1.0, 0.0, 1.0]])

    def probabilities(rows: Any) -> Any:
        powers = np.exp(rows[:, :2])
        softmax, sigmoid = powers / powers.sum(axis=1, keepdims=True), 1 / (1 + np.exp(-rows[:, 2:4]))
        return np.concatenate([softmax, sigmoid, rows[:, 4:]], axis=1)

    as_logits = ByOutput(forms, as_logits=True).energies(logits, other)
    as_outputs = ByOutput(forms, as_logits=False).energies(probabilities(logits), probabilities(other))
    np.testing.assert_allclose(as_logits, as_outputs, rtol=1e-6)
    assert as_logits.shape == (1, 3)
    assert as_logits[0, 2] == pytest.approx(0.5)
    equal = ByOutput(forms, as_logits=True).energies(logits, logits)
    assert equal[0, 0] == pytest.approx((1 / 256) ** 2 / 12, rel=1e-4)
