"""Operators with a version that the compiler does not support."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import NONE, Graph, Operator
from compress.targets.edgetpu.rewrites.elementwise import NotEightBitError, dequantized_constant, is_per_tensor_8bit

MAX_RANK = 4
"""Tensors of more dimensions need the newer version. Source: TFLite's op_version.cc."""


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


def float_on_cpu(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Compute an operator in float on the CPU, between DEQUANTIZE and QUANTIZE, if the compiler knows only its float
    version."""
    for version in range(operator.version - 1, 0, -1):
        edit = Edit(graph)
        inputs = [NONE if index == NONE else _float_input(edit, index) for index in operator.inputs]
        outputs = []
        for tensor in graph.output_tensors(operator):
            if not is_per_tensor_8bit(tensor):
                raise NotEightBitError
            floating = edit.like(tensor, "float", dtype="FLOAT32", quantization=None)
            edit.add("QUANTIZE", [floating], [tensor.index], edit.options("QuantizeOptions"))
            outputs.append(floating)
        edit.change(operator, inputs=inputs, outputs=outputs, version=version)
        yield edit


def _float_input(edit: Edit, index: int) -> int:
    """Return an input in float; tensors that are not quantized stay."""
    tensor = edit.before.tensors[index]
    if tensor.dtype not in ("INT8", "UINT8"):
        return index
    if not is_per_tensor_8bit(tensor):
        raise NotEightBitError
    if tensor.is_constant:
        values = dequantized_constant(tensor).astype(np.float32)
        return edit.tensor(f"{tensor.name}/float", tensor.shape, "FLOAT32", values=values)
    floating = edit.like(tensor, "float", dtype="FLOAT32", quantization=None)
    edit.add("DEQUANTIZE", [index], [floating], edit.options("DequantizeOptions"))
    return floating


def _needs_version(operator: Operator, graph: Graph) -> bool:
    """Return whether an operator needs its version for more than a type or a rank."""
    if operator.name == "CONV_2D":  # 6: groups
        return graph.tensors[operator.inputs[0]].shape[-1] != graph.tensors[operator.inputs[1]].shape[-1]
    if operator.name == "TRANSPOSE_CONV":  # 4: an activation
        return bool(operator.option("fusedActivationFunction", 0))
    return bool(operator.option("offset", False))  # STRIDED_SLICE 6
