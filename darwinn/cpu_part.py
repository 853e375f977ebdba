"""The operators of a compiled file that run on the CPU, compared with those of the model."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compress.model.tflite.graph import NONE, Graph, Operator, Tensor
from darwinn.operator_constants import (
    DATA_MOVEMENT,
    INT8_OFFSET,
    is_activation,
    quantization_of,
    unsigned_zero_point,
)

_IGNORED = frozenset({"quantizedBiasType"})
"""An option of newer schemas, which the vendor's compiler does not write."""
_REDUNDANT = frozenset({"CAST", "RESHAPE"})
"""Operators whose options repeat their tensors; the vendor's compiler may leave them out."""
_INSERTED = frozenset({"CAST", "DEQUANTIZE", "QUANTIZE", "RESHAPE"})
"""Operators that change no value, or only its type: a compiler may add them."""


@dataclass(frozen=True)
class CpuPart:
    """The operators of a model that a compiled file runs on the CPU.

    Attributes:
        operators: the indices of the operators in the model; all other operators run on the Edge TPU.
        tensors: the index in the model of each tensor of the compiled file, where it is known.
        differences: what is different, one message each.
        unmatched: operators and inputs that are not known in the model, one message each.
    """

    operators: frozenset[int]
    tensors: dict[int, int]
    differences: tuple[str, ...]
    unmatched: tuple[str, ...] = ()


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


def with_stated_outputs(
    compiled: Graph, model: Graph, custom_operators: Collection[int]
) -> tuple[Graph, tuple[str, ...]]:
    """Return the model with the scales and zero points that a compiled file states for the outputs of its programs.

    Returns:
        The model; the outputs whose scale or zero point was changed, one message each.
    """
    matched = _matched_tensors(compiled, model)
    written = {index for operator in custom_operators for index in compiled.operators[operator].outputs}
    tensors = list(model.tensors)
    messages = []
    for index in sorted(written & matched.keys()):
        ours, stated = model.tensors[matched[index]], compiled.tensors[index]
        if ours.quantization == stated.quantization or not is_activation(ours) or not is_activation(stated):
            continue
        messages.append(f"{ours.name}: {_tensor_difference(ours, stated)}")
        for copy in _copied_to(model, ours):
            zero_point = unsigned_zero_point(stated) - (INT8_OFFSET if copy.dtype == "INT8" else 0)
            assert stated.quantization is not None  # an activation
            tensors[copy.index] = replace(copy, quantization=replace(stated.quantization, zero_point=(zero_point,)))
    return replace(model, tensors=tuple(tensors)), tuple(messages)


def _copied_to(model: Graph, tensor: Tensor) -> list[Tensor]:
    """Return a tensor, and those that operators copy to it without a change of their scale."""
    copies, remaining = {tensor.index: tensor}, [tensor]
    while remaining:
        producer = model.producer.get(remaining.pop().index)
        if producer is None or producer.name not in DATA_MOVEMENT:
            continue
        for source in model.input_tensors(producer):
            is_copied = is_activation(source) and quantization_of(source) == quantization_of(tensor)
            if is_copied and source.index not in copies:
                copies[source.index] = source
                remaining.append(source)
    return list(copies.values())


def compare_cpu_part(compiled: Graph, model: Graph, custom_operators: Collection[int]) -> CpuPart:
    """Find the operators on the CPU in the model, and compare them.

    `custom_operators` has the indices of the compiled file's operators for the Edge TPU.
    """
    tensors = _matched_tensors(compiled, model)
    by_output = {operator.outputs: operator for operator in model.operators}
    matched: set[int] = set()
    differences, unmatched = [], []
    for operator in compiled.operators:
        if operator.index in custom_operators:
            continue
        match = by_output.get(tuple(tensors.get(index, NONE) for index in operator.outputs))
        if match is None:
            names = {model_operator.name for model_operator in model.operators} | _INSERTED
            message = f"operator {operator.name} on the CPU"
            if operator.name in names:
                unmatched.append(f"{message} writes no tensor of the model")
            else:
                differences.append(f"{message}: the model has no {operator.name}")
            continue
        matched.add(match.index)
        unmatched += [
            f"operator {match.index} ({match.name}) on the CPU: the model has no tensor {compiled.tensors[index].name}"
            for index in operator.inputs
            if index != NONE and index not in tensors and not compiled.tensors[index].is_constant
        ]
        difference = _operator_difference(operator, match, compiled, model, tensors)
        if difference:
            differences.append(f"operator {match.index} ({match.name}) on the CPU: {difference}")
    return CpuPart(frozenset(matched), tensors, tuple(differences), tuple(unmatched))


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
        if not theirs.is_constant and other not in tensors:
            continue  # It may be another tensor than the model's.
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
    custom = None if stored.customOptions is None else _decoded(bytes(stored.customOptions))
    values = {} if operator.options is None else vars(operator.options)
    return custom, sorted((name, np.asarray(value).tolist()) for name, value in values.items() if name not in _IGNORED)


def _decoded(options: bytes) -> Any:
    """Return a custom operator's map of numbers as (name, number) pairs: the order of its bytes is the writer's.

    Other options are returned as they are.
    """
    from flatbuffers import flexbuffers

    try:
        entries = flexbuffers.GetRoot(options).AsMap
        values = entries.Values
        pairs = [(key.AsKey, values[number]) for number, key in enumerate(entries.Keys)]
        if all(value.IsNumeric or value.IsBool for _, value in pairs):
            # As text, because NaN differs from itself. Writers choose integers, floats or booleans as they like.
            return sorted((name, repr(float(value.Value))) for name, value in pairs)
    except (struct.error, LookupError, ValueError, TypeError, OverflowError):
        pass
    return options


def _tensor_difference(ours: Tensor, theirs: Tensor) -> str:
    """Return how a tensor of the compiled file differs from that of the model; "" if it does not.

    Shape [] also stands for a shape that the model does not state: outputs of detection operators have it. The
    compiler may state the shape.
    """
    has_shape = ours.is_constant or bool(ours.shape)
    if ours.dtype != theirs.dtype or (has_shape and ours.shape != theirs.shape):
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
