"""Semantic segmentation: one class for each pixel, or for each position of a series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError, ModelError
from compress.core.measurement import Measurement, Metric, missing
from compress.data.types import Data, Split
from compress.model.ir.tensorflow import keras
from compress.tasks.base import Judge, Location, ModelOutputs, Refusal, Rows, Shapes, Specification, Use
from compress.tasks.illustrations import MasksIllustrator
from compress.tasks.measured import MeasuredTask, ScoresHead, refuse_moving, refuse_shape
from compress.tasks.output_forms import OutputForm, activation_of
from compress.tasks.regression import WITHOUT_CLASSES
from deploy.contract.image_geometry import NO_CLASS


@dataclass(frozen=True)
class SegmentationHead(ScoresHead):
    """A first output [n, ..., classes] of the probabilities of a softmax at each position, or of their logits."""

    loss_name: ClassVar[str] = "cross-entropy in nats, averaged over the positions"

    def constant_outputs(self, targets: NDArray[Any], shapes: Shapes) -> list[NDArray[np.float32]] | None:
        """Return the frequencies of the classes at every position, in the form of the model's output."""
        labels = targets[targets != NO_CLASS].astype(np.int64)
        counts = np.bincount(labels, minlength=shapes[0][-1])
        likely = np.maximum(counts / max(len(labels), 1), 1e-6)
        values = likely if self.probabilities else np.log(likely)
        return [np.broadcast_to(values, (1, *shapes[0])).astype(np.float32)]

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the cross entropy, averaged over the positions that count: [n]."""
        ops = keras().ops
        labels = ops.cast(targets, "int32")
        counted = ops.cast(ops.not_equal(labels, NO_CLASS), "float32")
        chosen = ops.one_hot(ops.where(labels == NO_CLASS, 0, labels), self.output.shape[-1], dtype="float32")
        entropy = -ops.sum(chosen * ops.log_softmax(self.logits(outputs)), axis=-1) * counted
        axes = tuple(range(1, len(self.output.shape)))
        return ops.sum(entropy, axis=axes) / ops.maximum(ops.sum(counted, axis=axes), 1)

    @property
    def specification(self) -> Specification:
        """The number of classes, by which rows are split into positions."""
        return {"classes": self.output.shape[-1]}


@dataclass(frozen=True)
class ByPixel(Judge):
    """The comparison of two segmentation models by all scores, and by the class at each position."""

    classes: int

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the share of the positions with the same class."""
        same = _classes_at(expected, self.classes) == _classes_at(actual, self.classes)
        return np.asarray(same.mean(axis=1), np.float64)


class Segmentation(MeasuredTask):
    """One class for each pixel; the metrics are the mean intersection over union and the pixel accuracy."""

    name: ClassVar[str] = "segmentation"
    instead_of: ClassVar[frozenset[str]] = frozenset({"classification", "regression"})
    models: ClassVar[str] = "segmentation models"
    score_name: ClassVar[str] = "validation_miou"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("miou", "Mean intersection over union", "fraction", "miou_drop", limited=True),
        Metric("pixel_accuracy", "Pixel accuracy", "fraction", "pixel_accuracy_drop"),
    )
    refused: ClassVar[Mapping[Use, Refusal]] = {
        **WITHOUT_CLASSES,
        "augmentation": Refusal("augment changes images, but not their masks", "no augment", "leave it out"),
    }
    agreement_note: ClassVar[str] = "pixels of the same class"

    def head(self, model: Any, data: Data, specification: Specification = None) -> SegmentationHead:
        """Return the head of a model with a score for each class at each position of the masks.

        Raises:
            DataError: the masks are not class indices.
        """
        masks = _masks(data)
        classes = len(data.class_names)
        refuse_shape(model, data, [*masks.shape[1:], classes], "a score for each class at each position of a mask")
        probabilities = activation_of(model.outputs[0]) == "softmax"
        form = OutputForm(model.outputs[0].name, tuple(model.outputs[0].shape[1:]), "softmax", 1.0)
        return SegmentationHead(form, probabilities)

    def refused_settings(self, settings: Mapping[str, Any]) -> list[tuple[Location, Refusal]]:
        """Return also preprocessing that would move pixels away from masks in arrays, which stay as they are."""
        return [*super().refused_settings(settings), *refuse_moving(settings, "the masks", ("masks",))]

    def constant(self, data: Data) -> Rows:
        """Return the most frequent class everywhere."""
        masks = _masks(data)
        counts = np.bincount(masks[masks != NO_CLASS].astype(np.int64).ravel(), minlength=len(data.class_names))
        scores = np.zeros((*masks.shape[1:], len(data.class_names)))
        scores[..., counts.argmax()] = 1
        return scores.reshape(1, -1)

    def kept(self, rows: Rows, targets: NDArray[Any], specification: Specification) -> NDArray[Any]:
        """Return for each sample the pixels by true class and predicted class: int64 [n, classes, classes]."""
        positions = int(np.prod(targets.shape[1:]))
        if rows.shape[1] % positions:
            raise ModelError(
                f"gives {rows.shape[1]} values for {positions} pixels",
                allowed="a score for each class at each pixel",
                hint="check data.source and the model's last layer",
            )
        classes = rows.shape[1] // positions
        predicted = _classes_at(rows, classes)
        truth = np.asarray(targets, np.int64).reshape(len(targets), -1)
        tables = np.zeros((len(rows), classes, classes), np.int64)
        for table, expected, actual in zip(tables, truth, predicted, strict=True):
            counted = expected != NO_CLASS
            np.add.at(table, (expected[counted], actual[counted]), 1)
        return tables

    def measured(self, kept: NDArray[Any], targets: NDArray[Any], note: str) -> dict[str, Measurement]:
        """Return intersection over union, averaged over the classes that occur, and the share of right pixels."""
        table = kept.sum(axis=0)
        right = np.diagonal(table)
        union = table.sum(axis=0) + table.sum(axis=1) - right
        occurs = table.sum(axis=1) > 0
        if not occurs.any():
            reason = "no pixel of the split has a class"
            return {name: missing("fraction", reason) for name in ("miou", "pixel_accuracy")}
        miou = float((right[occurs] / union[occurs]).mean())
        accuracy = float(right.sum() / table.sum())
        return {
            "miou": Measurement(miou, "fraction", "measured", note=f"{note}, {int(occurs.sum())} classes"),
            "pixel_accuracy": Measurement(accuracy, "fraction", "measured", note=note),
        }

    def fidelity(self, specification: Specification, *, logits: bool = False) -> ByPixel:
        """Return the comparison by scores and pixels."""
        return ByPixel((specification or {}).get("classes", 1))

    def illustrator(
        self, models: Mapping[str, ModelOutputs], data: Data, split: Split, labels: Sequence[str] = ()
    ) -> MasksIllustrator | None:
        """Return how masks are drawn; None for series."""
        masks = self.targets(data, split)
        if masks.ndim != 3:
            return None
        return MasksIllustrator([model.rows for model in models.values()], data.class_names, masks)


def _masks(data: Data) -> NDArray[Any]:
    """Return the masks of the training split, after a check that they are class indices: [n, ...]; NO_CLASS does not
    count."""
    masks = data.targets("train")
    classes = len(data.class_names)
    valid = masks.ndim >= 2 and np.asarray(masks == np.floor(masks)).all()
    if not valid or not (((masks >= 0) & (masks < classes)) | (masks == NO_CLASS)).all():
        raise DataError(
            f"the masks are {masks.dtype} {list(masks.shape)} from {masks.min()} to {masks.max()}",
            where="data.source",
            allowed=f"class indices from 0 to {classes - 1}, or {NO_CLASS} for pixels that do not count",
        )
    return masks


def _classes_at(rows: Rows, classes: int) -> NDArray[np.int64]:
    """Return the class with the highest score at each position: [n, positions]."""
    return np.asarray(np.asarray(rows).reshape(len(rows), -1, classes).argmax(axis=-1))
