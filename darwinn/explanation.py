"""Explanation of a compiled model, recovered from its file: operators, memory over time, transfers, parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

SCHEMA_VERSION = 1
CPU_MARK = " (CPU)"
MAX_NAMES = 6
"""The most neighbouring operators on the CPU that are named in a text."""
MAX_NAME = 48
"""The most characters of a tensor's name in a text."""
MAX_LINES = 12
"""The most differences in the text for a terminal."""


@dataclass(frozen=True)
class ExplainedTransfer:
    """A transfer between host and accelerator.

    Attributes:
        kind: "instructions", "input", "parameters", "output", "scratch" or "interrupt".
        name: the name of the input or output; "" for other kinds.
        offset: the first byte in the input, output or parameters; None if the file does not have the offset.
        step: the number of steps before the transfer; None for a transfer that is only in the DMA hints.
        is_announced: whether the transfer is in the file's DMA hints.
    """

    kind: str
    name: str
    offset: int | None
    size_bytes: int
    to_host: bool
    step: int | None
    is_announced: bool


@dataclass(frozen=True)
class ExplainedParameters:
    """The parameters that a program handles together.

    Attributes:
        offset: the first byte in the executable's parameters.
        is_cached: whether the parameters are loaded once; otherwise they are loaded at every inference.
        tiles: the tiles that store each part; empty for streamed parameters.
        operator: the index of the recovered operator; None if the operator is unknown.
        layout: rows, weights and other values as text; "" for an unknown layout.
    """

    offset: int
    size_bytes: int
    is_cached: bool
    tiles: tuple[tuple[int, ...], ...]
    operator: int | None
    layout: str = ""


@dataclass(frozen=True)
class ExplainedOperator:
    """An operator that was recovered from a program.

    Attributes:
        index: the position in the order of execution.
        name: the name in TFLite, or several names that compile to the same instructions; a "move" only copies.
        certainty: "confirmed": the parameters have exactly the size of the kernel and channels; "read": the kind is in
            the instruction; "inferred": the operator is the usual cause of the instructions.
        kernel: height and width of the window.
        stride: the stride along height and along width.
        input_channels: the input channels, rounded up to a multiple of 4.
        output_channels: the output channels, rounded up to a multiple of 4.
        positions: height times width; with several passes, borders count twice.
        passes: how often the operator is executed, for different parts of its output.
        cycles: the cycles of the slowest tile, without waiting.
        tiles: the number of tiles that compute the operator.
        steps: the first step, and the step after the last one.
        reads: the operators whose output is read; -1 is an input, or an unknown source.
        is_cached: whether the parameters are cached; None without parameters.
    """

    index: int
    name: str
    certainty: str
    kernel: tuple[int, int] | None
    stride: tuple[int, int] | None
    input_channels: int | None
    output_channels: int | None
    height: int | None
    width: int | None
    positions: int
    passes: int
    cycles: int
    tiles: int
    steps: tuple[int, int]
    reads: tuple[int, ...]
    parameter_bytes: int
    is_cached: bool | None

    @property
    def window(self) -> str:
        """Kernel and stride as text; "" without a kernel."""
        if self.kernel is None:
            return ""
        text = f"{self.kernel[0]}x{self.kernel[1]}"
        if self.stride is None:
            return text if self.kernel == (1, 1) else f"{text}, stride unknown"
        return text if self.stride == (1, 1) else f"{text}, stride {'x'.join(map(str, dict.fromkeys(self.stride)))}"

    @property
    def shape(self) -> str:
        """The shape of the output as text, height x width x channels; unknown sizes are left out."""
        channels = "?" if self.output_channels is None else str(self.output_channels)
        if self.height and self.width:
            return f"{self.height}x{self.width}x{channels}"
        return f"{self.positions:,} positions x {channels}" if self.positions else "unknown"


@dataclass(frozen=True)
class MemoryBuffer:
    """A part of the activation memory of a tile, and the steps during which it holds a result.

    Attributes:
        operator: the index of the operator that writes the result; -1 for an input.
        start: the first address over all tiles, in bytes.
        stop: the address after the last one over all tiles, in bytes.
        steps: the step that writes the result, and the step after the last one that reads it.
    """

    operator: int
    start: int
    stop: int
    steps: tuple[int, int]


@dataclass(frozen=True)
class ExplainedProgram:
    """One executable.

    Attributes:
        part: the number of the executable's custom operator in the file.
        type: the executable's type, as in the file.
        figures: sizes in bytes, by name.
        inputs: name, shape and bytes of each input.
        outputs: name, shape and bytes of each output.
        bundles: the number of instruction bundles, of 16 bytes each.
        understood_bundles: the number of bundles of instructions whose structure is known.
        instructions: the number of instructions for tiles.
        operations: the number of instructions for tiles, by what they do.
        scalar_loops: the jumps of the scalar core, which then computes something itself that is not recovered.
        step_cycles: the cycles of each step's slowest tile.
        live_bytes: by step, the bytes of a tile's memory that hold results.
        memory_bytes: the activation memory of a tile that the file claims.
        coverage: for each input, each output and the parameters: the name, the bytes, and the bytes in DMA hints.
        hints_are_complete: whether the file says that its DMA hints are all transfers.
        parameters: the parameters in the order of their use.
    """

    part: int
    type: str
    figures: dict[str, int]
    inputs: tuple[tuple[str, tuple[int, ...], int], ...]
    outputs: tuple[tuple[str, tuple[int, ...], int], ...]
    bundles: int
    understood_bundles: int
    instructions: int
    operations: dict[str, int]
    scalar_loops: int
    step_cycles: tuple[int, ...]
    step_operators: tuple[int, ...]
    live_bytes: tuple[int, ...]
    memory_bytes: int
    transfers: tuple[ExplainedTransfer, ...]
    coverage: tuple[tuple[str, int, int], ...]
    hints_are_complete: bool
    parameters: tuple[ExplainedParameters, ...]
    operators: tuple[ExplainedOperator, ...]
    buffers: tuple[MemoryBuffer, ...]


@dataclass(frozen=True)
class Explanation:
    """The explanation of a compiled model.

    Attributes:
        order: the operators of the file: those on the CPU, and the parts on the accelerator.
        limits: the limits of the explanation, one sentence each.
    """

    name: str
    order: tuple[str, ...]
    programs: tuple[ExplainedProgram, ...]
    limits: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return everything as a plain map, schema 1."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def describe(self) -> str:
        """Return a summary as text for a person."""
        lines = [f"order              {order_text(self.order)}"]
        for program in self.programs:
            lines += describe_program(program)
        lines += [f"limit              {limit}" for limit in self.limits]
        return "\n".join(lines) + "\n"


def order_text(order: Sequence[str]) -> str:
    """Return the operators of a file as text: of more than a few neighbours on the CPU, the first and their number."""
    parts = []
    for on_cpu, group in groupby(order, key=lambda name: name.endswith(CPU_MARK)):
        names = [name.removesuffix(CPU_MARK) for name in group]
        if not on_cpu:
            parts += names
            continue
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        parts.append(f"on the CPU {', '.join(names[:MAX_NAMES])}{more}")
    return "; ".join(parts)


def describe_program(program: ExplainedProgram) -> list[str]:
    """Return a summary of an executable, line by line."""
    read = f"{program.understood_bundles:,} of {program.bundles:,} bundles understood"
    lines = [f"{program.type:<18} {read}, {program.instructions:,} instructions for tiles"]
    moved = [transfer for transfer in program.transfers if transfer.kind not in ("instructions", "interrupt")]
    lines += _limited([f"  transfer         {_describe_transfer(transfer)}" for transfer in moved])
    if program.operators:
        names = Counter(operator.certainty for operator in program.operators if operator.name != "move")
        counts = ", ".join(f"{count} {certainty}" for certainty, count in names.items())
        moves = sum(operator.name == "move" for operator in program.operators)
        lines.append(f"  operators        {counts}; {moves} that only copy")
        operators = [operator for operator in program.operators if operator.name != "move"]
        lines += _limited([f"  {_describe_operator(operator)}" for operator in operators])
        lines.append(
            f"  memory           at most {max(program.live_bytes, default=0):,} bytes of results in a tile, "
            f"in {program.memory_bytes:,} that it takes"
        )
    return lines


def _limited(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LINES
    return lines if more <= 0 else [*lines[:MAX_LINES], f"  … and {more:,} more (--json and the page list all)"]


def _describe_transfer(transfer: ExplainedTransfer) -> str:
    direction = "to the host" if transfer.to_host else "to the chip"
    name = transfer.name if len(transfer.name) <= MAX_NAME else f"{transfer.name[:MAX_NAME]}…"
    return f"{transfer.size_bytes:>12,} bytes {direction}: {transfer.kind} {name}".rstrip()


def _describe_operator(operator: ExplainedOperator) -> str:
    window = f" {operator.window}" if operator.window else ""
    parameters = ""
    if operator.parameter_bytes:
        kind = "cached" if operator.is_cached else "streamed"
        parameters = f", {operator.parameter_bytes:,} bytes {kind}"
    passes = f", {operator.passes} passes" if operator.passes > 1 else ""
    return f"{operator.index:>4} {operator.name}{window} -> {operator.shape}{parameters}{passes} ({operator.certainty})"
