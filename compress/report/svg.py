"""Elements of drawings: axes, lines, texts, and labels that do not overlap."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from compress.report.wording import clean, shorten

WIDTH = 480  # px; two drawings fit next to each other on the page (page.css), and one on a telephone


class Axis(NamedTuple):
    """A map of values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, position = self.low, self.high, value
        if self.log:
            low, high, position = map(math.log, (low, high, value))
        return self.start + (self.end - self.start) * (position - low) / (high - low)

    def ticks(self, count: int, base: float = 1.0) -> list[float]:
        """Return about `count` round numbers of `base` along the axis."""
        low = self.low / base
        high = self.high / base
        if self.log:
            tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            ticks = [factor * 10.0**ten for ten in tens for factor in (1, 2, 5)]
        else:
            ten = 10.0 ** math.floor(math.log10((high - low) / count))
            step = next(ten * factor for factor in (1, 2, 5, 10) if ten * factor * count >= (high - low) * 0.999)
            first = math.ceil(low / step - 1e-9)
            ticks = [step * (first + i) for i in range(count + 2)]
        return [tick * base for tick in ticks if low * 0.999999 <= tick <= high * 1.000001]


def n(value: float) -> str:
    """Return a coordinate as text."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start", room: float = WIDTH) -> str:
    """Return a text of at most `room` pixels, cut in its middle if it is longer."""
    content = escape(fit(words, room))
    return f'<text x="{n(x)}" y="{n(y)}" class="{kind}" text-anchor="{anchor}">{content}</text>'


def wide(words: str, size: float = 13) -> float:
    """Return the approximate width of a text. Letters that are not Latin count as full squares."""
    narrow = sum(c in " .,:;'|()[]ijlrtf" for c in words)
    broad = sum(ord(c) >= 0x250 or c in "mwMW@%" for c in words)
    return size * (0.63 * len(words) - 0.25 * narrow + 0.37 * broad + 0.08 * sum(map(str.isupper, words)))


def fit(words: str, room: float) -> str:
    """Return a text on one line; if it is wider than about `room` pixels, its beginning and end."""
    full = shown = shorten(clean(words), 80)
    keep = len(full)
    while wide(shown) > room and keep > 1:
        keep -= 1
        shown = full[: keep - keep // 3] + "…" + full[len(full) - keep // 3 :]
    return shown


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a straight line."""
    return f'<line x1="{n(x1)}" y1="{n(y1)}" x2="{n(x2)}" y2="{n(y2)}" class="{kind}"/>'


def circle(x: float, y: float, radius: float, kind: str, tip: str = "") -> str:
    """Return a circle, with a tooltip if `tip` has one."""
    start = f'<circle cx="{n(x)}" cy="{n(y)}" r="{n(radius)}" class="{kind}"'
    return f"{start}>{tip}</circle>" if tip else f"{start}/>"


def polyline(positions: Sequence[tuple[float, float]], kind: str) -> str:
    """Return straight lines between points."""
    points = " ".join(f"{n(x)},{n(y)}" for x, y in positions)
    return f'<polyline points="{points}" class="{kind}"/>'


def level(y: float, left: float, right: float, words: str) -> str:
    """Return a horizontal line at height y, with its value on the left."""
    return line(left, y, right, y, "grid") + text(left - 6, y + 4, words, "tick", "end")


def tick(x: float, y: float, words: str) -> str:
    """Return a tick of a horizontal axis at height y, with its value below, without trailing zeros."""
    digits, space, unit = words.partition(" ")
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    return line(x, y, x, y + 4, "axis") + text(x, y + 17, digits + space + unit, "tick", "middle")


def tip(words: str) -> str:
    """Return the tooltip of an element."""
    return f"<title>{escape(shorten(clean(words), 200))}</title>"


def svg(ident: str, size: tuple[float, float], title: str, desc: str, parts: Sequence[str]) -> str:
    """Return the complete drawing, with its title and a description for screen readers."""
    width, height = (n(side) for side in size)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="{ident}-title {ident}-desc"><title id="{ident}-title">{escape(title)}</title>'
        f'<desc id="{ident}-desc">{escape(clean(desc))}</desc>\n' + "\n".join(parts) + "\n</svg>"
    )


LINE_HEIGHT = 14  # px; the font has 13
LINE = 16
"""Characters of a line."""
FRAME_WEIGHT = 40
"""Pixels outside of the frame count so much more than an overlap."""
FREE = 12
"""Overlapping pixels that do not make a label unreadable."""
DISTANCES = (26.0, 44.0, 64.0, 88.0)
"""Distances of labels that are connected with their point by a line."""
DIRECTIONS = 12  # chosen; every 30 degrees


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
                end_x = min(max(x, best.box.left), best.box.right)
                end_y = min(max(y, best.box.top), best.box.bottom)
                parts.append(line(x, y, end_x, end_y, "leader"))
        occupied.append(best.box)
        for i, words in enumerate(lines):
            parts.append(text(best.x, best.y + LINE_HEIGHT * i, words, "label", best.anchor))
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


def _placed(lines: Sequence[str], x: float, y: float, anchor: str) -> _Placement:
    """Return a label whose first baseline is at y; anchor says what of it is at x."""
    width = max(wide(line) for line in lines)
    left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
    return _Placement(x, y, anchor, Box(left, y - 11, left + width, y + LINE_HEIGHT * len(lines) - 11))


def _candidates(lines: Sequence[str], x: float, y: float) -> Iterator[_Placement]:
    """Yield the positions around a point: right, left, above and below, and at its corners."""
    rise = LINE_HEIGHT * (len(lines) - 1)
    offsets = [(10.0, 4 - rise / 2, "start"), (-10.0, 4 - rise / 2, "end")]
    offsets += [(0.0, -11.0 - rise, "middle"), (0.0, 20.0, "middle")]
    for corner in (-8.0 - rise, 16.0):
        offsets += [(9.0, corner, "start"), (-9.0, corner, "end")]
    return (_placed(lines, x + dx, y + dy, anchor) for dx, dy, anchor in offsets)


def _away(lines: Sequence[str], x: float, y: float) -> Iterator[_Placement]:
    """Yield positions around a point that need a line to it, the nearest first."""
    for distance in DISTANCES:
        for step in range(DIRECTIONS):
            angle = 2 * math.pi * step / DIRECTIONS
            dx = distance * math.cos(angle)
            anchor = "middle" if abs(dx) < 1 else "start" if dx > 0 else "end"
            middle = y + distance * math.sin(angle)
            yield _placed(lines, x + dx, middle - LINE_HEIGHT * len(lines) / 2 + 11, anchor)
