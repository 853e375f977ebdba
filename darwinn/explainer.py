"""The explanation of a compiled file: its programs, their operators, transfers and memory over time."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compress.core.errors import ModelError
from darwinn import compiled_file
from darwinn.blocks import INPUT_BLOCK
from darwinn.compiled_file import CompiledFile, CompiledOperator
from darwinn.explanation import (
    CPU_MARK,
    ExplainedOperator,
    ExplainedParameters,
    ExplainedProgram,
    ExplainedTransfer,
    Explanation,
    MemoryBuffer,
)
from darwinn.instructions import bundles
from darwinn.package import DmaHint, DmaHints, Executable, LayerInfo
from darwinn.parameter_location import parameter_bytes
from darwinn.program import (
    OPERATION_NAMES,
    TILE_COUNT,
    Program,
    ProgramTransfer,
    read_program,
)
from darwinn.program_parameters import (
    ProgramParameters,
    cached_parameters,
    streamed_parameters,
)
from darwinn.recovery import Certainty, RecoveredOperator, layout_text, recover, step_reads
from darwinn.tensor_steps import ProgramStep, tensor_steps

_CACHING = "PARAMETER_CACHING"
# Chosen limits of searches: a damaged file could otherwise take long.
_MAX_INPUTS = 64
"""The most results that no step wrote."""
MAX_TRANSFERS = 10_000
"""The most transfers of a program, and the most DMA hints; real programs have 20."""
_HINT_WINDOW = 64
"""The hints among which that of a transfer is searched."""
_MAX_UNREAD = 512
"""The most steps that a result without a reader is followed."""
_LIMITS = (
    "The file has no clock: the cycles are those of the array, without waiting for data.",
    "Channels are known in blocks of 4: those of an operator can be up to 3 fewer.",
    "Operators that only rename or reorder values, such as most RESHAPEs, have no instructions of their own.",
)
_NO_PICTURE = "A program could not be read to its end: what follows the first unknown instruction is missing."
_SCALAR = (
    "The scalar core computes something itself, in loops. In known files this is a softmax of compilers before 16, or "
    "an LSTM."
)
_NO_REGIONS = "The parts that load the parameters are not those of the parameters: no operator has parameters here."


@dataclass(frozen=True)
class _ReadProgram:
    """An executable with its program, steps and operators."""

    index: int
    executable: Executable
    hints: DmaHints
    program: Program
    steps: tuple[ProgramStep, ...]
    operators: tuple[RecoveredOperator, ...]
    parameters: tuple[ProgramParameters, ...]
    transfers: tuple[ExplainedTransfer, ...]


def explain(file: CompiledFile, name: str) -> Explanation:
    """Explain a compiled file by its name in texts.

    Raises:
        ModelError: the DMA hints are damaged, or a program is too large.
    """
    parts = [_read_part(file, compiled, first) for compiled, first in _parts(file)]
    programs = [_explained(number, program) for number, part in enumerate(parts, 1) for program in part]
    return Explanation(name, _order(file), tuple(programs), _limits(parts))


def _parts(file: CompiledFile) -> list[tuple[CompiledOperator, int]]:
    """Return each custom operator, and the index of its first executable in the file."""
    parts, first = [], 0
    for compiled in file.operators:
        parts.append((compiled, first))
        first += len(compiled.package.executables)
    return parts


def _read_part(file: CompiledFile, compiled: CompiledOperator, first: int) -> list[_ReadProgram]:
    """Read the executables of a custom operator: those that cache parameters first."""
    hints = compiled_file.dma_hints(file, compiled)
    indices = range(first, first + len(compiled.package.executables))
    read = []
    for index, executable, hint in zip(indices, compiled.package.executables, hints, strict=True):
        content = [bundle for stream in executable.instructions for bundle in bundles(file.bytes_at(stream))]
        read.append((index, executable, hint, read_program(content)))
    read.sort(key=lambda entry: entry[1].type != _CACHING)
    cached = [
        region
        for index, executable, _, program in read
        if executable.type == _CACHING
        for region in cached_parameters(program, index, executable.parameter_bytes)
    ]
    programs = []
    for index, executable, hint, program in read:
        if executable.type == _CACHING:
            regions = tuple(region for region in cached if region.executable == index)
            programs.append(
                _ReadProgram(index, executable, hint, program, (), (), regions, _transfers(program, hint, ()))
            )
            continue
        steps = tensor_steps(program)
        transfers = _transfers(program, hint, steps)
        arriving = [(transfer.offset, transfer.size_bytes) for transfer in transfers if transfer.kind == "parameters"]
        streamed = streamed_parameters(arriving, index, executable.parameter_bytes)
        parameters = [*cached, *streamed]
        blobs = {number: parameter_bytes(file, file.executables[number]) for number in indices}
        contents = [blobs[region.executable][region.extent.start : region.extent.stop] for region in parameters]
        operators = recover(steps, parameters, contents)
        if steps and any(bundle > steps[-1].bundle for bundle in program.exponentials):
            # Compilers before 16 compute a softmax at the end of a network on the scalar core.
            reads = (len(operators) - 1,)
            operators.append(RecoveredOperator(("SOFTMAX",), Certainty.INFERRED, [], reads=reads))
        programs.append(
            _ReadProgram(index, executable, hint, program, tuple(steps), tuple(operators), tuple(streamed), transfers)
        )
    return programs


def _order(file: CompiledFile) -> tuple[str, ...]:
    part_numbers = {compiled.operator.index: number for number, compiled in enumerate(file.operators, 1)}
    return tuple(
        f"Edge TPU part {part_numbers[operator.index]}"
        if operator.index in part_numbers
        else f"{operator.name}{CPU_MARK}"
        for operator in file.graph.operators
    )


def _limits(parts: Sequence[Sequence[_ReadProgram]]) -> tuple[str, ...]:
    programs = [program for part in parts for program in part]
    limits = list(_LIMITS)
    if any(not program.program.is_complete for program in programs):
        limits.append(_NO_PICTURE)
    if any(program.program.scalar_loops for program in programs):
        limits.append(_SCALAR)
    if any(program.executable.parameter_bytes and not program.parameters for program in programs):
        limits.append(_NO_REGIONS)
    return tuple(limits)


def _explained(part: int, read: _ReadProgram) -> ExplainedProgram:
    executable, program = read.executable, read.program
    figures = {
        "parameters": executable.parameter_bytes,
        "instructions": executable.instruction_bytes,
        "scratch memory on the host": executable.scratch_bytes,
        "activation memory of a tile": executable.narrow_bytes_per_tile,
    }
    owners = _owners(read)
    reads = step_reads(read.steps)
    buffers = _buffers(read, owners, reads)
    operations = Counter(OPERATION_NAMES[instruction.operation] for instruction in program.instructions)
    return ExplainedProgram(
        part=part,
        type=executable.type,
        figures=figures,
        inputs=tuple(map(_layer, executable.inputs)),
        outputs=tuple(map(_layer, executable.outputs)),
        bundles=len(program.bundles),
        understood_bundles=len(program.bundles) - len(program.unknown),
        instructions=len(program.instructions),
        operations=dict(operations.most_common()),
        scalar_loops=program.scalar_loops,
        step_cycles=tuple(step.cycles for step in read.steps),
        step_operators=tuple(owners),
        live_bytes=tuple(_live_bytes(buffers, len(read.steps))),
        memory_bytes=executable.narrow_bytes_per_tile,
        transfers=read.transfers,
        coverage=tuple(_coverage(executable, read.hints)),
        hints_are_complete=read.hints.is_complete,
        parameters=tuple(_parameters(read)),
        operators=tuple(_operator(index, operator, read) for index, operator in enumerate(read.operators)),
        buffers=tuple(buffers),
    )


def _layer(layer: LayerInfo) -> tuple[str, tuple[int, ...], int]:
    return layer.name.rstrip("\0"), layer.shape, layer.size_bytes


def _owners(read: _ReadProgram) -> list[int]:
    """Return the operator of each step."""
    owners = [-1] * len(read.steps)
    for index, operator in enumerate(read.operators):
        for step in operator.steps:
            owners[step] = index
    return owners


def _operator(index: int, operator: RecoveredOperator, read: _ReadProgram) -> ExplainedOperator:
    geometry = operator.geometry
    tiles = 0
    for step in operator.steps:
        tiles |= read.steps[step].tiles
    sizes = [region.size_bytes for region in operator.parameters]
    inputs = geometry.input_blocks if geometry else None
    return ExplainedOperator(
        index=index,
        name=operator.name,
        certainty=operator.certainty.value,
        kernel=geometry.kernel if geometry else operator.window,
        stride=geometry.stride if geometry else None,
        input_channels=inputs * INPUT_BLOCK if inputs else None,
        output_channels=operator.output_blocks * INPUT_BLOCK if operator.output_blocks else None,
        height=operator.height,
        width=operator.width,
        positions=operator.positions,
        passes=operator.passes,
        cycles=operator.cycles,
        tiles=tiles.bit_count(),
        steps=(operator.steps[0], operator.steps[-1] + 1) if operator.steps else (len(read.steps),) * 2,
        reads=operator.reads,
        parameter_bytes=sum(sizes),
        is_cached=operator.parameters[0].is_cached if operator.parameters else None,
    )


def _parameters(read: _ReadProgram) -> list[ExplainedParameters]:
    owners = {region: index for index, operator in enumerate(read.operators) for region in operator.parameters}
    regions = list(dict.fromkeys([*read.parameters, *owners])) if read.operators else list(read.parameters)
    explained = []
    for region in regions:
        tiles = tuple(tuple(tile for tile in range(TILE_COUNT) if mask >> tile & 1) for mask in region.tiles)
        owner = owners.get(region)
        layout = "" if owner is None else layout_text(read.operators[owner])
        explained.append(ExplainedParameters(region.offset, region.size_bytes, region.is_cached, tiles, owner, layout))
    return explained


def _transfers(program: Program, hints: DmaHints, steps: Sequence[ProgramStep]) -> tuple[ExplainedTransfer, ...]:
    """Return the transfers of the program with the names and offsets of the DMA hints; then hints that are not in it.

    A hint can be several transfers of the program: parameters that it receives one after another.
    """
    if max(len(program.transfers), len(hints.hints)) > MAX_TRANSFERS:
        raise ModelError(f"has more than {MAX_TRANSFERS:,} transfers in one program")
    starts = [step.bundle for step in steps]
    transfers = [_hint_transfer(hint) for hint in hints.hints if hint.kind == "instructions"]
    open_hints = _OpenHints(hints.hints)
    for transfer in program.transfers:
        step = bisect_right(starts, transfer.bundle)
        match = open_hints.take(transfer)
        if match is None:
            kind, to_host = transfer.kind, transfer.kind in ("output", "interrupt")
            transfers.append(ExplainedTransfer(kind, "", None, transfer.size_bytes, to_host, step, is_announced=False))
        else:
            transfers.append(replace(match, step=step))
    return (*transfers, *map(_hint_transfer, open_hints.unused()))


class _OpenHints:
    """The DMA hints that are not yet transfers of the program, in order, each with the bytes that are left."""

    def __init__(self, hints: Sequence[DmaHint]) -> None:
        self.hints = [hint for hint in hints if hint.kind not in ("instructions", "fence")]
        self.left = [hint.size_bytes for hint in self.hints]
        self.is_used = [False] * len(self.hints)
        self.first = 0

    def take(self, transfer: ProgramTransfer) -> ExplainedTransfer | None:
        """Return a transfer with the name and the offset of its hint; None without a hint."""
        while self.first < len(self.hints) and self.is_used[self.first] and not self.left[self.first]:
            self.first += 1
        for index in range(self.first, min(self.first + _HINT_WINDOW, len(self.hints))):
            hint, left = self.hints[index], self.left[index]
            scratch = "output" if hint.to_host else "input"
            same = transfer.kind in (hint.kind, scratch if hint.kind == "scratch" else hint.kind)
            is_part = hint.kind == "parameters" and left > transfer.size_bytes
            if same and (left == transfer.size_bytes or is_part) and (left or not self.is_used[index]):
                self.left[index] = left - transfer.size_bytes
                self.is_used[index] = True
                offset = hint.offset + hint.size_bytes - left
                return replace(_hint_transfer(hint), offset=offset, size_bytes=transfer.size_bytes)
        return None

    def unused(self) -> list[DmaHint]:
        """Return the hints that no transfer took."""
        return [hint for hint, used in zip(self.hints, self.is_used, strict=True) if not used]


def _hint_transfer(hint: DmaHint) -> ExplainedTransfer:
    name = hint.name.rstrip("\0")
    return ExplainedTransfer(hint.kind, name, hint.offset, hint.size_bytes, hint.to_host, None, is_announced=True)


def _coverage(executable: Executable, hints: DmaHints) -> list[tuple[str, int, int]]:
    """Return for each input, output and the parameters their bytes, and how many of them the hints transfer."""
    extents: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for hint in hints.hints:
        extents.setdefault((hint.kind, hint.name), []).append((hint.offset, hint.offset + hint.size_bytes))
    expected = [("input", layer.name, layer.size_bytes) for layer in executable.inputs]
    expected += [("output", layer.name, layer.size_bytes) for layer in executable.outputs]
    expected.append(("parameters", "", executable.parameter_bytes))
    rows = []
    for kind, name, size in expected:
        transferred_extents = extents.get((kind, name), [])
        if size or transferred_extents:
            rows.append((f"{kind} {name}".rstrip("\0 "), size, _covered(transferred_extents, size)))
    return rows


def _covered(extents: Sequence[tuple[int, int]], size: int) -> int:
    """Return the bytes of [0, size) that are in at least one extent."""
    covered = position = 0
    for start, stop in sorted(extents):
        first, last = max(start, position), min(stop, size)
        covered += max(last - first, 0)
        position = max(position, last)
    return covered


def _buffers(read: _ReadProgram, owners: Sequence[int], reads: Sequence[Sequence[Sequence[int]]]) -> list[MemoryBuffer]:
    """Return the results in the activation memory, each up to the last step that reads it.

    A result that no step reads can be one for the host: it stays up to the next output that the program sends, or until
    another step writes there.
    """
    steps = read.steps
    last = [0] * len(steps)
    inputs: dict[tuple[int, int], int] = {}
    for index, sources in enumerate(reads):
        for number, writers in enumerate(sources):
            for writer in writers:
                last[writer] = index + 1
            if not writers and len(inputs) < _MAX_INPUTS:
                extent = steps[index].sources[number]
                inputs[extent.start, extent.stop] = index + 1
    starts = [step.bundle for step in steps]
    outputs = [
        bisect_right(starts, transfer.bundle) for transfer in read.program.transfers if transfer.kind == "output"
    ]
    buffers = [MemoryBuffer(-1, start, stop, (0, until)) for (start, stop), until in inputs.items()]
    targets = [step.target for step in steps]
    for index, target in enumerate(targets):
        until = last[index] or _unread_until(index, targets, outputs)
        buffers.append(MemoryBuffer(owners[index], target.start, target.stop, (index, until)))
    return buffers


def _unread_until(index: int, targets: Sequence[range], outputs: Sequence[int]) -> int:
    """Return the end of a result that no step reads."""
    position = bisect_right(outputs, index)
    sent = outputs[position] if position < len(outputs) else index + 1
    target = targets[index]
    for later in range(index + 1, min(sent, index + 1 + _MAX_UNREAD)):
        if targets[later].start < target.stop and target.start < targets[later].stop:
            return later
    return min(sent, index + 1 + _MAX_UNREAD)


def _live_bytes(buffers: Sequence[MemoryBuffer], steps: int) -> list[int]:
    """Return for each step the bytes of a tile that hold results."""
    starting: list[list[MemoryBuffer]] = [[] for _ in range(steps)]
    for buffer in buffers:
        if buffer.steps[0] < steps:
            starting[buffer.steps[0]].append(buffer)
    live: list[MemoryBuffer] = []
    sizes = []
    for step in range(steps):
        live = [buffer for buffer in live if buffer.steps[1] > step] + starting[step]
        sizes.append(
            _covered([(buffer.start, buffer.stop) for buffer in live], max((buffer.stop for buffer in live), default=0))
        )
    return sizes
