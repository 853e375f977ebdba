"""Healing: a training that ends with a worse result than it started with is not kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Bright, context
from networks import with_batch_norms as network

from compress.core.artifact import MODEL_KERAS, Artifact, Kind
from compress.data.types import Split
from compress.learning.context import Context
from compress.learning.training import checkpoint, loop
from compress.learning.training.healing import heal
from compress.learning.training.loop import TrainingSettings
from compress.pipeline.stages import working_model
from compress.pipeline.stages.distill import Distill
from compress.pipeline.stages.prune import Prune
from compress.pipeline.stages.train import Train
from compress.targets import load
from compress.tasks.classification import ClassificationHead

pytestmark = pytest.mark.tensorflow
GENTLE = {"epochs": 6, "batch_size": 16, "learning_rate": 0.01}


class Wrong(Bright):
    """Data whose training labels are all wrong."""

    def labels(self, split: Split) -> np.ndarray:
        labels = super().labels(split)
        return 1 - labels if split == "train" else labels

    def inputs(self, split: Split) -> np.ndarray:
        return Bright().inputs(split)  # the inputs depend on the labels


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Context, list[str]]:
    """A context, and the notes that the user sees."""
    notes: list[str] = []
    training_context = context(Bright(), tmp_path)
    monkeypatch.setattr(training_context.progress, "note", notes.append)
    return training_context, notes


def trained(keras: Any, training_context: Context) -> Any:
    model = network(keras, dropout=0.2)
    loop.fit(
        model,
        loop.label_loss(ClassificationHead("softmax")),
        TrainingSettings(**GENTLE),
        replace(training_context, unfinished=None),
    )
    return model


def accuracy(model: Any) -> float:
    data = Bright()
    predictions = model.predict(data.inputs("validation"), verbose=0).argmax(axis=1)
    return float((predictions == data.labels("validation")).mean())


def test_a_harmful_training_is_not_kept(keras: Any, work: tuple[Context, list[str]]) -> None:
    training_context, notes = work
    model = trained(keras, training_context)
    before = [weight.tobytes() for weight in model.get_weights()]
    facts = heal(
        model,
        loop.label_loss(ClassificationHead("softmax")),
        TrainingSettings(**GENTLE),
        replace(training_context, data=Wrong()),
    )
    assert [weight.tobytes() for weight in model.get_weights()] == before
    assert facts["healing"]["kept"] is False
    assert facts["healing"]["validation_before"] == accuracy(model) == 1.0
    assert facts["healing"]["validation_after"] < 1.0
    assert len(facts["history"]) == 6
    assert "batch_norms" not in facts  # the batch norms of the start are unchanged
    (note,) = notes
    assert note == (
        f"the training changed the validation accuracy from 1.0 to {facts['healing']['validation_after']}: "
        "the weights from before the training are kept"
    )


def test_a_training_that_is_no_worse_is_kept(keras: Any, work: tuple[Context, list[str]]) -> None:
    training_context, notes = work
    model = network(keras)
    before = accuracy(model)
    facts = heal(model, loop.label_loss(ClassificationHead("softmax")), TrainingSettings(**GENTLE), training_context)
    assert facts["healing"] == {
        "kept": True,
        "metric": "accuracy",
        "validation_before": before,
        "validation_after": 1.0,
    }
    assert accuracy(model) == 1.0
    assert facts["batch_norms"]["recalibrated"] is True
    assert notes == []
    again = heal(model, loop.label_loss(ClassificationHead("softmax")), TrainingSettings(**GENTLE), training_context)
    assert again["healing"]["kept"] is True  # an equal result is good enough


@pytest.mark.parametrize("data", [Bright(), Wrong()], ids=["kept", "not kept"])
def test_an_interrupted_healing_ends_as_if_it_had_not_been(
    keras: Any,
    work: tuple[Context, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: Bright,
) -> None:
    from compress.model.ir.tensorflow import keras as seeded

    training_context, _ = work
    monkeypatch.setattr(checkpoint, "EVERY_S", 0.0)
    working_model.write_keras(trained(keras, training_context), tmp_path)
    model_bytes = (tmp_path / MODEL_KERAS).read_bytes()

    def healed(folder: Path | None, stop: int | None = None) -> tuple[Any, list[Any]]:
        seeded(0)
        (tmp_path / MODEL_KERAS).write_bytes(model_bytes)
        model = working_model.read(Artifact("", Kind.KERAS, tmp_path, {MODEL_KERAS: ""}, {}, 0), training_context)
        healing_context = replace(training_context, data=data, unfinished=folder)
        update = (lambda done, total, **metrics: 1 / (stop - done)) if stop else lambda *arguments, **metrics: None
        monkeypatch.setattr(training_context.progress, "update", update)
        facts = heal(model, loop.label_loss(ClassificationHead("softmax")), TrainingSettings(**GENTLE), healing_context)
        return facts, model.get_weights()

    facts, weights = healed(None)
    with pytest.raises(ZeroDivisionError):
        healed(tmp_path / "unfinished", stop=14)  # in the third epoch
    assert (tmp_path / "unfinished" / checkpoint.FILE).exists()
    again, resumed = healed(tmp_path / "unfinished")
    assert again == facts
    assert facts["healing"]["kept"] is not isinstance(data, Wrong)
    for mine, other in zip(resumed, weights, strict=True):
        np.testing.assert_array_equal(mine, other)


def artifact(model: Any, folder: Path, kind: Kind) -> Artifact:
    folder.mkdir()
    working_model.write(model, folder)
    return Artifact("", kind, folder, dict.fromkeys((MODEL_KERAS, "model.tflite"), ""), {}, 0)


@pytest.mark.parametrize(
    ("kind", "compared"), [(Kind.UNTRAINED, False), (Kind.KERAS, True)], ids=["untrained", "trained"]
)
def test_only_a_trained_model_is_compared(
    keras: Any, work: tuple[Context, list[str]], tmp_path: Path, kind: Kind, compared: bool
) -> None:
    training_context, _ = work
    training_context = replace(training_context, original=artifact(network(keras), tmp_path / "original", Kind.KERAS))
    run_facts = Train(**GENTLE).run(artifact(network(keras), tmp_path / "train", kind), training_context)
    assert ("healing" in run_facts) is compared
    assert run_facts["batch_norms"]["validation_after"] == 1.0
    run_facts = Distill(**GENTLE).run(artifact(network(keras), tmp_path / "distill", kind), training_context)
    assert ("healing" in run_facts) is compared


def test_prune_keeps_what_was_cut_where_training_does_harm(
    keras: Any, work: tuple[Context, list[str]], tmp_path: Path
) -> None:
    training_context, notes = work
    training_context = replace(training_context, target=load("edgetpu"))
    trained_artifact = artifact(trained(keras, training_context), tmp_path / "given", Kind.KERAS)
    stage = Prune(keep=0.9, allocation="balanced", importance="l2", **GENTLE)
    (step,) = stage.run(trained_artifact, replace(training_context, data=Wrong()))["steps"]
    assert step["layers"]
    assert step["healing"]["kept"] is False
    assert step["batch_norms"]["validation_after"] == step["healing"]["validation_before"]
    model = working_model.read(Artifact("", Kind.KERAS, tmp_path, {MODEL_KERAS: ""}, {}, 0), training_context)
    assert accuracy(model) == step["healing"]["validation_before"] > step["healing"]["validation_after"]
    assert any("the weights from before the training are kept" in note for note in notes)
