"""`prune` as a stage: steps, training between them, and continuation after an interruption."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, Noting, context
from pydantic import ValidationError

from compress.core.artifact import MODEL_KERAS, Artifact, Kind
from compress.core.errors import StageError
from compress.learning.context import Context
from compress.learning.distillation.settings import DistillationSettings
from compress.learning.pruning import iterative
from compress.learning.pruning.checkpoint import STATE
from compress.learning.training import healing, loop
from compress.model.tflite import graph, macs
from compress.pipeline.stages import working_model
from compress.pipeline.stages.prune import Prune
from compress.pipeline.stages.sensitivity import Sensitivity
from compress.targets import load

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def trained(keras: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    stack = [keras.Input((8, 8, 1)), layers.Conv2D(16, 3, name="first"), layers.BatchNormalization(), layers.ReLU()]
    stack += [layers.Conv2D(24, 3, name="second"), layers.ReLU(), layers.Flatten(), layers.Dense(2, name="scores")]
    model, data, folder = keras.Sequential(stack), Blobs(), tmp_path_factory.mktemp("trained")
    settings = loop.TrainingSettings(epochs=3, batch_size=16, learning_rate=0.005)  # longer: no gradient is left
    loop.fit(model, loop.label_loss(loop.head_of(model, data)), settings, context(data, folder))
    working_model.write(model, folder)
    return folder


@pytest.fixture
def original(keras: Any, trained: Path, tmp_path: Path) -> Artifact:
    """The trained model in a folder that a test may write to."""
    folder = shutil.copytree(trained, tmp_path / "given")
    keras.utils.set_random_seed(0)
    return Artifact("0" * 64, Kind.KERAS, folder, dict.fromkeys((MODEL_KERAS, "model.tflite"), ""), {}, 0)


@pytest.fixture
def work(original: Artifact, tmp_path: Path) -> Context:
    for name in ("made", "unfinished"):
        (tmp_path / name).mkdir()
    plain = context(Blobs(), tmp_path / "made")
    return replace(
        plain, original=original, target=load("edgetpu"), unfinished=tmp_path / "unfinished", progress=Noting()
    )


def pruned_model(keras: Any, work: Context) -> Any:
    return keras.saving.load_model(work.folder / MODEL_KERAS)


def accuracy(model: Any) -> float:
    data = Blobs()
    answers = np.asarray(model(data.inputs("test"))).argmax(axis=1)
    return float((answers == data.labels("test")).mean())


def test_the_model_is_smaller_and_still_right(keras: Any, original: Artifact, work: Context) -> None:
    facts = Prune(keep=0.5, epochs=4, learning_rate=0.01).run(original, work)
    (step,) = facts["steps"]
    assert facts["objective"]["name"] == "macs"
    assert step["cost"]["after"] <= 0.5 * step["cost"]["before"]
    assert set(step["layers"]) <= {"first", "second"}
    assert set(step["trials"]) == {"balanced", "uniform"}
    assert step["trials"][step["allocation"]] == max(step["trials"].values())
    assert {"macs", "parameters", "size_bytes", "compute_ms", "latency_ms", "streamed_bytes"} == set(
        step["figures"]["after"]
    )
    smaller = pruned_model(keras, work)
    for name, sizes in step["layers"].items():
        assert smaller.get_layer(name).filters == sizes["after"] < sizes["before"]
    assert smaller.count_params() == step["figures"]["after"]["parameters"]
    assert accuracy(smaller) == 1.0


@pytest.mark.parametrize("importance", ["taylor", "batch_norm", "l2", "l1"])
@pytest.mark.parametrize("allocation", ["balanced", "sensitivity", "global", "uniform"])
def test_every_way_to_choose_reaches_the_limit(
    original: Artifact, work: Context, importance: Any, allocation: Any
) -> None:
    facts = Prune(
        objective="parameters", keep=0.6, importance=importance, allocation=allocation, epochs=0, samples=32
    ).run(original, work)
    (step,) = facts["steps"]
    assert 0.3 < step["cost"]["after"] / step["cost"]["before"] <= 0.6
    assert step["allocation"] == allocation
    curves = [curve["layers"] for curve in step.get("sensitivity", [])]
    assert curves == ([["first"], ["second"]] if allocation == "sensitivity" else [])


def test_steps_go_down_evenly_with_training_after_each(keras: Any, original: Artifact, work: Context) -> None:
    stage = Prune(
        keep=0.25, steps=3, epochs=2, epochs_between=1, allocation="balanced", distill=DistillationSettings(weight=0.5)
    )
    facts = stage.run(original, work)
    costs = [facts["steps"][0]["cost"]["before"], *(step["cost"]["after"] for step in facts["steps"])]
    assert all(after < before for before, after in pairwise(costs))
    assert costs[3] <= 0.25 * costs[0]
    assert costs[1] > 0.4 * costs[0]
    assert [len(step["history"]) for step in facts["steps"]] == [1, 1, 2]


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_an_interrupted_run_goes_on(
    keras: Any, original: Artifact, work: Context, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """The run stops before a training: no decision is made again, and nothing is trained twice."""
    stage = Prune(keep=0.3, steps=3, epochs=1, importance="l2")
    calls: list[str] = []
    heal, trial = healing.heal, iterative._Step._trial_quality

    def counted(model: Any, loss: Any, settings: Any, training_context: Context) -> Any:
        assert training_context.unfinished is not None
        calls.append(f"train {training_context.unfinished.name}")
        if len(calls) == stop:
            raise KeyboardInterrupt
        return heal(model, loss, settings, training_context)

    def counted_trial(self: Any, model: Any) -> Any:
        calls.append("try")
        if len(calls) == stop:
            raise KeyboardInterrupt
        return trial(self, model)

    monkeypatch.setattr(healing, "heal", counted)
    monkeypatch.setattr(iterative._Step, "_trial_quality", counted_trial)
    with pytest.raises(KeyboardInterrupt):
        stage.run(original, work)
    before = list(calls)
    for path in work.folder.iterdir():  # the next attempt gets an empty folder
        path.unlink()
    facts = stage.run(original, work)
    again = calls[len(before) :]
    if before[-1].startswith("train"):  # the results of trials are known
        assert again[0] == before[-1]
    assert [call for call in (*before[:-1], *again) if call != "try"] == [
        "train step-1",
        "train step-2",
        "train step-3",
    ]
    assert len(facts["steps"]) == 3
    assert facts["steps"][2]["cost"]["after"] <= 0.3 * facts["steps"][0]["cost"]["before"]
    assert pruned_model(keras, work).count_params() == facts["steps"][2]["figures"]["after"]["parameters"]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"model": "gone.keras", "state": {"steps": [], "untrained": null}}'])
def test_damaged_state_is_no_state(original: Artifact, work: Context, content: bytes) -> None:
    assert work.unfinished is not None
    (work.unfinished / STATE).write_bytes(content)
    facts = Prune(epochs=0).run(original, work)
    assert len(facts["steps"]) == 1
    (note,) = work.progress.noted  # type: ignore[attr-defined]
    assert note.startswith("restart: the files of the interrupted run cannot be read")


def test_without_training_nothing_is_trained(
    original: Artifact, work: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "fit", lambda *arguments: pytest.fail("trained"))
    (step,) = Prune(epochs=0).run(original, work)["steps"]
    assert step["allocation"] == "balanced"
    assert "trials" not in step


def test_a_target_without_an_accelerator_has_no_times(original: Artifact, work: Context) -> None:
    cpu = replace(work, target=load("cpu"), unfinished=None)
    (step,) = Prune(epochs=0, allocation="balanced").run(original, cpu)["steps"]
    assert set(step["figures"]["after"]) == {"macs", "parameters", "size_bytes"}
    with pytest.raises(StageError, match="latency is not predicted for the target cpu"):
        Prune(objective="latency", keep=0.9).run(original, cpu)


def test_an_objective_that_the_target_does_not_predict_is_refused_before_any_work() -> None:
    assert Prune(objective="latency").refused_by_target(load("edgetpu")) is None
    assert Prune(objective="size").refused_by_target(load("cpu")) is None
    unfit = Prune(objective="latency").refused_by_target(load("cpu"))
    assert unfit is not None
    assert unfit.what == "objective: latency is not predicted for the target cpu"
    assert unfit.allowed == "macs, parameters, size"


def test_nothing_to_do_is_told(keras: Any, original: Artifact, work: Context) -> None:
    facts = Prune(objective="cache", epochs=2).run(original, work)
    (step,) = facts["steps"]
    assert step["layers"] == {}
    assert "history" not in step
    assert pruned_model(keras, work).count_params() == step["figures"]["before"]["parameters"]
    (note,) = work.progress.noted  # type: ignore[attr-defined]
    assert re.fullmatch(r"cache is [\d,]+ bytes already, and may be 7,340,032 bytes: nothing to remove", note)


def rewritten(keras: Any, original: Artifact, name: str) -> None:
    """Write the model with all weights of one layer set to 0."""
    model = keras.saving.load_model(original.folder / MODEL_KERAS)
    model.get_layer(name).set_weights([weight * 0 for weight in model.get_layer(name).get_weights()])
    working_model.write(model, original.folder)


@pytest.mark.parametrize("importance", ["taylor", "l2"])
def test_a_model_that_answers_the_same_for_every_sample_is_refused(
    keras: Any, original: Artifact, work: Context, importance: Any
) -> None:
    rewritten(keras, original, "scores")
    with pytest.raises(StageError, match=r"the same answer for all of \d+ training samples.*train it first"):
        Prune(importance=importance, epochs=0).run(original, work)


def test_a_layer_of_zeros_is_named(
    keras: Any, original: Artifact, work: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewritten(keras, original, "second")
    monkeypatch.setattr("compress.learning.pruning.iterative.refuse_constant", lambda *arguments: None)
    (step,) = Prune(epochs=0).run(original, work)["steps"]
    assert step["warnings"] == [
        "all weights are 0 in second: was the model trained?",
        "taylor finds no channel that matters to the loss: batch_norm is used instead",
    ]
    assert work.progress.noted == [f"prune: {text}" for text in step["warnings"]]  # type: ignore[attr-defined]


def test_sensitivity_says_the_same_of_such_models(
    keras: Any, original: Artifact, work: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Sensitivity(samples=16)
    assert probe.run({"model": original}, work)["importance"] == "taylor"
    rewritten(keras, original, "second")
    with pytest.raises(StageError, match=r"the same answer for all of 16 training samples"):
        probe.run({"model": original}, work)
    monkeypatch.setattr("compress.learning.pruning.importance.refuse_constant", lambda *arguments: None)
    assert probe.run({"model": original}, work)["importance"] == "batch_norm"
    assert work.progress.noted == [  # type: ignore[attr-defined]
        "sensitivity: taylor finds no channel that matters to the loss: batch_norm is used instead"
    ]


def test_out_of_reach_is_refused_before_training(original: Artifact, work: Context) -> None:
    with pytest.raises(StageError, match=r"latency: at_most 0\.01 cannot be reached"):
        Prune(objective="latency", at_most=0.01, host="pcie", steps=5).run(original, work)
    assert not any(metrics for _, _, metrics in work.progress.seen)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0.5, "at_most": 3.0}, "keep and at_most are both limits"),
        ({"keep_macs": 0.5, "objective": "latency"}, "keep_macs is for objective: macs"),
        ({"objective": "cache", "keep": 0.5}, "keep cannot be used with objective: cache"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Prune(**settings)


def test_many_batches_for_one_step_are_tried_with_as_many_as_there_are(original: Artifact, work: Context) -> None:
    """An epoch has three batches: the trial of one epoch makes a single step of them."""
    facts = Prune(keep=0.5, epochs=2, batch_size=32, gradient_accumulation=6).run(original, work)
    assert set(facts["steps"][0]["trials"]) == {"balanced", "uniform"}
    assert len(facts["steps"][0]["history"]) == 2


def test_training_between_steps_that_changes_nothing_is_refused(original: Artifact, work: Context) -> None:
    settings: dict[str, Any] = {"keep": 0.6, "steps": 2, "epochs": 8, "batch_size": 32, "gradient_accumulation": 6}
    with pytest.raises(StageError, match=r"epochs_between: 1 has 3 batches, and gradient_accumulation: 6"):
        Prune(**settings).run(original, work)
    assert len(Prune(**settings, epochs_between=0, importance="l2").run(original, work)["steps"]) == 2


@pytest.mark.parametrize("unroll", [True, False])
def test_a_layer_that_cannot_be_followed_counts_or_is_named(
    keras: Any, original: Artifact, work: Context, unroll: bool
) -> None:
    layers = keras.layers
    stack = [keras.Input((8, 8, 1)), layers.Reshape((8, 8)), layers.LSTM(16, unroll=unroll, name="held")]
    model = keras.Sequential([*stack, layers.Dense(96, activation="relu"), layers.Dense(2)])
    working_model.write(model, original.folder)
    (step,) = Prune(keep=0.95, epochs=0, importance="l2").run(original, work)["steps"]
    real = [macs.total_macs(graph.read(folder / "model.tflite")) for folder in (original.folder, work.folder)]
    assert [step["cost"]["before"], step["cost"]["after"]] == real
    assert [step["figures"][when]["macs"] for when in ("before", "after")] == real
    if unroll:
        assert real[0] > 10_000
        assert step["warnings"] == []
    else:
        (warning,) = step["warnings"]  # the 8-bit file is unrolled
        assert "MACs leave out operators inside a loop" in warning
