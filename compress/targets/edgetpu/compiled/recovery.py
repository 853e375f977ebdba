"""The operators of a compiled model, recovered from its programs alone.

An operator is executed in steps. A step is a sequence of tensor instructions with the same numbers, each for other
tiles. Its kind, its numbers and its loops say what it computes: how many positions and channels, with which kernel and
stride. Its addresses say which earlier step wrote what it reads. The size of its parameters confirms the result.

What the program does not say is not guessed: an operator has several `names` where they compile to the same
instructions, and None for dimensions that its loops do not separate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isqrt, prod

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.targets.edgetpu.compiled import operator_constants
from compress.targets.edgetpu.compiled.instructions import (
    ADD,
    MULTIPLY,
    PAIR,
    POOL_AVERAGE,
    Constants,
    VectorInstruction,
    vector_instructions,
)
from compress.targets.edgetpu.compiled.operator_constants import EXPONENTIAL_LIMIT, TABLE_LIMITS
from compress.targets.edgetpu.compiled.parameter_layout import ALIGNMENT, VECTOR_BLOCK
from compress.targets.edgetpu.compiled.program import TENSOR_OPERATIONS, TILE_COUNT, Program, TileInstruction
from compress.targets.edgetpu.compiled.program_parameters import ProgramParameters
from compress.targets.edgetpu.compiled.traversal import WORD_BYTES, Loop, Traversal, traversals
from compress.targets.edgetpu.parameter_memory import FEW_ROWS, INPUT_BLOCK, ROW_BLOCK, padded_rows, round_up

MAX_STEPS = 4_000
"""A large network has 300."""
_MAX_DISTANCE = 512
"""The steps before a step that are searched for what it reads."""
_MAX_PARTS = 8
"""The steps before a step that can write other parts of the same result."""
_VECTOR_BUNDLE = 15
"""The distance from the first bundle of a tensor instruction to the one with its numbers."""
_PRODUCTS, _MAXIMA, _SUMS, _INTERPOLATION = 1, 2, 3, 5
_WEIGHTS = MULTIPLY - {0x60}
_COPY = 0x60
_OVERHEADS = (0, 4, 8, 12)
"""The possible bytes of multiplier, bias and zero point for each row."""
_TILE_COLUMNS = 4
_MAX_PASS_DISTANCE = 64
"""The operators before a step that it can repeat."""
_VECTOR_BYTES = 16
"""The bytes of 4 numbers of a vector."""
_LARGEST_SUMMAND = 1 << 20
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = 87, 167
"""The exponents of float32 factors that occur: 2^-40 to 2^40."""
_SAME_SHAPE = frozenset({"ADD", "LOGISTIC", "MUL", "QUANTIZE", "SUB", "TANH", "move"})
"""The first names of operators whose output has the shape of their input."""
_POOLS = frozenset({"AVERAGE_POOL_2D", "MAX_POOL_2D", "RESIZE_BILINEAR"})
_MOST_TRANSFERS = 256
"""The most transfers that are the streamed parameters of one operator."""
_MOST_SKIPPED = 4
"""The most parameters in a row that no weighted sum has: tables of a softmax, constant vectors."""
_MATRIX_NAMES = ("CONCATENATION", "RESHAPE", "PAD", "SPLIT")
"""Operators that a matrix of zeros and ones can execute."""


class Certainty(StrEnum):
    """How certain a recovered operator is."""

    CONFIRMED = "confirmed"
    """The size of its parameters is exactly that of the recovered kernel and channels."""
    READ = "read"
    """Its kind is in the instruction."""
    INFERRED = "inferred"
    """It is the usual cause of these instructions."""


class StepKind(StrEnum):
    """What the instructions of a step compute."""

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
        tile: its operation and tiles.
        vector: its kind and numbers.
        source: what it reads.
        target: what it writes.
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
        groups = prod(loop.count for loop in _trailing_zeros(self.source.loops))
        positions = [loop.stride for loop in self.target.loops if loop.stride not in (1, row_blocks)]
        excess = row_blocks * groups - min(positions, default=row_blocks * groups)
        return range(extent.start, extent.stop - WORD_BYTES * excess) if 0 < excess < row_blocks else extent


@dataclass
class ProgramStep:
    """Instructions with the same numbers, for different tiles.

    Attributes:
        kind: what they compute.
        instructions: the instructions.
        name: of a function.
    """

    kind: StepKind
    instructions: list[TensorInstruction]
    name: str = ""

    @property
    def tiles(self) -> int:
        """One bit for each tile that takes part."""
        tiles = 0
        for each in self.instructions:
            tiles |= each.tile.tiles
        return tiles

    @property
    def bundle(self) -> int:
        """The index of its first bundle."""
        return self.instructions[0].tile.bundle

    @property
    def cycles(self) -> int:
        """The repetitions of its slowest tile: cycles of the array, as far as it does not wait."""
        return max(each.source.repetitions for each in self.instructions)

    @property
    def target(self) -> range:
        """The addresses of a tile that it writes, over all tiles."""
        return _union([each.written for each in self.instructions])

    @property
    def sources(self) -> list[range]:
        """The addresses of a tile that it reads, as far as known, over all tiles."""
        found = []
        plain = [each.source.extent for each in self.instructions if each.source.mode == 0]
        if self.kind is not StepKind.AVERAGE and plain and self.instructions[0].tile.operation == _PRODUCTS:
            found.append(_union(plain))
        pairs = [each for each in self.instructions if each.source.mode == 2 and self.kind is StepKind.SUM]
        if pairs:
            size = max(each.target.repetitions for each in pairs) * WORD_BYTES
            first = pairs[0].source
            found += [
                range(start, start + size) for start in (first.start, first.start + first.second_operand) if start >= 0
            ]
        return found

    @property
    def constants(self) -> Constants:
        """Its numbers."""
        return self.instructions[0].vector.constants

    @property
    def rows(self) -> int:
        """The number of output channels that it computes at once."""
        return max(each.vector.rows for each in self.instructions)


def _union(extents: Sequence[range]) -> range:
    return range(min(each.start for each in extents), max(each.stop for each in extents))


@dataclass(frozen=True)
class Geometry:
    """The dimensions of an operator, as far as its loops say them.

    Attributes:
        depthwise: whether each output channel reads one input channel.
        kernel: height and width of its window; None if the loops do not separate them.
        taps: the positions in its window.
        stride: along height and width.
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


@dataclass
class RecoveredOperator:
    """An operator of the compiled model.

    Attributes:
        names: its name in TFLite; several if they compile to the same instructions.
        certainty: how certain that is.
        steps: the indices of its steps.
        geometry: its dimensions, if it has weights or a window.
        height: of its output; None if unknown.
        width: of its output; None if unknown.
        positions: height times width.
        parameters: its parameters.
        reads: the indices of the operators whose output it reads; -1 is an input of the program or an unknown source.
        cycles: the cycles of the array, without waiting.
        passes: how often it is executed for different parts of its output.
        blocks: blocks of 4 output channels of an operator without geometry; None if unknown.
        window: height and width of the window of an average; None if unknown, or for another operator.
    """

    names: tuple[str, ...]
    certainty: Certainty
    steps: list[int]
    geometry: Geometry | None = None
    height: int | None = None
    width: int | None = None
    positions: int = 0
    parameters: list[ProgramParameters] = field(default_factory=list)
    reads: tuple[int, ...] = ()
    cycles: int = 0
    passes: int = 1
    blocks: int | None = None
    window: tuple[int, int] | None = None

    @property
    def output_blocks(self) -> int | None:
        """Blocks of 4 output channels; None if unknown."""
        return self.geometry.output_blocks if self.geometry else self.blocks

    @property
    def name(self) -> str:
        """Its names as text."""
        return " or ".join(self.names)


def tensor_steps(program: Program) -> list[ProgramStep]:
    """Return the steps of a program.

    Raises:
        ModelError: there are too many.
    """
    vectors = {each.bundle - _VECTOR_BUNDLE: each for each in vector_instructions(program.bundles)}
    steps: list[ProgramStep] = []
    for tile in program.instructions:
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
    """Return whether an instruction belongs to a step: the same numbers, for other tiles."""
    same_operation = step.instructions[0].tile.operation == instruction.tile.operation
    same_numbers = step.constants == instruction.vector.constants
    return kind is step.kind and same_operation and same_numbers and not step.tiles & instruction.tile.tiles


def _kind(operation: int, vector: VectorInstruction) -> tuple[StepKind, str]:
    """Return what an instruction computes, and the name of a function."""
    constants, kind = vector.constants, vector.kind
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
    del constants
    return by_kind.get(kind, StepKind.WEIGHTS), ""


def _copy_kind(vector: VectorInstruction) -> tuple[StepKind, str]:
    for name, limit in TABLE_LIMITS.items():
        if vector.constants.upper == limit:
            return StepKind.FUNCTION, name
    if vector.constants.lower == EXPONENTIAL_LIMIT:
        return StepKind.SOFTMAX, ""
    return (StepKind.MOVE if operator_constants.is_independent(vector) else StepKind.RESCALE), ""


def step_reads(steps: Sequence[ProgramStep]) -> list[list[list[int]]]:
    """Return for each step, and each of its `sources`, the steps that wrote it; none if it is no result of a step."""
    targets = [step.target for step in steps]
    signatures = [_signature(step) for step in steps]
    found: list[list[list[int]]] = []
    last_reader = [-1] * len(steps)
    for index, step in enumerate(steps):
        sources = []
        for extent in step.sources:
            earlier = range(index - 1, max(index - 1 - _MAX_DISTANCE, -1), -1)
            last = next((each for each in earlier if _overlap(targets[each], extent)), None)
            parts = [] if last is None else [*_other_parts(signatures, targets, last, last_reader), last]
            sources.append([each for each in parts if _overlap(targets[each], extent)])
        found.append(sources)
        for writer in (each for source in sources for each in source):
            last_reader[writer] = index
    return found


def _signature(step: ProgramStep) -> tuple[object, ...]:
    """Return what is equal in all steps of one operator."""
    shape = _shape(_geometry(step)) if step.kind is StepKind.WEIGHTS else ()
    return step.kind, step.constants, shape


def _other_parts(
    signatures: Sequence[tuple[object, ...]], targets: Sequence[range], last: int, last_reader: Sequence[int]
) -> list[int]:
    """Return the steps before `last` that wrote other parts of the same result: not read or written over before it."""
    found = []
    for each in range(max(last - _MAX_PARTS, 0), last):
        if signatures[each] != signatures[last] or each < last_reader[each] < last:
            continue
        own, later = targets[each], range(each + 1, last + 1)
        is_covered = any(_covers(targets[other], own) for other in later)
        is_reused = any(_overlap(targets[other], own) for other in later if signatures[other] != signatures[last])
        if not is_covered and not is_reused:
            found.append(each)
    return found


def _covers(outer: range, inner: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _overlap(first: range, second: range) -> bool:
    return first.start < second.stop and second.start < first.stop


def recover(
    steps: Sequence[ProgramStep], parameters: Sequence[ProgramParameters], contents: Sequence[NDArray[np.uint8]]
) -> list[RecoveredOperator]:
    """Return the operators of a program, in the order of execution.

    Args:
        steps: its steps.
        parameters: all parameters in the order of their use: cached and streamed ones, each in their order.
        contents: the bytes of each.
    """
    recovery = _Recovery(steps, parameters, contents)
    for index in range(len(steps)):
        recovery.add(index)
    recovery.finish()
    for index, operator in enumerate(recovery.operators):
        _measure(operator, [steps[index] for index in operator.steps])
        if operator.geometry is not None and operator.positions == 1:
            # Vectors are sent between tiles by instructions that are not recovered: older results are still there.
            operator.reads = tuple(each if each == index - 1 else -1 for each in operator.reads)
        _complete(operator, [recovery.operators[each] for each in operator.reads if each >= 0])
    return recovery.operators


class _Recovery:
    """The operators that were recovered so far.

    Attributes:
        operators: in the order of execution.
        owner: for each step so far, the index of its operator.
    """

    def __init__(
        self,
        steps: Sequence[ProgramStep],
        parameters: Sequence[ProgramParameters],
        contents: Sequence[NDArray[np.uint8]],
    ) -> None:
        self.steps = steps
        self.reads = step_reads(steps)
        self.content = dict(zip(parameters, contents, strict=True))
        self.queues = {cached: [each for each in parameters if each.is_cached is cached] for cached in (True, False)}
        self.operators: list[RecoveredOperator] = []
        self.owner: list[int] = []
        self.pass_of = -1

    def add(self, index: int) -> None:
        """Recover the operator of the next step, or assign the step to the operator before."""
        step = self.steps[index]
        reads = self.reads[index]
        self.pass_of = len(self.operators) - 1
        operator = self._operator(index)
        if operator is None:
            self.owner.append(self.pass_of)
            last = self.operators[self.pass_of]
            last.steps.append(index)
            last.cycles += step.cycles
            return
        operator.cycles = step.cycles
        operator.reads = tuple(dict.fromkeys(each for source in reads for each in self._owners(source)))
        self.owner.append(len(self.operators))
        self.operators.append(operator)

    def _owners(self, source: Sequence[int]) -> list[int]:
        return [self.owner[each] for each in source] or [-1]

    def _operator(self, index: int) -> RecoveredOperator | None:
        """Return the operator that a step begins; None if it belongs to the last one."""
        step = self.steps[index]
        if step.kind is StepKind.SOFTMAX or self._is_inside_softmax(index):
            return self._softmax(index)
        if step.kind is StepKind.WEIGHTS:
            return self._weighted(index)
        if step.kind is StepKind.RESCALE:
            return self._rescale(index)
        names = {
            StepKind.SUM: ("ADD",),
            StepKind.PRODUCT: ("MUL",),
            StepKind.AVERAGE: ("AVERAGE_POOL_2D", "MEAN"),
            StepKind.MAXIMUM: ("MAX_POOL_2D",),
            StepKind.FUNCTION: (step.name,),
            StepKind.INTERPOLATION: ("RESIZE_BILINEAR",),
            StepKind.MOVE: ("move",),
        }[step.kind]
        if step.kind in (StepKind.INTERPOLATION, StepKind.MOVE) and self._repeats(index):
            return None
        window = _average_window(step.instructions[0]) if step.kind is StepKind.AVERAGE else None
        return RecoveredOperator(names, Certainty.READ, [index], window=window)

    def _repeats(self, index: int) -> bool:
        """Return whether a step does the same as the step before, for other data."""
        if not index:
            return False
        step, before = self.steps[index], self.steps[index - 1]
        if step.kind is not before.kind:
            return False
        if step.kind is StepKind.MOVE:
            return step.constants == before.constants
        return not any(step.tiles & self.steps[each].tiles for each in self.operators[-1].steps)

    def _is_inside_softmax(self, index: int) -> bool:
        """Return whether a step between two parts of a softmax only copies."""
        if not self.operators or self.operators[-1].names != ("SOFTMAX",) or index + 1 >= len(self.steps):
            return False
        copies = self.steps[index].kind in (StepKind.MOVE, StepKind.RESCALE, StepKind.SUM)
        return copies and any(
            each.kind is StepKind.SOFTMAX for each in self.steps[index + 1 : index + 1 + _SOFTMAX_GAP]
        )

    def _softmax(self, index: int) -> RecoveredOperator | None:
        if self.operators and self.operators[-1].names == ("SOFTMAX",):
            return None
        return RecoveredOperator(("SOFTMAX",), Certainty.INFERRED, [index])

    def _rescale(self, index: int) -> RecoveredOperator:
        """Return a copy with another scale, or a product or sum with a constant vector in the parameters."""
        step = self.steps[index]
        blocks = max(_innermost_blocks(each) for each in step.instructions)
        found = self._take_in_order(index, {VECTOR_BLOCK, VECTOR_BLOCK * blocks})
        if found is None:
            return RecoveredOperator(("QUANTIZE", "CONCATENATION", "RESHAPE"), Certainty.INFERRED, [index])
        content = self.content[found]
        if _only_moves(content):
            names: tuple[str, ...] = _MATRIX_NAMES
        else:
            names = _vector_names(content)
        return RecoveredOperator(names, Certainty.INFERRED, [index], parameters=[found])

    def _take_in_order(self, index: int, sizes: set[int]) -> ProgramParameters | None:
        """Take the next parameters for a step that can do without: if the next weighted sum fits those after them."""
        near = self.steps[index + 1 : index + 1 + _MAX_PASS_DISTANCE]
        following = next((each for each in near if each.kind is StepKind.WEIGHTS), None)
        for queue in self.queues.values():
            if not queue or queue[0].size_bytes not in sizes:
                continue
            fits = None if following is None else _both_fit(following)
            others = [other[0] for other in self.queues.values() if other is not queue and other]
            if fits is None or any(fits(each.size_bytes) for each in (*queue[1 : 1 + _MOST_SKIPPED], *others)):
                return queue.pop(0)
        return None

    def _weighted(self, index: int) -> RecoveredOperator | None:
        """Return a convolution or dense layer; None if it is another pass of the last one."""
        step = self.steps[index]
        geometry = _geometry(step)
        found = self._take(lambda size: _fits(geometry, size))
        if found is None:
            divided = _divided(step, geometry)
            found = self._take(lambda size: _fits(divided, size))
            geometry = geometry if found is None else divided
        if found is None:
            earlier = self._earlier_pass(step, geometry)
            if earlier is not None:
                self.operators[earlier].passes += 1
                self.pass_of = earlier
                return None
            found = self._take_later(lambda size: _fits(geometry, size))
        certainty = Certainty.INFERRED if found is None else Certainty.CONFIRMED
        names: tuple[str, ...] = ("DEPTHWISE_CONV_2D",) if geometry.depthwise else ("CONV_2D",)
        if geometry.input_blocks == 1 and not geometry.depthwise:
            names = ("CONV_2D", "DEPTHWISE_CONV_2D")
        if found is not None and _only_moves(self.content[found]):
            names = _MATRIX_NAMES
        operator = RecoveredOperator(names, certainty, [index], geometry)
        operator.parameters = [found] if found is not None else []
        return operator

    def _earlier_pass(self, step: ProgramStep, geometry: Geometry) -> int | None:
        """Return the operator that a weighted sum repeats, with the same parameters, for other positions."""
        for index in range(len(self.operators) - 1, max(len(self.operators) - 1 - _MAX_PASS_DISTANCE, -1), -1):
            operator = self.operators[index]
            if operator.geometry is None or not operator.parameters:
                continue
            if (
                _shape(operator.geometry) == _shape(geometry)
                and self.steps[operator.steps[0]].constants == step.constants
            ):
                return index
        return None

    def _take(self, fits: Callable[[int], bool]) -> ProgramParameters | None:
        """Take the next cached or streamed parameters, if their size fits; streamed ones can be several transfers."""
        for queue in self.queues.values():
            if queue and fits(queue[0].size_bytes):
                return queue.pop(0)
        return self._take_together(fits)

    def _take_together(self, fits: Callable[[int], bool]) -> ProgramParameters | None:
        queue, size = self.queues[False], 0
        for count, each in enumerate(queue[:_MOST_TRANSFERS], 1):
            size += each.size_bytes
            if each.offset != queue[0].offset + size - each.size_bytes:
                return None
            if count > 1 and fits(size):
                found = replace(queue[0], size_bytes=size)
                self.content[found] = np.concatenate([self.content[part] for part in queue[:count]])
                del queue[:count]
                return found
        return None

    def _take_later(self, fits: Callable[[int], bool]) -> ProgramParameters | None:
        """Take parameters after some that fit no step; those are assigned to the softmax before them, if any."""
        for queue in self.queues.values():
            for position in range(1, min(1 + _MOST_SKIPPED, len(queue))):
                if fits(queue[position].size_bytes):
                    self._assign_tables(queue[:position])
                    found = queue[position]
                    del queue[: position + 1]
                    return found
        return None

    def _assign_tables(self, tables: Sequence[ProgramParameters]) -> None:
        softmax = [each for each in self.operators if each.names == ("SOFTMAX",)]
        if softmax:
            softmax[-1].parameters += tables

    def finish(self) -> None:
        """Assign the parameters that no step has to a softmax at the end."""
        if self.operators and self.operators[-1].names == ("SOFTMAX",):
            for queue in self.queues.values():
                self._assign_tables(queue)
                queue.clear()


_SOFTMAX_GAP = 4
"""The most steps that only copy between two parts of a softmax."""


def _innermost_blocks(instruction: TensorInstruction) -> int:
    return prod(loop.count for loop in instruction.target.loops if loop.stride == 1)


def _vector_names(content: NDArray[np.uint8]) -> tuple[str, ...]:
    """Return the operators that parameters of a copy can belong to: float32 factors, int32 summands, or weights."""
    blocks = content.reshape(-1, VECTOR_BLOCK)
    if blocks[:, _VECTOR_BYTES:].any():
        return "CONV_2D", "DEPTHWISE_CONV_2D"
    numbers = np.abs(np.ascontiguousarray(blocks[:, :_VECTOR_BYTES]).view(np.int32).astype(np.int64))
    numbers = numbers[numbers > 0]
    if len(numbers) and numbers.max() < _LARGEST_SUMMAND:
        return "ADD", "SUB"
    exponents = numbers >> 23 & 255
    if len(numbers) and exponents.min() >= _SMALLEST_EXPONENT and exponents.max() <= _LARGEST_EXPONENT:
        return ("MUL",) if len(blocks) > 1 else ("MUL", "CONV_2D", "DEPTHWISE_CONV_2D")
    return "CONV_2D", "DEPTHWISE_CONV_2D", "MUL", "ADD"


def _average_window(instruction: TensorInstruction) -> tuple[int, int] | None:
    """Return height and width of the window of an average: its first two loops, whose stride is 0."""
    loops = instruction.source.loops[:2]
    return (loops[1].count, loops[0].count) if len(loops) == 2 and not any(loop.stride for loop in loops) else None


def _both_fit(step: ProgramStep) -> Callable[[int], bool]:
    geometry = _geometry(step)
    divided = _divided(step, geometry)
    return lambda size: _fits(geometry, size) or _fits(divided, size)


def _fits(geometry: Geometry, size_bytes: int) -> bool:
    """Return whether parameters have the size of an operator's."""
    return _layout(geometry, size_bytes) is not None


def _layout(geometry: Geometry, size_bytes: int) -> tuple[int, int] | None:
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


def layout_text(operator: RecoveredOperator) -> str:
    """Return the layout of an operator's parameters as text; "" if it is not confirmed."""
    if operator.geometry is None or not operator.parameters:
        return ""
    layout = _layout(operator.geometry, operator.parameters[0].size_bytes)
    if layout is None:
        return ""
    rows, overhead = layout
    kind = "channels" if operator.geometry.depthwise else "rows"
    weights = WORD_BYTES * operator.geometry.word_count
    numbers = f" and {overhead} bytes of bias and scale" if overhead else ""
    return f"{rows:,} {kind} of {weights:,} bytes of weights{numbers}"


def _shape(geometry: Geometry) -> tuple[bool, int, int]:
    """Return what is equal in all passes of one operator."""
    return geometry.depthwise, geometry.word_count, geometry.rows


def _divided(step: ProgramStep, geometry: Geometry) -> Geometry:
    """Return the dimensions if each tile computes other output channels, as for a vector."""
    rows = sum(each.vector.rows * each.tile.tiles.bit_count() for each in step.instructions)
    return replace(geometry, rows=rows, output_blocks=-(-rows // INPUT_BLOCK), is_divided=True)


def _only_moves(content: NDArray[np.uint8]) -> bool:
    """Return whether parameters are zeros and ones: they only move data."""
    return bool((content <= 1).all())


def _geometry(step: ProgramStep) -> Geometry:
    """Return the dimensions of a weighted sum, from the instruction with the most repetitions."""
    instruction = max(step.instructions, key=lambda each: (len(each.source.loops), each.target.repetitions))
    source, target = list(instruction.source.loops), list(instruction.target.loops)
    if _is_depthwise(instruction):
        return _depthwise(source, target)
    return _convolution(step, instruction.vector.rows, source, target)


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


def _convolution(step: ProgramStep, rows: int, source: list[Loop], target: list[Loop]) -> Geometry:
    groups = 1
    while source and source[-1].stride == 0:
        groups *= source.pop().count
    row_blocks = -(-rows // INPUT_BLOCK)
    written = prod(loop.count for loop in target)
    spatial = max(written // (row_blocks * groups), 1)
    words = max(prod(loop.count for loop in source) // spatial, 1)
    all_rows = rows * groups
    pitch = [loop.stride for loop in target if loop.stride > 1]
    blocks = row_blocks * groups
    inner = [loop for loop in target if loop.stride != 1 and not (loop.count == groups and loop.stride == row_blocks)]
    if spatial > 1 and inner:
        blocks = min(blocks, min(loop.stride for loop in inner))
    del pitch
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
    found = []
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
                found.append((blocks, window, rest))
    return max(found, key=lambda each: each[0]) if found else None


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


def _measure(operator: RecoveredOperator, steps: Sequence[ProgramStep]) -> None:
    """Add the positions of an operator's output, over all tiles and passes; name a dense layer."""
    geometry = operator.geometry
    if geometry is not None and geometry.is_divided:
        operator.height = operator.width = operator.positions = 1
    elif operator.names != ("SOFTMAX",):
        grids = [_TileGrid(step, geometry) for step in steps]
        operator.positions = sum(grid.positions for grid in grids)
        if geometry is None and operator.positions == sum(len(grid.counts) for grid in grids) > 1:
            operator.positions = 0  # one in each tile: other positions, or other channels of one
        elif len(grids) == 1:
            operator.height, operator.width = grids[0].size()
    if operator.names[0] == "CONV_2D" and geometry is not None and geometry.taps <= 1 and operator.positions == 1:
        operator.names = ("FULLY_CONNECTED", "CONV_2D")


def _complete(operator: RecoveredOperator, sources: Sequence[RecoveredOperator]) -> None:
    """Add what follows from the operators that it reads: the shape of element-wise results, and of 1x1 convolutions."""
    geometry = operator.geometry
    source = next((each for each in sources if each.positions), None)
    if geometry is None and operator.names[0] in _SAME_SHAPE:
        if source is None:
            operator.positions = 0 if operator.names == ("move",) else operator.positions
            operator.height = operator.width = None if not operator.positions else operator.height
            return
        operator.positions, operator.blocks = source.positions, source.output_blocks
        operator.height, operator.width = source.height, source.width
    elif geometry is None and operator.names[0] in _POOLS:
        operator.blocks = source.output_blocks if source else None
    elif geometry is not None and geometry.kernel == (1, 1) and operator.height is None:
        same = next((each for each in sources if each.positions == operator.positions), None)
        if same is not None and operator.passes == 1:
            operator.height, operator.width = same.height, same.width


class _TileGrid:
    """The positions of an output in each tile.

    Attributes:
        counts: by tile, the number of positions.
        sides: by tile, height and width, where the loops separate them.
    """

    def __init__(self, step: ProgramStep, geometry: Geometry | None) -> None:
        self.counts: dict[int, int] = {}
        self.sides: dict[int, tuple[int, int]] = {}
        for each in step.instructions:
            loops = _spatial_loops(each, step, geometry)
            count = prod(loop.count for loop in loops)
            for tile in range(TILE_COUNT):
                if each.tile.tiles >> tile & 1:
                    self.counts[tile] = count
                    if len(loops) == 2:
                        self.sides[tile] = (loops[1].count, loops[0].count)
                    elif count == 1:
                        self.sides[tile] = (1, 1)

    @property
    def positions(self) -> int:
        """The positions of all tiles."""
        return sum(self.counts.values())

    def size(self) -> tuple[int | None, int | None]:
        """Return height and width of the output; None if the loops of too few tiles separate them."""
        heights = {tile // _TILE_COLUMNS: side[0] for tile, side in self.sides.items()}
        widths = {tile % _TILE_COLUMNS: side[1] for tile, side in self.sides.items()}
        for _ in range(2):
            for tile, count in self.counts.items():
                row, column = divmod(tile, _TILE_COLUMNS)
                if widths.get(column) and row not in heights:
                    heights[row] = count // widths[column]
                elif heights.get(row) and column not in widths:
                    widths[column] = count // heights[row]
        height, width = sum(heights.values()), sum(widths.values())
        return (height, width) if height * width == self.positions else (None, None)


def _spatial_loops(instruction: TensorInstruction, step: ProgramStep, geometry: Geometry | None) -> list[Loop]:
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
    groups = prod(loop.count for loop in _trailing_zeros(instruction.source.loops))
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


def _trailing_zeros(loops: Sequence[Loop]) -> list[Loop]:
    found: list[Loop] = []
    for loop in reversed(loops):
        if loop.stride:
            break
        found.append(loop)
    return found
