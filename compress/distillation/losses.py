"""Distillation: what is made small when a student learns from what its teachers say, and from the labels.

Scores are softened by a temperature. What several teachers say is averaged as probabilities, and handed around
as the logarithm of that: float32 [n, classes], the same for one teacher and for many.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.data.types import Split
from compress.distillation.features import Hints
from compress.distillation.settings import Decoupled, Teaching
from compress.distillation.teachers import Teacher
from compress.errors import StageError
from compress.files import write_atomically
from compress.ir.tensorflow import keras
from compress.stage import Context
from compress.training.batches import Augment
from compress.training.loop import Batch, ClassificationHead, Loss, TrainingSettings, label_loss

ONCE = "once, before the training"
IN_EVERY_STEP = "in every step, because augment changes the samples"
TAUGHT = "taught.npz"
BATCH = 256
"""Samples that teachers are asked about at once, before the training."""


def when(settings: TrainingSettings) -> str:
    """When the teachers answer: samples that change in every epoch have no answers that could be kept."""
    return ONCE if settings.augment == Augment() else IN_EVERY_STEP


def loss_of(
    head: ClassificationHead,
    teachers: Sequence[Teacher],
    teaching: Teaching,
    settings: TrainingSettings,
    context: Context,
    hints: Hints | None = None,
) -> Loss:
    """`weight` parts of what the teachers say, the rest cross entropy with the labels, and hints on top.

    Without augmentation the teachers are asked here, once; batches carry what they said. Features are too large
    for that, and are computed in every step.

    Args:
        head: of the student.
        teachers: one or more; hints come from the first.
        teaching: how much is learnt from them.
        settings: how the student is trained.
        context: data, and progress while the teachers answer.
        hints: the features that are compared; the model that is trained is then `hints.model`.

    Raises:
        StageError: a teacher that is a file for the TFLite runtime cannot answer in training steps.
    """
    unable = [teacher.name for teacher in teachers if teacher.model is None]
    if when(settings) != ONCE and unable:
        raise StageError(
            f"the teacher {unable[0]} is run as it is, without layers of Keras, and cannot answer in training steps",
            todo="leave augment out, so that teachers answer once, or take a Keras or a float .tflite file",
        )
    teachers = [hints.teacher, *teachers[1:]] if hints else teachers
    known = once(teachers, teaching.temperature, context) if when(settings) == ONCE else {}
    asked = teachers[: 1 if hints else 0] if known else teachers
    labelled = label_loss(head)

    def loss(batch: Batch, outputs: Any) -> Any:
        scores, found = (outputs[0], outputs[1:]) if hints else (outputs, ())
        answers = [teacher.answers(batch.inputs) for teacher in asked]
        taught = batch.taught if known else softened(teachers, [logits for logits, _ in answers], teaching.temperature)
        made = teaching.weight * taught_loss(head.logits(scores), taught, batch.labels, teaching)
        if teaching.weight < 1:
            made += (1 - teaching.weight) * labelled.of(batch, scores)
        return made + hints.loss(answers[0][1], found) if hints else made

    return Loss(loss, known)


def once(teachers: Sequence[Teacher], temperature: float, context: Context) -> dict[Split, NDArray[np.float32]]:
    """What teachers say of every sample of train and validation: logarithms of probabilities, [n, classes] each.

    It is kept for the next try, if this one is interrupted.
    """
    splits: tuple[Split, ...] = ("train", "validation")
    path = context.unfinished / TAUGHT if context.unfinished else None
    if path is not None and path.exists():
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as kept:
            return {split: kept[split] for split in splits}
    inputs = {split: context.data.inputs(split) for split in splits}
    done, total = 0, sum(len(each) for each in inputs.values())
    found: dict[Split, NDArray[np.float32]] = {}
    for split, samples in inputs.items():
        rows = []
        for start in range(0, len(samples), BATCH):
            part = samples[start : start + BATCH]
            rows.append(np.asarray(softened(teachers, [each.answers(part)[0] for each in teachers], temperature)))
            done += len(part)
            context.progress.update(done, total)
        found[split] = np.concatenate(rows)
    if path is not None:
        content = io.BytesIO()
        np.savez(content, **{str(split): rows for split, rows in found.items()})  # type: ignore[arg-type]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())
    return found


def softened(teachers: Sequence[Teacher], logits: Sequence[Any], temperature: float) -> Any:
    """The logarithm of the teachers' softened probabilities, averaged by their weights; logits [n, classes] each."""
    ops = keras().ops
    each = [ops.log_softmax(ops.convert_to_tensor(found, "float32") / temperature) for found in logits]
    if len(each) == 1:
        return each[0]
    shares = np.array([teacher.weight for teacher in teachers], np.float32)
    return ops.logsumexp(ops.stack(each) + np.log(shares / shares.sum())[:, None, None], axis=0)


def taught_loss(logits: Any, taught: Any, labels: Any, teaching: Teaching) -> Any:
    """Cross entropy of the student's softened scores with what it is taught, for each sample: [n].

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015: soft targets at `temperature`, their
    gradient scaled by its square. With `decoupled`, the weights of what the teacher says of the right class and of
    what it says of the wrong ones among themselves: Zhao et al., Decoupled Knowledge Distillation, 2022.

    Args:
        logits: the student's [n, classes].
        taught: logarithms of softened probabilities [n, classes], or logits over the temperature.
        labels: [n]; not looked at, unless `decoupled`.
        teaching: temperature, and whether it is decoupled.
    """
    taught, scores = keras().ops.stop_gradient(taught), logits / teaching.temperature
    if teaching.decoupled is None:
        return _cross_entropy(taught, scores) * teaching.temperature**2
    return _decoupled(taught, scores, labels, teaching.decoupled) * teaching.temperature**2


def _cross_entropy(taught: Any, scores: Any) -> Any:
    ops = keras().ops
    return -ops.sum(ops.softmax(taught) * ops.log_softmax(scores), axis=-1)


def _decoupled(taught: Any, scores: Any, labels: Any, weights: Decoupled) -> Any:
    """Cross entropy of right against wrong, and of the wrong classes among themselves; logits [batch, classes]."""
    ops = keras().ops
    of_right = ops.one_hot(ops.cast(ops.reshape(labels, (-1,)), "int32"), scores.shape[-1])
    pairs = []
    for logits in (taught, scores):
        others = ops.logsumexp(ops.where(of_right > 0, -1e9, logits), axis=-1)
        pairs.append(ops.stack([ops.sum(logits * of_right, axis=-1), others], axis=-1))
    among = [ops.where(of_right > 0, -1e9, logits) for logits in (taught, scores)]
    return weights.right * _cross_entropy(*pairs) + weights.wrong * _cross_entropy(*among)
