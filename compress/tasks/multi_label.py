"""Multi-label classification: any number of classes for each sample, by one sigmoid for each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError, ModelError
from compress.core.measurement import Measurement, Metric, missing
from compress.data.types import Data
from compress.model.ir.tensorflow import keras
from compress.tasks.base import Judge, Refusal, Rows, Shapes, Specification, Use, pooled_dense
from compress.tasks.measured import MeasuredTask, ScoresHead, refuse_shape
from compress.tasks.output_forms import OutputForm, activation_of
from compress.tasks.regression import WITHOUT_CLASSES, mean_with_interval


@dataclass(frozen=True)
class MultiLabelHead(ScoresHead):
    """A first output [n, classes] of the independent probabilities of sigmoids, or of their logits."""

    loss_name: ClassVar[str] = "binary cross-entropy in nats, averaged over the classes"

    def constant_outputs(self, targets: NDArray[Any], shapes: Shapes) -> list[NDArray[np.float32]] | None:
        """Return the frequency of each class, in the form of the model's output."""
        likely = np.clip(np.asarray(targets, np.float64).mean(axis=0), 1e-6, 1 - 1e-6)
        values = likely if self.probabilities else np.log(likely / (1 - likely))
        return [values.reshape(1, *shapes[0]).astype(np.float32)]

    @property
    def specification(self) -> Specification:
        """Whether the outputs are probabilities or logits."""
        return {"binary": "probability" if self.probabilities else "logit"}

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the binary cross entropy, averaged over the classes: [n]."""
        ops = keras().ops
        logits = self.logits(outputs)
        expected = ops.cast(targets, "float32")
        return ops.mean(ops.softplus(logits) - expected * logits, axis=-1)


@dataclass(frozen=True)
class ByLabels(Judge):
    """The comparison of two multi-label classifiers: all scores, and the labels that are chosen.

    Attributes:
        limit: scores above this limit choose a label: 0.5 for probabilities, 0 for logits.
    """

    limit: float

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the share of the labels that both choose or both do not choose."""
        return np.asarray(((expected > self.limit) == (actual > self.limit)).mean(axis=1), np.float64)


class MultiLabel(MeasuredTask):
    """Any number of classes for each sample; the metrics are the mean average precision and the F1 score."""

    name: ClassVar[str] = "multi_label"
    one_vector: ClassVar[bool] = True
    instead_of: ClassVar[frozenset[str]] = frozenset({"classification", "regression"})
    models: ClassVar[str] = "multi-label classifiers"
    score_name: ClassVar[str] = "validation_map"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("map", "Mean average precision", "fraction", "map_drop", limited=True),
        Metric("f1", "F1 score", "fraction", "f1_drop"),
    )
    refused: ClassVar[Mapping[Use, Refusal]] = WITHOUT_CLASSES
    agreement_note: ClassVar[str] = "labels that both models choose or both do not choose"

    def head(self, model: Any, data: Data, specification: Specification = None) -> MultiLabelHead:
        """Return the head of a model with one probability or logit for each class.

        Raises:
            ModelError: the model's output does not fit the classes, or it ends with a softmax.
            DataError: the labels are not 0 and 1.
        """
        classes = len(data.class_names)
        refuse_shape(model, data, [classes], "one probability for each class")
        _refuse_labels(data)
        activation = activation_of(model.outputs[0])
        if activation == "softmax":
            what = "the model ends with a softmax, which chooses one class"
            raise ModelError(what, allowed="a sigmoid, or no activation", hint="use another last layer")
        form = OutputForm(model.outputs[0].name, (classes,), "sigmoid", 1.0)
        return MultiLabelHead(form, activation == "sigmoid")

    def new_head(self, features: Any, data: Data, dropout: float) -> Any:
        """Return the probability of each class."""
        return pooled_dense(features, len(data.class_names), "sigmoid", dropout)

    def kept(self, rows: Rows, targets: NDArray[Any], specification: Specification) -> NDArray[Any]:
        """Return the scores."""
        if rows.shape != targets.shape:
            what = f"gives {rows.shape[1]} scores, but the data has {targets.shape[1]} classes"
            raise ModelError(what, hint="check data.source and the model's last layer")
        return np.asarray(rows, np.float64)

    def measured(self, kept: NDArray[Any], targets: NDArray[Any], note: str) -> dict[str, Measurement]:
        """Return the average precision, averaged over the classes that occur, and F1 at the best single limit."""
        truth = np.asarray(targets) > 0
        precisions = [average_precision(kept[:, index], truth[:, index]) for index in np.flatnonzero(truth.any(axis=0))]
        if not precisions:
            reason = "no sample of the split has a label"
            return {name: missing("fraction", reason) for name in ("map", "f1")}
        mean = mean_with_interval(np.array(precisions), "fraction", f"{note}, {len(precisions)} classes")
        f1 = Measurement(f1_score(kept, truth), "fraction", "measured", note=note)
        return {"map": mean, "f1": f1}

    def fidelity(self, specification: Specification, *, logits: bool = False) -> ByLabels:
        """Return the comparison by scores and labels."""
        is_logit = logits or (specification or {}).get("binary") == "logit"
        return ByLabels(0.0 if is_logit else 0.5)

    def manifest(self, specification: Specification, labels: Sequence[str] = ()) -> dict[str, Any]:
        """Return whether the device reads probabilities or logits."""
        return dict(specification or {})


def _refuse_labels(data: Data) -> None:
    targets = data.targets("train")
    if targets.ndim != 2 or not np.isin(targets, (0, 1)).all():
        raise DataError(
            f"the labels are {targets.dtype} {list(targets.shape)}, not 0 and 1 for each class",
            where="data.source",
            allowed="an array [n, classes] of 0 and 1",
        )


def average_precision(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> float:
    """Return the area under the curve of precision over recall for one class; equal scores count together.

    Source: the definition of scikit-learn's `average_precision_score`: the sum of the precision at each score, weighted
    by the increase of recall there.
    """
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)  # of each group of equal scores
    hits = np.cumsum(truth[order])[last]
    precision = hits / (np.flatnonzero(last) + 1)
    return float((np.diff(hits, prepend=0) / truth.sum() * precision).sum())


def f1_score(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> float:
    """Return the F1 score over all labels: scores above 0.5 if they are probabilities, otherwise above 0."""
    probabilities = scores.min() >= -1e-6 and scores.max() <= 1 + 1e-6
    chosen = scores > (0.5 if probabilities else 0.0)
    both = (chosen & truth).sum()
    total = chosen.sum() + truth.sum()
    return float(2 * both / total) if total else 0.0
