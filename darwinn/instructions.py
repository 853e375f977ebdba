"""The instructions of a compiled model that hold scales and zero points: read them, and replace their constants.

A program is a sequence of bundles of 16 bytes. A vector instruction is two of them: a prefix (its kind and the zero
points of its operands) and the bundle itself (a multiplier and two clamps); its last fields reach into the third
bundle. An addition has no multiplier for each operand there: bundles before it load two integer factors.

Source: observed in compiled models. In 29 of them, all 1,997 vector instructions have this form, and each bundle that
differs between two trainings of one architecture is in one of these fields.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

BUNDLE_BYTES = 16
"""Read from 29 compiled models: with it, each of their 120,368 bundles is a part of a known instruction
(`benchmarks/results/explain.json`)."""
# The positions of fields are read from the 1,997 vector instructions of the same 29 models: see above.
_KIND_BIT = 47  # All bits of the prefix below it are 0.
_KIND_BITS = 14  # Up to _FLAG_BIT.
_MARK_BIT, _MARK = 13, 0b110
FIELDS_BIT = 29
"""The first bit of the multiplier in the main bundle; the bits below are the form of the instruction."""
_FLAG_BIT = 61
"""The first bit of the zero points in the prefix: 1 if the zero points of the weights are in the parameters."""
MULTIPLY = frozenset({0x30, 0x60, 0x70})
"""Convolutions, dense layers, copies, and functions by table."""
ADD = 0x160
"""Sums of two tensors, whose two factors are in other bundles."""
POOL_AVERAGE = 0x30E0
"""Averages over positions: AVERAGE_POOL_2D and MEAN."""
PAIR = 0x3860
"""Products of two tensors, maximum pooling, and moves."""
NEGATE = 0x3120
"""The largest input of a softmax, negated."""
FIXED_POINT = 0x1E0
"""Products with 16 bits, at the end of a softmax and in an LSTM."""
_FACTOR_BITS = (88, 104)
"""A factor is in one of two fields of its bundle."""
_FACTOR_MARK = 1 << 87
"""The only other bit that is set in a bundle that loads a factor."""
_FACTOR_LIMIT = 1 << 15
"""Factors have 15 bits."""


@dataclass(frozen=True)
class Constants:
    """The constants of a vector instruction that scales and zero points determine.

    Attributes:
        multiplier: bits of the float32 factor.
        upper: bits of the float32 upper clamp, before the output's zero point is added.
        lower: bits of the float32 lower clamp.
        offset: int32 that is added before the multiplication.
        output_zero_point: the zero point of the output, as unsigned.
        input_zero_point: the zero point of the input, as unsigned.
        weight_zero_point: the zero point of the weights or of the second operand, as unsigned.
    """

    multiplier: int
    upper: int
    lower: int
    offset: int
    output_zero_point: int
    input_zero_point: int
    weight_zero_point: int


@dataclass(frozen=True)
class VectorInstruction:
    """A vector instruction.

    Attributes:
        bundle: the index of the main bundle; the prefix is the bundle before it.
        kind: the operation, such as `ADD`; some are not understood.
        form: the low bits of its bundle, which do not depend on values of the model.
        rows: the number of output channels that it computes at once.
        per_channel: whether the zero points of the weights are in the parameters.
        constants: the constants that scales and zero points determine.
    """

    bundle: int
    kind: int
    form: int
    rows: int
    per_channel: bool
    constants: Constants


@dataclass(frozen=True)
class Factor:
    """A bundle that loads an integer factor of an addition.

    Attributes:
        bit: the first bit of the factor.
        value: the factor, of 15 bits.
    """

    bundle: int
    bit: int
    value: int


def bundles(program: bytes) -> list[int]:
    """Return the bundles of a program as integers; a last part that is shorter than a bundle is left out."""
    size_bytes = len(program) // BUNDLE_BYTES * BUNDLE_BYTES
    pairs = struct.iter_unpack("<QQ", program[:size_bytes])
    return [low | high << 64 for low, high in pairs]


def vector_instructions(program: Sequence[int]) -> list[VectorInstruction]:
    """Return the vector instructions of a program."""
    instructions = []
    for index in range(1, len(program)):
        prefix, main = program[index - 1], program[index]
        kind = prefix >> _KIND_BIT & (1 << _KIND_BITS) - 1
        has_prefix = kind and not prefix & (1 << _KIND_BIT) - 1
        if has_prefix and main >> _MARK_BIT & 7 == _MARK:
            following = program[index + 1] if index + 1 < len(program) else 0
            instructions.append(_instruction(index, kind, prefix, main, following))
    return instructions


def _instruction(index: int, kind: int, prefix: int, main: int, following: int) -> VectorInstruction:
    words = (main | following << 128) >> FIELDS_BIT
    multiplier, upper, lower, offset, last = (words >> 32 * field & 0xFFFFFFFF for field in range(5))
    zero_points = prefix >> _FLAG_BIT
    constants = Constants(
        multiplier,
        upper,
        lower,
        offset - (1 << 32) if offset >> 31 else offset,
        last & 0xFFFF,
        zero_points >> 17 & 0x7FFF,
        zero_points >> 1 & 0xFFFF,
    )
    form = main & (1 << FIELDS_BIT) - 1
    return VectorInstruction(index, kind, form, (form >> 20 & 63) + 1, bool(zero_points & 1), constants)


def factors(program: Sequence[int]) -> list[Factor]:
    """Return the bundles that load the factors of additions."""
    loads = []
    for index, bundle in enumerate(program):
        for bit in _FACTOR_BITS:
            value = bundle >> bit
            if 0 < value < _FACTOR_LIMIT and bundle == value << bit | _FACTOR_MARK:
                loads.append(Factor(index, bit, value))
    return loads


def replace_constants(program: bytearray, instruction: VectorInstruction, constants: Constants) -> None:
    """Write other constants into a vector instruction of a program."""
    start = (instruction.bundle - 1) * BUNDLE_BYTES
    old = int.from_bytes(program[start : start + 3 * BUNDLE_BYTES], "little")
    new = _with_constants(old, constants)
    program[start : start + 3 * BUNDLE_BYTES] = new.to_bytes(3 * BUNDLE_BYTES, "little")


def _with_constants(bits: int, constants: Constants) -> int:
    """Return three bundles, as one integer, with other constants."""
    first = BUNDLE_BYTES * 8 + FIELDS_BIT
    fields = (
        (_FLAG_BIT + 1, 16, constants.weight_zero_point),
        (_FLAG_BIT + 17, 15, constants.input_zero_point),
        (first, 32, constants.multiplier),
        (first + 32, 32, constants.upper),
        (first + 64, 32, constants.lower),
        (first + 96, 32, constants.offset & 0xFFFFFFFF),
        (first + 128, 16, constants.output_zero_point),
    )
    for bit, size, value in fields:
        bits = bits & ~((1 << size) - 1 << bit) | value << bit
    return bits


def replace_factor(program: bytearray, factor: Factor, value: int) -> None:
    """Write another factor into a bundle that loads one."""
    start = factor.bundle * BUNDLE_BYTES
    program[start : start + BUNDLE_BYTES] = (value << factor.bit | _FACTOR_MARK).to_bytes(BUNDLE_BYTES, "little")
