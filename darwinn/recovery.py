"""The operators of a compiled model, recovered from its programs alone.

An operator is executed in steps. A step is a sequence of tensor instructions with the same constants, each for other
tiles. Its kind, its constants and its loops say what it computes: how many positions and channels, with which kernel
and stride. Its addresses say which earlier step wrote what it reads. The size of its parameters confirms the result.

What the program does not say is not guessed: an operator has several `names` where they compile to the same
instructions, and None for dimensions that its loops do not separate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod

import numpy as np
from numpy.typing import NDArray

from darwinn.operator_geometry import (
    Geometry,
    TileGrid,
    average_window,
    divided,
    fits,
    geometry_of,
    layout,
    pass_shape,
)
from darwinn.parameter_layout import VECTOR_BLOCK
from darwinn.program_parameters import ProgramParameters
from darwinn.tensor_steps import ProgramStep, StepKind
from darwinn.traversal import WORD_BYTES

# Chosen limits of searches: a damaged file could otherwise take long.
_MAX_PASS_DISTANCE = 64
"""The operators before a step that it can repeat."""
_VECTOR_BYTES = 16
"""The bytes of 4 values of a vector."""
_LARGEST_SUMMAND = 1 << 20
"""Smaller int32 values are summands: the bits of every float32 factor that occurs are larger."""
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = 87, 167
"""The exponents of float32 factors that occur: 2^-40 to 2^40."""
_SAME_SHAPE = frozenset({"ADD", "LOGISTIC", "MUL", "QUANTIZE", "SUB", "TANH", "move"})
"""The first names of operators whose output has the shape of their input."""
_POOLS = frozenset({"AVERAGE_POOL_2D", "MAX_POOL_2D", "RESIZE_BILINEAR"})
_MOST_TRANSFERS = 256
"""The most transfers that are the streamed parameters of one operator."""
_SOFTMAX_GAP = 4
"""The most steps that only copy between two parts of a softmax."""
_MOST_SKIPPED = 4
"""The most parameters in a row that no weighted sum has: tables of a softmax, constant vectors."""
_MATRIX_NAMES = ("CONCATENATION", "RESHAPE", "PAD", "SPLIT")
"""Operators that a matrix of zeros and ones can execute."""


class Certainty(StrEnum):
    """How certain a recovered operator is."""

    CONFIRMED = "confirmed"
    """The parameters have the size of the kernel and channels, and are read from the tiles that store them."""
    READ = "read"
    """The operator's kind is in the instruction."""
    INFERRED = "inferred"
    """The operator is the usual cause of these instructions."""


@dataclass
class RecoveredOperator:
    """An operator of the compiled model.

    Attributes:
        names: the name in TFLite; several names if they compile to the same instructions.
        geometry: the dimensions of an operator with weights or a window.
        height: the height of the output; None if unknown.
        width: the width of the output; None if unknown.
        positions: height times width.
        reads: the indices of the operators whose output is read; -1 is an input of the program or an unknown source.
        cycles: the cycles of the array, without waiting.
        passes: how often the operator is executed for different parts of its output.
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
        """The names as text."""
        return " or ".join(self.names)


def recover(
    steps: Sequence[ProgramStep], parameters: Sequence[ProgramParameters], contents: Sequence[NDArray[np.uint8]]
) -> list[RecoveredOperator]:
    """Return the operators of a program, in the order of execution.

    `parameters` has the cached and the streamed parameters, each kind in the order of its use, and `contents` the bytes
    of each of them.
    """
    recovery = _Recovery(steps, parameters, contents)
    for index in range(len(steps)):
        recovery.add(index)
    recovery.finish()
    for index, operator in enumerate(recovery.operators):
        _measure(operator, [steps[index] for index in operator.steps])
        if operator.geometry is not None and operator.positions == 1:
            # Vectors are sent between tiles by instructions that are not recovered: older results are still there.
            operator.reads = tuple(source if source == index - 1 else -1 for source in operator.reads)
        _complete(operator, [recovery.operators[source] for source in operator.reads if source >= 0])
    return recovery.operators


class _Recovery:
    """The operators that were recovered so far.

    Attributes:
        operators: the operators in the order of execution.
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
        self.queues = {
            cached: [region for region in parameters if region.is_cached is cached] for cached in (True, False)
        }
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
        owners: dict[int, None] = {}
        for source in reads:
            owners.update(dict.fromkeys([self.owner[step_index] for step_index in source] or [-1]))
        operator.reads = tuple(owners)
        self.owner.append(len(self.operators))
        self.operators.append(operator)

    def _operator(self, index: int) -> RecoveredOperator | None:
        """Return the operator that a step begins; None if it belongs to the last one."""
        step = self.steps[index]
        if step.kind is StepKind.SOFTMAX or self._is_inside_softmax(index):
            if self.operators and self.operators[-1].names == ("SOFTMAX",):
                return None
            return RecoveredOperator(("SOFTMAX",), Certainty.INFERRED, [index])
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
        window = average_window(step.instructions[0]) if step.kind is StepKind.AVERAGE else None
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
        return not any(step.tiles & self.steps[step_index].tiles for step_index in self.operators[-1].steps)

    def _is_inside_softmax(self, index: int) -> bool:
        """Return whether a step between two parts of a softmax only copies."""
        if not self.operators or self.operators[-1].names != ("SOFTMAX",) or index + 1 >= len(self.steps):
            return False
        copies = self.steps[index].kind in (StepKind.MOVE, StepKind.RESCALE, StepKind.SUM)
        return copies and any(
            step.kind is StepKind.SOFTMAX for step in self.steps[index + 1 : index + 1 + _SOFTMAX_GAP]
        )

    def _rescale(self, index: int) -> RecoveredOperator:
        """Return a copy with another scale, or a product or sum with a constant vector in the parameters."""
        step = self.steps[index]
        loops = (instruction.target.loops for instruction in step.instructions)
        blocks = max(prod(loop.count for loop in nested if loop.stride == 1) for nested in loops)
        parameters = self._take_in_order(index, {VECTOR_BLOCK, VECTOR_BLOCK * blocks})
        if parameters is None:
            return RecoveredOperator(("QUANTIZE", "CONCATENATION", "RESHAPE"), Certainty.INFERRED, [index])
        content = self.content[parameters]
        if _only_moves(content):
            names: tuple[str, ...] = _MATRIX_NAMES
        else:
            names = _vector_names(content)
        return RecoveredOperator(names, Certainty.INFERRED, [index], parameters=[parameters])

    def _take_in_order(self, index: int, sizes: set[int]) -> ProgramParameters | None:
        """Take the next parameters for a step that can do without: if the next weighted sum fits those after them."""
        near = self.steps[index + 1 : index + 1 + _MAX_PASS_DISTANCE]
        following = next((step for step in near if step.kind is StepKind.WEIGHTS), None)
        geometries = []
        if following is not None:
            geometry = geometry_of(following)
            geometries = [geometry, divided(following, geometry)]
        for queue in self.queues.values():
            if not queue or queue[0].size_bytes not in sizes:
                continue
            others = [other[0] for other in self.queues.values() if other is not queue and other]
            candidates = [*queue[1 : 1 + _MOST_SKIPPED], *others]
            if following is None or any(
                fits(geometry, region.size_bytes) for region in candidates for geometry in geometries
            ):
                return queue.pop(0)
        return None

    def _weighted(self, index: int) -> RecoveredOperator | None:
        """Return a convolution or dense layer; None if it is another pass of the last one."""
        step = self.steps[index]
        geometry = geometry_of(step)
        by_tile = divided(step, geometry)
        parameters = self._take(lambda region: fits(geometry, region.size_bytes) and _is_read_by(step, region))
        if parameters is None:
            parameters = self._take(lambda region: fits(by_tile, region.size_bytes) and _is_read_by(step, region))
            geometry = geometry if parameters is None else by_tile
        certainty = Certainty.CONFIRMED
        if parameters is None:
            earlier = self._earlier_pass(step, geometry)
            if earlier is not None:
                self.operators[earlier].passes += 1
                self.pass_of = earlier
                return None
            parameters = self._take(lambda region: fits(geometry, region.size_bytes)) or self._take_later(
                lambda region: fits(geometry, region.size_bytes)
            )
            certainty = Certainty.CONFIRMED if parameters and _is_read_by(step, parameters) else Certainty.INFERRED
        names: tuple[str, ...] = ("DEPTHWISE_CONV_2D",) if geometry.depthwise else ("CONV_2D",)
        if geometry.input_blocks == 1 and not geometry.depthwise:
            names = ("CONV_2D", "DEPTHWISE_CONV_2D")
        if parameters is not None and _only_moves(self.content[parameters]):
            names = _MATRIX_NAMES
        operator = RecoveredOperator(names, certainty, [index], geometry)
        operator.parameters = [parameters] if parameters is not None else []
        return operator

    def _earlier_pass(self, step: ProgramStep, geometry: Geometry) -> int | None:
        """Return the operator that a weighted sum repeats, with the same parameters, for other positions."""
        for index in range(len(self.operators) - 1, max(len(self.operators) - 1 - _MAX_PASS_DISTANCE, -1), -1):
            operator = self.operators[index]
            if operator.geometry is None or not operator.parameters:
                continue
            same_constants = self.steps[operator.steps[0]].constants == step.constants
            same_shape = pass_shape(operator.geometry) == pass_shape(geometry)
            if same_shape and same_constants and _is_read_by(step, operator.parameters[0]):
                return index
        return None

    def _take(self, suits: Callable[[ProgramParameters], bool]) -> ProgramParameters | None:
        """Take the next cached or streamed parameters, if they suit; streamed ones can be several transfers."""
        for queue in self.queues.values():
            if queue and suits(queue[0]):
                return queue.pop(0)
        return self._take_together(suits)

    def _take_together(self, suits: Callable[[ProgramParameters], bool]) -> ProgramParameters | None:
        queue, size = self.queues[False], 0
        for count, region in enumerate(queue[:_MOST_TRANSFERS], 1):
            size += region.size_bytes
            if region.offset != queue[0].offset + size - region.size_bytes:
                return None
            joined = replace(queue[0], size_bytes=size)
            if count > 1 and suits(joined):
                self.content[joined] = np.concatenate([self.content[part] for part in queue[:count]])
                del queue[:count]
                return joined
        return None

    def _take_later(self, suits: Callable[[ProgramParameters], bool]) -> ProgramParameters | None:
        """Take parameters after some that fit no step; those are assigned to the softmax before them, if any."""
        for queue in self.queues.values():
            for position in range(1, min(1 + _MOST_SKIPPED, len(queue))):
                if suits(queue[position]):
                    self._assign_tables(queue[:position])
                    parameters = queue[position]
                    del queue[: position + 1]
                    return parameters
        return None

    def _assign_tables(self, tables: Sequence[ProgramParameters]) -> None:
        softmax = [operator for operator in self.operators if operator.names == ("SOFTMAX",)]
        if softmax:
            softmax[-1].parameters += tables

    def finish(self) -> None:
        """Assign the parameters that no step has to a softmax at the end."""
        if self.operators and self.operators[-1].names == ("SOFTMAX",):
            for queue in self.queues.values():
                self._assign_tables(queue)
                queue.clear()


def _is_read_by(step: ProgramStep, parameters: ProgramParameters) -> bool:
    """Return whether a step can read cached parameters: it reads them from the tiles that store them, or in place."""
    tiles = parameters.tiles
    return not tiles or not step.parameter_tiles or tuple(step.parameter_tiles[: len(tiles)]) == tiles


def _vector_names(content: NDArray[np.uint8]) -> tuple[str, ...]:
    """Return the operators that parameters of a copy can belong to: float32 factors, int32 summands, or weights."""
    blocks = content.reshape(-1, VECTOR_BLOCK)
    if blocks[:, _VECTOR_BYTES:].any():
        return "CONV_2D", "DEPTHWISE_CONV_2D"
    values = np.abs(np.ascontiguousarray(blocks[:, :_VECTOR_BYTES]).view(np.int32).astype(np.int64))
    values = values[values > 0]
    if len(values) and values.max() < _LARGEST_SUMMAND:
        return "ADD", "SUB"
    exponents = values >> 23 & 255
    if len(values) and exponents.min() >= _SMALLEST_EXPONENT and exponents.max() <= _LARGEST_EXPONENT:
        return ("MUL",) if len(blocks) > 1 else ("MUL", "CONV_2D", "DEPTHWISE_CONV_2D")
    return "CONV_2D", "DEPTHWISE_CONV_2D", "MUL", "ADD"


def layout_text(operator: RecoveredOperator) -> str:
    """Return the layout of an operator's parameters as text; "" if it is not confirmed."""
    if operator.geometry is None or not operator.parameters:
        return ""
    fitted = layout(operator.geometry, operator.parameters[0].size_bytes)
    if fitted is None:
        return ""
    rows, overhead = fitted
    kind = "channels" if operator.geometry.depthwise else "rows"
    weights = WORD_BYTES * operator.geometry.word_count
    suffix = f" and {overhead} bytes of bias and scale" if overhead else ""
    return f"{rows:,} {kind} of {weights:,} bytes of weights{suffix}"


def _only_moves(content: NDArray[np.uint8]) -> bool:
    """Return whether parameters are zeros and ones: they only move data."""
    return bool((content <= 1).all())


def _measure(operator: RecoveredOperator, steps: Sequence[ProgramStep]) -> None:
    """Add the positions of an operator's output, over all tiles and passes; name a dense layer."""
    geometry = operator.geometry
    if geometry is not None and geometry.is_divided:
        operator.height = operator.width = operator.positions = 1
    elif operator.names != ("SOFTMAX",):
        grids = [TileGrid(step, geometry) for step in steps]
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
    source = next((candidate for candidate in sources if candidate.positions), None)
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
        same = next((candidate for candidate in sources if candidate.positions == operator.positions), None)
        if same is not None and operator.passes == 1:
            operator.height, operator.width = same.height, same.width


_MAX_DISTANCE = 512
"""The steps before a step that are searched for what it reads. Chosen: a large network has 300 steps."""
_MAX_PARTS = 8
"""The steps before a step that can write other parts of the same result; chosen."""


def step_reads(steps: Sequence[ProgramStep]) -> list[list[list[int]]]:
    """Return for each step, and each of its `sources`, the steps that wrote it; none if no step did."""
    targets = [step.target for step in steps]
    signatures: list[tuple[object, ...]] = []  # equal in all steps of one operator
    for step in steps:
        shape = pass_shape(geometry_of(step)) if step.kind is StepKind.WEIGHTS else ()
        signatures.append((step.kind, step.constants, shape))
    reads: list[list[list[int]]] = []
    last_reader = [-1] * len(steps)
    for index, step in enumerate(steps):
        sources = []
        for extent in step.sources:
            earlier = range(index - 1, max(index - 1 - _MAX_DISTANCE, -1), -1)
            last = next((step_index for step_index in earlier if _overlap(targets[step_index], extent)), None)
            parts = [] if last is None else [*_other_parts(signatures, targets, last, last_reader), last]
            sources.append([part for part in parts if _overlap(targets[part], extent)])
        reads.append(sources)
        for writer in (step_index for source in sources for step_index in source):
            last_reader[writer] = index
    return reads


def _other_parts(
    signatures: Sequence[tuple[object, ...]], targets: Sequence[range], last: int, last_reader: Sequence[int]
) -> list[int]:
    """Return the steps before `last` that wrote other parts of the same result: not read or written over before it."""
    parts = []
    for step in range(max(last - _MAX_PARTS, 0), last):
        if signatures[step] != signatures[last] or step < last_reader[step] < last:
            continue
        target, later = targets[step], range(step + 1, last + 1)
        is_covered = any(targets[other].start <= target.start and target.stop <= targets[other].stop for other in later)
        is_reused = any(_overlap(targets[other], target) for other in later if signatures[other] != signatures[last])
        if not is_covered and not is_reused:
            parts.append(step)
    return parts


def _overlap(first: range, second: range) -> bool:
    return first.start < second.stop and second.start < first.stop
