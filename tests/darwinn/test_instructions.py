"""Vector instructions: reading and replacing their numbers."""

from __future__ import annotations

import random

from darwinn.instructions import (
    ADD,
    Constants,
    bundles,
    factors,
    replace_constants,
    replace_factor,
    vector_instructions,
)

# An addition of a MobileNetV2 and its factors, in the form of COMPILED files: prefix, bundle, and the next bundle.
PREFIX = 0xB0000000000000
MAIN = 0xF85FC00008600000070125EC8030C0E0
NEXT = 0xFFFF5BB42
FACTOR = 0x5C1F << 88 | 1 << 87
PROGRAM = b"".join(bundle.to_bytes(16, "little") for bundle in (FACTOR, 0, PREFIX, MAIN, NEXT, 0))
NUMBERS = Constants(0x38092F64, 0x43000000, 0xC2FE0000, -5383657, 127, 0, 0)


def test_the_numbers_of_an_instruction_are_read() -> None:
    """A cut program is read up to its last whole bundle."""
    (instruction,) = vector_instructions(bundles(PROGRAM))
    assert (instruction.bundle, instruction.kind, instruction.rows) == (3, ADD, 4)
    assert instruction.constants == NUMBERS
    assert [len(vector_instructions(bundles(PROGRAM[:size]))) for size in (67, 63, 0)] == [1, 0, 0]


def test_replaced_numbers_are_read_again_and_nothing_else_changes() -> None:
    (instruction,) = vector_instructions(bundles(PROGRAM))
    rng = random.Random(0)
    for _ in range(100):
        bits = [rng.getrandbits(32) for _ in range(3)]
        offset, zero_points = rng.randrange(-(1 << 31), 1 << 31), [rng.getrandbits(8) for _ in range(3)]
        other = Constants(*bits, offset, *zero_points)
        program = bytearray(PROGRAM)
        replace_constants(program, instruction, other)
        assert [
            changed_instruction.constants for changed_instruction in vector_instructions(bundles(bytes(program)))
        ] == [other]
        replace_constants(program, instruction, NUMBERS)
        assert bytes(program) == PROGRAM


def test_a_factor_is_replaced() -> None:
    (factor,) = factors(bundles(PROGRAM))
    assert factor.value == 0x5C1F
    program = bytearray(PROGRAM)
    replace_factor(program, factor, 77)
    assert [changed_factor.value for changed_factor in factors(bundles(bytes(program)))] == [77]
