"""Models as after retraining: the same layers with other values; and a comparison of the parts of compiled files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from compress.model.tflite import graph
from compress.model.tflite.graph import Graph, Tensor
from darwinn.compiled_file import CompiledFile
from darwinn.operator_constants import is_activation, unsigned_zero_point

WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
_ONE_SCALE = ("AVERAGE_POOL_2D", "CONCATENATION", "MAX_POOL_2D", "MEAN", "PAD", "QUANTIZE", "RESHAPE", "SPLIT")
_FIXED_OUTPUT = ("LOGISTIC", "SOFTMAX", "TANH")


def changed(model: bytes, change: Callable[[Graph], None]) -> bytes:
    """Return a model after a change of its graph; files that are attached at its end stay."""
    parsed = graph.parse(model)
    change(parsed)
    attached = model.find(b"PK\x03\x04")
    return graph.serialize(parsed) + (model[attached:] if attached > 0 else b"")


def other_weights(model: bytes, operators: Iterable[int], seed: int) -> bytes:
    """Return a model with random weights, and random biases where there were biases; scales stay."""
    rng = np.random.default_rng(seed)

    def change(parsed: Graph) -> None:
        for index in operators:
            operator = parsed.operators[index]
            if operator.name in WEIGHTED:
                weights, *biases = (
                    parsed.tensors[tensor_index] for tensor_index in operator.inputs[1:3] if tensor_index >= 0
                )
                if weights.is_constant:
                    _assign(parsed, weights, rng.integers(0, 256, weights.elements, np.uint8))
                for bias in biases:
                    if bias.is_constant and not bias.is_zero:
                        _assign(parsed, bias, rng.integers(1, 1000, bias.elements, np.int32))

    return changed(model, change)


def _assign(parsed: Graph, tensor: Tensor, values: Any) -> None:
    number = parsed.source.subgraphs[0].tensors[tensor.index].buffer
    parsed.source.buffers[number].data = values.view(np.uint8)


def other_scales(model: bytes, seed: int) -> bytes:
    """Return a model with other scales (by up to 5%) and zero points of activations. Tied scales stay equal."""
    rng = np.random.default_rng(seed)

    def change(parsed: Graph) -> None:
        groups = _groups(parsed)
        fixed = {groups[index] for index in parsed.inputs if index in groups}
        for operator in parsed.operators:
            fixed |= {groups[operator.outputs[0]]} if operator.name in _FIXED_OUTPUT else set()
        numbers: dict[int, tuple[float, int]] = {}
        for index, group in groups.items():
            tensor = parsed.tensors[index]
            assert tensor.quantization is not None
            zero_point = unsigned_zero_point(tensor)
            if group not in numbers:
                shift = int(rng.integers(-5, 6)) if zero_point else 0
                scale = np.float32(tensor.quantization.scale[0] * (0.95 + 0.1 * rng.random()))
                numbers[group] = float(scale), min(max(zero_point + shift, bool(zero_point)), 255)
            if group not in fixed:
                stored = parsed.source.subgraphs[0].tensors[index].quantization
                stored.scale = np.array(numbers[group][:1], np.float32)
                stored.zeroPoint = np.array([numbers[group][1] - (128 if tensor.dtype == "INT8" else 0)], np.int64)

    return changed(model, change)


def _groups(parsed: Graph) -> dict[int, int]:
    """Return for each activation the tensor that represents its group, whose scales must stay equal."""
    group = {tensor.index: tensor.index for tensor in parsed.tensors if is_activation(tensor)}
    for operator in parsed.operators:
        if operator.name not in _ONE_SCALE:
            continue
        tensors = [tensor for tensor in (*operator.inputs, *operator.outputs) if tensor in group]
        for first, other in pairwise(tensors):
            if _numbers(parsed.tensors[other]) == _numbers(parsed.tensors[first]):
                merged = group[other]
                group = {
                    index: group[first] if representative == merged else representative
                    for index, representative in group.items()
                }
    return group


def _numbers(tensor: Tensor) -> tuple[float, int]:
    assert tensor.quantization is not None
    return tensor.quantization.scale[0], unsigned_zero_point(tensor)


def without_tokens(file: CompiledFile) -> bytes:
    """Return a compiled file with zeros for its caching tokens."""
    content = bytearray(file.content)
    for executable in file.executables:
        if executable.token_position is not None:
            content[executable.token_position : executable.token_position + 8] = bytes(8)
    return bytes(content)


def differing_parts(first: CompiledFile, second: CompiledFile) -> set[str]:
    """Return the parts in which two compiled files of one size differ: "parameters", "instructions" or "other"."""
    contents = [np.frombuffer(without_tokens(file), np.uint8) for file in (first, second)]
    differs = contents[0] != contents[1]
    parts = set()
    for executable in first.executables:
        for name, extents in (("parameters", (executable.parameters,)), ("instructions", executable.instructions)):
            for extent in extents:
                parts |= {name} if differs[extent.start : extent.stop].any() else set()
                differs[extent.start : extent.stop] = False
    return parts | ({"other"} if differs.any() else set())
