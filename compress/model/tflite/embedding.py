"""The embedding of a classifier: the input of its last dense layer, as a second output of the file.

The output has a fixed name, by which every reader of the file finds it. Compilers keep the names of outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compress.core.errors import ModelError
from compress.model.tflite.dequantization import constant_values
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import NONE, Graph, Operator
from deploy.contract.embedding import LinearHead

OUTPUT = "coralline_embedding"
"""The name of the output."""
PASSED = ("SOFTMAX", "LOGISTIC", "LOG_SOFTMAX", "QUANTIZE", "DEQUANTIZE", "RESHAPE", "SQUEEZE")
"""Operators between the last dense layer and the output of a classifier."""
DENSE = ("FULLY_CONNECTED", "CONV_2D")
"""Operators that are dense layers, the convolution on an input of one pixel."""
ACTIVATIONS = ("SOFTMAX", "LOGISTIC")
"""Operators whose outputs are probabilities."""


def is_embedding(detail: Mapping[str, Any]) -> bool:
    """Return whether a runtime's detail of an output is that of the embedding."""
    return str(detail["name"]).startswith(OUTPUT)  # a runtime may append a number


def exposed(graph: Graph) -> Graph:
    """Return a classifier's graph with the embedding as its second output.

    Raises:
        ModelError: the graph has several outputs, or no dense layer before the output.
    """
    if len(graph.outputs) != 1:
        names = ", ".join(graph.tensors[index].name for index in graph.outputs)
        raise ModelError(f"has the outputs {names}", allowed="one output: the scores of the classes")
    index = last_dense(graph).inputs[0]
    if index not in graph.producer:
        raise ModelError(
            "has no layer in front of its last dense layer, so the embedding would be the input",
            hint="leave out expose_embedding",
        )
    edit = Edit(graph)
    edit.rename(index, OUTPUT)
    edit.outputs = [*graph.outputs, index]
    return edit.graph()


def last_dense(graph: Graph) -> Operator:
    """Return the operator that computes the logits of a classifier.

    Raises:
        ModelError: the graph does not end with a dense layer.
    """
    operator = graph.producer.get(graph.outputs[0])
    while operator is not None and operator.name in PASSED:
        operator = graph.producer.get(operator.inputs[0])
    if operator is None or not _is_dense(graph, operator):
        name = "an input" if operator is None else operator.name
        raise ModelError(
            f"ends with {name}, not with a dense layer and an activation",
            allowed=f"{' or '.join(DENSE)}, then any of {', '.join(PASSED)}",
            hint="leave out expose_embedding: only classifiers with a last dense layer have an embedding",
        )
    return operator


def gives_probabilities(graph: Graph) -> bool:
    """Return whether the first output is that of a softmax or a sigmoid."""
    operator = graph.producer.get(graph.outputs[0])
    while operator is not None and operator.name in PASSED:
        if operator.name in ACTIVATIONS:
            return True
        operator = graph.producer.get(operator.inputs[0])
    return False


def head_of(graph: Graph) -> LinearHead:
    """Return the last dense layer of a quantized classifier, dequantized; a class for each of its outputs.

    Raises:
        ModelError: the layer has an activation, or its weights are not constants.
    """
    operator = last_dense(graph)
    if operator.option("fusedActivationFunction", 0):
        raise ModelError(
            "the last dense layer has an activation", allowed="a dense layer without an activation before the softmax"
        )
    source, kernel = (graph.tensors[index] for index in operator.inputs[:2])
    weights = constant_values(kernel).reshape(-1, source.elements)
    biases = np.zeros(len(weights), np.float32)
    if len(operator.inputs) > 2 and operator.inputs[2] != NONE:
        biases = constant_values(graph.tensors[operator.inputs[2]]).reshape(-1)
    return LinearHead(weights, biases)


def _is_dense(graph: Graph, operator: Operator) -> bool:
    if operator.name not in DENSE:
        return False
    source, kernel = (graph.tensors[index] for index in operator.inputs[:2])
    classes = kernel.shape[0] if kernel.shape else 0
    outputs = graph.tensors[operator.outputs[0]].elements
    return source.elements * classes == kernel.elements and outputs == classes > 0
