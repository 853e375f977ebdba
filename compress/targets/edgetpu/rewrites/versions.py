"""Operators with a version that the compiler does not support, but that use none of its new features."""

from __future__ import annotations

from collections.abc import Iterator

from compress.tflite.edit import Edit
from compress.tflite.graph import Graph, Operator

MAX_RANK = 4


def older_version(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace a version that only adds types, or ranks above 4, by the newest one that the compiler supports."""
    # Source: TFLite's op_version.cc. `_needs_version` lists the features that newer versions add for 8-bit tensors.
    tensors = [*graph.input_tensors(operator), *graph.output_tensors(operator)]
    if any(len(tensor.shape) > MAX_RANK for tensor in tensors) or _needs_version(operator, graph):
        return
    for version in range(operator.version - 1, 0, -1):
        edit = Edit(graph)
        edit.change(operator, version=version)
        yield edit


def _needs_version(operator: Operator, graph: Graph) -> bool:
    """Return whether an operator needs its version for more than a type or a rank."""
    if operator.name == "CONV_2D":  # 6: groups
        return graph.tensors[operator.inputs[0]].shape[-1] != graph.tensors[operator.inputs[1]].shape[-1]
    if operator.name == "TRANSPOSE_CONV":  # 4: an activation
        return bool(operator.option("fusedActivationFunction", 0))
    return bool(operator.option("offset", False))  # STRIDED_SLICE 6
