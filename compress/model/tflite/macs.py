"""Costs of a graph: multiply-accumulates and parameters, counted from shapes, and its compressed size."""

from __future__ import annotations

import zlib
from math import prod

from compress.core.errors import ModelError
from compress.model.tflite.graph import NONE, Graph, Operator

WEIGHTED = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV", "CONV_3D", "CONV_3D_TRANSPOSE"}
_TRANSPOSED = ("TRANSPOSE_CONV", "CONV_3D_TRANSPOSE")
_RECURRENT = (
    *("LSTM", "UNIDIRECTIONAL_SEQUENCE_LSTM", "BIDIRECTIONAL_SEQUENCE_LSTM", "RNN", "UNIDIRECTIONAL_SEQUENCE_RNN"),
    *("BIDIRECTIONAL_SEQUENCE_RNN", "SVDF"),
)
"""Operators that multiply by each of their weight matrices once in every step of time."""


def macs(graph: Graph, operator: Operator) -> int:
    """Return the multiply-accumulates of an operator in one inference; 0 for operators without any.

    Raises:
        ModelError: the operator lacks a required input, output or dimension.
    """
    if operator.name not in (*WEIGHTED, *_RECURRENT, "BATCH_MATMUL"):
        return 0
    try:
        return _count(graph, operator)
    except (IndexError, ValueError) as error:
        message = f"operator {operator.index} ({operator.name}) lacks an input, an output or a dimension"
        raise ModelError(message) from error


def _count(graph: Graph, operator: Operator) -> int:
    out = graph.output_tensors(operator)[0]
    if operator.name in _TRANSPOSED:  # [out, kh, kw, in], [kd, kh, kw, out, in]
        return graph.tensors[operator.inputs[2]].elements * prod(graph.tensors[operator.inputs[1]].shape[:-1])
    if operator.name in _RECURRENT:
        others = (graph.tensors[index] for index in operator.inputs[1:] if index != NONE)
        weights = sum(tensor.elements for tensor in others if len(tensor.shape) == 2 and not tensor.is_variable)
        batch_and_time = prod(out.shape[:-1])
        return weights * batch_and_time
    weights_shape = graph.tensors[operator.inputs[1]].shape
    if operator.name == "CONV_2D":  # [out, kh, kw, in / groups]
        return out.elements * prod(weights_shape[1:])
    if operator.name == "DEPTHWISE_CONV_2D":  # [1, kh, kw, out]
        return out.elements * prod(weights_shape[1:3])
    if operator.name == "CONV_3D":  # [kd, kh, kw, in, out]
        return out.elements * prod(weights_shape[:4])
    if operator.name == "BATCH_MATMUL":
        left = graph.tensors[operator.inputs[0]].shape
        return out.elements * left[-2 if operator.option("adjX", False) else -1]
    return out.elements * weights_shape[-1]  # FULLY_CONNECTED: [out, in]


def total_macs(graph: Graph) -> int:
    """Return the multiply-accumulates of one inference."""
    return sum(macs(graph, operator) for operator in graph.operators)


def parameters(graph: Graph) -> int:
    """Return the number of parameters: weights, biases and other constant operands, each counted once.

    Integer constants outside weighted layers (shapes, axes, paddings) are not parameters.
    """
    counted: set[int] = set()
    for operator in graph.operators:
        for position, index in enumerate(operator.inputs):
            if index == NONE or not graph.tensors[index].is_constant:
                continue
            structural = graph.tensors[index].dtype in ("INT32", "INT64", "BOOL")
            bias = operator.name in WEIGHTED and position == (3 if operator.name in _TRANSPOSED else 2)
            if bias or not structural:
                counted.add(index)
    return sum(graph.tensors[index].elements for index in counted)


def compressed_bytes(content: bytes) -> int:
    """Return the size of a file after compression with deflate (RFC 1951) at the highest level, as in zlib and gzip."""
    return len(zlib.compress(content, 9))
