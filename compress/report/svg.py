"""Parts of charts: axes, lines and texts as SVG, in the colours of the page (`report.html.j2`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from compress.report.wording import clean, shorten

WIDTH = 480


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
