"""The page of `inspect --explain`: what a compiled model does, with a picture of its program over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from compress.core.resources import __version__
from compress.report import html
from compress.report.blocks import Block, Cell, Details, Figure, Pairs, Section, Table, Text, missing, table
from compress.report.program_chart import Band, Mark, Occupied, program_chart
from compress.report.wording import shorten
from darwinn.explanation import (
    ExplainedOperator,
    ExplainedProgram,
    ExplainedTransfer,
    Explanation,
    order_text,
)

Row = tuple[Cell | str, ...]
_MAX_NAME = 80
"""Letters of a file name in the title: it then fits one line of the page."""
_MAX_ROWS = 2000
"""Of longer tables, the first rows."""
_MOVE = "move"
_CAPTION = (
    "From left to right the steps of one inference. Transfers are at the step before which they start. The rectangles "
    "in the memory are results: their height is their addresses, over all tiles, and they end with the last step that "
    "reads them. Their colours alternate; grey ones were written by no step. The dashed line is the memory that the "
    "file claims. “Cached” and “streamed” are parameters: the higher a mark, the more bytes."
)


def page(explanation: Explanation) -> str:
    """Return the page."""
    return html.render(
        "explanation.html.j2",
        name=shorten(explanation.name, _MAX_NAME),
        lines=headlines(explanation),
        sections=sections(explanation),
        coralline=__version__,
    )


def headlines(explanation: Explanation) -> list[str]:
    """Return the summary of what was recovered."""
    operators = [
        operator for program in explanation.programs for operator in program.operators if operator.name != _MOVE
    ]
    certain = Counter(operator.certainty for operator in operators)
    counts = ", ".join(f"{count} {certainty}" for certainty, count in certain.items())
    understood = sum(program.understood_bundles for program in explanation.programs)
    bundles = sum(program.bundles for program in explanation.programs)
    recovered = f"{len(operators)} operators recovered ({counts or 'none'})"
    return [f"{recovered}; {understood:,} of {bundles:,} instruction bundles understood."]


def sections(explanation: Explanation) -> list[Section]:
    """Return the sections, in order."""
    programs = explanation.programs
    return [
        Section("Program over time", list(_pictures(programs))),
        Section("Order and executables", [Text(order_text(explanation.order)), *_executables(programs)]),
        Section("Operators", list(_operators(programs))),
        Section("Transfers", list(_transfers(programs))),
        Section("Parameters", list(_parameters(programs))),
        Section("Limits", [Text(limit) for limit in explanation.limits]),
    ]


def _pictures(programs: Sequence[ExplainedProgram]) -> Iterator[Block]:
    for number, program in enumerate(programs):
        if program.type == "PARAMETER_CACHING":
            continue
        drawing = program_chart(
            f"program-{number}", program.step_cycles, _bands(program), _occupied(program), program.memory_bytes
        )
        if drawing:
            title = f"Part {program.part}, {program.type}."
            yield Figure(drawing, title, _CAPTION, is_wide=True, see="Operators")
        else:
            yield missing(f"part {program.part} has no steps that are understood, or too many for a drawing")


def _bands(program: ExplainedProgram) -> list[Band]:
    steps = len(program.step_cycles)
    to_chip = [
        transfer
        for transfer in program.transfers
        if not transfer.to_host and transfer.kind not in ("instructions", "parameters")
    ]
    to_host = [transfer for transfer in program.transfers if transfer.to_host and transfer.kind != "interrupt"]
    return [
        Band("input", _transfer_marks(to_chip, "in", steps)),
        Band("output", _transfer_marks(to_host, "out", steps)),
        Band("cached", list(_parameter_marks(program, is_cached=True))),
        Band("streamed", list(_parameter_marks(program, is_cached=False))),
        Band("conv, dense", _operator_marks(program, "weights")),
        Band("depthwise", _operator_marks(program, "depthwise")),
        Band("other operators", _operator_marks(program, "other")),
        Band("copies", _operator_marks(program, "move")),
    ]


def _transfer_marks(transfers: Sequence[ExplainedTransfer], style: str, steps: int) -> list[Mark]:
    marks = []
    for transfer in transfers:
        step = steps if transfer.step is None else transfer.step
        marks.append(Mark(step, step, style, f"{transfer.kind} {transfer.name}: {transfer.size_bytes:,} bytes"))
    return marks


def _parameter_marks(program: ExplainedProgram, *, is_cached: bool) -> Iterator[Mark]:
    largest = max((operator.parameter_bytes for operator in program.operators), default=0) or 1
    for operator in program.operators:
        if operator.parameter_bytes and operator.is_cached is is_cached:
            kind = "cached" if operator.is_cached else "streamed"
            tip = f"{operator.index} {operator.name}: {operator.parameter_bytes:,} bytes of parameters, {kind}"
            for first, stop in _runs(program, operator):
                yield Mark(first, stop, kind, tip, (operator.parameter_bytes / largest) ** 0.5)


def style_of(operator: ExplainedOperator) -> str:
    """Return the band of an operator, which is also its CSS class."""
    if operator.name == _MOVE:
        return "move"
    if operator.name.startswith("DEPTHWISE"):
        return "depthwise"
    return "weights" if operator.name.startswith(("CONV_2D", "FULLY")) else "other"


def _operator_marks(program: ExplainedProgram, style: str) -> list[Mark]:
    return [
        Mark(first, stop, style, _tip(operator))
        for operator in program.operators
        if style_of(operator) == style
        for first, stop in _runs(program, operator)
    ]


def _runs(program: ExplainedProgram, operator: ExplainedOperator) -> list[tuple[int, int]]:
    """Return the neighbouring steps of an operator: several for one that runs in passes."""
    runs: list[tuple[int, int]] = []
    for step in range(*operator.steps):
        if program.step_operators[step] != operator.index:
            continue
        if runs and runs[-1][1] == step:
            runs[-1] = (runs[-1][0], step + 1)
        else:
            runs.append((step, step + 1))
    return runs


def _tip(operator: ExplainedOperator) -> str:
    return f"{operator.index} {operator.name} {operator.window} -> {operator.shape}, {operator.cycles:,} cycles"


def _occupied(program: ExplainedProgram) -> list[Occupied]:
    occupied = []
    for buffer in program.buffers:
        writer = "an input" if buffer.operator < 0 else f"{buffer.operator} {program.operators[buffer.operator].name}"
        style = "fed" if buffer.operator < 0 else ("even", "odd")[buffer.operator % 2]
        tip = f"{writer}: bytes {buffer.start:,} to {buffer.stop:,}, steps {buffer.steps[0]} to {buffer.steps[1] - 1}"
        occupied.append(Occupied(max(buffer.start, 0), buffer.stop, *buffer.steps, style, tip))
    return occupied


def _executables(programs: Sequence[ExplainedProgram]) -> Iterator[Block]:
    for program in programs:
        yield Text(f"Part {program.part}, {program.type}: {program.instructions:,} instructions for tiles.")
        rows = [(name, f"{size:,} bytes") for name, size in program.figures.items()]
        rows += [
            (f"input {shorten(name, 60)}", f"{_shape(shape)}, {size:,} bytes") for name, shape, size in program.inputs
        ]
        rows += [
            (f"output {shorten(name, 60)}", f"{_shape(shape)}, {size:,} bytes") for name, shape, size in program.outputs
        ]
        if program.live_bytes:
            rows.append(("largest sum of results in a tile", f"{max(program.live_bytes):,} bytes"))
        yield Pairs(rows)
        counts: list[Row] = [(name, f"{count:,}") for name, count in program.operations.items()]
        if counts:
            yield Details("Instructions for tiles", [Table(("What they do", "Number"), counts)])


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _operators(programs: Sequence[ExplainedProgram]) -> Iterator[Block]:
    head = ("Operator", "Output", "Window", "Parameters", "Cycles", "Reads", "Certainty")
    for program in programs:
        if program.type == "PARAMETER_CACHING":
            continue
        rows = [_operator_row(operator) for operator in program.operators if operator.name != _MOVE][:_MAX_ROWS]
        yield from table(head, rows, f"Part {program.part}. Channels are rounded up to a multiple of 4.")
        moves = [_operator_row(operator) for operator in program.operators if operator.name == _MOVE][:_MAX_ROWS]
        if moves:
            yield Details(f"{len(moves)} copies", table(head, moves))
        if not rows:
            yield missing(f"part {program.part} has no operators that are understood")


def _operator_row(operator: ExplainedOperator) -> Row:
    kind = "" if operator.is_cached is None else "cached" if operator.is_cached else "streamed"
    passes = f"{operator.passes} passes" if operator.passes > 1 else ""
    reads = ", ".join("input or unknown" if index < 0 else str(index) for index in operator.reads)
    return (
        f"{operator.index} {operator.name}",
        Cell(operator.shape, f"{operator.tiles} tiles"),
        operator.window or "—",
        Cell(f"{operator.parameter_bytes:,} bytes" if operator.parameter_bytes else "—", kind),
        Cell(f"{operator.cycles:,}", passes),
        reads or "unknown",
        operator.certainty,
    )


def _transfers(programs: Sequence[ExplainedProgram]) -> Iterator[Block]:
    for program in programs:
        rows: list[Row] = []
        for transfer in program.transfers[:_MAX_ROWS]:
            when = "before the program" if transfer.kind == "instructions" else "not in the program"
            if transfer.step is not None:
                when = f"after step {transfer.step}" if transfer.step else "before the first step"
            source = "program and DMA hints" if transfer.is_announced and transfer.step is not None else "program only"
            if transfer.step is None:
                source = "DMA hints"
            rows.append(
                (
                    Cell(transfer.kind, shorten(transfer.name, 100)),
                    f"{transfer.size_bytes:,}",
                    "to the host" if transfer.to_host else "to the chip",
                    when,
                    source,
                )
            )
        yield from table(
            ("Transfer", "Bytes", "Direction", "When", "Source"), rows, f"Part {program.part}, {program.type}"
        )
        yield from _coverage(program)


def _coverage(program: ExplainedProgram) -> Iterator[Block]:
    different = [row for row in program.coverage if row[1] != row[2]]
    if not different:
        yield Text("The DMA hints transfer every byte of the inputs, the outputs and the parameters.")
        return
    for name, size, covered in different:
        yield Text(f"{shorten(name, 100)}: the DMA hints transfer {covered:,} of {size:,} bytes.")
    if not program.hints_are_complete:
        yield Text("The file says that its DMA hints are not all transfers.")


def _parameters(programs: Sequence[ExplainedProgram]) -> Iterator[Block]:
    for program in programs:
        rows: list[Row] = []
        for region in program.parameters[:_MAX_ROWS]:
            tiles = "; ".join(",".join(map(str, part)) for part in region.tiles[:32])
            owner = "not known"
            if region.operator is not None:
                is_known = region.operator < len(program.operators)
                owner = f"{region.operator} {program.operators[region.operator].name if is_known else ''}"
            kind = "cached" if region.is_cached else "streamed"
            rows.append(
                (f"{region.offset:,}", f"{region.size_bytes:,}", kind, tiles or "—", Cell(owner, region.layout))
            )
        if rows and program.operators:
            head = ("Offset", "Bytes", "Kind", "Tiles of the parts", "Operator")
            yield Details(f"Part {program.part}: {len(rows)} regions", [Table(head, rows)], is_open=len(rows) <= 12)
    yield Text(
        "A region is what a program loads together. A part of it is stored in the tiles of its numbers, 0 to 15."
    )
