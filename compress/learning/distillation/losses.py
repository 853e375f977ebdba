"""Knowledge distillation: the loss of a student on the outputs of its teachers and on the labels.

The head of the student combines the outputs of several teachers into soft targets (`Head.soft_targets`), and compares
them with the outputs of the student (`Head.distillation_loss`). For classifiers, soft targets are logarithms of
softened probabilities.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.core.progress import Phase
from compress.data.types import Data, Split
from compress.learning.context import Context
from compress.learning.distillation.features import FeatureDistillation
from compress.learning.distillation.settings import DistillationSettings
from compress.learning.distillation.teachers import Teacher, TeacherOutput
from compress.learning.training.augmentation import Augment
from compress.learning.training.loop import Batch, Loss, TrainingSettings, label_loss
from compress.learning.training.phases import BUILD
from compress.tasks.base import Head
from deploy.contract.durable_files import write_atomically

ONCE = "once, before the training"
IN_EVERY_STEP = "in every step, because augment changes the samples"
SOFT_TARGETS = "soft_targets.npz"
TEACHERS = "outputs of the teachers"
BATCH = 256
"""Number of samples that teachers process at once before the training."""


def schedule(settings: TrainingSettings) -> str:
    """Return when the teachers run: once, unless augmentation changes the samples in every epoch."""
    return ONCE if settings.augment == Augment() else IN_EVERY_STEP


def teachers_phase(data: Data) -> Phase:
    """Return the phase in which teachers run before the training."""
    samples = sum(len(data.labels(split)) for split in ("train", "validation"))
    return Phase(TEACHERS, BUILD + samples, unit="sample")


def loss_of(
    head: Head,
    teachers: Sequence[Teacher],
    distillation: DistillationSettings,
    settings: TrainingSettings,
    context: Context,
    hints: FeatureDistillation | None = None,
) -> Loss:
    """Return the weighted sum of the distillation loss and the loss on the labels, plus the loss on features.

    Without augmentation the teachers run here, once, and the batches contain their soft targets. Features are too large
    for that, and are computed in every step.

    Args:
        head: the head of the student.
        teachers: one or more teachers; features are those of the first.
        distillation: temperature and weights.
        settings: settings of the student's training.
        context: the data, and the progress of the teachers.
        hints: the features to compare; the model to train is then `hints.model`.

    Raises:
        StageError: a teacher runs in the TFLite runtime, and cannot run in training steps.
    """
    without_layers = [teacher.name for teacher in teachers if teacher.model is None]
    if schedule(settings) != ONCE and without_layers:
        raise StageError(
            f"the teacher {without_layers[0]} runs in the TFLite runtime, and cannot run in training steps",
            hint="remove augment, so that teachers run once, or use a Keras or a float .tflite file",
        )
    if hints:
        teachers = [hints.teacher, *teachers[1:]]
    precomputed: dict[Split, NDArray[np.float32]] = {}
    teachers_in_steps = teachers
    if schedule(settings) == ONCE:
        precomputed = precompute(head, teachers, distillation.temperature, context)
        teachers_in_steps = teachers[:1] if hints else []

    def loss(batch: Batch, outputs: Any) -> Any:
        student_outputs = outputs
        if hints:
            count = len(hints.student.outputs)
            student_outputs, student_features = outputs[:count], outputs[count:]
        teacher_outputs = [teacher.predict(batch.inputs) for teacher in teachers_in_steps]
        targets = batch.soft_targets
        if not precomputed:
            targets = _combined(head, teachers, teacher_outputs, distillation.temperature)
        total = weighted(head, batch, student_outputs, targets, distillation)
        if hints:
            _, teacher_features = teacher_outputs[0]
            total += hints.loss(teacher_features, student_features)
        return total

    name = f"{distillation.weight:g} x divergence from the teachers"
    if distillation.weight < 1:
        name += f" + {1 - distillation.weight:g} x {head.loss_name}"
    return Loss(loss, precomputed, head, name + (" + distance of features" if hints else ""))


def weighted(head: Head, batch: Batch, outputs: Any, soft_targets: Any, distillation: DistillationSettings) -> Any:
    """Return the weighted sum of the distillation loss and the loss on the labels: [n].

    `head` and `outputs` are those of the student, and `soft_targets` come from the teachers (`Head.soft_targets`).
    """
    total = distillation.weight * head.distillation_loss(head.logits(outputs), soft_targets, distillation.temperature)
    if distillation.weight < 1:
        total += (1 - distillation.weight) * label_loss(head).of(batch, outputs)
    return total


def precompute(
    head: Head, teachers: Sequence[Teacher], temperature: float, context: Context
) -> dict[Split, NDArray[np.float32]]:
    """Return the soft targets of every sample of train and validation.

    They are saved, so that an interrupted stage does not compute them again.
    """
    splits: tuple[Split, ...] = ("train", "validation")
    path = context.unfinished / SOFT_TARGETS if context.unfinished else None
    if path is not None and path.exists():
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as saved:
            return {split: saved[split] for split in splits}
    inputs = {split: context.data.inputs(split) for split in splits}
    done, total = 0, sum(len(samples) for samples in inputs.values())
    targets: dict[Split, NDArray[np.float32]] = {}
    with context.progress.phase(teachers_phase(context.data)):
        for split, samples in inputs.items():
            rows = []
            for start in range(0, len(samples), BATCH):
                part = samples[start : start + BATCH]
                outputs = [teacher.predict(part) for teacher in teachers]
                rows.append(np.asarray(_combined(head, teachers, outputs, temperature)))
                done += len(part)
                context.progress.update(done, total)
            targets[split] = np.concatenate(rows)
    if path is not None:
        content = io.BytesIO()
        np.savez(content, **{str(split): rows for split, rows in targets.items()})  # type: ignore[arg-type]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())
    return targets


def _combined(head: Head, teachers: Sequence[Teacher], outputs: Sequence[TeacherOutput], temperature: float) -> Any:
    weights = [teacher.weight for teacher in teachers]
    return head.soft_targets([logits for logits, _ in outputs], weights, temperature)
