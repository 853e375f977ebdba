"""Whether weights that were not located can be in a compiled file at all, in whatever order.

An operator whose values are not at the expected position proves nothing: another version of the compiler may store
its outputs elsewhere. But every weight is one byte of the file. So a file that has too few bytes of one value outside
of the located parameters cannot hold the weights that were not located.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compress.model.tflite.graph import Graph
from darwinn.compiled_file import CompiledFile
from darwinn.parameter_layout import NumberKind, ParameterLayout, Values
from darwinn.parameter_location import (
    LeftoverKind,
    ParameterLocation,
    ParameterRegion,
    parameter_bytes,
    region_bytes,
)
from darwinn.stored_parameters import StoredParameters

MIN_EQUAL_WEIGHTS = 0.5
"""The share of an output's weights that must be equal, so that the other values at its position are its own, too.

Weights that are zero do not count, because they are equal in many models. By chance, one of 256 weights is equal.
"""
_WORD_BYTES = 4
"""The weights of 4 input channels of one output are next to each other in all compiled models that were seen."""
_MIN_EQUAL_WORDS = 0.5
"""The share of such groups that must be in the file, where at least half of the model was not located."""
_BYTE_VALUES = 256
"""The number of different bytes."""


@dataclass(frozen=True)
class UnlocatedParameters:
    """The weights that are not at the position where they are expected.

    Attributes:
        outputs: by region that differs, whether each output of the operator is identified by its weights.
        contradiction: the reason why the file cannot hold these weights; "" if it can.
    """

    outputs: Mapping[ParameterRegion, NDArray[np.bool_]]
    contradiction: str


def unlocated_parameters(file: CompiledFile, model: Graph, location: ParameterLocation) -> UnlocatedParameters:
    """Find the weights that were not located, and count whether the rest of the file has room for them."""
    outputs = {region: _identified(file, model, region) for region in location.regions if not region.is_equal}
    needed, spare = [_Bytes.empty()], [_leftover_bytes(file, location)]
    for region, identified in outputs.items():
        if NumberKind.WEIGHT in region.values.arrays:
            holds = _holds(region.layout, region.values, ~identified[_rows(model, region.parameters)])
            needed.append(_Bytes.at(holds, region.layout.encode(region.values)))
            spare.append(_Bytes.at(holds | region.layout.padding, region_bytes(file, region)))
    located = [region for region in location.regions if NumberKind.WEIGHT in region.parameters.tensors]
    shared = {region.parameters.tensors[NumberKind.WEIGHT] for region in located}
    for part in location.missing:
        # Operators that share their weights may share them in the file, too.
        if part.choices and NumberKind.WEIGHT in part.tensors and part.tensors[NumberKind.WEIGHT] not in shared:
            choice = part.choices[0]
            layout = choice.usual_layout
            selected = np.ones(choice.values.arrays[NumberKind.WEIGHT].size, bool)
            needed.append(_Bytes.at(_holds(layout, choice.values, selected), layout.encode(choice.values)))
    located_bytes = sum(region.size_bytes for region in located if region.is_equal)
    return UnlocatedParameters(outputs, _contradiction(_Bytes.joined(needed), _Bytes.joined(spare), located_bytes))


@dataclass(frozen=True)
class _Bytes:
    """Bytes of parameters.

    Attributes:
        counts: how often each value of a byte occurs.
        words: the aligned groups of 4 bytes that they are in.
    """

    counts: NDArray[np.int64]
    words: NDArray[np.uint32]

    @classmethod
    def empty(cls) -> _Bytes:
        return cls(np.zeros(_BYTE_VALUES, np.int64), np.zeros(0, np.uint32))

    @classmethod
    def at(cls, holds: NDArray[np.bool_], content: NDArray[np.uint8]) -> _Bytes:
        """Return the bytes of a content at some positions."""
        counts = np.bincount(content[holds], minlength=_BYTE_VALUES)
        words = len(content) // _WORD_BYTES * _WORD_BYTES
        groups = np.ascontiguousarray(content[:words]).view("<u4")
        return cls(counts, groups[holds[:words].reshape(-1, _WORD_BYTES).any(axis=1)])

    @classmethod
    def joined(cls, parts: Sequence[_Bytes]) -> _Bytes:
        return cls(np.sum([part.counts for part in parts], axis=0), np.concatenate([part.words for part in parts]))


def _leftover_bytes(file: CompiledFile, location: ParameterLocation) -> _Bytes:
    parts = [_Bytes.empty()]
    for leftover in location.leftovers:
        if leftover.kind is not LeftoverKind.ALIGNMENT:
            content = parameter_bytes(file, file.executables[leftover.executable])
            content = content[leftover.extent.start : leftover.extent.stop]
            parts.append(_Bytes.at(np.ones(len(content), bool), content))
    return _Bytes.joined(parts)


def _contradiction(needed: _Bytes, spare: _Bytes, located_bytes: int) -> str:
    """Return why bytes cannot be among others; "" if they can."""
    excess = needed.counts - spare.counts
    value = int(excess.argmax())
    if excess[value] > 0:
        return (
            f"{needed.counts.sum():,} weights were not located, and {needed.counts[value]:,} of them are stored as "
            f"{value}; the rest of the parameters in the compiled file has {spare.counts[value]:,} bytes of this value"
        )
    if located_bytes < needed.counts.sum():
        equal = np.isin(needed.words, spare.words).mean()
        if equal < _MIN_EQUAL_WORDS:
            return (
                f"{needed.counts.sum():,} weights were not located; {1 - equal:.0%} of their groups of 4 input "
                "channels are nowhere in the compiled file"
            )
    return ""


def _rows(model: Graph, part: StoredParameters) -> NDArray[np.int64]:
    """Return the output that each weight of an operator belongs to, in the order of the weights."""
    rows = []
    for index in part.tensors[NumberKind.WEIGHT]:
        tensor = model.tensors[index]
        indices = np.arange(tensor.elements)
        is_depthwise = part.operator.name == "DEPTHWISE_CONV_2D"
        outputs = tensor.shape[-1 if is_depthwise else 0]
        rows.append(indices % outputs if is_depthwise else indices // (tensor.elements // outputs))
    return np.concatenate(rows)


def output_of_each_number(model: Graph, part: StoredParameters, values: Values) -> dict[NumberKind, NDArray[np.int64]]:
    """Return the output that each value of an operator belongs to, by kind."""
    rows = {
        kind: np.arange(array.size) if array.size > 1 else np.zeros(1, np.int64)
        for kind, array in values.arrays.items()
    }
    if NumberKind.WEIGHT in part.tensors:
        rows[NumberKind.WEIGHT] = _rows(model, part)
    return rows


def _identified(file: CompiledFile, model: Graph, region: ParameterRegion) -> NDArray[np.bool_]:
    """Return for each output whether most of its weights are in the region; all are one for a constant operand."""
    content = region_bytes(file, region)
    kind = NumberKind.WEIGHT if NumberKind.WEIGHT in region.values.arrays else NumberKind.CONSTANT
    expected = region.values.arrays[kind].ravel()
    equal = region.layout.decode(content, region.values)[kind].ravel() == expected
    if kind is NumberKind.CONSTANT:
        return np.full(len(expected), equal.mean() >= MIN_EQUAL_WEIGHTS)
    rows = _rows(model, region.parameters)
    outputs = int(rows.max()) + 1
    zero_points = region.values.arrays[NumberKind.ZERO_POINT]
    zeros = zero_points[rows] if zero_points.size == outputs else zero_points[0]
    counted = (expected != zeros) & _is_stored(region.layout, region.values)
    totals = np.bincount(rows[counted], minlength=outputs)
    return (np.bincount(rows[counted & equal], minlength=outputs) >= MIN_EQUAL_WEIGHTS * totals) & (totals > 0)


def _is_stored(layout: ParameterLayout, values: Values) -> NDArray[np.bool_]:
    """Return whether each weight is in a region; taps that read only padding are not."""
    stored = np.zeros(len(values.pool), bool)
    stored[layout.sources[~layout.padding]] = True
    start = values.starts[NumberKind.WEIGHT]
    return stored[start : start + values.arrays[NumberKind.WEIGHT].size]


def _holds(layout: ParameterLayout, values: Values, selected: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the positions in a region that hold selected weights."""
    indices = layout.sources - values.starts[NumberKind.WEIGHT]
    holds: NDArray[np.bool_] = (indices >= 0) & (indices < len(selected)) & ~layout.padding
    holds[holds] = selected[indices[holds]]
    return holds
