"""A drawing of a program over time: transfers, operators and parameters in bands, and the memory below them.

The horizontal axis is the steps of the program, as wide as they take. A result in memory is a rectangle: its height is
its addresses, and its width the steps during which it is needed. Colours and patterns are CSS classes of the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from compress.report import svg

WIDTH = 980  # px; nearly the width of the page (page.css)
LEFT, RIGHT = 128, 972
MAX_MARKS = 4000
"""Of more rectangles, the drawing is left out."""
_LANE, _GAP = 24, 8
_MEMORY = 260  # px, chosen
_SMALLEST_SHARE = 0.0015
"""The least width of a step, as a share of the whole."""
_TALLEST = 20  # px; less than _LANE, so that a gap is above


class Mark(NamedTuple):
    """A rectangle in a band.

    Attributes:
        first: the step that it starts with.
        stop: the step after its last one.
        style: its CSS class.
        tip: what it is.
        height: as a share of the band's height.
    """

    first: int
    stop: int
    style: str
    tip: str
    height: float = 1.0


class Band(NamedTuple):
    """A row of rectangles with a name."""

    name: str
    marks: Sequence[Mark]


class Occupied(NamedTuple):
    """A result in memory: addresses, and the steps during which it is needed."""

    start: int
    stop: int
    first: int
    last: int
    style: str
    tip: str


def program_chart(
    ident: str, weights: Sequence[int], bands: Sequence[Band], occupied: Sequence[Occupied], memory_bytes: int
) -> str:
    """Draw a program; "" if it has no steps, or too many.

    Args:
        ident: the identifier of the drawing in its page.
        weights: the duration of each step.
        bands: the rows above the memory.
        occupied: the results in memory.
        memory_bytes: the memory that the program takes.
    """
    count = sum(len(band.marks) for band in bands) + len(occupied)
    if not weights or count > MAX_MARKS:
        return ""
    edges = _edges(weights)
    parts: list[str] = []
    top = 6.0
    for band in bands:
        parts += _band(band, edges, top)
        top += _LANE + _GAP
    height = max([memory_bytes, *(region.stop for region in occupied)], default=1) or 1
    axis = svg.Axis(0, height, top + _MEMORY, top + 8)
    parts += _memory(occupied, edges, axis, memory_bytes)
    parts.append(svg.text(LEFT, top + _MEMORY + 18, f"{len(weights)} steps, as wide as their cycles", "tick"))
    description = (
        f"{len(weights)} steps from left to right; {', '.join(band.name for band in bands)}; below them the memory of "
        f"a tile, {memory_bytes:,} bytes, with {len(occupied)} results"
    )
    return svg.svg(ident, (WIDTH, top + _MEMORY + 26), "The program over time", description, parts)


def _edges(weights: Sequence[int]) -> list[float]:
    """Return the left edge of each step, and the right edge of the last."""
    total = sum(weights) or 1
    shares = [max(weight / total, _SMALLEST_SHARE) for weight in weights]
    total_share = sum(shares)
    return [LEFT + (RIGHT - LEFT) * share / total_share for share in accumulate(shares, initial=0.0)]


def _rectangle(corners: tuple[float, float, float, float], style: str, tip: str) -> str:
    left, top, right, bottom = corners
    width, height = max(right - left, 0.6), max(bottom - top, 0.6)
    return (
        f'<rect x="{svg.n(left)}" y="{svg.n(top)}" width="{svg.n(width)}" height="{svg.n(height)}" class="{style}">'
        f"{svg.tip(tip)}</rect>"
    )


def _band(band: Band, edges: Sequence[float], top: float) -> Iterator[str]:
    yield svg.text(LEFT - 8, top + 16, band.name, "name", "end", LEFT - 12)
    yield svg.line(LEFT, top + _LANE, RIGHT, top + _LANE, "grid")
    for mark in band.marks:
        bottom = top + _LANE
        tall = max(mark.height * _TALLEST, 2)
        left, right = edges[min(mark.first, len(edges) - 1)], edges[min(mark.stop, len(edges) - 1)]
        if right - left < _NARROW and mark.first >= len(edges) - 1:
            left = right - _NARROW
        yield _rectangle((left, bottom - tall, max(right, left + _NARROW), bottom), mark.style, mark.tip)


_NARROW = 2.0
"""The least width of a mark."""


def _memory(occupied: Sequence[Occupied], edges: Sequence[float], axis: svg.Axis, memory_bytes: int) -> Iterator[str]:
    yield svg.text(LEFT - 8, axis.end + 12, "memory of a tile", "name", "end", LEFT - 12)
    for tick in axis.ticks(4, 1024):
        yield svg.level(axis.at(tick), LEFT, RIGHT, f"{tick / 1024:g} KiB")
    for region in occupied:
        corners = (
            edges[min(region.first, len(edges) - 1)],
            axis.at(region.stop),
            edges[min(region.last, len(edges) - 1)],
            axis.at(region.start),
        )
        yield _rectangle(corners, region.style, region.tip)
    yield svg.line(LEFT, axis.at(memory_bytes), RIGHT, axis.at(memory_bytes), "limit")
