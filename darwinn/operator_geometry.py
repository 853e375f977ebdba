"""The dimensions of an operator, from the loops of its instructions: kernel, stride, channels, positions.

A weighted sum reads, from the innermost loop on: some of the input channels, the window, the positions, the other input
channels; it repeats all that for each group of 64 output channels. A depthwise operator has the blocks of channels in
the outermost loop. A loop can be missing, and two can be one where their addresses continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt, prod

from darwinn.blocks import FEW_ROWS, INPUT_BLOCK, ROW_BLOCK, padded_rows, round_up
from darwinn.parameter_layout import ALIGNMENT
from darwinn.program import TILE_COUNT
from darwinn.tensor_steps import ProgramStep, TensorInstruction, trailing_zeros
from darwinn.traversal import WORD_BYTES, Loop

_OVERHEADS = (0, 4, 8, 12)
"""The possible bytes of multiplier, bias and zero point for each row."""
_TILE_COLUMNS = 4
"""The 16 tiles are four rows of four."""


@dataclass(frozen=True)
class Geometry:
    """The dimensions of an operator, as far as its loops say them.

    Attributes:
        depthwise: whether each output channel reads one input channel.
        kernel: height and width of its window; None if the loops do not separate them.
        taps: the positions in its window.
        stride: the stride along height and along width.
        input_blocks: blocks of 4 input channels.
        output_blocks: blocks of 4 output channels; an upper limit for one position.
        rows: the rows of its parameters.
        word_count: words of 4 weights for each row; for a depthwise operator, the taps.
        is_divided: whether each tile computes other output channels of one position.
    """

    depthwise: bool
    kernel: tuple[int, int] | None
    taps: int
    stride: tuple[int, int] | None
    input_blocks: int | None
    output_blocks: int
    rows: int
    word_count: int
    is_divided: bool = False


def geometry_of(step: ProgramStep) -> Geometry:
    """Return the dimensions of a weighted sum, from the instruction with the most repetitions."""
    instruction = max(
        step.instructions, key=lambda candidate: (len(candidate.source.loops), candidate.target.repetitions)
    )
    source, target = list(instruction.source.loops), list(instruction.target.loops)
    if _is_depthwise(instruction):
        return _depthwise(source, target)
    return _convolution(instruction.vector.rows, source, target)


def _is_depthwise(instruction: TensorInstruction) -> bool:
    """Return whether the blocks of channels are the outermost loop of both input and output."""
    source, target = instruction.source.loops, instruction.target.loops
    if instruction.vector.rows != INPUT_BLOCK or not source or not target:
        return False
    return source[-1] == target[-1] and source[-1].stride == 1


def _depthwise(source: list[Loop], target: list[Loop]) -> Geometry:
    blocks = source.pop().count
    target.pop()
    spatial = prod(loop.count for loop in target)
    taps = prod(loop.count for loop in source) // spatial or 1
    window, rest = _window(source, taps)
    stride = _stride(window, rest, blocks, taps)
    return Geometry(True, _kernel(window, taps), taps, stride, blocks, blocks, INPUT_BLOCK * blocks, taps)


def _convolution(rows: int, source: list[Loop], target: list[Loop]) -> Geometry:
    repeated = trailing_zeros(source)
    source = source[: len(source) - len(repeated)]
    groups = prod(loop.count for loop in repeated)
    row_blocks = -(-rows // INPUT_BLOCK)
    written = prod(loop.count for loop in target)
    spatial = max(written // (row_blocks * groups), 1)
    words = max(prod(loop.count for loop in source) // spatial, 1)
    all_rows = rows * groups
    blocks = row_blocks * groups
    inner = [loop for loop in target if loop.stride != 1 and not (loop.count == groups and loop.stride == row_blocks)]
    if spatial > 1 and inner:
        blocks = min(blocks, min(loop.stride for loop in inner))
    channels = _split(source, spatial, words)
    if channels is None:
        return Geometry(False, None, 0, None, None, blocks, all_rows, words)
    input_blocks, window, rest = channels
    taps = words // input_blocks
    return Geometry(
        False,
        _kernel(window, taps),
        taps,
        _stride(window, rest, input_blocks, taps),
        input_blocks,
        blocks,
        all_rows,
        words,
    )


def _split(source: list[Loop], spatial: int, words: int) -> tuple[int, list[Loop], list[Loop]] | None:
    """Return blocks of input channels, the loops of the window and those of the output's positions.

    The loops are: some of the channels, the window, the positions, the other channels. The first and the last can be
    missing. Neighbouring positions are as far apart as there are blocks of channels.
    """
    splits = []
    for first in (0, 1):
        for last in (0, 1):
            inner = source[0].count if first and source and source[0].stride == 1 else 1
            outer = source[-1].count if last and source[first:] and source[-1].stride == inner else 1
            if (first and inner == 1) or (last and outer == 1):
                continue
            middle = source[first : len(source) - last]
            blocks = inner * outer
            window, rest = _window(middle, words // blocks if words % blocks == 0 else 0)
            if prod(loop.count for loop in rest) != spatial or words % blocks:
                continue
            if all(loop.stride % blocks == 0 for loop in middle):
                splits.append((blocks, window, rest))
    return max(splits, key=lambda split: split[0]) if splits else None


def _window(loops: Sequence[Loop], taps: int) -> tuple[list[Loop], list[Loop]]:
    """Return the first loops, whose repetitions are the taps of a window, and the others."""
    count = 0
    while count < len(loops) and prod(loop.count for loop in loops[:count]) < taps:
        count += 1
    return list(loops[:count]), list(loops[count:])


def _kernel(window: Sequence[Loop], taps: int) -> tuple[int, int] | None:
    """Return height and width of a window; None if its loops do not separate them."""
    if taps == 1:
        return 1, 1
    if prod(loop.count for loop in window) != taps:
        return None
    if len(window) == 2:
        return window[1].count, window[0].count
    side = isqrt(taps)
    return (side, side) if side * side == taps else None


def _stride(window: Sequence[Loop], rest: Sequence[Loop], blocks: int, taps: int) -> tuple[int, int] | None:
    """Return the stride along height and width; None if no loop says it. One loop says it for both."""
    row = window[1].stride if len(window) == 2 else isqrt(taps) * blocks
    along_width, along_height = blocks, row
    if len(rest) == 2 and taps > 1 and row and rest[1].stride % row == 0:
        return rest[1].stride // along_height, rest[0].stride // along_width
    if not rest or rest[0].stride % blocks:
        return None
    is_height = len(rest) == 1 and taps > 1 and row and rest[0].stride % row == 0
    stride = rest[0].stride // (along_height if is_height else along_width)
    return stride, stride


def divided(step: ProgramStep, geometry: Geometry) -> Geometry:
    """Return the dimensions if each tile computes other output channels, as for a vector."""
    rows = sum(instruction.vector.rows * instruction.tile.tiles.bit_count() for instruction in step.instructions)
    return replace(geometry, rows=rows, output_blocks=-(-rows // INPUT_BLOCK), is_divided=True)


def pass_shape(geometry: Geometry) -> tuple[bool, int, int]:
    """Return what is equal in all passes of one operator."""
    return geometry.depthwise, geometry.word_count, geometry.rows


def fits(geometry: Geometry, size_bytes: int) -> bool:
    """Return whether parameters have the size of an operator's."""
    return layout(geometry, size_bytes) is not None


def layout(geometry: Geometry, size_bytes: int) -> tuple[int, int] | None:
    """Return rows and bytes of overhead for each row of parameters of this size; None if it is not an operator's.

    The rows of a depthwise operator are its channels.
    """
    if geometry.depthwise:
        rows = [INPUT_BLOCK * geometry.output_blocks]
    else:
        rows = [geometry.rows, padded_rows(geometry.rows), round_up(geometry.rows, ROW_BLOCK)]
        rows += [FEW_ROWS] if geometry.rows <= FEW_ROWS else []
    for count in rows:
        for overhead in _OVERHEADS:
            # A depthwise operator has 4x4 weights for each tap and block of 4 channels: 4 bytes for a row, as others.
            if round_up(count * (WORD_BYTES * geometry.word_count + overhead), ALIGNMENT) == size_bytes:
                return count, overhead
    return None


def average_window(instruction: TensorInstruction) -> tuple[int, int] | None:
    """Return height and width of the window of an average: its first two loops, whose stride is 0."""
    loops = instruction.source.loops[:2]
    return (loops[1].count, loops[0].count) if len(loops) == 2 and not any(loop.stride for loop in loops) else None


class TileGrid:
    """The positions of an output in each tile.

    Attributes:
        counts: by tile, the number of positions.
        sizes: by tile, height and width, where the loops separate them.
    """

    def __init__(self, step: ProgramStep, geometry: Geometry | None) -> None:
        self.counts: dict[int, int] = {}
        self.sizes: dict[int, tuple[int, int]] = {}
        for instruction in step.instructions:
            loops = _spatial_loops(instruction, geometry)
            count = prod(loop.count for loop in loops)
            for tile in range(TILE_COUNT):
                if instruction.tile.tiles >> tile & 1:
                    self.counts[tile] = count
                    if len(loops) == 2:
                        self.sizes[tile] = (loops[1].count, loops[0].count)
                    elif count == 1:
                        self.sizes[tile] = (1, 1)

    @property
    def positions(self) -> int:
        """The positions of all tiles."""
        return sum(self.counts.values())

    def size(self) -> tuple[int | None, int | None]:
        """Return height and width of the output; None if the loops of too few tiles separate them."""
        heights = {tile // _TILE_COLUMNS: size[0] for tile, size in self.sizes.items()}
        widths = {tile % _TILE_COLUMNS: size[1] for tile, size in self.sizes.items()}
        for _ in range(2):
            for tile, count in self.counts.items():
                row, column = divmod(tile, _TILE_COLUMNS)
                if widths.get(column) and row not in heights:
                    heights[row] = count // widths[column]
                elif heights.get(row) and column not in widths:
                    widths[column] = count // heights[row]
        height, width = sum(heights.values()), sum(widths.values())
        return (height, width) if height * width == self.positions else (None, None)


def _spatial_loops(instruction: TensorInstruction, geometry: Geometry | None) -> list[Loop]:
    """Return the loops of an output over positions, the innermost (along the width) first."""
    loops = list(instruction.target.loops)
    if geometry is None:
        return [loop for loop in loops if loop.stride != 1]
    if geometry.depthwise:
        rest = _window(instruction.source.loops[:-1], geometry.taps)[1]
        same = prod(loop.count for loop in rest) == prod(loop.count for loop in loops[:-1])
        return rest if same else loops[:-1]
    row_blocks = -(-instruction.vector.rows // INPUT_BLOCK)
    if row_blocks > 1 and loops and loops[0] == Loop(1, row_blocks):
        loops.pop(0)
    groups = prod(loop.count for loop in trailing_zeros(instruction.source.loops))
    if groups > 1 and loops and loops[-1] == Loop(row_blocks, groups):
        loops.pop()
    if len(loops) == 1 and geometry.input_blocks:
        split = _split(
            list(instruction.source.loops[: len(instruction.source.loops) - (groups > 1)]),
            loops[0].count,
            geometry.word_count,
        )
        if split is not None and len(split[2]) == 2:
            return split[2]
    return loops
