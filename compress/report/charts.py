"""Charts as inline SVG: plain values in, one <svg> element as a string out.

Colours are CSS classes of the page (`report.html.j2`), so that they follow light, dark and
print; whatever a colour says is also said by shape, pattern, place or text. Coordinates are
about CSS pixels on a telephone: charts are drawn narrow, and never shrink to the unreadable.
"""

from __future__ import annotations

import bisect
import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compress.report import MINUS, clean, number, shorten, svg
from compress.report.svg import WIDTH

_Box = tuple[float, float, float, float]


class Point(NamedTuple):
    """A model after a stage: its cost and its accuracy."""

    label: str
    cost: float
    accuracy: float
    low: float | None = None
    high: float | None = None
    measured: bool = True


class ClassChange(NamedTuple):
    """The accuracy of a class before and after; the interval is that of `after`."""

    name: str
    samples: int
    before: float
    after: float
    low: float | None = None
    high: float | None = None


class LatencyCurve(NamedTuple):
    """The latencies of a model, and the percentiles to mark: (name, fraction of runs, ms)."""

    name: str
    is_original: bool
    values: Sequence[float]
    marks: Sequence[tuple[str, float, float]]


class OperatorRow(NamedTuple):
    """One operator of the compressed model, in the order of execution."""

    name: str
    on_tpu: bool
    macs: int


def trade_off(points: Sequence[Point], *, cost: str, unit: str) -> str:
    """Draw accuracy against cost after each stage, in the order of the stages.

    Args:
        points: at least one; neighbours that are the same point are drawn as one.
        cost: what the horizontal axis says, "size" or "MACs".
        unit: its unit, "bytes" or "MACs".
    """
    points = list(_merged(points))
    x, y = _cost_axis([point.cost for point in points]), _accuracy_axis(points)
    parts = [svg.text(10, 14, "Accuracy, validation", "name")]
    parts += [svg.level(y.at(tick), 58, 468, f"{tick:.3g}") for tick in y.ticks(5)]
    base = 2.0 ** (10 * min(3, math.floor(math.log2(max(x.high, 1)) / 10))) if unit == "bytes" else 1.0
    parts += [svg.tick(x.at(tick), 290, number(tick, unit) if tick else "0") for tick in x.ticks(5, base)]
    name = f"← less {cost}" + (", logarithmic" if x.log else "")
    parts += [svg.line(58, 290, 468, 290, "axis"), svg.text(468, 326, name, "name", "end")]
    places = _dodged([(x.at(point.cost), y.at(point.accuracy)) for point in points])
    way = " ".join(f"{svg.n(a)},{svg.n(b)}" for a, b in places)
    parts.append(f'<polyline points="{way}" class="way"/>')
    bars: list[_Box] = []
    for point, (a, b) in zip(points, places, strict=True):
        sure = "" if point.measured else " unsure"
        if point.low is not None and point.high is not None:
            bars.append((a - 4, y.at(point.high), a + 4, y.at(point.low)))
            parts.append(_whisker(bars[-1], f"whisker{sure}"))
        tip = svg.tip(f"{point.label}: accuracy {number(point.accuracy, 'fraction')}, {number(point.cost, unit)}")
        parts.append(f'<circle cx="{svg.n(a)}" cy="{svg.n(b)}" r="5" class="dot{sure}">{tip}</circle>')
    parts += _labels([point.label for point in points], places, bars)
    description = "; ".join(f"{p.label}: {number(p.accuracy, 'fraction')} at {number(p.cost, unit)}" for p in points)
    return svg.svg(f"trade-off-{unit}", (WIDTH, 332), f"Accuracy against {cost} after each stage", description, parts)


def _merged(points: Sequence[Point]) -> Iterator[Point]:
    for _, group in itertools.groupby(points, key=lambda point: point[1:]):
        same = list(group)
        yield same[0]._replace(label=", ".join(point.label for point in same))


def _cost_axis(costs: Sequence[float]) -> svg.Axis:
    low, high = min(costs), max(costs)
    if 0 < low * 12 < high:
        return svg.Axis(low / 1.6, high * 1.3, 58, 468, log=True)
    return svg.Axis(0, high * 1.12 or 1, 58, 468)


def _accuracy_axis(points: Sequence[Point]) -> svg.Axis:
    values = [value for p in points for value in (p.accuracy, p.low, p.high) if value is not None]
    room = max(0.12 * (max(values) - min(values)), 0.004)
    return svg.Axis(max(0.0, min(values) - room), min(1.0, max(values) + room), 284, 30)


def _whisker(box: _Box, kind: str) -> str:
    left, top, right, bottom = box
    ends = f"M{svg.n(left)} {svg.n(top)}H{svg.n(right)}M{svg.n(left)} {svg.n(bottom)}H{svg.n(right)}"
    return f'<path d="{ends}M{svg.n((left + right) / 2)} {svg.n(top)}V{svg.n(bottom)}" class="{kind}"/>'


def _dodged(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the positions; those that would overlap another interval are moved sideways."""
    result: list[tuple[float, float]] = []
    for x, y in places:
        tried = [x + step for step in (0, -14, 14, -28, 28, -42, 42)]
        free = [place for place in tried if all(abs(place - other) >= 13 for other, _ in result)]
        result.append((min(max([*free, x][0], 66), 462), y))
    return result


def _labels(labels: Sequence[str], places: Sequence[tuple[float, float]], bars: Sequence[_Box]) -> list[str]:
    """Place each label next to its point, where it overlaps least with points, bars, lines and other labels."""
    full = [*bars, *((x - 7, y - 7, x + 7, y + 7) for x, y in places)]
    for (x1, y1), (x2, y2) in itertools.pairwise(places):
        way = [(x1 + (x2 - x1) * i / 20, y1 + (y2 - y1) * i / 20) for i in range(1, 20)]
        full += [(x - 2, y - 2, x + 2, y + 2) for x, y in way]
    parts = []
    for label, (x, y) in zip(labels, places, strict=True):
        lines = textwrap.wrap(shorten(clean(label), 60), 16, max_lines=3, placeholder="…") or ["?"]
        long, rise = max(svg.wide(line) for line in lines), 14 * (len(lines) - 1)
        ways = [(10, 4 - rise / 2, "start"), (-10, 4 - rise / 2, "end"), (0, -11 - rise, "middle"), (0, 20, "middle")]
        ways += [(a * 9, b, side) for b in (-8 - rise, 16) for a, side in ((1, "start"), (-1, "end"))]
        tried = []
        for dx, dy, anchor in ways:
            left = x + dx - {"start": 0, "middle": long / 2, "end": long}[anchor]
            box = (left, y + dy - 11, left + long, y + dy + rise + 3)
            outside = max(0, 60 - box[0]) + max(0, box[2] - 472) + max(0, 18 - box[1]) + max(0, box[3] - 288)
            tried.append((outside * 40 + sum(_overlap(box, other) for other in full), dx, dy, anchor, box))
        _, dx, dy, anchor, box = min(tried, key=lambda way: way[0])
        full.append(box)
        parts += [svg.text(x + dx, y + dy + 14 * i, line, "label", anchor) for i, line in enumerate(lines)]
    return parts


def _overlap(one: _Box, two: _Box) -> float:
    width, height = min(one[2], two[2]) - max(one[0], two[0]), min(one[3], two[3]) - max(one[1], two[1])
    return width * height if width > 0 and height > 0 else 0.0


def class_changes(rows: Sequence[ClassChange]) -> str:
    """Draw a line for each class from its accuracy before (ring) to its accuracy after (dot), in the order given."""
    values = [value for row in rows for value in (row.before, row.after)]
    x = svg.Axis(max(0.0, math.floor(min(values) * 10 - 0.5) / 10), 1, 164, 394)
    height = 44 + 17 * len(rows)
    parts = [svg.text(146, 14, "class", "tick", "end"), svg.text(474, 14, "change", "tick", "end")]
    for tick in x.ticks(5):
        at = x.at(tick)
        parts += [svg.line(at, 20, at, height - 20, "grid"), svg.text(at, 14, f"{tick:.3g}", "tick", "middle")]
    for i, row in enumerate(rows):
        parts += _class_row(row, x, 32 + 17 * i)
    parts.append(svg.text(279, height - 4, "Accuracy of the class", "name", "middle"))
    description = [f"{row.name}: {row.before:.3f} to {row.after:.3f}" for row in rows]
    return svg.svg("classes", (WIDTH, height), "Accuracy of each class before and after", "; ".join(description), parts)


def _class_row(row: ClassChange, x: svg.Axis, y: float) -> list[str]:
    change = row.after - row.before
    kind, sign = ("loss", "▼") if change < -5e-4 else ("gain", "▲") if change > 5e-4 else ("same", "=")
    change_text = "= 0" if kind == "same" else f"{sign} {change:+.3f}".replace("-", MINUS)
    one, two = x.at(row.before), x.at(row.after)
    tip = svg.tip(f"{row.name}: {row.before:.3f} before, {row.after:.3f} after, {row.samples} samples")
    parts = [f"<g>{tip}", svg.text(146, y + 4, row.name, "label", "end", 144)]
    if row.low is not None and row.high is not None:
        parts.append(svg.line(x.at(max(row.low, x.low)), y, x.at(row.high), y, "reach"))
    parts += [
        svg.line(one, y, two, y, kind),
        f'<circle cx="{svg.n(one)}" cy="{svg.n(y)}" r="4.5" class="original ring"/>',
        f'<circle cx="{svg.n(two)}" cy="{svg.n(y)}" r="3.2" class="result"/>',
        svg.text(474, y + 4, change_text, f"label {kind}", "end"),
        "</g>",
    ]
    return parts


def confusion_matrix(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Draw counts by true class (rows) and predicted class (columns), shaded by the fraction of the row."""
    cell = 32 if len(counts) <= 12 else 23
    labels = [classes[i] if i < len(classes) else str(i) for i in range(len(counts))]
    long = min(110, max(svg.wide(name[:20]) for name in labels) + 4)
    upright = long <= cell
    left, top = 26 + long, 26 + (12 if upright else long)
    across = "predicted class →"
    size = (left + max(cell * len(counts), svg.wide(across)) + 4, top + cell * len(counts) + 4)
    parts = [svg.text(left, 14, across, "tick")]
    middle = top + cell * len(counts) / 2
    turned = svg.text(0, 0, "← true class", "tick", "middle")
    parts.append(f'<g transform="translate(13 {svg.n(middle)}) rotate(-90)">{turned}</g>')
    for at, name in ((cell * (i + 0.5), name) for i, name in enumerate(labels)):
        parts.append(svg.text(left - 5, top + at + 4, name, "label", "end", long))
        if upright:
            parts.append(svg.text(left + at, top - 5, name, "label", "middle"))
        else:
            turned = svg.text(0, 4, name, "label", "start", long)
            parts.append(f'<g transform="translate({svg.n(left + at)} {svg.n(top - 5)}) rotate(-90)">{turned}</g>')
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            tip = f"{labels[i]} predicted as {labels[j]}: {count}"
            place = (left + cell * j, top + cell * i, float(cell))
            parts.append(_matrix_cell(place, count, sum(row), i == j, tip))
    wrong = sorted((-n, i, j) for i, row in enumerate(counts) for j, n in enumerate(row) if n and i != j)
    confusions = [f"{labels[i]} predicted as {labels[j]}: {-n}" for n, i, j in wrong[:10]]
    desc = "Most frequent confusions: " + "; ".join(confusions) if confusions else "No confusions"
    return svg.svg("confusion", size, "Confusion matrix of the result", desc, parts)


def _matrix_cell(place: tuple[float, float, float], count: int, total: int, right: bool, tip: str) -> str:
    x, y, cell = place
    kind, share = "hit" if right else "miss", count / max(total, 1)
    opacity = 0 if not count else 0.12 + 0.88 * (share if right else math.sqrt(share))
    shade = "empty" if not count else "inverse" if opacity > 0.72 else "label"
    number_ = str(count) if count < 10_000 else f"{count / 1000:.0f}k"
    box = f'x="{svg.n(x + 0.5)}" y="{svg.n(y + 0.5)}" width="{svg.n(cell - 1)}" height="{svg.n(cell - 1)}"'
    return (
        f'<g>{svg.tip(tip)}<rect {box} class="{kind}" fill-opacity="{opacity:.2f}"/>'
        + svg.text(x + cell / 2, y + cell / 2 + 4, number_ if count else "·", shade, "middle")
        + "</g>"
    )


def latency_curves(curves: Sequence[LatencyCurve]) -> str:
    """Draw the cumulative distribution of the latency of each model; every curve has at least one value."""
    top = max(max([*sorted(c.values)[: _rank(c.values, 0.99) + 1], *(ms for *_, ms in c.marks)]) for c in curves)
    x, y = svg.Axis(0, top * 1.1 or 1, 44, 468), svg.Axis(0, 1, 250, 34)
    parts = [svg.text(10, 14, "Fraction of runs", "name")]
    parts += [svg.level(y.at(share), 44, 468, f"{share}" if share < 1 else "") for share in (0, 0.5, 0.9, 0.99, 1)]
    parts += [svg.tick(x.at(tick), 250, f"{tick:.3g}") for tick in x.ticks(6)]
    parts += [svg.line(44, 250, 468, 250, "axis"), svg.text(468, 286, "Latency of one inference, ms", "name", "end")]
    descriptions = []
    for curve in curves:
        kind, values = "original" if curve.is_original else "result", sorted(curve.values)
        parts.append(f'<path d="{_steps(values, x, y)}" class="curve {kind}"/>')
        share = 0.35 if kind == "result" else 0.65
        near = min(x.at(values[_rank(values, share)]), x.end)
        room = near + 8 + svg.wide(curve.name) < x.end
        parts.append(svg.text(near + (8 if room else -8), y.at(share), curve.name, "label", "start" if room else "end"))
        for name, share, ms in curve.marks:
            tip = svg.tip(f"{curve.name}, {name}: {number(ms, 'ms')}")
            parts.append(_mark(min(x.at(ms), x.end), y.at(share), kind, tip))
        descriptions.append(f"{curve.name}: " + ", ".join(f"{name} {number(ms, 'ms')}" for name, _, ms in curve.marks))
    return svg.svg("latency", (WIDTH, 292), "Distribution of the latency", "; ".join(descriptions), parts)


def _rank(values: Sequence[float], share: float) -> int:
    return max(0, math.ceil(share * len(values)) - 1)


def _steps(values: Sequence[float], x: svg.Axis, y: svg.Axis) -> str:
    """Return an empirical distribution as a path; of more than 400 values every n-th is drawn."""
    drawn = values[:: max(1, len(values) // 400)]
    end = min(x.at(values[0]), x.end)
    path = [f"M{svg.n(end)} {svg.n(y.start)}"]
    for value in itertools.takewhile(lambda value: value <= x.high, drawn):
        end = x.at(value)
        path.append(f"H{svg.n(end)}V{svg.n(y.at(bisect.bisect_right(values, value) / len(values)))}")
    return " ".join(path) + (f" H{svg.n(x.end)}" if end < x.end else "")


def _mark(x: float, y: float, kind: str, tip: str) -> str:
    if kind == "original":
        return f'<circle cx="{svg.n(x)}" cy="{svg.n(y)}" r="4.5" class="original ring">{tip}</circle>'
    return f'<path d="M{svg.n(x)} {svg.n(y - 5.5)}l5.5 5.5l-5.5 5.5l-5.5 -5.5z" class="result">{tip}</path>'


def operator_strip(operators: Sequence[OperatorRow]) -> str:
    """Draw where operators run: a bar with all operators of equal width, and one by their MACs."""
    parts = [
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" class="cpu"/><rect width="2" height="6" class="stripe"/></pattern></defs>'
    ]
    total = sum(op.macs for op in operators)
    rows = [("Operators in order of execution", [1.0] * len(operators), 20.0)]
    if total:
        rows.append(("Operators by MACs", [op.macs / total for op in operators], 84.0))
    for name, weights, y in rows:
        parts.append(svg.text(0, y - 6, name, "tick"))
        parts += _segments(operators, weights, y)
    on_tpu = sum(op.on_tpu for op in operators)
    desc = f"{on_tpu} operators on the Edge TPU, {len(operators) - on_tpu} on the CPU"
    return svg.svg("strip", (WIDTH, 124 if total else 60), "Where operators run", desc, parts)


def _segments(operators: Sequence[OperatorRow], weights: Sequence[float], y: float) -> list[str]:
    """Return the rectangles of a bar; more than 120 operators are drawn as runs with the same placement."""
    total, parts, start, i = sum(weights), [], 0.0, 0
    while i < len(operators):
        end = i + 1
        while len(operators) > 120 and end < len(operators) and operators[end].on_tpu == operators[i].on_tpu:
            end += 1
        wide = sum(weights[i:end]) / total * WIDTH
        place = "Edge TPU" if operators[i].on_tpu else "CPU"
        what = operators[i].name if end == i + 1 else f"operators {i} to {end - 1}"
        kind = 'class="tpu"' if operators[i].on_tpu else 'fill="url(#hatch)"'
        gap = 0.5 if wide > 2 else 0
        box = f'x="{start:.2f}" y="{svg.n(y)}" width="{max(wide - gap, 0):.2f}" height="36"'
        if wide > 0:
            parts.append(f"<rect {box} {kind}>{svg.tip(f'{i}: {what}, {place}')}</rect>")
        start, i = start + wide, end
    return parts
