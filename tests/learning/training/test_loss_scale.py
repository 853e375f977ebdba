"""The names of losses, and the loss of guessing: no other constant outputs of a head are better than its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context

from compress.learning.training import loop
from compress.learning.training.callbacks import LossScale
from compress.learning.training.loop import TrainingSettings
from compress.tasks.base import Head
from compress.tasks.classification import ClassificationHead
from compress.tasks.embeddings import EmbeddingHead
from compress.tasks.keypoints import KeypointsHead
from compress.tasks.measured import ValuesHead
from compress.tasks.multi_label import MultiLabelHead
from compress.tasks.output_forms import OutputForm
from compress.tasks.outputs import OutputsHead
from compress.tasks.reconstruction import ReconstructionHead
from compress.tasks.segmentation import SegmentationHead
from deploy.contract.image_geometry import NO_CLASS

RANDOM = np.random.default_rng(0)
LABELS = np.array([0] * 50 + [1] * 30 + [2] * 20)
FREQUENCIES = np.array([0.5, 0.3, 0.2])
ENTROPY = float(-(FREQUENCIES * np.log(FREQUENCIES)).sum())
VALUES = RANDOM.normal([5.0, -2.0], [3.0, 0.1], (100, 2)).astype(np.float32)
FLAGS = (RANDOM.random((100, 3)) < FREQUENCIES).astype(np.float32)
MASKS = np.array([[0, 0, 1, NO_CLASS], [1, 0, 0, 2]])
POINTS = np.concatenate([RANDOM.random((40, 2, 2)), RANDOM.random((40, 2, 1)) < 0.7], axis=2).astype(np.float32)
CLEAN = np.concatenate([RANDOM.random((40, 6)), [[0.0]] * 30 + [[1.0]] * 10], axis=1).astype(np.float32)
SCORES = OutputForm("scores", (3,), "softmax", 1.0)
BOTH = (SCORES, OutputForm("size", (1,), "values", 2.0))
ROWS = np.concatenate([np.eye(3)[LABELS] * 0.7 + 0.1, RANDOM.normal(0, 2, (100, 1))], axis=1).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A head with targets, the shapes of a model's outputs, and the loss of guessing, if it is known."""

    head: Head
    targets: np.ndarray
    shapes: list[tuple[int, ...]] = field(default_factory=lambda: [(3,)])
    loss: float | None = None


CASES = {
    "softmax": Case(ClassificationHead("softmax"), LABELS, loss=ENTROPY),
    "logits": Case(ClassificationHead("logits"), LABELS, loss=ENTROPY),
    "sigmoids": Case(ClassificationHead("sigmoid"), LABELS),
    "binary": Case(ClassificationHead("sigmoid", is_binary=True), LABELS % 2, [(1,)]),
    "binary logit": Case(ClassificationHead("logits", is_binary=True), LABELS % 2, [(1,)]),
    "regression": Case(ValuesHead(tuple(VALUES.std(axis=0).tolist())), VALUES, [(2,)], 1.0),
    "keypoints": Case(KeypointsHead((1.0,) * 4), POINTS, [(2, 2)]),
    "flat keypoints": Case(KeypointsHead((1.0,) * 4), POINTS, [(4,)]),
    "reconstruction": Case(ReconstructionHead((1.0,)), CLEAN, [(2, 3, 1)]),
    "multi-label": Case(MultiLabelHead(replace(SCORES, form="sigmoid"), True), FLAGS),
    "multi-label logits": Case(MultiLabelHead(replace(SCORES, form="sigmoid"), False), FLAGS),
    "segmentation": Case(SegmentationHead(replace(SCORES, shape=(4, 3)), True), MASKS, [(4, 3)]),
    "segmentation logits": Case(SegmentationHead(replace(SCORES, shape=(4, 3)), False), MASKS, [(4, 3)]),
    "outputs": Case(OutputsHead(BOTH), ROWS, [(3,), (1,)]),
}


def mean_loss(case: Case, outputs: list[np.ndarray]) -> float:
    repeated = [np.repeat(np.asarray(output, np.float32), len(case.targets), axis=0) for output in outputs]
    return float(np.asarray(case.head.loss(case.targets, repeated)).mean())


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", CASES)
def test_no_other_constant_is_better(keras: Any, name: str) -> None:
    case = CASES[name]
    guess = case.head.constant_outputs(case.targets, case.shapes)
    assert guess is not None
    assert [output.shape for output in guess] == [(1, *shape) for shape in case.shapes]
    least = mean_loss(case, guess)
    if case.loss is not None:
        assert least == pytest.approx(case.loss, abs=1e-4)
    tolerance = 2e-2 if name.startswith("segmentation") else 1e-5  # for masks, positions are weighted by sample
    for number in range(len(guess)):
        for factor in (0.9, 1.1):
            changed = [output * factor if index == number else output for index, output in enumerate(guess)]
            assert mean_loss(case, changed) >= least - tolerance


@pytest.mark.tensorflow
def test_a_task_without_a_guess(keras: Any) -> None:
    assert EmbeddingHead().constant_outputs(LABELS, [(8,)]) is None
    assert EmbeddingHead.loss_name == "supervised contrastive loss in nats"


@pytest.mark.tensorflow
def test_a_class_without_samples_has_a_finite_loss(keras: Any) -> None:
    (guess,) = ClassificationHead("logits").constant_outputs(LABELS, [(5,)]) or []
    assert np.isfinite(guess).all()
    assert guess[0].argmax() == 0


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["regression", "keypoints", "reconstruction"])
def test_errors_in_the_unit_of_the_targets(keras: Any, name: str) -> None:
    case = CASES[name]
    guess = [
        np.repeat(output, len(case.targets), axis=0)
        for output in case.head.constant_outputs(case.targets, case.shapes) or []
    ]
    values = case.head.training_values(case.targets, guess)
    assert tuple(values) == case.head.shown_values
    (errors,) = (np.asarray(tensor) for tensor in values.values())
    assert errors.shape == (len(case.targets),)
    if name == "regression":
        np.testing.assert_allclose(errors, np.abs(VALUES - VALUES.mean(axis=0)).mean(axis=1), rtol=1e-4)
    if name == "keypoints":
        visible = POINTS[..., 2] > 0
        distances = np.linalg.norm(guess[0] - POINTS[..., :2], axis=-1)
        expected = (distances * visible).sum(axis=1) / np.maximum(visible.sum(axis=1), 1)
        np.testing.assert_allclose(errors, expected, rtol=1e-4)
    if name == "reconstruction":
        assert not errors[30:].any()  # anomalies
        np.testing.assert_allclose(
            errors[:30], np.abs(guess[0][:30].reshape(30, -1) - CLEAN[:30, :-1]).mean(axis=1), rtol=1e-4
        )


def test_the_text() -> None:
    scale = LossScale("cross-entropy in nats", {"loss": 2.3026}).with_accuracy(LABELS)
    assert str(scale) == "the loss is the cross-entropy in nats; guessing gives loss 2.3, accuracy 0.5"
    assert str(LossScale()) == ""
    assert str(LossScale("x")) == "the loss is the x"


def network(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential([layers.Input((8, 8, 1)), layers.Flatten(), layers.Dense(2)])


@pytest.mark.tensorflow
def test_a_training_reports_its_scale(keras: Any, tmp_path: Path) -> None:
    model, training_context = network(keras), context(Blobs(), tmp_path)
    facts = loop.fit(
        model, loop.own_loss(model, training_context), TrainingSettings(epochs=1, batch_size=32), training_context
    )
    assert facts["loss"] == {"name": "cross-entropy in nats", "guessing": pytest.approx(np.log(2), abs=1e-3)}


@pytest.mark.tensorflow
def test_distillation_is_compared_with_guessing_too_and_0_is_the_teacher(keras: Any, tmp_path: Path) -> None:
    from compress.learning.distillation import losses, teachers
    from compress.learning.distillation.settings import DistillationSettings

    model, training_context = network(keras), context(Blobs(), tmp_path)
    teacher = teachers.of_model(network(keras), Blobs(), "teacher")
    head = loop.head_of(model, Blobs())
    settings = TrainingSettings(epochs=1)
    loss = losses.loss_of(
        head, [teacher], DistillationSettings(weight=0.9, temperature=2.0), settings, training_context
    )
    targets = {"labels": Blobs().labels("train"), "soft_targets": loss.soft_targets["train"]}
    scale = loop.loss_scale(model, loss, Blobs().inputs("train"), targets, 0)
    assert scale.name == "0.9 x divergence from the teachers + 0.1 x cross-entropy in nats"
    assert scale.references["loss"] > 0
    alone = losses.loss_of(
        head, [teacher], DistillationSettings(weight=1.0, temperature=2.0), settings, training_context
    )
    batch = loop.Batch(Blobs().inputs("train"), targets["labels"], targets["soft_targets"])
    np.testing.assert_allclose(np.asarray(alone.of(batch, teacher.predict(batch.inputs)[0])), 0.0, atol=1e-5)
