"""Accuracy of classifiers, with confidence intervals, and what differs between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.measurement import Measurement
from compress.stage import MODEL_TFLITE, Artifact, Context, Facts, Need, Probe
from compress.tflite.runtime import Model, version

Z95 = 1.959963984540054
"""The 97.5th percentile of the standard normal distribution."""


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
            scores = model.scores(samples)
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


def proportion(successes: int, trials: int, note: str = "") -> Measurement:
    """A share with its Wilson 95% score interval.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927), 209-212.
    """
    low, high = _wilson(successes, trials)
    return Measurement(successes / trials, "fraction", "measured", low, high, f"{note}, {trials} samples".lstrip(", "))


def _wilson(successes: int, trials: int) -> tuple[float, float]:
    share, z2 = successes / trials, Z95 * Z95
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # rounding may cross the share


def drop(original: NDArray[np.bool_], result: NDArray[np.bool_]) -> Measurement:
    """Loss of accuracy from `original` to `result`, both "was it right" for the same samples.

    The interval is Newcombe's for paired proportions: the two Wilson intervals, combined
    with the correlation between the pairs.
    Source: R. G. Newcombe, Statistics in Medicine 17 (1998), 2635-2650, method 10.
    """
    n = len(original)
    both, first = int((original & result).sum()), int((original & ~result).sum())
    second, neither = int((~original & result).sum()), int((~original & ~result).sum())
    p1, p2 = (both + first) / n, (both + second) / n
    (l1, u1), (l2, u2) = _wilson(both + first, n), _wilson(both + second, n)
    product = float(both + first) * (second + neither) * (both + second) * (first + neither)
    excess = both * neither - first * second
    # Newcombe's continuity correction applies to a positive correlation only.
    corrected = max(excess - n / 2, 0.0) if excess > 0 else float(excess)
    phi = corrected / sqrt(product) if product else 0.0
    down = sqrt(max((p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2, 0))
    up = sqrt(max((u1 - p1) ** 2 - 2 * phi * (u1 - p1) * (p2 - l2) + (p2 - l2) ** 2, 0))
    difference = p1 - p2
    note = f"paired on {n} samples: {first} lost, {second} gained"
    return Measurement(difference, "fraction", "measured", difference - down, difference + up, note)


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
