"""The section on the placement of operators, and the placement as a file for Model Explorer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from compress.model.tflite.graph import Graph
from compress.report import charts
from compress.report.blocks import (
    Block,
    Cell,
    Columns,
    Details,
    Figure,
    FileLink,
    Heading,
    Section,
    Table,
    Text,
    joined,
    missing,
    table,
)
from compress.report.wording import MAX_PROSE, absence, count, cut, number, sentence, shorten, span
from compress.results.placement import OperatorPlacement, PlacementRecord
from compress.results.run import RunRecord

NODE_DATA_FILE = "model_explorer.json"
"""The name of the file in the folder of a run."""
COLOURS = {"tpu": "#9fd8de", "cpu": "#f2b766"}
UNKNOWN = "#d0d5db"
MAX_ON_CPU = 10
MAX_OPEN = 8
"""The table of all operators is folded if it is longer; the operators on the CPU are then listed first."""
EXPECTED_CAPTION = (
    "Predicted latency at the highest clock, from the shapes of the layers. The values for the CPU alone are rough."
)


def section(record: RunRecord) -> Section:
    """Return the section."""
    placement = record.placement
    if placement is None:
        return Section("Where operators run", [missing(absence(record))])
    side_by_side = Columns([[_figure(placement)], [*_compilation(placement)]])
    rows = [
        (
            shorten(prediction.summary, 100),
            number(prediction.latency_ms, "ms"),
            span(prediction.low_ms, prediction.high_ms, "ms"),
            number(prediction.cpu_alone_ms, "ms"),
        )
        for prediction in placement.expected_latency.values()
    ]
    expected = table(("Host", "Median", "Interval", "CPU alone"), rows, EXPECTED_CAPTION)
    before = _lookup(placement.lookup_table)
    text = "the placement for Model Explorer, which draws the model as a graph in these colours."
    graph = [FileLink(NODE_DATA_FILE, text)] if NODE_DATA_FILE in record.outputs else []
    return Section("Where operators run", [side_by_side, *before, *expected, *_operators(placement), *graph])


def _lookup(table: tuple[int, ...] | None) -> Iterator[Block]:
    """Yield what the CPU does before the first operator."""
    if table is not None:
        yield Text(
            f"Before the first operator, the CPU looks up the input in a table of {table[0]:,} rows of {table[1]:,} "
            "values. The latencies do not include that."
        )


def _figure(placement: PlacementRecord) -> Block:
    ops = placement.ops
    if not ops:
        return missing("no operators were recorded")
    on_tpu = sum(op.on_tpu for op in ops)
    macs = {processor: placement.macs.get(processor, 0) for processor in ("tpu", "cpu")}
    caption = (
        f"Edge TPU: {count(on_tpu, 'operator')}, {number(macs['tpu'], 'MACs')} MACs. "
        f"CPU: {count(len(ops) - on_tpu, 'operator')}, {number(macs['cpu'], 'MACs')} MACs. "
        "MACs are counted in the file."
    )
    if total := sum(macs.values()):
        caption += f" The Edge TPU runs {number(macs['tpu'] / total, 'fraction')} of all MACs."
    if len(ops) > charts.MAX_SEGMENTS:
        caption += " Neighbours with the same placement are drawn as one."
    title = f"Placement of the operators, {placement.origin}."
    return Figure(charts.operator_strip(ops), title, caption, see=_all_operators(len(ops)))


def _all_operators(count: int) -> str:
    """Return the title of the table of all operators."""
    return f"All {count} operators"


def _compilation(placement: PlacementRecord) -> Iterator[Block]:
    """Yield the summary, and whether the model was compiled or is expected to compile."""
    yield Text(f"{shorten(placement.summary, MAX_PROSE)} ({placement.origin}).")
    failure = shorten(placement.failure or "reason not recorded", MAX_PROSE)
    if placement.origin == "measured":
        yield Text(
            "✓ Compiled with the vendor's compiler. The placement is read from the compiled file (measured).", "good"
        )
        return
    if placement.compiled:
        yield Text(f"✕ The vendor's compiler failed: {failure}", "bad")
    else:
        reason = shorten(placement.reason, MAX_PROSE) or "not compiled: reason not recorded"
        yield Text(f"○ {sentence(reason)}", "unsure")
    yield Text("The placement is predicted from the rules of the compiler.")
    if placement.compiled:
        return
    if placement.compiles is False:
        yield Text(f"✕ The model is not expected to compile (predicted): {failure}", "bad")
    elif placement.compiles:
        yield Text("The model is expected to compile (predicted).")
    else:
        yield Text("It is not known if the model compiles.")
    if placement.how_to_compile:
        yield Heading("How to compile")
        lines = cut(placement.how_to_compile).splitlines()
        yield from (Text(line) for line in lines if line.strip())


def _operators(placement: PlacementRecord) -> Iterator[Block]:
    """Yield the first operators on the CPU, and all operators."""
    if not placement.ops:
        return
    on_cpu = [op for op in placement.ops if not op.on_tpu]
    if on_cpu:
        yield Heading("Operators on the CPU")
        yield _operator_table(on_cpu[:MAX_ON_CPU], placement)
    if len(on_cpu) > MAX_ON_CPU:
        yield Text(f"… and {len(on_cpu) - MAX_ON_CPU} more operators on the CPU.")
    yield Details(
        _all_operators(len(placement.ops)),
        [_operator_table(placement.ops, placement)],
        is_open=len(placement.ops) <= MAX_OPEN,
    )


def _operator_table(ops: Sequence[OperatorPlacement], placement: PlacementRecord) -> Table:
    header = ("Operator", f"Runs on ({placement.origin})", "MACs (counted)", "Reason")
    return Table(header, [_operator(op) for op in ops])


def _operator(op: OperatorPlacement) -> tuple[Cell | str, ...]:
    version = "" if op.version is None else f"version {op.version}; "
    head = Cell(f"{op.index} {shorten(op.op)}", version + shorten(op.output))
    reason = Cell(
        shorten(op.status, MAX_PROSE) or "status not recorded", shorten(f"{op.reason} {op.advice}", 2 * MAX_PROSE)
    )
    return (head, Cell(op.processor, style="" if op.on_tpu else "unsure"), f"{op.macs:,}", reason)


def node_data(graph: Graph, placement: PlacementRecord) -> str:
    """Return the file with which Model Explorer colours the nodes of a .tflite file by the placement of operators.

    The format is that of custom node data in ai-edge-model-explorer 0.1.34: a node is found by the name of one of its
    output tensors, or by its identifier, which is the index of the operator in its reader of .tflite files.
    """
    used = Counter(tensor.name for tensor in graph.tensors)
    results = {}
    for operator, source in zip(placement.ops, graph.operators, strict=True):
        names = [tensor.name for tensor in graph.output_tensors(source) if tensor.name and used[tensor.name] == 1]
        key = names[0] if names else str(operator.index)
        value = operator.processor
        if not operator.on_tpu:
            value = joined(": ", value, shorten(joined(" ", operator.status, operator.reason), MAX_PROSE))
        results[key] = {"value": value, "bgColor": COLOURS.get(operator.placement, UNKNOWN)}
    content = {
        "name": f"Placement ({placement.origin})",
        "results": results,
        "showExpandedSummaryOnGroupNode": True,
        "hideInAggregatedStatsTable": True,  # sums and means of numbers
        "hideInChildrenStatsTable": True,
    }
    return json.dumps(content, indent=1) + "\n"
