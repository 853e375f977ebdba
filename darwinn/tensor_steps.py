"""The steps of a program: tensor instructions with the same constants, each for other tiles.

The kind and the constants of an instruction say what it computes. Its addresses say what it reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

from compress.core.errors import ModelError
from darwinn import operator_constants
from darwinn.blocks import INPUT_BLOCK
from darwinn.instructions import (
    ADD,
    MULTIPLY,
    PAIR,
    POOL_AVERAGE,
    Constants,
    VectorInstruction,
    vector_instructions,
)
from darwinn.operator_constants import EXPONENTIAL_LIMIT, TABLE_LIMITS
from darwinn.program import PARAMETER_READ, TENSOR_OPERATIONS, Program, TileInstruction
from darwinn.traversal import WORD_BYTES, Loop, Traversal, traversals

MAX_STEPS = 4_000
"""A large network has 300."""
_VECTOR_BUNDLE = 15
"""The distance from the first bundle of a tensor instruction to the one with its constants: read from 29 compiled
models, as the fields in `instructions`."""
_PRODUCTS, _MAXIMA, _SUMS, _INTERPOLATION = 1, 2, 3, 5
_COPY = 0x60
"""The kind in MULTIPLY without weights: a copy, or a function by table."""
_WEIGHTS = MULTIPLY - {_COPY}


class StepKind(StrEnum):
    """The computation of the instructions of a step."""

    WEIGHTS = "weighted sum"
    SUM = "sum"
    PRODUCT = "product"
    AVERAGE = "average"
    MAXIMUM = "maximum"
    FUNCTION = "function"
    RESCALE = "rescale"
    MOVE = "move"
    INTERPOLATION = "interpolation"
    SOFTMAX = "part of a softmax"


@dataclass(frozen=True)
class TensorInstruction:
    """A tensor instruction.

    Attributes:
        tile: the operation, and the tiles that execute it.
        vector: the kind and the constants.
        source: the addresses that are read.
        target: the addresses that are written.
    """

    tile: TileInstruction
    vector: VectorInstruction
    source: Traversal
    target: Traversal

    @property
    def written(self) -> range:
        """The addresses that it writes: without the output channels of the last group that the operator lacks."""
        extent = self.target.extent
        row_blocks = -(-self.vector.rows // INPUT_BLOCK)
        groups = prod(loop.count for loop in trailing_zeros(self.source.loops))
        positions = [loop.stride for loop in self.target.loops if loop.stride not in (1, row_blocks)]
        excess = row_blocks * groups - min(positions, default=row_blocks * groups)
        return range(extent.start, extent.stop - WORD_BYTES * excess) if 0 < excess < row_blocks else extent


@dataclass
class ProgramStep:
    """Instructions with the same constants, for different tiles.

    Attributes:
        name: the name of a function; "" for another kind.
        parameter_tiles: the tiles of each instruction after it that sends data from the memory of a tile: its
            parameters, before other data.
    """

    kind: StepKind
    instructions: list[TensorInstruction]
    name: str = ""
    parameter_tiles: list[int] = field(default_factory=list)

    @property
    def tiles(self) -> int:
        """One bit for each tile that takes part."""
        tiles = 0
        for instruction in self.instructions:
            tiles |= instruction.tile.tiles
        return tiles

    @property
    def bundle(self) -> int:
        """The index of the step's first bundle."""
        return self.instructions[0].tile.bundle

    @property
    def cycles(self) -> int:
        """The repetitions of the slowest tile: cycles of the array, without waiting."""
        return max(instruction.source.repetitions for instruction in self.instructions)

    @property
    def target(self) -> range:
        """The addresses of a tile that the step writes, over all tiles."""
        return _union([instruction.written for instruction in self.instructions])

    @property
    def sources(self) -> list[range]:
        """The known addresses of a tile that the step reads, over all tiles."""
        extents = []
        plain = [instruction.source.extent for instruction in self.instructions if instruction.source.mode == 0]
        if self.kind is not StepKind.AVERAGE and plain and self.instructions[0].tile.operation == _PRODUCTS:
            extents.append(_union(plain))
        pairs = [
            instruction
            for instruction in self.instructions
            if instruction.source.mode == 2 and self.kind is StepKind.SUM
        ]
        if pairs:
            size = max(instruction.target.repetitions for instruction in pairs) * WORD_BYTES
            first = pairs[0].source
            extents += [
                range(start, start + size) for start in (first.start, first.start + first.second_operand) if start >= 0
            ]
        return extents

    @property
    def constants(self) -> Constants:
        """The constants, which are equal in all instructions."""
        return self.instructions[0].vector.constants

    @property
    def rows(self) -> int:
        """The number of output channels that the step computes at once."""
        return max(instruction.vector.rows for instruction in self.instructions)


def _union(extents: Sequence[range]) -> range:
    return range(min(extent.start for extent in extents), max(extent.stop for extent in extents))


def tensor_steps(program: Program) -> list[ProgramStep]:
    """Return the steps of a program.

    Raises:
        ModelError: the program has more than MAX_STEPS steps.
    """
    vectors = {vector.bundle - _VECTOR_BUNDLE: vector for vector in vector_instructions(program.bundles)}
    steps: list[ProgramStep] = []
    for tile in program.instructions:
        if tile.operation == PARAMETER_READ and steps:
            steps[-1].parameter_tiles.append(tile.tiles)
        vector = vectors.get(tile.bundle)
        if tile.operation not in TENSOR_OPERATIONS or vector is None:
            continue
        instruction = TensorInstruction(tile, vector, *traversals(program.bundles, tile.bundle))
        kind, name = _kind(tile.operation, vector)
        if steps and _continues(steps[-1], instruction, kind):
            steps[-1].instructions.append(instruction)
        else:
            steps.append(ProgramStep(kind, [instruction], name))
        if len(steps) > MAX_STEPS:
            raise ModelError(f"has more than {MAX_STEPS:,} steps in one program")
    return steps


def _continues(step: ProgramStep, instruction: TensorInstruction, kind: StepKind) -> bool:
    """Return whether an instruction belongs to a step: the same constants, for other tiles."""
    same_operation = step.instructions[0].tile.operation == instruction.tile.operation
    same_constants = step.constants == instruction.vector.constants
    return kind is step.kind and same_operation and same_constants and not step.tiles & instruction.tile.tiles


def _kind(operation: int, vector: VectorInstruction) -> tuple[StepKind, str]:
    """Return what an instruction computes, and the name of a function."""
    kind = vector.kind
    if operation == _MAXIMA:
        return (StepKind.MAXIMUM, "") if kind == PAIR else (StepKind.SOFTMAX, "")
    if operation == _INTERPOLATION:
        return StepKind.INTERPOLATION, ""
    if operation == _SUMS or kind not in (*_WEIGHTS, _COPY, ADD, PAIR, POOL_AVERAGE):
        return StepKind.SOFTMAX, ""
    if kind == _COPY:
        return _copy_kind(vector)
    moves = operator_constants.is_independent(vector)
    by_kind = {ADD: StepKind.SUM, PAIR: StepKind.PRODUCT, POOL_AVERAGE: StepKind.AVERAGE}
    if moves and kind in by_kind:
        return (StepKind.SOFTMAX if kind == ADD else StepKind.MOVE), ""
    return by_kind.get(kind, StepKind.WEIGHTS), ""


def _copy_kind(vector: VectorInstruction) -> tuple[StepKind, str]:
    for name, limit in TABLE_LIMITS.items():
        if vector.constants.upper == limit:
            return StepKind.FUNCTION, name
    if vector.constants.lower == EXPONENTIAL_LIMIT:
        return StepKind.SOFTMAX, ""
    return (StepKind.MOVE if operator_constants.is_independent(vector) else StepKind.RESCALE), ""


def trailing_zeros(loops: Sequence[Loop]) -> list[Loop]:
    """Return the outermost loops that read the same addresses again: for each group of output channels."""
    trailing: list[Loop] = []
    for loop in reversed(loops):
        if loop.stride:
            break
        trailing.append(loop)
    return trailing
