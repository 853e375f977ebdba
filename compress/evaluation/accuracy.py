"""Accuracy of classifiers, with confidence intervals, and what differs between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from compress.artifact import MODEL_TFLITE, Artifact, Facts
from compress.data.rows import blocks
from compress.errors import ModelError
from compress.measurement import drop, proportion
from compress.stage import Context, Need, Probe
from compress.tflite.interpreter import Model, version


class Accuracy(Probe):
    """Share of the samples of a split whose highest score is the right class."""

    name: ClassVar[str] = "accuracy"
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert",)

    split: Literal["validation", "test"]
    """The split that is measured on; `test` only for the final comparison."""

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """For each subject its `accuracy` and its `predictions`; and the `labels`."""
        samples, labels = context.data.inputs(self.split), context.data.labels(self.split)
        facts: Facts = {"labels": labels.tolist()}
        for done, (name, artifact) in enumerate(subjects.items()):
            context.progress.update(done, len(subjects))
            model = Model(artifact.file(MODEL_TFLITE), reproducible=True)
            scores = np.concatenate([model.scores(part) for part in blocks(samples)])
            if scores.shape[1] != len(context.data.class_names):
                raise ModelError(
                    f"gives {scores.shape[1]} scores, but the data has {len(context.data.class_names)} classes",
                    todo="check data.source and the model's last layer",
                )
            predictions = scores.argmax(axis=1)
            note = f"{self.split} split, {version()}, reference kernels"
            accuracy = proportion(int((predictions == labels).sum()), len(labels), note)
            facts[name] = {"accuracy": accuracy.to_json(), "predictions": predictions.tolist()}
        return facts


def compare(facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Any]:
    """What changed from one subject to another: drop, agreement, per class, confusion.

    Args:
        facts: what `Accuracy.run` found.
        names: the class names.
        original: the subject compared with.
        result: the subject compared.
    """
    labels = np.array(facts["labels"])
    before, after = np.array(facts[original]["predictions"]), np.array(facts[result]["predictions"])
    per_class = []
    for index, name in enumerate(names):
        members = labels == index
        count = int(members.sum())
        if count:
            shares = [proportion(int((p[members] == index).sum()), count).to_json() for p in (before, after)]
            per_class.append({"name": name, "samples": count, "original": shares[0], "result": shares[1]})
    agreement = proportion(int((before == after).sum()), len(labels), "same predicted class")
    return {
        "measurements": {
            "accuracy_drop": drop(before == labels, after == labels).to_json(),
            "agreement": agreement.to_json(),
        },
        "per_class": per_class,
        "confusion": {
            name: confusion(labels, predicted, len(names))
            for name, predicted in (("original", before), ("result", after))
        },
    }


def confusion(labels: NDArray[np.int64], predicted: NDArray[np.int64], classes: int) -> list[list[int]]:
    """Counts by true class (row) and predicted class (column)."""
    table = np.zeros((classes, classes), np.int64)
    np.add.at(table, (labels, predicted), 1)
    rows: list[list[int]] = table.tolist()
    return rows
