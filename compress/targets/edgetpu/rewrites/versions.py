"""Operators whose version is newer than the compiler, but which do nothing that is new."""

from __future__ import annotations

from collections.abc import Iterator

from compress.tflite.edit import Edit
from compress.tflite.graph import Graph, Operator

MAX_RANK = 4


def older_version(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """A version that only adds types, or ranks above 4, becomes the newest one that the compiler knows."""
    # Source: TFLite's op_version.cc. What a newer version adds for 8-bit tensors of rank 4 is listed in `_needs_version`.
    tensors = [*graph.input_tensors(operator), *graph.output_tensors(operator)]
    if any(len(tensor.shape) > MAX_RANK for tensor in tensors) or _needs_version(operator, graph):
        return
    for version in range(operator.version - 1, 0, -1):
        edit = Edit(graph)
        edit.change(operator, version=version)
        yield edit


def _needs_version(operator: Operator, graph: Graph) -> bool:
    """Whether an operator needs its version for more than a type or a rank."""
    if operator.name == "CONV_2D":  # 6: groups
        return graph.tensors[operator.inputs[0]].shape[-1] != graph.tensors[operator.inputs[1]].shape[-1]
    if operator.name == "TRANSPOSE_CONV":  # 4: an activation
        return bool(operator.option("fusedActivationFunction", 0))
    return bool(operator.option("offset", False))  # STRIDED_SLICE 6
