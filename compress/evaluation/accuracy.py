"""Accuracy of classifiers, with confidence intervals, and what differs between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from compress.artifact import MODEL_TFLITE, Artifact, Facts
from compress.data.rows import blocks
from compress.errors import ModelError
from compress.evaluation import degeneracy
from compress.measurement import drop, proportion
from compress.stage import Context, Need, Probe
from compress.tflite.interpreter import LoadedModel, version


class Accuracy(Probe):
    """Share of the samples of a split whose highest score is the right class."""

    name: ClassVar[str] = "accuracy"
    version: ClassVar[int] = 2
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert",)

    split: Literal["validation", "test"]
    """The split that is measured on; `test` only for the final comparison."""

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Return `accuracy`, `predictions` and `constant` of each subject; and `labels` and `split`."""
        samples, labels = context.data.inputs(self.split), context.data.labels(self.split)
        facts: Facts = {"labels": labels.tolist(), "split": self.split}
        for done, (name, artifact) in enumerate(subjects.items()):
            context.progress.update(done, len(subjects))
            model = LoadedModel(artifact.file(MODEL_TFLITE), reproducible=True)
            scores = np.concatenate([model.scores(part) for part in blocks(samples)])
            if scores.shape[1] != len(context.data.class_names):
                raise ModelError(
                    f"gives {scores.shape[1]} scores, but the data has {len(context.data.class_names)} classes",
                    todo="check data.source and the model's last layer",
                )
            predictions = scores.argmax(axis=1)
            note = f"{self.split} split, {version()}, reference kernels"
            accuracy = proportion(int((predictions == labels).sum()), len(labels), note)
            floats = np.issubdtype(model.output["dtype"], np.floating)
            constant = bool(floats) and _is_constant(scores) and not _is_constant(samples)
            facts[name] = {
                "accuracy": accuracy.to_json(),
                "predictions": predictions.tolist(),
                "constant": constant,
            }
        return facts


def _is_constant(rows: NDArray[Any]) -> bool:
    """Whether all rows equal the first one; NaN equals NaN."""
    return all(np.array_equal(row, rows[0], equal_nan=True) for row in rows)


def judge_answers(facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, degeneracy.Judgement]:
    """Decide of two classifiers whether they give one class to nearly everything.

    Args:
        facts: the facts of `Accuracy.run`.
        names: the class names.
        original: the subject compared with.
        result: the subject compared; it may be the same one.
    """
    spreads = {name: _spread(facts, names, name) for name in (original, result)}
    return {
        original: degeneracy.judge(spreads[original]),
        result: degeneracy.judge(spreads[result], spreads[original]),
    }


def _spread(facts: Facts, names: Sequence[str], subject: str) -> degeneracy.Spread:
    """The counts of the most frequent class that a classifier gives."""
    labels, predictions = np.array(facts["labels"]), np.array(facts[subject]["predictions"])
    counts = np.bincount(predictions, minlength=len(names))
    answer = int(counts.argmax())
    constant = bool(facts[subject]["constant"])
    text = f"answers {names[answer]!r} to {counts[answer]:,} of {len(labels):,} {facts['split']} samples"
    if constant:
        text = f"gives the same output for all {len(labels):,} {facts['split']} samples"
    others = labels != answer
    return degeneracy.Spread(
        text=text,
        samples=len(labels),
        same=int(counts[answer]),
        others=int(others.sum()),
        told_apart=int((others & (predictions != answer)).sum()),
        constant=constant,
    )


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
