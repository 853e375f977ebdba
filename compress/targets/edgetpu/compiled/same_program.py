"""Whether the compiler makes the same program for two models, except for numbers: the conditions of a relink.

Each function returns every difference, in words, so that a refusal lists all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from compress.targets.edgetpu.compiled.operator_constants import is_activation, unsigned_zero_point
from compress.tflite.graph import NONE, Graph, Operator, Tensor

WEIGHTED = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV"})
_WEIGHT, _BIAS = 1, 2
_REPLACED = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"}
"""Operators whose constants a relink writes; those of others must be equal."""
_SHARED_SCALES = WEIGHTED | {"LOGISTIC", "TANH", "SOFTMAX"}
"""Operators that rescale anyway: equal scales of their tensors mean nothing."""
_IGNORED_OPTIONS = frozenset({"quantizedBiasType"})


def structure_differences(old: Graph, new: Graph) -> list[str]:
    """Return the differences between the structures of two models: operators, options, shapes and types.

    The order of the operators and of their tensors must be the same; names and indices of tensors can differ.
    """
    differences = []
    if len(old.operators) != len(new.operators):
        return [f"the old model has {len(old.operators)} operators, the new one {len(new.operators)}"]
    if (old.subgraphs, new.subgraphs) != (1, 1):
        differences.append(f"the models have {old.subgraphs} and {new.subgraphs} subgraphs; only one is supported")
    for before, after in zip(old.operators, new.operators, strict=True):
        differences += _operator_differences(before, after)
        if _custom_options(old, before) != _custom_options(new, after):
            differences.append(f"{describe(before)}: its custom options differ")
    tensors: dict[int, int] = {}
    for where, first, second in _tensor_pairs(old, new):
        if (first == NONE) != (second == NONE):
            differences.append(f"{where}: only one of the models has it")
        elif first != NONE and tensors.setdefault(first, second) != second:
            differences.append(f"{where}: it is connected differently")
        elif first != NONE:
            differences += [f"{where}: {each}" for each in _tensor_differences(old.tensors[first], new.tensors[second])]
    if len(set(tensors.values())) != len(tensors):
        differences.append("the operators of the new model share tensors that those of the old one do not share")
    return list(dict.fromkeys(differences))


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
        ("its type", old.dtype, new.dtype),
        ("its shape", old.shape, new.shape),
        ("whether it is constant", old.is_constant, new.is_constant),
        ("whether it is a variable", old.is_variable, new.is_variable),
        ("its number of scales", _scales(old), _scales(new)),
    ):
        if first != second:
            yield f"{what} is {first}, in the new model {second}"


def _scales(tensor: Tensor) -> tuple[int, int] | None:
    quantization = tensor.quantization
    return (
        None
        if quantization is None
        else (len(quantization.scale), quantization.axis if quantization.per_channel else 0)
    )


def compiler_choices(old: Graph, new: Graph, operators: set[int]) -> list[str]:
    """Return the differences in numbers that the compiler's choices can depend on, for operators on the Edge TPU.

    Args:
        old: the model that was compiled.
        new: a model with the same structure.
        operators: the operators that run on the Edge TPU.
    """
    differences = []
    for before in old.operators:
        after = new.operators[before.index]
        if before.index in operators:
            differences += [f"{describe(before)}: {each}" for each in _choices(old, before, new, after)]
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
    numbers = [
        (each.quantization.scale[0], unsigned_zero_point(each))
        for each in tensors
        if is_activation(each) and each.quantization is not None
    ]
    return [
        (first[0] == second[0], first == second) for index, first in enumerate(numbers) for second in numbers[:index]
    ]
