"""graph.html: the operators of a .tflite file as a graph, coloured by where they run, with the reasons.

One page that needs nothing else, neither a server nor a script. It is scrolled, and scaled by style rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compress.model.tflite.graph import NONE, Graph, Tensor
from compress.report import html, svg
from compress.report.blocks import Block, Cell, Section, Table, Text, joined
from compress.report.layered_layout import Edge, Layout, Point, layout
from compress.report.record import OperatorRecord
from compress.report.wording import MAX_PROSE, TIMES, count, number, sentence, shorten

GRAPH_FILE = "graph.html"
"""The name of the page in the folder of a run."""
MOST_DRAWN = 1500
"""Of more operators there is the table alone."""
WIDTH = 236.0
HEIGHT = 48.0
END_HEIGHT = 30.0
"""The height of the boxes of inputs and outputs."""
MARGIN = 12.0
MOST_ENDS = 64
"""Inputs or outputs that are drawn."""
ZOOMS = (25, 50, 75, 100, 150)
KINDS = {"tpu": "tpu", "cpu": "cpu"}
"""The CSS classes of placements; others are unknown."""


@dataclass(frozen=True)
class GraphSubject:
    """The subject of the page.

    Attributes:
        name: the name of the model.
        target: the name of the target.
        summary: one line about the placement.
        failure: the reason why the compiler rejects the model, or None.
        origin: "predicted", or "measured" if the placement was read from a compiled file.
    """

    name: str
    target: str
    summary: str
    failure: str | None = None
    origin: str = "predicted"


@dataclass(frozen=True)
class _Node:
    """A box of the drawing: an operator, an input or an output."""

    lines: tuple[str, ...]
    kind: str
    tip: str
    ident: str = ""
    tag: str = ""

    @property
    def size(self) -> tuple[float, float]:
        return (WIDTH, HEIGHT if self.ident else END_HEIGHT)


def page(graph: Graph, operators: Sequence[OperatorRecord], subject: GraphSubject) -> str:
    """Return the page.

    Args:
        graph: the model.
        operators: its operators with their placement, in the same order.
        subject: what the page is about.

    Raises:
        ValueError: the operators are not those of the model.
    """
    if [operator.op for operator in operators] != [operator.name for operator in graph.operators]:
        raise ValueError("the placement is that of another model")
    on_cpu = [operator for operator in operators if not operator.on_tpu]
    drawing, width = "", 0.0
    if len(operators) <= MOST_DRAWN:
        drawing, width = draw(graph, operators, subject)
    return html.render(
        "graph.html.j2",
        subject=subject,
        name=shorten(subject.name, 100),
        summary=sentence(f"{shorten(subject.summary, MAX_PROSE)} ({subject.origin})"),
        failure="" if subject.failure is None else sentence(shorten(subject.failure, MAX_PROSE)),
        drawing=drawing,
        width=f"{width:.0f}",
        zooms=ZOOMS,
        most=MOST_DRAWN,
        legend=_legend(operators),
        sections=[
            Section("Operators on the CPU", _listed(on_cpu, "Every operator runs on the Edge TPU."), "on-the-cpu"),
            Section("All operators", _listed(operators, "The model has no operators."), "all-operators"),
        ],
    )


def _legend(operators: Sequence[OperatorRecord]) -> list[tuple[str, str, str]]:
    """Return class, name and count of the placements that occur."""
    rows = []
    for kind, name in (("tpu", "Edge TPU"), ("cpu", "CPU"), ("unknown", "unknown")):
        members = [operator for operator in operators if KINDS.get(operator.placement, "unknown") == kind]
        if members:
            macs = sum(operator.macs for operator in members)
            rows.append((kind, name, f"{count(len(members), 'operator')}, {number(macs, 'MACs')} MACs"))
    return rows


def _listed(operators: Sequence[OperatorRecord], nothing: str) -> list[Block]:
    rows = [_row(operator) for operator in operators]
    return [Table(("Operator", "Runs on", "MACs", "Reason"), rows)] if rows else [Text(nothing)]


def _row(operator: OperatorRecord) -> tuple[Cell | str, ...]:
    head = Cell(f"{operator.index} {shorten(operator.op)}", shorten(operator.output, MAX_PROSE))
    reason = Cell(
        shorten(operator.status, MAX_PROSE) or "no rule applies",
        shorten(joined(" ", operator.reason, operator.advice), 2 * MAX_PROSE),
    )
    return (head, operator.processor, f"{operator.macs:,}", reason)


def draw(graph: Graph, operators: Sequence[OperatorRecord], subject: GraphSubject) -> tuple[str, float]:
    """Return the graph as SVG, and its width."""
    nodes, edges = _nodes_and_edges(graph, operators)
    placed = layout([node.size for node in nodes], edges)
    size = (placed.width + 2 * MARGIN, placed.height + 2 * MARGIN)
    parts = [
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" class="cpu"/><rect width="2" height="6" class="stripe"/></pattern></defs>',
        f'<g transform="translate({svg.n(MARGIN)} {svg.n(MARGIN)})">',
        *(_edge(route) for route in placed.routes.values()),
        *(_box(node, placed, index) for index, node in enumerate(nodes)),
        "</g>",
    ]
    description = f"{subject.summary}. The tables below have every operator with its placement and the reason."
    return svg.svg(
        "operators", size, "The operators of the model, from its inputs to its outputs", description, parts
    ), size[0]


def _nodes_and_edges(graph: Graph, operators: Sequence[OperatorRecord]) -> tuple[list[_Node], list[Edge]]:
    """Return the operators, then inputs and outputs of the model; and the pairs that share a tensor."""
    nodes = [
        _operator(operator, graph.output_tensors(source))
        for operator, source in zip(operators, graph.operators, strict=True)
    ]
    producers = {tensor: operator.index for tensor, operator in graph.producer.items()}
    for tensor in dict.fromkeys(graph.inputs[:MOST_ENDS]):
        if tensor not in producers:
            producers[tensor] = len(nodes)
            nodes.append(_end("input", graph.tensors[tensor]))
    edges = [
        (producers[tensor], operator.index)
        for operator in graph.operators
        for tensor in operator.inputs
        if tensor != NONE and tensor in producers and producers[tensor] != operator.index
    ]
    for tensor in dict.fromkeys(graph.outputs[:MOST_ENDS]):
        if tensor in producers:
            edges.append((producers[tensor], len(nodes)))
            nodes.append(_end("output", graph.tensors[tensor]))
    return nodes, [(first, last) for first, last in edges if _is_forward(first, last, len(graph.operators))]


def _is_forward(first: int, last: int, operators: int) -> bool:
    """Whether an edge follows the order of execution: a damaged file may read a tensor before it is written."""
    return first >= operators or last >= operators or first < last


def _operator(operator: OperatorRecord, outputs: Sequence[Tensor]) -> _Node:
    shape = _shape(outputs[0]) if outputs else "no output"
    if len(outputs) > 1:
        shape += f" and {len(outputs) - 1} more"
    kind = KINDS.get(operator.placement, "unknown")
    reason = joined(" ", operator.status, operator.reason, operator.advice)
    tip = joined(
        "; ",
        f"{operator.index} {operator.op}: {operator.processor}",
        reason,
        f"{operator.macs:,} MACs",
        operator.output,
    )
    return _Node((f"{operator.index} {operator.op}", shape), kind, tip, f"op-{operator.index}", operator.processor)


def _end(what: str, tensor: Tensor) -> _Node:
    return _Node((f"{what} {_shape(tensor)}",), "end", f"{what} {tensor.name}")


def _shape(tensor: Tensor) -> str:
    shape = TIMES.join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {tensor.dtype.lower()}"


def _edge(route: Sequence[Point]) -> str:
    """Return an edge as a smooth line that begins and ends vertically."""
    (x, y), *rest = route
    path = [f"M{svg.n(x)} {svg.n(y)}"]
    for to_x, to_y in rest:
        if abs(to_x - x) < 0.05:
            path.append(f"V{svg.n(to_y)}")
        else:
            middle = svg.n((y + to_y) / 2)
            path.append(f"C{svg.n(x)} {middle} {svg.n(to_x)} {middle} {svg.n(to_x)} {svg.n(to_y)}")
        x, y = to_x, to_y
    return f'<path d="{"".join(path)}" class="edge"/>'


def _box(node: _Node, placed: Layout, index: int) -> str:
    """Return a box: a bar in the colour of the placement, the operator, its output, and the placement as text."""
    width, height = node.size
    x, y = placed.centres[index]
    left = x - width / 2
    top = y - height / 2
    ident = f' id="{node.ident}"' if node.ident else ""
    corner = 4 if node.ident else END_HEIGHT / 2
    frame = f'x="{svg.n(left)}" y="{svg.n(top)}" width="{svg.n(width)}" height="{svg.n(height)}" rx="{svg.n(corner)}"'
    parts = [f'<g class="node {node.kind}"{ident}>{svg.tip(node.tip)}<rect {frame} class="frame"/>']
    if not node.ident:
        parts.append(svg.text(x, y + 4, node.lines[0], "small", "middle", width - 16))
        return "".join([*parts, "</g>"])
    fill = 'fill="url(#hatch)"' if node.kind == "cpu" else f'class="{node.kind}"'
    bar = f'x="{svg.n(left)}" y="{svg.n(top)}" width="9" height="{svg.n(height)}" rx="2"'
    parts += [
        f"<rect {bar} {fill}/>",
        svg.text(left + 17, top + 20, node.lines[0], "op", room=width - 26),
        svg.text(left + 17, top + 38, node.lines[1], "small", room=width - 64),
        svg.text(left + width - 8, top + 38, node.tag, "small tag", "end"),
    ]
    return "".join([*parts, "</g>"])
