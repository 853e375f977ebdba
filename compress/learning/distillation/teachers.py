"""Teachers of knowledge distillation, from a model in memory or a file of any supported format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.core.errors import ModelError
from compress.data.types import Data
from compress.learning.context import Context
from compress.learning.training.loop import head_of
from compress.model.importers import model_file
from compress.model.ir.tensorflow import run
from compress.model.tflite.graph import Graph
from compress.model.tflite.interpreter import LoadedModel
from compress.tasks import task_of
from compress.tasks.base import Head, Specification

SAMPLES = 8
"""Number of real samples on which an imported file is compared with its original."""
SMALLEST_PROBABILITY = 1e-7
"""Lower limit of probabilities before the logarithm."""
PASSED_THROUGH = ("DEQUANTIZE", "QUANTIZE", "RESHAPE")
TeacherOutput = tuple[Any, Sequence[Any]]
"""Logits [n, classes], up to a constant; and features, for feature distillation."""


@dataclass(frozen=True)
class Teacher:
    """A model with the same output as the student, from which the student learns.

    Attributes:
        name: its name in messages and facts.
        predict: float32 samples [n, ...] -> logits and features.
        model: the Keras model; None for a file that runs in the TFLite runtime, and only outside of training steps.
        weight: its weight relative to other teachers.
    """

    name: str
    predict: Callable[[Any], TeacherOutput]
    model: Any = None
    weight: float = 1.0


def of_model(model: Any, data: Data, name: str, specification: Specification = None) -> Teacher:
    """Return a Keras model as a teacher; its weights are frozen.

    Raises:
        ModelError: its input or its classes do not fit the data.
    """
    try:
        head = head_of(model, data, specification)
    except ModelError as error:
        error.where = f"teacher {name}"
        raise
    model.trainable = False

    def predict(inputs: Any) -> TeacherOutput:
        return head.logits(run(model, inputs)), ()

    return Teacher(name, predict, model)


def read(path: Path, context: Context, head: Head | None = None) -> Teacher:
    """Read a teacher from a file or a SavedModel folder.

    A file that can be imported becomes a Keras model. A .tflite file that is quantized, or has operators without Keras
    layers, runs in the TFLite runtime, and only before the training. For a task other than classification, `head` is
    the head of the student.

    Raises:
        UntrustedError: loading would run code from the file.
        ModelError: the file cannot be read, or its input or its classes do not fit the data.
    """
    file = model_file.read(path)
    if file.kind == "tflite" and file.becomes != "keras":
        return _in_runtime(path, file.content.graph, context, head)
    imported = model_file.load(file, trust=context.trust, samples=context.data.inputs("train")[:SAMPLES])
    return of_model(imported.model, context.data, path.name, context.specification)


def _in_runtime(path: Path, graph: Graph, context: Context, head: Head | None) -> Teacher:
    """Return a .tflite file as a teacher; its outputs have the form of the student's, or those of a classifier."""
    where = f"teacher {path.name}"
    model = LoadedModel(path, reproducible=True)
    try:
        model.feed(np.zeros(context.data.input_shape, np.float32))
    except ModelError as error:
        error.where = where
        raise
    if head is None or task_of(context.data).counts_right:
        return Teacher(path.name, _class_logits(model, graph, context.data, where))

    def predict(inputs: Any) -> TeacherOutput:
        rows = model.scores(np.asarray(inputs, np.float32))
        return head.logits(model.output_layout.split(rows)), ()

    return Teacher(path.name, predict)


def _class_logits(model: LoadedModel, graph: Graph, data: Data, where: str) -> Callable[[Any], TeacherOutput]:
    """Return the function to the logits of a classifier, by the activation that the file ends with.

    8-bit probabilities of 0 and 1 are off by half a quantization step.
    """
    shape = model.output_layout.shapes[0]
    if model.output_layout.size != len(data.class_names):
        raise ModelError(
            f"the model's output has the shape {list(shape)}, but the data has {len(data.class_names)} classes",
            where=where,
            hint="check data.source and the model's last layer",
        )
    smallest = float(model.outputs[0]["quantization"][0]) / 2 or SMALLEST_PROBABILITY
    activation = _last_operator(graph)

    def predict(inputs: Any) -> TeacherOutput:
        scores = model.scores(np.asarray(inputs, np.float32))
        if activation == "SOFTMAX":
            scores = np.log(np.maximum(scores, smallest))
        elif activation == "LOGISTIC":
            scores = np.log(np.maximum(scores, smallest)) - np.log(np.maximum(1 - scores, smallest))
        return scores, ()

    return predict


def _last_operator(graph: Graph) -> str:
    """Return the operator that computes the output, before operators that only pass it on; "" if there is none."""
    producer, index = graph.producer, graph.outputs[0]
    while index in producer and producer[index].name in PASSED_THROUGH:
        index = producer[index].inputs[0]
    return producer[index].name if index in producer else ""
