"""The order in which the compiler writes the values of an operator's parameters.

A layout maps every byte of a region to one byte of the operator's values. So the same layout writes a region for new
values, compares a region with given ones, and names the value that a byte belongs to.

Source: observed in compiled models. Parameters come in groups of up to 64 rows (outputs). A group starts with a
header: for each row a float32 multiplier, an int32 bias, and a uint32 zero point, each if the operator needs it. The
weights follow in blocks of rows by 4 input channels, in the order [outer channel blocks][taps][inner channel blocks].
The rows of a depthwise convolution come in groups of 4, with a 4x4 diagonal for each tap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from darwinn.blocks import INPUT_BLOCK, ROW_BLOCK, round_up

ALIGNMENT = 64
"""Every region starts at a multiple of this number of bytes, and is filled up with zeros: so do all 446 regions of 29
compiled models (`benchmarks/results/explain.json`)."""
VECTOR_BLOCK = 64
"""The bytes of 4 values of a vector: 4 x 4 bytes, then zeros."""


class NumberKind(StrEnum):
    """The kinds of values in a region."""

    FIXED = "fixed"
    ZERO_POINT = "zero point"
    BIAS = "bias"
    MULTIPLIER = "multiplier"
    WEIGHT = "weight"
    CONSTANT = "constant"


HEADER = (NumberKind.MULTIPLIER, NumberKind.BIAS, NumberKind.ZERO_POINT)
"""The order of the values in the header of a group."""
_ZERO, _ONE = 0, 1
"""The values of the kind FIXED: 0.0 (zero bytes) and 1.0."""
_FIXED = np.array([0.0, 1.0], np.float32)


@dataclass(frozen=True, eq=False)
class Values:
    """The values of one operator, as the compiler stores them.

    Attributes:
        arrays: by kind. WEIGHT: uint8, all elements of the tensor in its order (int8 plus 128). ZERO_POINT: uint32,
            that of the weights, for each output or one for all. BIAS: int32. MULTIPLIER: float32. CONSTANT: the
            elements of another operand.
    """

    arrays: Mapping[NumberKind, NDArray[Any]]

    @cached_property
    def signature(self) -> tuple[tuple[str, str, int], ...]:
        """Kind, type and size of each array: what must be equal for a layout to fit."""
        return tuple((kind.value, str(array.dtype), array.size) for kind, array in self._parts)

    @cached_property
    def pool(self) -> NDArray[np.uint8]:
        """All values, one after another, as bytes."""
        return np.concatenate([np.ascontiguousarray(array).ravel().view(np.uint8) for _, array in self._parts])

    @cached_property
    def starts(self) -> dict[NumberKind, int]:
        """The position of each array in the pool."""
        starts, position = {}, 0
        for kind, array in self._parts:
            starts[kind] = position
            position += array.nbytes
        return starts

    @cached_property
    def _parts(self) -> list[tuple[NumberKind, NDArray[Any]]]:
        return [(NumberKind.FIXED, _FIXED), *self.arrays.items()]

    def without(self, kind: NumberKind) -> Values:
        """Return the same values without one kind."""
        return Values({array_kind: array for array_kind, array in self.arrays.items() if array_kind is not kind})


@dataclass(frozen=True)
class NumberDifference:
    """A number that differs.

    Attributes:
        index: the position among the values of one kind.
        expected: the value that the operator has.
        actual: the value in the region.
    """

    kind: NumberKind
    index: int
    expected: int | float
    actual: int | float


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """The source of every byte of a region.

    Attributes:
        sources: [size_bytes], the position of each byte in the pool of the operator's values.
        padding: [size_bytes], whether the byte belongs to a row or channel that the operator does not have.
        signature: the signature of the values that the layout is for.
        rule: the free choices of the compiler in this layout, such as the number of inner channel blocks.
    """

    sources: NDArray[np.int32]
    padding: NDArray[np.bool_]
    signature: tuple[tuple[str, str, int], ...]
    rule: str

    @property
    def size_bytes(self) -> int:
        """The size of the region, without the zeros at its end."""
        return len(self.sources)

    def encode(self, values: Values) -> NDArray[np.uint8]:
        """Return the region for an operator's values.

        Raises:
            ModelError: the operator has other kinds of values, or another number of them.
        """
        if values.signature != self.signature:
            raise ModelError(
                f"its parameters are {_described(values.signature)}; the layout is for {_described(self.signature)}"
            )
        return values.pool[self.sources]

    def decode(self, region: NDArray[np.uint8], values: Values) -> dict[NumberKind, NDArray[Any]]:
        """Return the values in a region. Values that the region does not contain are those of `values`."""
        pool = values.pool.copy()
        stored = ~self.padding
        pool[self.sources[stored]] = region[stored]
        arrays = {}
        for kind, array in values.arrays.items():
            start = values.starts[kind]
            arrays[kind] = pool[start : start + array.nbytes].view(array.dtype)
        return arrays

    def differences(self, region: NDArray[np.uint8], values: Values) -> Iterator[NumberDifference]:
        """Yield the values of a region that differ from an operator's."""
        for kind, actual in self.decode(region, values).items():
            expected = values.arrays[kind].ravel()
            differs = actual.view(f"u{actual.itemsize}") != np.ascontiguousarray(expected).view(f"u{actual.itemsize}")
            for index in np.flatnonzero(differs).tolist():
                yield NumberDifference(kind, index, expected[index].item(), actual[index].item())

    def padding_differs(self, region: NDArray[np.uint8], values: Values) -> bool:
        """Return whether bytes that belong to no number are different from what the rules say."""
        return bool((region != self.encode(values))[self.padding].any())


def _described(signature: tuple[tuple[str, str, int], ...]) -> str:
    return ", ".join(f"{size} x {kind}" for kind, _, size in signature[1:]) or "nothing"


@dataclass(frozen=True, eq=False)
class Matrix:
    """The weights of a convolution or dense layer, before the compiler's choices.

    Attributes:
        values: the values of the operator.
        positions: [outputs, taps, channels], the index of each weight in its tensor; a negative one is an output that
            the operator does not have.
        rows: the rows of the only group (`padded_rows`, or 4 for few outputs); several groups have 64 each.
        header: the kinds of values in the header of each group, in the order of HEADER.
    """

    values: Values
    positions: NDArray[np.int32]
    rows: int
    header: tuple[NumberKind, ...]

    @property
    def channel_blocks(self) -> int:
        """The number of blocks of 4 input channels."""
        return -(-int(self.positions.shape[2]) // INPUT_BLOCK)

    @property
    def first_rows(self) -> int:
        """The rows of the first group."""
        return self.rows if len(self.positions) <= ROW_BLOCK else ROW_BLOCK

    @property
    def size_bytes(self) -> int:
        """The size of the region, without the zeros at its end."""
        rows = self.first_rows * -(-len(self.positions) // ROW_BLOCK)
        taps = int(self.positions.shape[1])
        return rows * (4 * len(self.header) + taps * self.channel_blocks * INPUT_BLOCK)

    @property
    def inner_blocks(self) -> list[int]:
        """The possible numbers of inner channel blocks, from the largest; one if there is one tap."""
        blocks = self.channel_blocks
        if self.positions.shape[1] == 1:
            return [blocks]
        return sorted({-(-blocks // outer) for outer in range(1, blocks + 1)}, reverse=True)

    @property
    def usual_layout(self) -> ParameterLayout:
        """The layout with the most inner channel blocks."""
        return self.layout_of(self.inner_blocks[0])

    @property
    def is_padded_to_a_group(self) -> bool:
        """Whether the last of several groups has rows that the operator does not have."""
        return len(self.positions) > ROW_BLOCK and bool(len(self.positions) % ROW_BLOCK)

    def layout_of(self, inner: int, *, ones: bool = False) -> ParameterLayout:
        """Return a layout.

        `inner` is the number of inner channel blocks. With `ones`, the multipliers of rows beyond the operator's
        outputs are 1.0, not 0.
        """
        sources, padding = [], []
        for first in range(0, len(self.positions), ROW_BLOCK):
            group = self.positions[first : first + ROW_BLOCK]
            header = self.group_header(first, group, self.first_rows, ones=ones)
            for part, pads in (*header, *self._blocks(first, group, inner)):
                sources.append(part)
                padding.append(pads)
        rule = f"{inner} inner channel blocks" + (", multipliers of 1.0 in missing rows" if ones else "")
        return ParameterLayout(np.concatenate(sources), np.concatenate(padding), self.values.signature, rule)

    @cached_property
    def _present(self) -> NDArray[np.int32]:
        """The outputs that the operator has: the index of each row's values."""
        present = self.positions[:, 0, 0] >= 0
        return np.where(present, np.cumsum(present) - 1, -1).astype(np.int32)

    def group_header(
        self, first: int, group: NDArray[np.int32], rows: int, *, ones: bool = False
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Yield sources and padding of each kind of value in the header of a group that starts at output `first`."""
        present = self._present[first : first + len(group)]
        pads = np.ones(rows, bool)
        pads[: len(group)] = present < 0
        output_rows = np.flatnonzero(~pads)
        for kind in self.header:
            start = self.values.starts[kind]
            fixed = _ONE if ones and kind is NumberKind.MULTIPLIER else _ZERO
            offsets = np.full(rows, self.values.starts[NumberKind.FIXED] + 4 * fixed, np.int32)
            if kind is not NumberKind.BIAS:
                offsets[: round_up(len(group), INPUT_BLOCK)] = start + 4 * present[0]
            offsets[output_rows] = start + 4 * present[output_rows]
            sources = offsets[:, None] + np.arange(4, dtype=np.int32)
            yield sources.ravel().astype(np.int32), np.repeat(pads, 4)

    def _blocks(
        self, first: int, group: NDArray[np.int32], inner: int
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        count, taps, channels = group.shape
        blocks = self.channel_blocks
        rows = self.first_rows
        sources = np.full((rows, taps, blocks * INPUT_BLOCK), self.values.starts[NumberKind.FIXED], np.int32)
        pads = np.ones(sources.shape, bool)
        filled = min(round_up(count, INPUT_BLOCK), rows)
        present = self._present[first : first + count]
        sources[:filled] = self.zero_point_sources(present[:1])[:, None, None]
        sources[:count] = self.zero_point_sources(np.where(present < 0, present[0], present))[:, None, None]
        output_rows = np.flatnonzero(present >= 0)
        sources[output_rows, :, :channels] = self.values.starts[NumberKind.WEIGHT] + group[output_rows]
        pads[output_rows, :, :channels] = False
        for start in range(0, blocks, inner):
            width = min(inner, blocks - start)
            columns = slice(start * INPUT_BLOCK, (start + width) * INPUT_BLOCK)
            yield _by_tap(sources[:, :, columns], width), _by_tap(pads[:, :, columns], width)

    def zero_point_sources(self, outputs: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the positions in the pool of the low bytes of the zero points of outputs."""
        start = self.values.starts[NumberKind.ZERO_POINT]
        per_output = self.values.arrays[NumberKind.ZERO_POINT].size > 1
        return (start + 4 * outputs if per_output else np.full(len(outputs), start)).astype(np.int32)


def _by_tap(values: NDArray[Any], width: int) -> NDArray[Any]:
    """Return [rows, taps, width * 4] in the order [taps, width, rows, 4], flat."""
    rows, taps, _ = values.shape
    return values.reshape(rows, taps, width, INPUT_BLOCK).transpose(1, 2, 0, 3).ravel()


def depthwise(matrix: Matrix) -> ParameterLayout:
    """Return the layout of a depthwise convolution, of whose positions [channels, taps, 1] a group takes 4 rows."""
    sources, padding = [], []
    for first in range(0, len(matrix.positions), INPUT_BLOCK):
        group = matrix.positions[first : first + INPUT_BLOCK]
        for part, pads in (*matrix.group_header(first, group, INPUT_BLOCK), _diagonals(matrix, first, group)):
            sources.append(part)
            padding.append(pads)
    return ParameterLayout(np.concatenate(sources), np.concatenate(padding), matrix.values.signature, "")


def _diagonals(matrix: Matrix, first: int, group: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    count, taps, _ = group.shape
    output_indices = np.full(INPUT_BLOCK, first, np.int32)
    output_indices[:count] += np.arange(count, dtype=np.int32)
    blocks = np.empty((taps, INPUT_BLOCK, INPUT_BLOCK), np.int32)
    blocks[:] = matrix.zero_point_sources(output_indices)[:, None]
    pads = np.ones(blocks.shape, bool)
    diagonal = np.arange(count)
    blocks[:, diagonal, diagonal] = matrix.values.starts[NumberKind.WEIGHT] + group[:, :, 0].T
    pads[:, diagonal, diagonal] = False
    return blocks.ravel(), pads.ravel()


def vector(values: Values) -> ParameterLayout:
    """Return the layout of a constant vector of 4-byte values: 4 of them, then zeros, in every 64 bytes."""
    count = values.arrays[NumberKind.CONSTANT].size
    start = values.starts[NumberKind.CONSTANT]
    offsets = np.full(round_up(count, INPUT_BLOCK), values.starts[NumberKind.FIXED], np.int32)
    offsets[:count] = start + 4 * np.arange(count, dtype=np.int32)
    blocks = np.full((len(offsets) // INPUT_BLOCK, VECTOR_BLOCK), values.starts[NumberKind.FIXED], np.int32)
    pads = np.ones(blocks.shape, bool)
    stored = 4 * INPUT_BLOCK
    blocks[:, :stored] = (offsets[:, None] + np.arange(4, dtype=np.int32)).reshape(-1, stored)
    pads[:, :stored] = np.repeat(np.arange(len(offsets)) >= count, 4).reshape(-1, stored)
    return ParameterLayout(blocks.ravel(), pads.ravel(), values.signature, "")


def plain(values: Values) -> ParameterLayout:
    """Return the layout of a constant tensor: its bytes in their order."""
    array = values.arrays[NumberKind.CONSTANT]
    sources = values.starts[NumberKind.CONSTANT] + np.arange(array.nbytes, dtype=np.int32)
    return ParameterLayout(sources, np.zeros(array.nbytes, bool), values.signature, "")
