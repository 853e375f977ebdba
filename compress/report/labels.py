"""The placement of labels next to the points of a chart, where they overlap least."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compress.report import svg
from compress.report.wording import clean, shorten

LINE_HEIGHT = 14
LINE = 16
"""Characters of a line."""
FRAME_WEIGHT = 40
"""Pixels outside of the frame count so much more than an overlap."""
FREE = 12
"""Overlapping pixels that do not make a label unreadable."""
DISTANCES = (26.0, 44.0, 64.0, 88.0)
"""Distances of labels that are connected with their point by a line."""
DIRECTIONS = 12


class Box(NamedTuple):
    """A rectangle in a chart."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Return the area that is in both."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0) * max(height, 0)


FRAME = Box(60, 18, 472, 288)


class _Placement(NamedTuple):
    """A position for a label: its first baseline, and the end of the text that is there."""

    x: float
    y: float
    anchor: str
    box: Box

    def penalty(self, occupied: Sequence[Box]) -> float:
        """Return how much the label overlaps, and how far it leaves the frame."""
        outside = max(0.0, FRAME.left - self.box.left) + max(0, self.box.right - FRAME.right)
        outside += max(0, FRAME.top - self.box.top) + max(0, self.box.bottom - FRAME.bottom)
        return outside * FRAME_WEIGHT + sum(self.box.overlap(other) for other in occupied)


def placed_labels(labels: Sequence[str], positions: Sequence[tuple[float, float]], bars: Sequence[Box]) -> list[str]:
    """Return each label next to its point, away from points, bars, lines and other labels.

    A label without space next to its point is further away, and a line leads from the point to it.
    """
    occupied = [*bars, *(Box(x - 7, y - 7, x + 7, y + 7) for x, y in positions), *_along_lines(positions)]
    parts = []
    for label, (x, y) in zip(labels, positions, strict=True):
        lines = _wrapped(shorten(clean(label)))
        best = min(_candidates(lines, x, y), key=lambda placement: placement.penalty(occupied))
        if best.penalty(occupied) > FREE:
            away = min(_away(lines, x, y), key=lambda placement: placement.penalty(occupied))
            if away.penalty(occupied) < best.penalty(occupied):
                best = away
                parts.append(_leader(x, y, best.box))
        occupied.append(best.box)
        for i, line in enumerate(lines):
            parts.append(svg.text(best.x, best.y + LINE_HEIGHT * i, line, "label", best.anchor))
    return parts


def _wrapped(label: str) -> list[str]:
    """Return the lines of a label; a word that is longer than a line is broken after an underscore, if it has one."""
    breakable = re.sub(rf"\S{{{LINE + 1},}}", lambda word: word[0].replace("_", "_ "), label)
    lines = textwrap.wrap(breakable, LINE, max_lines=3, placeholder="…") or ["?"]
    return [line.replace("_ ", "_") for line in lines]


def _along_lines(positions: Sequence[tuple[float, float]]) -> Iterator[Box]:
    """Yield small boxes along the lines between the points."""
    for (x1, y1), (x2, y2) in itertools.pairwise(positions):
        for i in range(1, 20):
            x = x1 + (x2 - x1) * i / 20
            y = y1 + (y2 - y1) * i / 20
            yield Box(x - 2, y - 2, x + 2, y + 2)


def _candidates(lines: Sequence[str], x: float, y: float) -> Iterator[_Placement]:
    """Yield the positions around a point: right, left, above and below, and at its corners."""
    width = max(svg.wide(line) for line in lines)
    rise = LINE_HEIGHT * (len(lines) - 1)
    offsets = [(10.0, 4 - rise / 2, "start"), (-10.0, 4 - rise / 2, "end")]
    offsets += [(0.0, -11.0 - rise, "middle"), (0.0, 20.0, "middle")]
    for corner in (-8.0 - rise, 16.0):
        offsets += [(9.0, corner, "start"), (-9.0, corner, "end")]
    for dx, dy, anchor in offsets:
        left = x + dx - {"start": 0, "middle": width / 2, "end": width}[anchor]
        yield _Placement(x + dx, y + dy, anchor, Box(left, y + dy - 11, left + width, y + dy + rise + 3))


def _away(lines: Sequence[str], x: float, y: float) -> Iterator[_Placement]:
    """Yield positions around a point that need a line to it, the nearest first."""
    width = max(svg.wide(line) for line in lines)
    rise = LINE_HEIGHT * (len(lines) - 1)
    for distance in DISTANCES:
        for step in range(DIRECTIONS):
            angle = 2 * math.pi * step / DIRECTIONS
            dx = distance * math.cos(angle)
            middle = distance * math.sin(angle)
            anchor = "middle" if abs(dx) < 1 else "start" if dx > 0 else "end"
            left = x + dx - {"start": 0, "middle": width / 2, "end": width}[anchor]
            top = y + middle - (rise + LINE_HEIGHT) / 2
            yield _Placement(x + dx, top + 11, anchor, Box(left, top, left + width, top + rise + LINE_HEIGHT))


def _leader(x: float, y: float, box: Box) -> str:
    """Return a line from a point to the nearest place of a label."""
    end_x = min(max(x, box.left), box.right)
    end_y = min(max(y, box.top), box.bottom)
    return svg.line(x, y, end_x, end_y, "leader")
