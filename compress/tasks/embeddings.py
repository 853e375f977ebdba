"""Embeddings: vectors whose nearest neighbours are samples of the same class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from compress.core.measurement import Measurement, Metric, missing, proportion
from compress.data.types import Data, Split
from compress.model.ir.tensorflow import keras
from compress.tasks.base import (
    Head,
    Judge,
    Refusal,
    Rows,
    Specification,
    Use,
    first_output,
    pooled_dense,
    refuse_misfit,
)
from compress.tasks.measured import MeasuredTask
from compress.tasks.regression import WITHOUT_CLASSES
from deploy.contract.embedding import ALIKE, alike

SHARPNESS = 10.0
"""Factor of cosines before the softmax of the supervised contrastive loss: the inverse of its temperature 0.1."""
NEW_SIZE = 128
"""Length of the vectors of a new head."""


@dataclass(frozen=True)
class EmbeddingHead(Head):
    """A first output of one vector for each sample."""

    loss_name: ClassVar[str] = "supervised contrastive loss in nats"

    def logits(self, outputs: Any) -> Any:
        """Return the vectors, divided by their length: [n, values]."""
        ops = keras().ops
        values = ops.cast(first_output(outputs), "float32")
        flat = ops.reshape(values, (ops.shape(values)[0], int(np.prod(values.shape[1:]))))
        return flat / ops.maximum(ops.norm(flat, axis=-1, keepdims=True), 1e-9)

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the supervised contrastive loss of each sample of the batch [n]; 0 without another of its class.

        Source: Khosla et al., Supervised Contrastive Learning, 2020, equation 2.
        """
        ops = keras().ops
        vectors = self.logits(outputs)
        labels = ops.reshape(ops.cast(targets, "int32"), (-1,))
        itself = ops.eye(ops.shape(labels)[0], dtype="float32")
        cosines = ops.matmul(vectors, ops.transpose(vectors)) * SHARPNESS - 1e9 * itself
        likelihood = ops.log_softmax(cosines, axis=-1)
        same = ops.cast(labels[:, None] == labels[None, :], "float32") - itself
        return -ops.sum(same * ops.where(same > 0, likelihood, 0.0), axis=-1) / ops.maximum(ops.sum(same, axis=-1), 1)

    def divergence(self, expected: Any, actual: Any, temperature: float = 1.0) -> Any:
        """Return one minus the cosine: [n]."""
        return 1 - keras().ops.sum(expected * actual, axis=-1)


@dataclass(frozen=True)
class ByDirection(Judge):
    """The comparison of two embedding models by the vectors of each sample."""

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return 1 where the vectors have nearly the same direction."""
        return np.asarray(alike(expected, actual), np.float64)


class Embeddings(MeasuredTask):
    """Vectors; the metric is the share of samples whose nearest neighbour has the same class."""

    name: ClassVar[str] = "embeddings"
    one_vector: ClassVar[bool] = True
    instead_of: ClassVar[frozenset[str]] = frozenset({"classification"})
    needs_every_class: ClassVar[bool] = False
    models: ClassVar[str] = "embedding models"
    score_name: ClassVar[str] = "validation_recall"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("recall", "Nearest neighbour of the same class", "fraction", "recall_drop", limited=True),
    )
    refused: ClassVar[Mapping[Use, Refusal]] = {
        **WITHOUT_CLASSES,
        "embedding": Refusal("the output of the model is the embedding already", hint="leave it out"),
    }
    recognition: ClassVar[Literal["", "scores", "embedding"]] = "embedding"
    agreement_note: ClassVar[str] = f"samples whose two vectors have a cosine of at least {ALIKE:g}"

    def head(self, model: Any, data: Data, specification: Specification = None) -> EmbeddingHead:
        """Return the head of a model that takes the samples."""
        refuse_misfit(model, data)
        return EmbeddingHead()

    def new_head(self, features: Any, data: Data, dropout: float) -> Any:
        """Return a vector for each sample."""
        return pooled_dense(features, NEW_SIZE, None, dropout)

    def targets(self, data: Data, split: Split) -> NDArray[Any]:
        """Return the labels: int64 [n]."""
        return data.labels(split)

    def constant(self, data: Data) -> Rows | None:
        """Return None: if all vectors are the same, no neighbour is nearest."""
        return None

    def kept(self, rows: Rows, targets: NDArray[Any], specification: Specification) -> NDArray[Any]:
        """Return the vectors, divided by their length: [n, values]."""
        values = np.asarray(rows, np.float64)
        return np.asarray(values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12))

    def measured(self, kept: NDArray[Any], targets: NDArray[Any], note: str) -> dict[str, Measurement]:
        """Return the share of samples whose nearest other sample of the split has the same class."""
        if not np.isfinite(kept).all():
            return {"recall": missing("fraction", "the model's outputs are not finite")}
        counts = np.bincount(targets)
        counted = counts[targets] > 1
        if not counted.any():
            return {"recall": missing("fraction", "no class has two samples in the split")}
        right = []
        for start in range(0, len(kept), 1024):
            cosine = kept[start : start + 1024] @ kept.T
            part = np.arange(len(cosine))
            cosine[part, part + start] = -np.inf
            right.append(targets[cosine.argmax(axis=1)] == targets[start : start + 1024])
        hits = np.concatenate(right)[counted]
        return {"recall": proportion(int(hits.sum()), len(hits), note)}

    def fidelity(self, specification: Specification, *, logits: bool = False) -> ByDirection:
        """Return the comparison by direction."""
        return ByDirection()
