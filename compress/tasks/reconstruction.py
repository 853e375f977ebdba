"""Reconstruction: a model whose output is its own input, or a clean form of it; and anomaly detection by its error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.core.measurement import Measurement, Metric, missing
from compress.data.types import Data, Split
from compress.model.ir.tensorflow import keras
from compress.tasks.base import Refusal, Rows, Shapes, Specification, Use
from compress.tasks.measured import MeasuredTask, ValuesHead, refuse_shape
from compress.tasks.regression import WITHOUT_CLASSES, mean_with_interval

NORMAL = ("normal", "ok", "good", "healthy")
"""Names of the class of samples that are not anomalies, in lower case; without such a name, it is the first class."""
UNKNOWN = -1.0
"""The label of samples without classes; 0 is normal, 1 an anomaly."""


@dataclass(frozen=True)
class ReconstructionHead(ValuesHead):
    """A first output of the shape of the targets."""

    def constant_outputs(self, targets: NDArray[Any], shapes: Shapes) -> list[NDArray[np.float32]] | None:
        """Return the mean of the samples that are not anomalies."""
        normal = targets[targets[:, -1] <= 0, :-1]
        return super().constant_outputs(normal if len(normal) else targets[:, :-1], shapes)

    def training_values(self, targets: Any, outputs: Any) -> Mapping[str, Any]:
        """Return the mean absolute error in the unit of the samples; 0 for anomalies, as in the loss."""
        values = super().training_values(targets[:, :-1], self.logits(outputs))
        return {name: keras().ops.where(targets[:, -1] > 0, 0.0, value) for name, value in values.items()}

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the mean squared error in units of the variance [n]; 0 for anomalies.

        The targets [n, values + 1] are flattened clean samples with their label, 1 for an anomaly.
        """
        ops = keras().ops
        targets = ops.cast(targets, "float32")
        error = self.divergence(targets[:, :-1], self.logits(outputs))
        return ops.where(targets[:, -1] > 0, 0.0, error)

    def logits(self, outputs: Any) -> Any:
        """Return the output, flattened: [n, values]."""
        ops = keras().ops
        values = super().logits(outputs)
        return ops.reshape(values, (ops.shape(values)[0], int(np.prod(values.shape[1:]))))


class Reconstruction(MeasuredTask):
    """Autoencoders and denoisers; the metrics are the mean squared error and, with classes, the AUC of anomalies.

    Samples are compared with themselves, or with the targets [n, ...] of the data. If the data has classes, one of them
    is normal (NORMAL), and all others are anomalies: the model does not learn from anomalies, and its error should be
    larger for anomalies.
    """

    name: ClassVar[str] = "reconstruction"
    instead_of: ClassVar[frozenset[str]] = frozenset({"classification", "regression", "outputs"})
    needs_every_class: ClassVar[bool] = False
    models: ClassVar[str] = "autoencoders"
    score_name: ClassVar[str] = "validation_score"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("mse", "Mean squared error", "", "mse_increase", limited=True),
        Metric("auc", "AUC of anomalies by the error", "fraction", "auc_drop", limited=True),
    )
    refused: ClassVar[Mapping[Use, Refusal]] = {
        **WITHOUT_CLASSES,
        "augmentation": Refusal("augment changes the inputs, but not what they are compared with", "no augment"),
    }
    agreement_note: ClassVar[str] = "values that differ by at most 0.1 of their standard deviation"

    def head(self, model: Any, data: Data, specification: Specification = None) -> ReconstructionHead:
        """Return the head of a model whose output has the shape of the targets."""
        values = _clean(data, "train")
        shape = values.shape[1:]
        if len(model.outputs[0].shape) == len(shape) and shape[-1] == 1:
            shape = shape[:-1]  # a model of a series [n, time] for samples [n, time, 1]
        refuse_shape(model, data, shape, "the shape of the samples")
        deviation = float(np.asarray(values[:1024], np.float64).std()) or 1.0
        return ReconstructionHead((deviation,))

    def targets(self, data: Data, split: Split) -> NDArray[Any]:
        """Return flattened clean samples with their label: float32 [n, values + 1]; 1 for an anomaly."""
        values = _clean(data, split)
        label = np.full((len(values), 1), UNKNOWN, np.float32)
        if data.class_names:
            names = enumerate(data.class_names)
            label[:, 0] = data.labels(split) != next((index for index, name in names if name.lower() in NORMAL), 0)
        return np.concatenate([np.asarray(values, np.float32).reshape(len(values), -1), label], axis=1)

    def constant(self, data: Data) -> Rows:
        """Return the mean of the training samples that are not anomalies."""
        targets = self.targets(data, "train")
        normal = targets[targets[:, -1] <= 0, :-1]
        return np.asarray(normal.astype(np.float64).mean(axis=0, keepdims=True))

    def kept(self, rows: Rows, targets: NDArray[Any], specification: Specification) -> NDArray[Any]:
        """Return the mean squared error of each sample [n]."""
        expected = targets[:, :-1].astype(np.float64)
        if rows.shape != expected.shape:
            what = f"gives {rows.shape[1]} values for samples of {expected.shape[1]}"
            raise ModelError(what, allowed="as many", hint="choose another model")
        return np.asarray(((rows - expected) ** 2).mean(axis=1), np.float64)

    def measured(self, kept: NDArray[Any], targets: NDArray[Any], note: str) -> dict[str, Measurement]:
        """Return the mean squared error without anomalies, and the AUC."""
        label = targets[:, -1]
        normal = kept[label <= 0]
        mse = missing("", "all samples of the split are anomalies")
        if len(normal):
            mse = mean_with_interval(normal, "", note)
        anomalies = kept[label > 0]
        if not len(anomalies) or not len(normal):
            auc = missing("fraction", "the split does not have both normal samples and anomalies")
        else:
            auc = Measurement(area_under_curve(anomalies, normal), "fraction", "measured", note=note)
        return {"mse": mse, "auc": auc}


def area_under_curve(positive: NDArray[np.float64], negative: NDArray[np.float64]) -> float:
    """Return the probability that a positive sample has a larger score than a negative one; equal scores count half."""
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([positive, negative]))
    wins = ranks[: len(positive)].sum() - len(positive) * (len(positive) + 1) / 2
    return float(wins / (len(positive) * len(negative)))


def _clean(data: Data, split: Split) -> NDArray[Any]:
    """Return the expected outputs for the samples of a split: the targets of the data, or the samples themselves."""
    return data.targets(split) if data.has_targets else data.inputs(split)
