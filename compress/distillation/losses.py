"""Distillation: the loss of a student with the answers of its teachers and with the targets of the data.

The head of the student combines the answers of several teachers into one training target (`Head.softened`), and
compares (`Head.taught_loss`); for classifiers these are logarithms of softened probabilities.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.data.types import Split
from compress.distillation.features import Hints
from compress.distillation.settings import Teaching
from compress.distillation.teachers import Answers, Teacher
from compress.errors import StageError
from compress.files import write_atomically
from compress.stage import Context
from compress.tasks.base import Head
from compress.training.batches import Augment
from compress.training.loop import Batch, Loss, TrainingSettings, label_loss

ONCE = "once, before the training"
IN_EVERY_STEP = "in every step, because augment changes the samples"
TAUGHT = "taught.npz"
BATCH = 256
"""Samples that teachers are asked about at once, before the training."""


def when(settings: TrainingSettings) -> str:
    """When the teachers answer: samples that change in every epoch have no answers that could be kept."""
    return ONCE if settings.augment == Augment() else IN_EVERY_STEP


def loss_of(
    head: Head,
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
    known = once(head, teachers, teaching.temperature, context) if when(settings) == ONCE else {}
    asked = teachers[: 1 if hints else 0] if known else teachers
    labelled = label_loss(head)

    def loss(batch: Batch, outputs: Any) -> Any:
        scores, found = (outputs[0], outputs[1:]) if hints else (outputs, ())
        answers = [teacher.answers(batch.inputs) for teacher in asked]
        taught = batch.taught if known else _combined(head, teachers, answers, teaching.temperature)
        made = teaching.weight * head.taught_loss(head.logits(scores), taught, batch.labels, teaching)
        if teaching.weight < 1:
            made += (1 - teaching.weight) * labelled.of(batch, scores)
        return made + hints.loss(answers[0][1], found) if hints else made

    return Loss(loss, known)


def once(
    head: Head, teachers: Sequence[Teacher], temperature: float, context: Context
) -> dict[Split, NDArray[np.float32]]:
    """Return the combined answers of the teachers for every sample of train and validation.

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
            answers = [teacher.answers(part) for teacher in teachers]
            rows.append(np.asarray(_combined(head, teachers, answers, temperature)))
            done += len(part)
            context.progress.update(done, total)
        found[split] = np.concatenate(rows)
    if path is not None:
        content = io.BytesIO()
        np.savez(content, **{str(split): rows for split, rows in found.items()})  # type: ignore[arg-type]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())
    return found


def _combined(head: Head, teachers: Sequence[Teacher], answers: Sequence[Answers], temperature: float) -> Any:
    return head.softened([each for each, _ in answers], [teacher.weight for teacher in teachers], temperature)
