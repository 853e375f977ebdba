"""A program of the Edge TPU as a sequence of instructions: those for tiles, and the transfers from and to the host.

A program is a sequence of bundles of 16 bytes. Bundles for the scalar core have bit 11. All others belong to
instructions for tiles: the first bundle has the operation, one bit for each tile, and a running number, and the
operation says how many bundles follow. As the numbers are consecutive, a program that was read to its end was read
correctly.

The scalar core starts a transfer with four registers, of which two are its size and its kind.

Source: observed in compiled models. In 29 of them, the 58 programs are read to their end, and the transfers are the
DMA hints of the executable. The fields of scalar bundles: decompiler.py in geohot/edgetpuxray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

TILE_COUNT = 16
"""Bits of the tile mask in each tile instruction."""
# The numbers and the fields below are read from 29 compiled models: with them, the 58 programs are read to their end,
# and no running number is missing. Another value would leave bundles that are not understood.
TENSOR_OPERATIONS = frozenset({1, 2, 3, 5})
"""Operations that compute. 1: products and sums; 2: maxima; 3: sums over positions; 5: bilinear interpolation."""
PARAMETER_READ = 0x10
"""Sends data from the memory of one tile to others: parameters to all tiles, or outputs to the host."""
PARAMETER_WRITE = 0x11
"""Stores data that arrives from the host in tiles."""
_STREAM = 6
"""The operation of the scalar core that sends a part of a stream from the host to tiles."""
TENSOR_BUNDLES = 17
"""The number of bundles of an instruction that computes."""
_LENGTHS = {
    **dict.fromkeys(TENSOR_OPERATIONS, TENSOR_BUNDLES),
    **dict.fromkeys((PARAMETER_READ, PARAMETER_WRITE, 0x12), 4),
    **dict.fromkeys((0x13, 0x14), 7),
    **dict.fromkeys((0x15, 0x16, 0x17, 0x18), 6),
    0x19: 13,
    0x1A: 1,
}
"""The number of bundles of each numbered operation. 0x15 to 0x18 exchange borders between neighbours; 0x19 loads a
table of a function; 0x1A waits for others."""
OPERATION_NAMES = {
    1: "products and sums",
    2: "maxima",
    3: "sums over positions",
    5: "bilinear interpolation",
    PARAMETER_READ: "parameters or outputs from the memory of a tile",
    PARAMETER_WRITE: "data from the host into tiles",
    **dict.fromkeys((0x12, 0x13, 0x14), "data between tiles"),
    **dict.fromkeys((0x15, 0x16, 0x17, 0x18), "borders between neighbouring tiles"),
    0x19: "tables of functions",
    0x1A: "waiting",
}
"""The meanings of the operations, as far as they are known."""
_SCALAR_LENGTHS = {_STREAM: 4, 4: 2, 5: 2, 7: 2}
"""Operations of the scalar core with more than one bundle."""
_WAIT = 0x1A
"""The operation that waits for other instructions: it has its running number at another bit."""
_START_BITS, _LOW_BITS, _START_SIZE = 0xF80, 0xFFF, 40
"""The first bundle of a program has these low bits, and a size, in bits, below bit _START_SIZE."""
_END = 0x1F
"""The operation of the scalar core at the end of a program."""
_BRANCHES = frozenset({2, 3})
_NUMBER_MASK = (1 << 14) - 1
"""Running numbers have 14 bits, and start again at 0."""
_MOST_MISSING = 8
"""The most instructions that are skipped after a bundle that is not understood; chosen."""
_SCALAR_BIT = 11
"""Set in bundles for the scalar core alone."""
_TILES_BIT = 12
"""The first of 16 bits, one for each tile."""
_MOVE_IMMEDIATE, _MOVE = 0x2F, 0x0F
_COMPARISONS = frozenset({*range(0x09, 0x0F), *range(0x29, 0x2F)})
_LOG2_E = 0x3FB8AA3B
"""Bits of the float32 1.4427: 2 to the power of it times x is e to the power of x."""
_LOAD_DESCRIPTOR, _START_TRANSFER = 0x0A, 0x0C
_SIZE_WORD, _KIND_WORD = 2, 3
TRANSFER_KINDS = {0: "instructions", 1: "input", 2: "parameters", 3: "output", 4: "interrupt"}


@dataclass(frozen=True)
class TileInstruction:
    """An instruction for tiles.

    Attributes:
        bundle: the index of its first bundle.
        operation: the operation, such as `PARAMETER_READ`.
        tiles: one bit for each tile that executes the instruction: bit 4 * row + column.
    """

    bundle: int
    operation: int
    tiles: int


@dataclass(frozen=True)
class ProgramTransfer:
    """A transfer that the program starts.

    Attributes:
        bundle: the index of the bundle that starts it.
        kind: one of TRANSFER_KINDS; a transfer of scratch memory is an "input" or "output".
    """

    bundle: int
    kind: str
    size_bytes: int


@dataclass(frozen=True)
class StreamPart:
    """A part of a stream from the host that is sent to tiles.

    Attributes:
        bundle: the index of the first bundle of its instruction.
        line: the first line of the part in the stream, in lines of 64 bytes.
    """

    bundle: int
    tiles: int
    line: int


@dataclass
class Program:
    """A program as it was read.

    Attributes:
        parts: the parts of streams from the host, in order.
        unknown: the indices of bundles that are not understood; a program with any was not read correctly after it.
        scalar_loops: the number of jumps of the scalar core: it computes something itself.
        exponentials: the indices of bundles in which the scalar core multiplies by the logarithm of e to base 2.
    """

    bundles: Sequence[int]
    instructions: list[TileInstruction] = field(default_factory=list)
    transfers: list[ProgramTransfer] = field(default_factory=list)
    parts: list[StreamPart] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    scalar_loops: int = 0
    exponentials: list[int] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every bundle was understood as a part of an instruction."""
        return not self.unknown


def read_program(bundles: Sequence[int]) -> Program:
    """Return the instructions of a program; its bundles are from `instructions.bundles`.

    After a bundle that is not understood, reading continues at the next instruction whose number is a little higher.
    """
    reader = _ProgramReader(Program(bundles))
    index = 0
    while index < len(bundles):
        index += reader.read(index)
    return reader.program


class _ProgramReader:
    """The state while a program is read.

    Attributes:
        program: what was read.
        numbered: the number of the next instruction.
        has_begun: whether the first bundle of a program was read.
        is_lost: whether the last bundle was not understood.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.numbered = 0
        self.has_begun = False
        self.is_lost = True
        self._scalar = _ScalarCore()

    def read(self, index: int) -> int:
        """Read an instruction; return the number of its bundles."""
        bundle = self.program.bundles[index]
        operation = bundle >> 6 & 31
        if bundle & _LOW_BITS == _START_BITS and not bundle >> _START_SIZE:
            self.numbered, self.has_begun, self.is_lost = 0, True, False  # there is one in each stream
            return 1
        if bundle >> _SCALAR_BIT & 1 and not self.is_lost:
            _scalar(self.program, self._scalar, index, operation)
            return _SCALAR_LENGTHS.get(operation, 1)
        if bundle == 0:
            return 1
        if bundle & 0x3F == 0 and operation in _LENGTHS and not bundle >> _SCALAR_BIT & 1:
            number = bundle >> (28 if operation == _WAIT else 46) & _NUMBER_MASK
            missing = number - self.numbered & _NUMBER_MASK
            if self.has_begun and (missing == 0 or (self.is_lost and missing <= _MOST_MISSING)):
                self.numbered += missing + 1
                self.is_lost = False
                tiles = bundle >> _TILES_BIT & 0xFFFF
                self.program.instructions.append(TileInstruction(index, operation, tiles))
                return _LENGTHS[operation]
        self.program.unknown.append(index)
        self.is_lost = True
        return 1


class _ScalarCore:
    """The registers of the scalar core whose values are known, and the descriptor of the next transfer."""

    def __init__(self) -> None:
        self.registers: dict[int, int | None] = {}
        self.descriptor: dict[int, int | None] = {}

    def execute(self, bundle: int) -> bool:
        """Execute a bundle as far as constants are moved; return whether it starts a transfer."""
        vector = bundle >> 31 & 31
        if vector == _LOAD_DESCRIPTOR:
            self.descriptor[bundle >> 36 & 255] = bundle >> 49 & 31
        operation, target, immediate = bundle >> 54 & 63, bundle >> 60 & 31, bundle >> 70 & 0xFFFFFFFF
        starts = vector == _START_TRANSFER
        if operation == _MOVE_IMMEDIATE:
            self.registers[target] = immediate
        elif operation == _MOVE:
            self.registers[target] = self.registers.get(immediate & 31)
        elif operation and operation not in _COMPARISONS:
            self.registers[target] = None
        return starts

    def word(self, position: int) -> int | None:
        """Return a word of the descriptor; None if its value is not known."""
        register = self.descriptor.get(position)
        return None if register is None else self.registers.get(register)


def _scalar(program: Program, scalar: _ScalarCore, index: int, operation: int) -> None:
    """Read a bundle of the scalar core."""
    bundle = program.bundles[index]
    if bundle >> 70 & 0xFFFFFFFF == _LOG2_E:
        program.exponentials.append(index)
    if operation in _BRANCHES:
        program.scalar_loops += 1
    elif operation == _STREAM and index + 3 < len(program.bundles):
        line = (program.bundles[index + 2] >> 64 & 0xFFFF) - 1
        program.parts.append(StreamPart(index, program.bundles[index + 3] >> 25 & 0xFFFF, line))
    elif operation not in _SCALAR_LENGTHS and operation != _END and scalar.execute(bundle):
        kind, size = scalar.word(_KIND_WORD), scalar.word(_SIZE_WORD)
        if kind is not None and size is not None:
            program.transfers.append(ProgramTransfer(index, TRANSFER_KINDS.get(kind, "unknown"), size))
