"""The operators of a compiled file that run on the CPU, compared with those of the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.tflite.graph import NONE, Graph, Operator, Tensor

_IGNORED = frozenset({"quantizedBiasType"})
"""An option of newer schemas, which the vendor's compiler does not write."""
_REDUNDANT = frozenset({"CAST", "RESHAPE"})
"""Operators whose options repeat their tensors; the vendor's compiler may leave them out."""


@dataclass(frozen=True)
class CpuPart:
    """The operators of a model that a compiled file runs on the CPU.

    Attributes:
        operators: their indices in the model; all others run on the Edge TPU.
        tensors: the index in the model of each tensor of the compiled file, where it is known.
        differences: what is different, one message each.
    """

    operators: frozenset[int]
    tensors: dict[int, int]
    differences: tuple[str, ...]


def interface_differences(compiled: Graph, model: Graph) -> list[str]:
    """Return the differences between the inputs and outputs of a compiled file and of a model, one message each."""
    messages = []
    for kind, ours, theirs in (
        ("input", model.inputs, compiled.inputs),
        ("output", model.outputs, compiled.outputs),
    ):
        if len(ours) != len(theirs):
            messages.append(f"the model has {len(ours)} {kind}s, and the compiled file has {len(theirs)}")
            continue
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            difference = _tensor_difference(model.tensors[mine], compiled.tensors[other])
            if difference:
                messages.append(f"{kind} {number} ({model.tensors[mine].name}): {difference}")
    return messages


def compare_cpu_part(compiled: Graph, model: Graph, custom_operators: set[int]) -> CpuPart:
    """Find the operators on the CPU in the model, and compare them.

    Args:
        compiled: the graph of the compiled file.
        model: the model.
        custom_operators: the indices of the compiled file's operators for the Edge TPU.
    """
    tensors = _matched_tensors(compiled, model)
    by_output = {operator.outputs: operator for operator in model.operators}
    matched: set[int] = set()
    differences = []
    for operator in compiled.operators:
        if operator.index in custom_operators:
            continue
        match = by_output.get(tuple(tensors.get(index, NONE) for index in operator.outputs))
        if match is None:
            differences.append(f"operator {operator.name} on the CPU is not in the model")
            continue
        matched.add(match.index)
        difference = _operator_difference(operator, match, compiled, model, tensors)
        if difference:
            differences.append(f"operator {match.index} ({match.name}) on the CPU: {difference}")
    return CpuPart(frozenset(matched), tensors, tuple(differences))


def _matched_tensors(compiled: Graph, model: Graph) -> dict[int, int]:
    """Return the index in the model of each tensor: inputs and outputs by position, others by name."""
    by_name = {tensor.name.rstrip("\0"): tensor.index for tensor in model.tensors}
    uses = Counter(tensor.name.rstrip("\0") for tensor in model.tensors)
    matched = {}
    for tensor in compiled.tensors:
        name = tensor.name.rstrip("\0")
        if uses[name] == 1:
            matched[tensor.index] = by_name[name]
    matched.update(zip((*compiled.inputs, *compiled.outputs), (*model.inputs, *model.outputs), strict=True))
    return matched


def _operator_difference(
    operator: Operator, match: Operator, compiled: Graph, model: Graph, tensors: dict[int, int]
) -> str:
    if (operator.name, operator.custom) != (match.name, match.custom):
        return f"it is {operator.name} in the compiled file"
    if match.name not in _REDUNDANT and _options(operator, compiled) != _options(match, model):
        return "its options are different"
    if len(operator.inputs) != len(match.inputs):
        return f"it has {len(operator.inputs)} inputs in the compiled file, and {len(match.inputs)} in the model"
    for number, (other, mine) in enumerate(zip(operator.inputs, match.inputs, strict=True)):
        if (other == NONE) != (mine == NONE):
            return f"input {number} is missing in one of the two"
        if other == NONE:
            continue
        theirs, ours = compiled.tensors[other], model.tensors[mine]
        difference = _tensor_difference(ours, theirs)
        if difference:
            return f"input {number} ({ours.name}): {difference}"
        if not ours.is_constant and tensors.get(other) != mine:
            return f"input {number} is {theirs.name} in the compiled file, and {ours.name} in the model"
    for other, mine in zip(operator.outputs, match.outputs, strict=True):
        difference = _tensor_difference(model.tensors[mine], compiled.tensors[other])
        if difference:
            return f"output {model.tensors[mine].name}: {difference}"
    return ""


def _options(operator: Operator, graph: Graph) -> Any:
    """Return the options of an operator in a form that can be compared."""
    stored = graph.source.subgraphs[0].operators[operator.index]
    custom = b"" if stored.customOptions is None else bytes(stored.customOptions)
    values = {} if operator.options is None else vars(operator.options)
    return custom, sorted((name, np.asarray(value).tolist()) for name, value in values.items() if name not in _IGNORED)


def _tensor_difference(ours: Tensor, theirs: Tensor) -> str:
    """Return how a tensor of the compiled file differs from that of the model; "" if it does not."""
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype} {list(ours.shape)} in the model, {theirs.dtype} {list(theirs.shape)} in the compiled file"
    if ours.quantization != theirs.quantization:
        return f"its scale or zero point is different ({_quantization(ours)} and {_quantization(theirs)})"
    if ours.is_constant != theirs.is_constant:
        return "it is a constant in one of the two"
    if ours.data is not None and theirs.data is not None and not np.array_equal(ours.data, theirs.data):
        different = np.flatnonzero(ours.data != theirs.data)
        return f"{len(different):,} of {len(ours.data):,} bytes are different, the first at {int(different[0]):,}"
    return ""


def _quantization(tensor: Tensor) -> str:
    quantization = tensor.quantization
    if quantization is None:
        return "none"
    zero_points = quantization.zero_point[:1] or (0,)
    return f"{quantization.scale[0]:.9g} and {zero_points[0]}"
