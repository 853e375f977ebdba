"""Whether two models have the same structure, so that one is the other with other values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from compress.model.tflite.graph import NONE, Graph, Operator, Tensor

_IGNORED_OPTIONS = frozenset({"quantizedBiasType"})
"""An option of newer schemas that changes nothing."""


def differences(old: Graph, new: Graph) -> list[str]:
    """Return the differences between the structures of two models: operators, options, shapes and types.

    The order of the operators and of their tensors must be the same; names and indices of tensors can differ.
    """
    messages = []
    if len(old.operators) != len(new.operators):
        return [f"the old model has {len(old.operators)} operators, the new one {len(new.operators)}"]
    if (old.subgraphs, new.subgraphs) != (1, 1):
        messages.append(f"the models have {old.subgraphs} and {new.subgraphs} subgraphs; only one is supported")
    for before, after in zip(old.operators, new.operators, strict=True):
        messages += _operator_differences(before, after)
        if _custom_options(old, before) != _custom_options(new, after):
            messages.append(f"{describe(before)}: its custom options differ")
    for role in ("inputs", "outputs"):
        if len(getattr(old, role)) != len(getattr(new, role)):
            messages.append(f"the numbers of {role} of the models differ")
    tensors: dict[int, int] = {}
    for where, first, second in _tensor_pairs(old, new):
        if (first == NONE) != (second == NONE):
            messages.append(f"{where}: only one of the models has this tensor")
        elif first != NONE and tensors.setdefault(first, second) != second:
            messages.append(f"{where}: the tensor is connected differently")
        elif first != NONE:
            messages += [
                f"{where}: {message}" for message in _tensor_differences(old.tensors[first], new.tensors[second])
            ]
    if len(set(tensors.values())) != len(tensors):
        messages.append("the operators of the new model share tensors that those of the old one do not share")
    return list(dict.fromkeys(messages))


def matching_tensors(old: Graph, new: Graph) -> dict[int, int]:
    """Return the tensor of the new model for each tensor of the old one; their structures are equal."""
    return {first: second for _, first, second in _tensor_pairs(old, new) if first != NONE}


def _tensor_pairs(old: Graph, new: Graph) -> Iterator[tuple[str, int, int]]:
    """Yield the tensors with the same role in both models, and the role."""
    for before, after in zip(old.operators, new.operators, strict=True):
        for role in ("inputs", "outputs"):
            first, second = getattr(before, role), getattr(after, role)
            for number, pair in enumerate(zip(first, second, strict=False)):
                yield f"{describe(before)}, {role.removesuffix('s')} {number}", *pair
    for role in ("inputs", "outputs"):
        for number, pair in enumerate(zip(getattr(old, role), getattr(new, role), strict=False)):
            yield f"{role.removesuffix('s')} {number} of the model", *pair


def describe(operator: Operator) -> str:
    """Return the name of an operator for messages."""
    return f"operator {operator.index} ({operator.name})"


def _operator_differences(old: Operator, new: Operator) -> list[str]:
    if (old.name, old.custom, old.version) != (new.name, new.custom, new.version):
        return [f"{describe(old)} of version {old.version} is {new.name} of version {new.version} in the new model"]
    differences = []
    if (len(old.inputs), len(old.outputs)) != (len(new.inputs), len(new.outputs)):
        differences.append(f"{describe(old)}: the numbers of its tensors differ")
    first, second = _options(old.options), _options(new.options)
    differences += [
        f"{describe(old)}: its option {name} is {first.get(name)}, in the new model {second.get(name)}"
        for name in sorted({*first, *second} - _IGNORED_OPTIONS)
        if first.get(name) != second.get(name)
    ]
    return differences


def _custom_options(graph: Graph, operator: Operator) -> bytes:
    stored = graph.source.subgraphs[0].operators[operator.index].customOptions
    return b"" if stored is None else bytes(stored)


def _options(options: Any) -> Mapping[str, Any]:
    values = {} if options is None else vars(options)
    return {name: np.asarray(value).tolist() for name, value in values.items()}


def _tensor_differences(old: Tensor, new: Tensor) -> Iterator[str]:
    for what, first, second in (
        ("the type", old.dtype, new.dtype),
        ("the shape", old.shape, new.shape),
        ("whether the tensor is constant", old.is_constant, new.is_constant),
        ("whether the tensor is a variable", old.is_variable, new.is_variable),
        ("the number of scales", _scales(old), _scales(new)),
    ):
        if first != second:
            yield f"{what} is {first}, in the new model {second}"


def _scales(tensor: Tensor) -> tuple[int, int] | None:
    quantization = tensor.quantization
    if quantization is None:
        return None
    return len(quantization.scale), quantization.axis if quantization.per_channel else 0
