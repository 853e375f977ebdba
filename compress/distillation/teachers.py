"""Teachers: classifiers that a student learns from, whatever file they come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.types import Data
from compress.errors import ModelError
from compress.importers import model_file
from compress.stage import Context
from compress.tflite.graph import Graph
from compress.tflite.interpreter import LoadedModel
from compress.training.loop import head_of

SAMPLES = 8
"""Real ones that a rebuilt file is compared on."""
LEAST = 1e-7
"""Probability that stands for none."""
PASSED_THROUGH = ("DEQUANTIZE", "QUANTIZE", "RESHAPE")
Answers = tuple[Any, Sequence[Any]]


@dataclass(frozen=True)
class Teacher:
    """A classifier of the same classes that a student learns from.

    Attributes:
        name: what it is called in messages and facts.
        answers: float32 samples [n, ...] -> logits [n, classes] (up to a constant), and the features that are
            watched, if any are (`compress.distillation.features`).
        model: as a Keras model; None for a file that only the TFLite runtime runs, and so outside of training steps.
        weight: its share beside other teachers.
    """

    name: str
    answers: Callable[[Any], Answers]
    model: Any = None
    weight: float = 1.0


def of_model(model: Any, data: Data, name: str) -> Teacher:
    """A Keras model as a teacher; its weights are not trained any more.

    Raises:
        ModelError: its input or its classes are not those of the data.
    """
    try:
        head = head_of(model, data)
    except ModelError as error:
        error.where = f"teacher {name}"
        raise
    model.trainable = False

    def answers(inputs: Any) -> Answers:
        return head.logits(model(inputs, training=False)), ()

    return Teacher(name, answers, model)


def read(path: Path, context: Context) -> Teacher:
    """A teacher from a file, or the folder of a SavedModel.

    What can be rebuilt becomes a Keras model. A .tflite file that is quantized, or that Keras has no layers for, is
    run as it is by the TFLite runtime: it can answer before the training alone.

    Raises:
        UntrustedError: loading would run code that came with the file.
        ModelError: it cannot be read, or its input or its classes are not those of the data.
    """
    found = model_file.read(path)
    if found.kind == "tflite" and found.becomes != "keras":
        return _run_as_it_is(path, found.content.graph, context.data)
    imported = model_file.load(found, trust=context.trust, samples=context.data.inputs("train")[:SAMPLES])
    return of_model(imported.model, context.data, path.name)


def _run_as_it_is(path: Path, graph: Graph, data: Data) -> Teacher:
    """A .tflite file in the runtime. An 8-bit probability of 0 is taken for half a step, one of 1 likewise."""
    model, where = LoadedModel(path, reproducible=True), f"teacher {path.name}"
    try:
        model.feed(np.zeros(data.input_shape, np.float32))
    except ModelError as error:
        error.where = where
        raise
    shape = [int(side) for side in model.output["shape"]]
    if math.prod(shape) != len(data.class_names):
        raise ModelError(
            f"the model's output has the shape {shape[1:]}, but the data has {len(data.class_names)} classes",
            where=where,
            todo="check data.source and the model's last layer",
        )
    least = float(model.output["quantization"][0]) / 2 or LEAST
    last = _last(graph)

    def answers(inputs: Any) -> Answers:
        scores = model.scores(np.asarray(inputs, np.float32))
        if last == "SOFTMAX":
            scores = np.log(np.maximum(scores, least))
        elif last == "LOGISTIC":
            scores = np.log(np.maximum(scores, least)) - np.log(np.maximum(1 - scores, least))
        return scores, ()

    return Teacher(path.name, answers)


def _last(graph: Graph) -> str:
    """The operator that the output comes from, those that only pass it on apart; empty if there is none."""
    producer, index = graph.producer, graph.outputs[0]
    while index in producer and producer[index].name in PASSED_THROUGH:
        index = producer[index].inputs[0]
    return producer[index].name if index in producer else ""
