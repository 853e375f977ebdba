"""Whether the compiler makes the same program for two models of one structure, except for values."""

from __future__ import annotations

from collections.abc import Iterator

from compress.model.tflite.graph import NONE, Graph, Operator, Tensor
from compress.model.tflite.structure import describe
from darwinn.operator_constants import is_activation, unsigned_zero_point

WEIGHTED = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV"})
_WEIGHT, _BIAS = 1, 2
_REPLACED = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"}
"""Operators whose constants a relink writes; those of others must be equal."""
_SHARED_SCALES = WEIGHTED | {"LOGISTIC", "TANH", "SOFTMAX"}
"""Operators that rescale anyway: equal scales of their tensors mean nothing."""


def compiler_choices(old: Graph, new: Graph, operators: set[int]) -> list[str]:
    """Return the differences in values that the compiler's choices can depend on, for operators on the Edge TPU.

    Args:
        old: the model that was compiled.
        new: a model with the same structure.
        operators: the operators that run on the Edge TPU.
    """
    differences = []
    for before in old.operators:
        after = new.operators[before.index]
        if before.index in operators:
            differences += [f"{describe(before)}: {choice}" for choice in _choices(old, before, new, after)]
    return differences


def _choices(old: Graph, before: Operator, new: Graph, after: Operator) -> Iterator[str]:
    for number, (first, second) in enumerate(zip(before.inputs, after.inputs, strict=True)):
        if first == NONE or not old.tensors[first].is_constant:
            continue
        pair = old.tensors[first], new.tensors[second]
        if before.name not in _REPLACED:
            if _content(pair[0]) != _content(pair[1]):
                yield f"its constant operand {pair[0].name!r} differs; a relink replaces only weights and biases"
        elif number == _BIAS and pair[0].is_zero != pair[1].is_zero:
            yield "its biases are all zero in one model only, and the compiler drops such biases"
        elif number == _WEIGHT and _one_scale(pair[0]) != _one_scale(pair[1]):
            yield "the scales of its weights are all equal in one model only, which is another layout"
    if before.name not in _SHARED_SCALES and _equal_scales(old, before) != _equal_scales(new, after):
        yield "other tensors of it have equal scales or zero points, so that the compiler can choose other steps"
    if before.name == "PAD":
        padded = old.tensors[before.inputs[0]], new.tensors[after.inputs[0]]
        if unsigned_zero_point(padded[0]) != unsigned_zero_point(padded[1]):
            yield "its zero point differs, and where the program holds the padding's value is not known"


def _content(tensor: Tensor) -> tuple[bytes, object]:
    data = b"" if tensor.data is None else tensor.data.tobytes()
    quantization = tensor.quantization
    return data, None if quantization is None else (quantization.scale, quantization.zero_point)


def _one_scale(tensor: Tensor) -> bool:
    return tensor.quantization is None or tensor.quantization.one_scale


def _equal_scales(graph: Graph, operator: Operator) -> list[tuple[bool, bool]]:
    """Return which pairs of activations of an operator have equal scales, and which equal scales and zero points."""
    tensors = [graph.tensors[index] for index in (*operator.inputs, *operator.outputs) if index != NONE]
    quantizations = [
        (tensor.quantization.scale[0], unsigned_zero_point(tensor))
        for tensor in tensors
        if is_activation(tensor) and tensor.quantization is not None
    ]
    return [
        (first[0] == second[0], first == second)
        for index, first in enumerate(quantizations)
        for second in quantizations[:index]
    ]
