"""Quantization under the activation scales of another .tflite file of the same architecture (`scales_from`).

A compiled model keeps scales in its instructions. A retrained model with the same scales can be put into it without a
change of the instructions (`relink`). To find the tensor of the file for each quantization
point, the network is converted once with a different range at every point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from compress.core.errors import StageError
from compress.learning.quantization import export, quantizer_placement
from compress.learning.quantization.plan import LEVELS, QuantizationPlan
from compress.model.ir.keras_graph import Network
from compress.model.tflite import graph as graphs
from compress.model.tflite import structure
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import NONE, Graph, Operator, Quantization, Tensor

_STEP = 0.01
"""The relative distance of the ranges by which points are recognized."""
_TOLERANCE = 1e-5
"""The relative difference of scales that are the same; chosen between rounding to float32 and `_STEP`."""
_ROUNDING = 1e-5
"""The relative difference of a scale from the requested one that rounding to float32 explains."""
_INT8_RANGE = (-128, 127)
_LARGEST_WEIGHT = 127
_WEIGHTED = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"})
Rewrite = Callable[[bytes], bytes]


@dataclass(frozen=True)
class ScaledFile:
    """A file with the activation scales of another one.

    Attributes:
        content: the .tflite file.
        clipped_weights: weights that the old scale of a dense layer cannot hold, which are clipped.
    """

    content: bytes
    clipped_weights: int


def read(path: Path) -> Graph:
    """Read the file whose scales are used.

    Raises:
        StageError: the file is not a quantized .tflite file.
    """
    old = graphs.read(path)
    if not any(map(_is_activation, old.tensors)):
        raise StageError("has no 8-bit activations", where=str(path), hint="check quantize.scales_from")
    return old


def plan_for(
    network: Network, plan: QuantizationPlan, old: Graph, io: export.InputType, rewrite: Rewrite
) -> QuantizationPlan:
    """Return a plan for a network in canonical form with the ranges of another file.

    Of `plan`, which is any plan for the network, the rounding stays. The function `rewrite` is the one that is applied
    to a converted file before it is stored.

    Raises:
        StageError: the other file has another structure, or different scales where this network has one.
    """
    plan = QuantizationPlan(plan.ranges, "the scales of another file", rounding=plan.rounding)
    points = quantizer_placement.find(network)
    fixed = quantizer_placement.fixed(network, points)
    probes = {}
    for number, (point, (low, _)) in enumerate(plan.ranges.items()):
        if point not in fixed:
            size = 1 + _STEP * number
            probes[point] = (-size / 2, size / 2) if low < 0 else (0.0, size)
    probe = graphs.parse(rewrite(export.convert(network, replace(plan, ranges={**plan.ranges, **probes}), io)))
    _require_structure(old, probe)
    ranges = dict(plan.ranges)
    for point, (low, high) in probes.items():
        quantizations = _quantizations(old, probe, (high - low) / LEVELS)
        if len(quantizations) > 1:
            raise StageError(
                f"the old file has {len(quantizations)} scales for {point}, which has one here",
                hint="quantize both models with the same version",
            )
        for quantization in quantizations:
            first, last = ((end - quantization.first_zero_point) * quantization.scale[0] for end in _INT8_RANGE)
            ranges[point] = first, last
    return replace(plan, ranges=ranges)


def _require_structure(old: Graph, new: Graph) -> None:
    different = structure.differences(old, new)
    if different:
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise StageError(
            f"the file of `scales_from` has another structure: {'; '.join(different[:3])}{more}",
            hint="give a file of the same architecture, made by the same converter with the same settings",
        )


def _is_activation(tensor: Tensor) -> bool:
    is_8_bit = tensor.dtype in ("INT8", "UINT8") and not tensor.is_constant
    return is_8_bit and tensor.quantization is not None and not tensor.quantization.per_channel


def _quantizations(old: Graph, probe: Graph, scale: float) -> set[Quantization]:
    """Return the quantizations in the old file of the int8 tensors that have a scale in the probe."""
    quantizations = set()
    for first, second in structure.matching_tensors(old, probe).items():
        tensor, quantization = probe.tensors[second], old.tensors[first].quantization
        if tensor.dtype != "INT8" or not _is_activation(tensor) or tensor.quantization is None or quantization is None:
            continue
        if abs(tensor.quantization.scale[0] / scale - 1) < _TOLERANCE:
            quantizations.add(quantization)
    return quantizations


def with_scales(content: bytes, old: Graph) -> ScaledFile:
    """Return a file with exactly the activation scales of another one.

    Scales of activations differ from the requested ones by rounding at most, and are replaced. The weights of dense
    layers have one scale, which is in the instructions too: they are rounded to the old scale.

    Raises:
        StageError: a scale or zero point differs by more, or the structures differ.
    """
    new = graphs.parse(content)
    _require_structure(old, new)
    edit = Edit(new)
    pairs = structure.matching_tensors(old, new)
    for first, second in pairs.items():
        if _is_activation(new.tensors[second]):
            edit.requantize(second, _agreed(old.tensors[first], new.tensors[second]).scale)
    clipped = 0
    for before, operator in zip(old.operators, new.operators, strict=True):
        if operator.name in _WEIGHTED:
            clipped += _round_weights(edit, operator, old.tensors[before.inputs[1]])
    return ScaledFile(graphs.serialize(edit.graph()), clipped)


def _agreed(old: Tensor, new: Tensor) -> Quantization:
    first, second = old.quantization, new.quantization
    assert second is not None
    if first is None or first.zero_point != second.zero_point or abs(second.scale[0] / first.scale[0] - 1) > _ROUNDING:
        raise StageError(
            f"tensor {new.name!r} has the scale and zero point {second.scale[0]:.9g} and {second.zero_point}, "
            f"in the old file {first.scale[0] if first else 0:.9g} and {first.zero_point if first else ()}",
            hint="this operator cannot be quantized under other scales; quantize without `scales_from`",
        )
    return first


def _round_weights(edit: Edit, operator: Operator, old: Tensor) -> int:
    """Round weights with one scale to their old scale, with their biases; return how many were clipped."""
    graph = edit.before
    source, weights = (graph.tensors[index].quantization for index in operator.inputs[:2])
    tensor = graph.tensors[operator.inputs[1]]
    if source is None or weights is None or weights.per_channel or old.quantization is None or tensor.dtype != "INT8":
        return 0
    scale = old.quantization.scale
    ratio = float(weights.scale[0]) / float(scale[0])
    rounded = np.rint(tensor.array().astype(np.float64) * ratio)
    edit.assign(tensor.index, np.clip(rounded, -_LARGEST_WEIGHT, _LARGEST_WEIGHT).astype(np.int8))
    edit.requantize(tensor.index, scale)
    if len(operator.inputs) > 2 and operator.inputs[2] != NONE:
        bias = graph.tensors[operator.inputs[2]]
        limits = np.iinfo(np.int32)
        scaled = np.rint(bias.array().astype(np.float64) * ratio)
        edit.assign(bias.index, np.clip(scaled, limits.min, limits.max).astype(np.int32))
        edit.requantize(bias.index, [source.scale[0] * scale[0]])
    return int((np.abs(rounded) > _LARGEST_WEIGHT).sum())
