"""Draw the flowcharts of the manuals as SVG, so that a page needs no script to show them.

GitHub draws a block ```mermaid by itself. Here the directive `mermaid` draws the same lines `a --> b`: nodes in rows,
each below all nodes that point to it.
"""

from __future__ import annotations

import re
from html import escape

from docutils import nodes
from docutils.parsers.rst import Directive

Edges = list[tuple[str, str]]
EDGE = re.compile(r"([\w.]+) --> ([\w.]+)")
WIDTH, ROW, HEIGHT, GAP = 760, 74, 26, 14
LETTER = 7.3
"""The approximate width of a letter, in pixels."""
SWEEPS = 20
"""Passes that reorder the nodes of the rows."""


class Flowchart(Directive):
    """The directive `mermaid`, for lines `a --> b`."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the drawing as HTML."""
        edges: Edges = [match.groups() for line in self.content if (match := EDGE.search(line))]  # type: ignore[misc]
        return [nodes.raw("", svg(edges), format="html")]


def rows(edges: Edges) -> list[list[str]]:
    """Return the nodes in rows: each node is one row below the lowest node that points to it."""
    depth = {name: 0 for edge in edges for name in edge}
    for _ in depth:
        for start, end in edges:
            depth[end] = max(depth[end], depth[start] + 1)
    result: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for name in sorted(depth):
        result[depth[name]].append(name)
    return _untangled(result, edges)


def _untangled(table: list[list[str]], edges: Edges) -> list[list[str]]:
    """Order each row by the mean position of its neighbours, so that fewer lines cross."""
    for _ in range(SWEEPS):
        places = {name: (index + 0.5) / len(row) for row in table for index, name in enumerate(row)}
        for row in table:
            row.sort(key=lambda name: _mean_place(name, edges, places))
    return table


def _mean_place(name: str, edges: Edges, places: dict[str, float]) -> float:
    neighbours = [places[end] for start, end in edges if start == name]
    neighbours += [places[start] for start, end in edges if end == name]
    return (sum(neighbours) + places[name]) / (len(neighbours) + 1)


def svg(edges: Edges) -> str:
    """Return the drawing as SVG."""
    table = rows(edges)
    centres: dict[str, tuple[float, float]] = {}
    for line, row in enumerate(table):
        widths = [_width(name) for name in row]
        room = WIDTH - sum(widths) - GAP * (len(row) - 1)
        left = max(room / 2, 0)
        for name, width in zip(row, widths, strict=True):
            centres[name] = (left + width / 2, line * ROW + HEIGHT / 2 + 2)
            left += width + GAP + room / (2 * len(row)) * (len(row) > 1)
    shift = _shift(centres)
    centres = {name: (x + shift, y) for name, (x, y) in centres.items()}
    summary = escape("; ".join(f"{start} imports {end}" for start, end in edges))
    lines = [
        f'<svg viewBox="0 0 {WIDTH} {len(table) * ROW}" role="img" style="max-width:100%">',
        f"<title>Packages and their imports</title><desc>{summary}</desc>",
        '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
        '<path d="M0,0L6,3L0,6z" fill="currentColor"/></marker></defs>',
        *(_line(centres[start], centres[end]) for start, end in edges),
        *(_box(name, *centre) for name, centre in centres.items()),
        "</svg>",
    ]
    return "\n".join(lines)


def _shift(centres: dict[str, tuple[float, float]]) -> float:
    """Return the horizontal shift that centres the drawing."""
    left = min(x - _width(name) / 2 for name, (x, _) in centres.items())
    right = max(x + _width(name) / 2 for name, (x, _) in centres.items())
    return (WIDTH - left - right) / 2


def _width(name: str) -> float:
    return len(name) * LETTER + 16


def _line(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    y1, y2 = y1 + HEIGHT / 2, y2 - HEIGHT / 2
    bend = (y2 - y1) / 2
    path = f"M{x1:.0f},{y1:.0f}C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} {x2:.0f},{y2 - 1:.0f}"
    return f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity="0.45" marker-end="url(#tip)"/>'


def _box(name: str, x: float, y: float) -> str:
    width = _width(name)
    return (
        f'<rect x="{x - width / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{width:.0f}" height="{HEIGHT}" rx="4" '
        'fill="var(--color-background-secondary)" stroke="currentColor" stroke-opacity="0.6"/>'
        f'<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle" font-size="12" fill="currentColor">'
        f"{escape(name)}</text>"
    )
