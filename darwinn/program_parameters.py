"""Where the parameters of each operator are in a compiled file, according to its programs.

The program that caches parameters sends them to the tiles in parts: first an instruction for each tile that stores
one, then the parts. All parts of one operator are announced together, so that the announcements separate operators.
Parameters that are not cached arrive in one transfer for each operator.

Source: observed in compiled models. In 28 of 29, these are exactly the regions that are predicted for the operators;
the 29th, with an LSTM, has operators whose parameters are not predicted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from darwinn.parameter_layout import ALIGNMENT
from darwinn.program import PARAMETER_WRITE, Program

_LINES = 1 << 16
"""The program counts the lines of its stream modulo this number: the field has 16 bits."""


@dataclass(frozen=True)
class ProgramParameters:
    """The parameters that a program handles together: those of one operator.

    Attributes:
        executable: the index of the executable in the file.
        offset: the first byte in the executable's parameters.
        size_bytes: the number of bytes, with zeros at the end.
        tiles: for each part, the tiles that store it; empty for streamed parameters.
        is_cached: whether the parameters are loaded once.
    """

    executable: int
    offset: int
    size_bytes: int
    tiles: tuple[int, ...]
    is_cached: bool

    @property
    def extent(self) -> range:
        """The bytes in the executable's parameters."""
        return range(self.offset, self.offset + self.size_bytes)


def cached_parameters(program: Program, executable: int, size_bytes: int) -> list[ProgramParameters]:
    """Return the parameters of each operator that a caching program loads; none if its parts are not the stream."""
    announced = [instruction.bundle for instruction in program.instructions if instruction.operation == PARAMETER_WRITE]
    groups: list[tuple[int, list[int]]] = []
    base, last, previous = 0, -1, -1
    for part in program.parts:
        line = base + part.line
        if line < last:
            base += _LINES
            line += _LINES
        if not groups or bisect_left(announced, previous) < bisect_left(announced, part.bundle):
            groups.append((line * ALIGNMENT, []))
        groups[-1][1].append(part.tiles)
        last, previous = line, part.bundle
    return _consecutive(groups, executable, size_bytes)


def _consecutive(
    groups: Sequence[tuple[int, Sequence[int]]], executable: int, size_bytes: int
) -> list[ProgramParameters]:
    """Return groups, each up to the beginning of the next; none if they are not in order from 0 to the end."""
    starts = [start for start, _ in groups]
    stops = [*starts[1:], size_bytes]
    if not starts or starts[0] != 0 or any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return []
    return [
        ProgramParameters(executable, start, stop - start, tuple(tiles), is_cached=True)
        for (start, tiles), stop in zip(groups, stops, strict=True)
    ]


def streamed_parameters(
    transfers: Sequence[tuple[int | None, int]], executable: int, size_bytes: int
) -> list[ProgramParameters]:
    """Return the parameters that a program receives at every inference; those that it receives again only once.

    None if the transfers are not all parameters.

    `transfers` has the offset, if it is known, and the size of each transfer in order; `size_bytes` is the size of
    all parameters of the executable.
    """
    if sum(size for _, size in transfers) == size_bytes:
        stops = list(accumulate(size for _, size in transfers))
        extents = [(stop - size, size) for stop, (_, size) in zip(stops, transfers, strict=True)]
    else:
        extents = list(dict.fromkeys((offset, size) for offset, size in transfers if offset is not None))
        position = 0
        for offset, size in sorted(extents):
            if offset != position:
                return []
            position += size
        if position != size_bytes:
            return []
    return [ProgramParameters(executable, offset, size, (), is_cached=False) for offset, size in extents]
