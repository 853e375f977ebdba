"""A classifier of digits with an embedding, trained with scikit-learn without two of the digits, and its bundles."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tiny
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

from compress.bundling.packing import Packing, pack
from compress.bundling.recognition import RecognitionSettings
from compress.data.dataset import Dataset
from compress.model.tflite import embedding, graph
from compress.tasks import TASKS
from deploy.contract import bundle

NEW = (3, 7)
"""The digits that the network does not know."""
OLD = tuple(digit for digit in range(10) if digit not in NEW)
NAMES = ["zero", "one", "two", "four", "five", "six", "eight", "nine"]
HIDDEN = 48
PREPROCESS = [{"resize": {"size": [8, 8]}}, {"scale": {"from": [0, 255], "to": [0, 1]}}]


@functools.cache
def digits() -> tuple[Any, Any]:
    """Return images uint8 [n, 8, 8, 1] from 0 to 255 and their digits."""
    source = load_digits()
    return np.rint(source.images * (255 / 16)).astype(np.uint8)[..., np.newaxis], source.target


def photos(digit: int, count: int = 5, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Return `count` random images of a digit, and all other images of it."""
    images, labels = digits()
    order = np.random.default_rng(seed).permutation(np.flatnonzero(labels == digit))
    return list(images[order[:count]]), list(images[order[count:]])


@functools.cache
def dataset(task: str = "classification") -> Dataset:
    """Return the data set of the known digits."""
    images, labels = digits()
    known = np.isin(labels, OLD)
    indices = np.searchsorted(OLD, labels[known])
    return Dataset.from_arrays((images[known], indices), class_names=NAMES, preprocess=PREPROCESS, task=task)


@functools.cache
def _trained() -> MLPClassifier:
    data = dataset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = MLPClassifier((HIDDEN,), alpha=1e-3, max_iter=40, random_state=0)
        return network.fit(data.inputs("train").reshape(-1, 64), data.labels("train"))


def model(*, int8: bool = True, softmax: bool = True, head: bool = True) -> bytes:
    """Return the classifier as a .tflite file; without its head, a model of embeddings."""
    network = _trained()
    (first, second), (bias, biases) = network.coefs_, network.intercepts_
    inputs = dataset().inputs("train").reshape(-1, 64)
    hidden_values = np.maximum(inputs @ first + bias, 0)
    logit_values = hidden_values @ second + biases
    builder = tiny.TfliteBuilder(int8=int8)
    x = builder.activation("image", [1, 8, 8, 1], (0.0, 1.0))
    hidden = builder.activation("hidden", [1, HIDDEN], (0.0, float(hidden_values.max())))
    relu = builder.schema.FullyConnectedOptionsT()
    relu.fusedActivationFunction = builder.schema.ActivationFunctionType.RELU
    builder.operator(
        "FULLY_CONNECTED", [x, *builder.weights("first", first.T, bias, x, per_channel=False)], hidden, relu
    )
    if not head:
        return builder.finish([x], [hidden])
    span = float(logit_values.min()), float(logit_values.max())
    logits = builder.activation("logits", [1, len(OLD)], span)
    builder.dense(hidden, second.T, biases, logits)
    if not softmax:
        return builder.finish([x], [logits])
    scores = builder.activation("scores", [1, len(OLD)], (0.0, 255 / 256))
    options = builder.schema.SoftmaxOptionsT()
    options.beta = 1.0
    builder.operator("SOFTMAX", [logits], scores, options)
    builder.codes[-1].version = 2 if int8 else 1
    return builder.finish([x], [scores])


def exposed(content: bytes) -> bytes:
    """Return a file with the embedding as its second output."""
    return graph.serialize(embedding.exposed(graph.parse(content)))


@functools.cache
def packed(
    *,
    expose: bool = True,
    softmax: bool = True,
    task: str = "classification",
    recognition: RecognitionSettings = RecognitionSettings(),  # noqa: B008 - frozen
) -> bytes:
    """Return a bundle of the classifier, or of the model of embeddings."""
    head = task == "classification"
    int8 = model(softmax=softmax, head=head)
    with TemporaryDirectory() as folder:
        files = {"original": Path(folder, "original.tflite"), "int8": Path(folder, "int8.tflite")}
        files["original"].write_bytes(model(int8=False, softmax=softmax, head=head))
        files["int8"].write_bytes(exposed(int8) if expose and head else int8)
        packing = Packing(
            name="shop",
            files=files,
            task=TASKS[task],
            tools={},
            progress=tiny.Notes(),
            data=dataset(task),
            recognition=recognition,
        )
        return pack(packing)


def opened(**settings: Any) -> bundle.Bundle:
    return bundle.Bundle(packed(**settings))
