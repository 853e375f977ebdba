"""The accuracy probe: the accuracy of a model, and the changes from one model to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import text_bundles

from compress.core.artifact import MODEL_TFLITE, Artifact
from compress.core.errors import ModelError
from compress.learning.context import Context
from compress.model.tflite.interpreter import LoadedModel
from compress.pipeline.probes import Evaluation
from compress.tasks.classification import Classification, confusion

Make = Callable[..., Any]


def predictions(artifact: Artifact, context: Context) -> np.ndarray:
    model = LoadedModel(artifact.file(MODEL_TFLITE), reproducible=True)
    return model.scores(context.data.inputs("test")).argmax(axis=1)


def test_accuracy_of_two_models(artifact: Make, context: Make) -> None:
    first, second = artifact(), artifact(int8=False, seed=5)
    plain = context()
    predicted = predictions(first, plain)
    labels = np.where(np.arange(12) < 9, predicted, (predicted + 1) % 3)  # the first model is right on 9 of 12 samples
    around = context(labels=labels)
    facts = Evaluation(split="test").run({"first": first, "second": second}, around)
    assert facts["labels"] == labels.tolist()
    assert facts["first"]["predictions"] == predicted.tolist()
    assert facts["second"]["predictions"] == predictions(second, plain).tolist() != predicted.tolist()
    measured = facts["first"]["accuracy"]
    assert (measured["value"], measured["unit"], measured["how"]) == (0.75, "fraction", "measured")
    assert measured["low"] < 0.75 < measured["high"]
    assert measured["note"].startswith("test split, ai-edge-litert ")
    assert measured["note"].endswith(", default kernels without a delegate, 12 samples")
    assert facts["second"]["accuracy"]["value"] == np.mean(predictions(second, plain) == labels)


@pytest.mark.parametrize("classes", [("a", "b"), ("a", "b", "c", "d")])
def test_a_model_with_another_number_of_classes(artifact: Make, context: Make, classes: tuple[str, ...]) -> None:
    advice = "name all classes of the model in `classes`" if len(classes) < 3 else "check the spelling of the labels"
    message = rf"gives 3 scores, but the data has {len(classes)} classes: 'a' \(\d+ samples\), .*; {advice}"
    with pytest.raises(ModelError, match=message):
        Evaluation(split="test").run({"model": artifact()}, context(classes=classes))


def test_numbers_that_are_looked_up_have_no_range(artifact: Make, context: Make) -> None:
    numbers = np.arange(48, dtype=np.float32).reshape(12, 4) % 21
    model = artifact(text_bundles.model())
    facts = Evaluation(split="test").run({"first": model, "second": model}, context(numbers))
    assert facts["input_range"] is None


FACTS: dict[str, Any] = {
    "labels": [0, 0, 0, 0, 1, 1, 1, 3, 3, 3],
    "before": {"predictions": [0, 0, 0, 1, 1, 1, 1, 3, 3, 0]},  # 8 right
    "after": {"predictions": [0, 0, 1, 1, 1, 1, 0, 3, 3, 3]},  # 7 right: two lost, one gained
}
NAMES = ("apple", "bread", "cheese", "dates")


def test_compare() -> None:
    comparison = Classification().compare(FACTS, NAMES, "before", "after")
    drop, agreement = comparison["measurements"]["accuracy_drop"], comparison["measurements"]["agreement"]
    assert drop["value"] == pytest.approx(0.1)
    assert drop["note"] == "paired on 10 samples: 2 lost, 1 gained"
    assert drop["low"] < 0.1 < drop["high"]
    assert agreement["value"] == 0.7
    assert agreement["note"] == "same predicted class, 10 samples"
    back = Classification().compare(FACTS, NAMES, "after", "before")["measurements"]
    assert back["accuracy_drop"]["value"] == pytest.approx(-0.1)
    assert back["agreement"] == agreement
    class_accuracies = [
        (row["name"], row["samples"], row["original"]["value"], row["result"]["value"])
        for row in comparison["per_class"]
    ]
    assert class_accuracies == [
        ("apple", 4, 0.75, 0.5),
        ("bread", 3, 1.0, pytest.approx(2 / 3)),
        ("dates", 3, pytest.approx(2 / 3), 1.0),  # no sample is cheese
    ]
    tables = comparison["confusion"]
    assert tables["original"] == [[3, 1, 0, 0], [0, 3, 0, 0], [0, 0, 0, 0], [1, 0, 0, 2]]
    assert tables["result"] == [[2, 2, 0, 0], [1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 3]]
    assert confusion(np.array([2]), np.array([0]), 3) == [[0, 0, 0], [0, 0, 0], [1, 0, 0]]
