"""The order in which a tensor instruction reads its input and writes its output in the activation memory of a tile.

Each order is a start and eight nested loops, the innermost first. A loop has the number of its repetitions minus 1, and
the step of the address when it advances, which includes the way back to the start of the loops inside it. Addresses are
in words of 4 bytes: 4 channels of one position.

Source: observed in compiled models; compare "counters, strides and limits" of tensors in US patent 10,175,980.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from darwinn.instructions import BUNDLE_BYTES
from darwinn.program import TENSOR_BUNDLES

WORD_BYTES = 4
"""The bytes of a word: 4 channels of one position."""
# The fields are read from 29 compiled models. Height and width that follow from them are right for 413 of 417 operators
# (4 operators were not recovered), and no address is above the memory that the file claims
# (`benchmarks/results/explain.json`).
_LOOPS = 8
_START_BITS, _ADDRESS_BITS = 20, 18
_STEP_BITS, _LIMIT_BITS, _FLAG_BITS = 17, 17, 3
_LOOP_BITS = _STEP_BITS + _LIMIT_BITS + _FLAG_BITS
_SOURCE_BIT, _TARGET_BIT = 191, 574
"""The first bits of the input's and the output's start in an instruction."""
_PAIR_MODE = 2


@dataclass(frozen=True)
class Loop:
    """A loop that is repeated at least twice.

    Attributes:
        stride: words between two repetitions.
        count: the number of repetitions.
    """

    stride: int
    count: int


@dataclass(frozen=True)
class Traversal:
    """The addresses that an instruction reads or writes, in order.

    Attributes:
        start: the first address, in bytes of a tile's memory.
        loops: the innermost first; loops with one repetition are left out.
        mode: 0: words; 1: single bytes, which is not interpreted further; 2: two operands in turn.
        second_operand: in mode 2, the bytes from the first operand to the second.
    """

    start: int
    loops: tuple[Loop, ...]
    mode: int
    second_operand: int = 0

    @property
    def repetitions(self) -> int:
        """The number of words that are read or written; repeated reads of a word count each time."""
        return prod(loop.count for loop in self.loops)

    @property
    def extent(self) -> range:
        """The addresses from the first to the last byte."""
        offsets = [loop.stride * (loop.count - 1) for loop in self.loops]
        low = sum(offset for offset in offsets if offset < 0)
        high = sum(offset for offset in offsets if offset > 0)
        return range(self.start + WORD_BYTES * low, self.start + WORD_BYTES * (high + 1))


def traversals(bundles: Sequence[int], first: int) -> tuple[Traversal, Traversal]:
    """Return what the tensor instruction at a bundle reads and writes."""
    bits = 0
    for index, bundle in enumerate(bundles[first : first + TENSOR_BUNDLES]):
        bits |= bundle << 8 * BUNDLE_BYTES * index
    return _traversal(bits, _SOURCE_BIT), _traversal(bits, _TARGET_BIT)


def _traversal(bits: int, position: int) -> Traversal:
    start = bits >> position & (1 << _START_BITS) - 1
    mode = start >> _ADDRESS_BITS
    loops, passed, second = [], 0, 0
    for index in range(_LOOPS):
        entry = bits >> position + _START_BITS + _LOOP_BITS * index
        step = entry & (1 << _STEP_BITS) - 1
        if step >> _STEP_BITS - 1:  # negative, in two's complement
            step -= 1 << _STEP_BITS
        repeated = entry >> _STEP_BITS & (1 << _LIMIT_BITS) - 1
        stride = step + passed
        passed += stride * repeated
        if mode == _PAIR_MODE and index == 1:
            second = WORD_BYTES * (step + 1)
        if repeated:
            loops.append(Loop(stride, repeated + 1))
    return Traversal(start & (1 << _ADDRESS_BITS) - 1, tuple(loops), mode, second)
