"""Edge TPU programs, assembled bundle by bundle in the form that was observed in compiled models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from darwinn.instructions import MULTIPLY
from darwinn.program import PARAMETER_WRITE, TENSOR_BUNDLES, TRANSFER_KINDS

ALL_TILES = 0xFFFF
WEIGHTS = max(MULTIPLY)
SCALAR = 1 << 11
KINDS = {name: number for number, name in TRANSFER_KINDS.items()}
Loops = Sequence[tuple[int, int]]
"""(stride in words, repetitions), the innermost first."""


def traversal(start: int, loops: Loops, mode: int = 0) -> int:
    """Encode the start and the eight loops of an input or output."""
    bits, passed = start | mode << 18, 0
    for index in range(8):
        stride, count = loops[index] if index < len(loops) else (0, 1)
        step = stride - passed
        passed += stride * (count - 1)
        flags = 6 if index == 7 else 0
        bits |= (step & 0x1FFFF | count - 1 << 17 | flags << 34) << 20 + 37 * index
    return bits


@dataclass
class ProgramMaker:
    """A builder of a program. Its methods add instructions."""

    bundles: list[int] = field(default_factory=lambda: [0x1E << 6 | SCALAR])
    number: int = 0

    def tensor(
        self,
        source: int,
        target: int,
        *,
        tiles: int = ALL_TILES,
        kind: int = WEIGHTS,
        rows: int = 64,
        multiplier: int = 1,
    ) -> None:
        """Add a tensor instruction that reads and writes what `traversal` returned."""
        bits = 1 << 6 | tiles << 12 | self.number << 46 | source << 191 | target << 574
        vector = 14 * 128
        bits |= kind << vector + 47
        bits |= (0b110 << 13 | rows - 1 << 20) << vector + 128
        bits |= multiplier << vector + 128 + 29
        self.bundles += [bits >> 128 * index & (1 << 128) - 1 for index in range(TENSOR_BUNDLES)]
        self.number += 1

    def numbered(self, operation: int, length: int, tiles: int = ALL_TILES) -> None:
        """Add an instruction for tiles that is not a tensor instruction."""
        self.bundles += [operation << 6 | tiles << 12 | self.number << 46, *[0] * (length - 1)]
        self.number += 1

    def transfer(self, kind: str, size: int) -> None:
        """Add a transfer: words 2 and 3 of its descriptor are loaded from registers 8 and 9, the size and the kind."""
        for register, value in ((8, size), (9, KINDS[kind])):
            self.bundles.append(SCALAR | 0x2F << 54 | register << 60 | value << 70)
        for word, register in ((2, 8), (3, 9)):
            self.bundles.append(SCALAR | 0x0A << 31 | word << 36 | register << 49)
        self.bundles.append(SCALAR | 0x0C << 31)

    def parameters(self, parts: Sequence[tuple[int, int]]) -> None:
        """Add the parameters of an operator in a caching program: (line of 64 bytes, tiles) of each part."""
        for _, tiles in parts:
            self.numbered(PARAMETER_WRITE, 4, tiles)
        for line, tiles in parts:
            self.bundles += [6 << 6 | SCALAR, 0, (line + 1 & 0xFFFF) << 64, tiles << 25]

    def unknown(self) -> None:
        """Add a bundle that is not part of a known instruction."""
        self.bundles.append(0x09 << 6 | 1 << 12)

    def finished(self) -> bytes:
        """Return the program with its end."""
        bundles = [*self.bundles, 1 << 6 | SCALAR, 0x1F << 6 | SCALAR]
        return b"".join(bundle.to_bytes(16, "little") for bundle in bundles)
