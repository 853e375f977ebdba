"""Regression: targets of a data set, head, metrics, degenerate answers, and a pipeline from training to int8."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from blobs import Blobs, bars
from tiny import Coralline

from compress.core.errors import DataError, ModelError
from compress.data.sources import Npz
from compress.data.types import Split
from compress.pipeline.runner import run
from compress.pipeline.schema import load
from compress.tasks.base import ModelOutputs
from compress.tasks.measured import ValuesHead
from compress.tasks.regression import Regression

NAMES = ("height", "width")


@dataclass
class Sizes(Blobs):
    """Data with two targets of very different scale."""

    class_names: tuple[str, ...] = NAMES
    task: str = "regression"

    def targets(self, split: Split) -> np.ndarray:
        count = len(self.labels(split))
        return np.stack([np.arange(count), 1000 * np.arange(count)], axis=1).astype(np.float32)


def facts(*predictions: np.ndarray) -> dict[str, Any]:
    models = {name: ModelOutputs(rows, True) for name, rows in zip(("a", "b"), predictions, strict=False)}
    return dict(Regression().evaluate(models, Sizes(), "test", "made up"))


def saved(folder: Path, y: np.ndarray, count: int = 40) -> Npz:
    np.savez(folder / "data.npz", x=np.zeros((count, 4, 4), np.float32), y=y)
    return Npz(file=str(folder / "data.npz"), targets=NAMES)


def test_targets_of_an_npz_file_are_divided_by_quantiles(tmp_path: Path) -> None:
    y = np.stack([np.arange(40.0)[::-1], np.ones(40)], axis=1)
    samples = saved(tmp_path, y).load()
    assert samples.targets is not None
    np.testing.assert_array_equal(samples.targets, y.astype(np.float32))
    assert samples.class_names == NAMES
    assert np.bincount(samples.labels).tolist() == [10, 10, 10, 10]
    assert samples.labels[0] == 3  # the largest
    kept = samples.part(np.array([0, 39]))
    assert kept.targets is not None
    assert kept.targets[:, 0].tolist() == [39, 0]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.zeros(40), r"array 'y' is float64 \[40\]; allowed: numbers \[40, 2\]: height, width"),
        (np.zeros((39, 2)), r"allowed: numbers \[40, 2\]"),
        (np.full((40, 2), "x"), "is <U1"),
        (np.where(np.arange(80) == 7, np.nan, 0.0).reshape(40, 2), "target 'width' of sample 3 is nan"),
        (np.full((40, 2), 1e300), "target 'height' of sample 0 is 1e"),
    ],
)
def test_targets_that_cannot_be_used_are_refused(tmp_path: Path, y: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        saved(tmp_path, y).load()


def test_numbers_without_names_of_targets_say_what_to_do(tmp_path: Path) -> None:
    source = saved(tmp_path, np.zeros(40)).model_copy(update={"targets": None})
    with pytest.raises(DataError, match="for regression, name the targets with `targets`"):
        source.load()
    with pytest.raises(ValueError, match="cannot be used together"):
        Npz(file="x.npz", targets=("a",), classes=("b", "c"))


def test_targets_of_different_scale_have_the_same_weight_in_the_loss(keras: Any) -> None:
    head = ValuesHead((2.0, 2000.0))
    losses = np.asarray(head.loss(np.array([[0, 0], [0, 0]]), np.array([[2.0, 0], [0, 2000.0]])))
    np.testing.assert_allclose(losses, [0.5, 0.5])
    taught = head.soft_targets([np.array([[1.0, 3.0]]), np.array([[4.0, 0.0]])], [2.0, 1.0], 4.0)
    np.testing.assert_allclose(np.asarray(taught), [[2.0, 2.0]])


def test_a_head_has_one_number_for_each_target(keras: Any) -> None:
    image = keras.Input((8, 8, 1))
    flat = keras.layers.Flatten()(image)
    head = Regression().head(keras.Model(image, keras.layers.Dense(2)(flat)), Sizes())
    spread = np.arange(96).std()
    np.testing.assert_allclose(head.scale, (spread, 1000 * spread))
    with pytest.raises(ModelError, match=r"shape \[3\]; allowed: \[2\]: one value for each target"):
        Regression().head(keras.Model(image, keras.layers.Dense(3)(flat)), Sizes())


def test_metrics_and_their_changes() -> None:
    targets = Sizes().targets("test").astype(np.float64)
    error = np.where(np.arange(32) % 2, 2.0, -2.0)[:, np.newaxis] * [1, 1000]
    metrics = facts(targets + error / 2, targets + error)
    assert metrics["a"]["mae"]["value"] == pytest.approx(500.5)
    assert metrics["b"]["mae"]["value"] == pytest.approx(1001)
    variance = targets[:, 0].var()
    assert metrics["b"]["r2"]["value"] == pytest.approx(1 - 4 / variance)
    changes = Regression().compare(metrics, NAMES, "a", "b")["measurements"]
    assert changes["mae_increase"]["value"] == pytest.approx(1.0)
    assert changes["r2_drop"]["value"] == pytest.approx(3 / variance)
    assert changes["agreement"]["value"] == 0  # 1 is more than a tenth of 9.2
    scores = [Regression().score(targets + part, Sizes(), "test", None) for part in (error, error / 2)]
    assert scores[0] < scores[1]


def test_one_number_for_everything_is_degenerate() -> None:
    targets = Sizes().targets("test").astype(np.float64)
    metrics = facts(targets, np.broadcast_to(targets.mean(axis=0), targets.shape))
    judged = Regression().judge_outputs(metrics, NAMES, "a", "b")
    assert (judged["a"].verdict, judged["b"].verdict) == ("varied", "degenerate")
    assert judged["b"].text == "gives nearly the same output for 32 test samples"


def test_outputs_that_are_not_finite_have_no_metrics() -> None:
    metrics = facts(np.full((32, 2), np.nan))
    assert metrics["a"]["mae"]["how"] == metrics["a"]["r2"]["how"] == "missing"


BUILDER = """
import keras

def net(input_shape, classes):
    layers = keras.layers
    image = keras.Input(input_shape)
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(image)
    x = layers.Conv2D(16, 3, 2, padding="same", activation="relu")(x)
    return keras.Model(image, layers.Dense(classes)(layers.Flatten()(x)))
"""
PIPELINE = """
schema_version: 1
name: sizes
target: cpu
model: {builder: "net.py:net", trust: true}
data: {source: {npz: {file: data.npz, targets: [height, width]}}}
stages:
  - train: {epochs: 12, learning_rate: 0.01, early_stopping: 8}
  - prune: {keep_macs: 0.6, epochs: 3, samples: 64}
  - distill: {epochs: 3, temperature: 3}
  - quantize: {method: qat, epochs: 2, calibration_samples: 32}
measure: {latency: {runs: 3}}
budget: {mae_increase: 3}
"""


@pytest.mark.essential
def test_a_pipeline_from_training_to_int8(tmp_path: Path) -> None:
    images, sizes = bars(400)
    np.savez(tmp_path / "data.npz", x=images, y=sizes.astype(np.float32))
    (tmp_path / "net.py").write_text(BUILDER)
    (tmp_path / "p.yaml").write_text(PIPELINE)
    record = run(load(tmp_path / "p.yaml"), tmp_path / "runs", tiny.Notes()).to_json()
    assert record["status"] == "ok"
    before, after = (record["models"][model]["measurements"] for model in ("original", "result"))
    for measured in (before, after):
        assert measured["r2"]["value"] > 0.6
        assert measured["mae"]["value"] < 1.0
    assert after["macs"]["value"] < 0.7 * before["macs"]["value"]
    (row,) = record["budget"]
    assert (row["name"], row["holds"], row["measured"]["how"]) == ("mae_increase", True, "measured")
    assert set(record["stages"][-1]["facts"]["validation_score"]) == {"ptq", "qat"}
    page = (tmp_path / "runs" / "sizes" / "report.html").read_text()
    assert "Mean absolute error" in page
    assert "<dt>2 targets</dt><dd>height · width</dd>" in page
    assert "2 targets" in (tmp_path / "runs" / "sizes" / "report.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mae_increase: 3", "accuracy_drop: 0.1", "accuracy_drop limits classifiers, but regression models are"),
        ("distill: {epochs: 3", "package: {}\n  - distill: {epochs: 3", "would be given"),
        ("early_stopping: 8", "class_weights: balanced", "class_weights: the data has no single class"),
        ("distill: {epochs: 3", "sparsify: {epochs: 3", "trains with tfmot"),
    ],
)
def test_what_regression_cannot_use_is_refused_before_any_work(
    tmp_path: Path, coralline: Coralline, old: str, new: str, message: str
) -> None:
    text = PIPELINE.replace(old, new).replace(", temperature: 3}", "}") if "sparsify" in new else PIPELINE
    np.savez(tmp_path / "data.npz", x=np.zeros((40, 8, 8, 1), np.float32), y=np.zeros((40, 2)))
    (tmp_path / "net.py").write_text(BUILDER)
    (tmp_path / "p.yaml").write_text(text.replace(old, new))
    done = coralline("p.yaml", "--dry-run")
    assert done.returncode == 2
    assert message in done.stderr


def test_a_target_that_larger_values_hide_counts_on_its_own() -> None:
    """A height that becomes constant changes the mean error of height and width by a thousandth."""
    targets = Sizes().targets("test").astype(np.float64)
    constant = targets.copy()
    constant[:, 0] = targets[:, 0].mean()
    reasons = Regression().findings({**facts(targets, constant), "samples": 30}, NAMES, "a", "b")
    (reason,) = (reason for reason in reasons if "target" in reason.text)
    assert reason.level == "not usable"
    assert reason.text.startswith("the target 'height': the result is no better than a constant answer")
    assert not Regression().findings({**facts(targets, targets * 1.01), "samples": 30}, NAMES, "a", "b")


def test_candidates_are_compared_in_units_of_each_target() -> None:
    targets = Sizes().targets("test").astype(np.float64)
    errors = np.stack([np.ones(len(targets)), np.zeros(len(targets))], axis=1)
    judge = Regression().fidelity(None)
    small = judge.snr_db(targets, targets + errors).mean()
    assert small < judge.snr_db(targets, targets + 100 * errors[:, ::-1]).mean()
