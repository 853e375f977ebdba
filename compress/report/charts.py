"""Charts as inline SVG: plain values in, one <svg> element as a string out.

Colours are CSS classes of the page (`report.html.j2`), so that they follow light, dark and
print; whatever a colour says is also said by shape, pattern, place or text. Coordinates are
about CSS pixels on a telephone: charts are drawn narrow, and never shrink to the unreadable.

Every point is drawn at its true position, also where points overlap. A function with `notes` in its name returns what
the reader must know about the axes of a drawing: where one does not begin at 0, is logarithmic, or ends before a value.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compress.report import svg
from compress.report.svg import WIDTH, Box, placed_labels
from compress.report.wording import MINUS, count, noun, number
from compress.results.evaluation import ClassRecord
from compress.results.placement import OperatorPlacement

LEFT = 58  # px, chosen; numbers fit on its left
RIGHT = 468  # px; WIDTH without a margin
BOTTOM = 290
"""The frame of the plot of quality against cost, and of latencies."""
_CUT = (f'<path d="M{LEFT - 5} {BOTTOM - 2}l10 -5M{LEFT - 5} {BOTTOM - 7}l10 -5" class="cut"/>',)
"""The mark of an axis that does not begin at 0: two strokes across it."""
WHISKER = 4.0  # px, chosen
WIDER = 3.0
"""Half the width of the ends of an interval, and how much wider they are for each interval on the same line."""
CLOSE = 6.0
"""Intervals that are nearer to each other than this are on the same line."""
SAME = 5e-4
"""Changes below this are shown as 0."""
_FILLS = {True: 'class="tpu"', False: 'fill="url(#hatch)"'}
"""Attributes of the operators on the Edge TPU, and of those on the CPU."""
_SHADES = {True: ("hit", 1.0), False: ("miss", 0.5)}
"""CSS class of right and wrong answers, and the exponent of their share: few wrong answers must be visible."""
PALEST = 0.1  # chosen; a single answer is still visible on the paper
DARKEST = 0.45
"""Opacity of the shades behind counts: these are legible on the darkest one, in light and dark (`page.css`)."""
_LABEL_AT = {"original": 0.65, "result": 0.35}
"""The fraction of runs next to which the name of a curve is."""
MAX_STEPS = 400
"""Of more latencies every n-th is drawn."""
MAX_SEGMENTS = 120
"""Of more operators, those with the same placement are drawn as one."""


class Point(NamedTuple):
    """A model after a stage: its cost and its quality with the interval."""

    label: str
    cost: float
    quality: float
    low: float | None = None
    high: float | None = None
    measured: bool = True

    @property
    def style(self) -> str:
        """The CSS class of a point that is not measured."""
        return "" if self.measured else " unsure"


class LatencyCurve(NamedTuple):
    """The latencies of a model, and the percentiles to mark: (name, fraction of runs, ms); kind: its CSS class."""

    name: str
    kind: str
    values: Sequence[float]
    marks: Sequence[tuple[str, float, float]]


class Confusion(NamedTuple):
    """How often a class is taken for another; both are indices of classes."""

    samples: int
    actual: int
    predicted: int


def trade_off(points: Sequence[Point], *, quality: str, cost: str, unit: str) -> str:
    """Draw quality against cost after each stage, in the order of the stages.

    Args:
        points: at least one; neighbours that are the same point are drawn as one.
        quality: the name of the vertical axis.
        cost: the name of the horizontal axis, "size" or "MACs".
        unit: its unit, "bytes" or "MACs".
    """
    points = list(_merged(points))
    x = _cost_axis([point.cost for point in points])
    y = _quality_axis(points)
    positions = [(x.at(point.cost), y.at(point.quality)) for point in points]
    name = f"{quality}, validation, from {y.low:.3g}" if y.low > 0 else f"{quality}, validation"
    parts = [
        svg.text(10, 14, svg.fit(name, WIDTH - 20), "name"),
        *(svg.level(y.at(tick), LEFT, RIGHT, f"{tick:.3g}") for tick in y.ticks(5)),
        *_cost_ticks(x, cost, unit),
        *(_CUT if y.low > 0 else []),
        svg.polyline(positions, "way"),
    ]
    bars: list[Box] = []
    dots = []
    for point, (a, b) in zip(points, positions, strict=True):
        if point.low is not None and point.high is not None:
            reach = WHISKER + WIDER * sum(abs((bar.left + bar.right) / 2 - a) < CLOSE for bar in bars)
            bars.append(Box(a - reach, y.at(point.high), a + reach, y.at(point.low)))
            parts.append(_whisker(bars[-1], point.style))
        tip = svg.tip(f"{point.label}: {noun(quality)} {number(point.quality, 'fraction')}, {number(point.cost, unit)}")
        dots.append(svg.circle(a, b, 5, f"dot{point.style}", tip))
    parts += [*dots, *placed_labels([point.label for point in points], positions, bars)]
    description = "; ".join(f"{p.label}: {number(p.quality, 'fraction')} at {number(p.cost, unit)}" for p in points)
    return svg.svg(f"trade-off-{unit}", (WIDTH, 332), f"{quality} against {cost} after each stage", description, parts)


def trade_off_notes(points: Sequence[Point]) -> list[str]:
    """Return sentences on the axes of `trade_off`, and on intervals that are drawn on the same line."""
    points = list(_merged(points))
    y = _quality_axis(points)
    notes = []
    if y.low > 0:
        notes.append(f"The vertical axis begins at {y.low:.3g}, not at 0.")
    x = _cost_axis([point.cost for point in points])
    if x.log:
        notes.append("The horizontal axis is logarithmic.")
    positions = sorted(x.at(point.cost) for point in points if point.low is not None and point.high is not None)
    if any(second - first < CLOSE for first, second in itertools.pairwise(positions)):
        notes.append("Intervals on the same line have ends of different widths, the earlier stage the narrower ones.")
    return notes


def _merged(points: Sequence[Point]) -> Iterator[Point]:
    for _, group in itertools.groupby(points, key=lambda point: point[1:]):
        same = list(group)
        yield same[0]._replace(label=", ".join(point.label for point in same))


def _cost_axis(costs: Sequence[float]) -> svg.Axis:
    low = min(costs)
    high = max(costs)
    if 0 < low * 12 < high:
        return svg.Axis(low / 1.6, high * 1.3, LEFT, RIGHT, log=True)
    return svg.Axis(0, high * 1.12 or 1, LEFT, RIGHT)


def _cost_ticks(x: svg.Axis, cost: str, unit: str) -> list[str]:
    """Return the horizontal axis; bytes have round values in their binary unit."""
    binary_unit = 2.0 ** (10 * min(3, math.floor(math.log2(max(x.high, 1)) / 10)))
    ticks = x.ticks(5, binary_unit if unit == "bytes" else 1.0)
    name = f"← less {cost}"
    if x.log:
        name += ", logarithmic"
    return [
        *(svg.tick(x.at(tick), BOTTOM, number(tick, unit) if tick else "0") for tick in ticks),
        svg.line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis"),
        svg.text(RIGHT, 326, name, "name", "end"),
    ]


def _quality_axis(points: Sequence[Point]) -> svg.Axis:
    """Return the vertical axis. It ends at 0 and 1 unless a value is outside, as a negative R² is."""
    values = [value for p in points for value in (p.quality, p.low, p.high) if value is not None]
    room = max(0.12 * (max(values) - min(values)), 0.004)
    low = min(values) - room
    high = max(values) + room
    if min(values) >= 0:
        low = max(0.0, low)
    if max(values) <= 1:
        high = min(1.0, high)
    return svg.Axis(low, high, BOTTOM - 6, 30)


def _whisker(box: Box, style: str) -> str:
    left = svg.n(box.left)
    right = svg.n(box.right)
    ends = f"M{left} {svg.n(box.top)}H{right}M{left} {svg.n(box.bottom)}H{right}"
    middle = f"M{svg.n((box.left + box.right) / 2)} {svg.n(box.top)}V{svg.n(box.bottom)}"
    return f'<path d="{ends}{middle}" class="whisker{style}"/>'


def class_changes(rows: Sequence[ClassRecord], quality: str = "Accuracy") -> str:
    """Draw a line for each class from its quality before (ring) to that after (dot), in the order given.

    Both values of every class are known; `quality` is the name of the metric.
    """
    x = _class_axis(rows)
    height = 44 + 17 * len(rows)
    parts = [svg.text(146, 14, "class", "tick", "end"), svg.text(474, 14, "change", "tick", "end")]
    for tick in x.ticks(5):
        at = x.at(tick)
        parts += [svg.line(at, 20, at, height - 20, "grid"), svg.text(at, 14, f"{tick:.3g}", "tick", "middle")]
    descriptions = []
    for i, row in enumerate(rows):
        before, after = row.original.value or 0.0, row.result.value or 0.0
        parts += _class_row(row, (before, after), x, 32 + 17 * i)
        descriptions.append(f"{row.name}: {before:.3f} to {after:.3f}")
    parts.append(svg.text(279, height - 4, f"{quality} of the class", "name", "middle"))
    title = f"{quality} of each class before and after"
    return svg.svg("classes", (WIDTH, height), title, "; ".join(descriptions), parts)


def _class_axis(rows: Sequence[ClassRecord]) -> svg.Axis:
    """Return the axis of `class_changes`. All values and intervals are on it."""
    ends = [(row.original.value, row.result.value, row.result.low) for row in rows]
    lowest = min(value for values in ends for value in values if value is not None)
    return svg.Axis(max(0.0, math.floor(lowest * 10 - 0.5) / 10), 1, 164, 394)


def class_notes(rows: Sequence[ClassRecord]) -> list[str]:
    """Return a sentence on the axis of `class_changes` if it does not begin at 0."""
    low = _class_axis(rows).low
    return [f"The axis begins at {low:.3g}, not at 0."] if low > 0 else []


def _class_row(row: ClassRecord, values: tuple[float, float], x: svg.Axis, y: float) -> list[str]:
    first, last = values
    change = last - first
    if change < -SAME:
        kind, text = "loss", f"▼ {MINUS}{-change:.3f}"
    elif change > SAME:
        kind, text = "gain", f"▲ +{change:.3f}"
    else:
        kind, text = "same", "= 0"
    before = x.at(first)
    after = x.at(last)
    tip = svg.tip(f"{row.name}: {first:.3f} before, {last:.3f} after, {count(row.samples, row.counted)}")
    interval = []
    if row.result.low is not None and row.result.high is not None:
        interval.append(svg.line(x.at(row.result.low), y, x.at(min(row.result.high, x.high)), y, "reach"))
    return [
        f"<g>{tip}",
        svg.text(146, y + 4, row.name, "label", "end", 144),
        *interval,
        svg.line(before, y, after, y, kind),
        svg.circle(before, y, 4.5, "original ring"),
        svg.circle(after, y, 3.2, "result"),
        svg.text(474, y + 4, text, f"label {kind}", "end"),
        "</g>",
    ]


def confusions(counts: Sequence[Sequence[int]]) -> list[Confusion]:
    """Return the wrong answers by the two classes, the most frequent first."""
    pairs = [Confusion(n, i, j) for i, row in enumerate(counts) for j, n in enumerate(row) if n and i != j]
    return sorted(pairs, key=lambda pair: (-pair.samples, pair.actual, pair.predicted))


def confusion_matrix(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Draw counts by true class (rows) and predicted class (columns), shaded by the fraction of the row."""
    cell = 32 if len(counts) <= 12 else 23
    longest = min(110, max(svg.wide(name[:20]) for name in classes) + 4)
    is_upright = longest <= cell
    left = 26 + longest
    top = 38 if is_upright else 26 + longest
    title = "predicted class →"
    size = (left + max(cell * len(counts), svg.wide(title)) + 4, top + cell * len(counts) + 4)
    parts = [
        svg.text(left, 14, title, "tick"),
        _turned(13, top + cell * len(counts) / 2, svg.text(0, 0, "← true class", "tick", "middle")),
    ]
    for i, name in enumerate(classes):
        middle = cell * (i + 0.5)
        parts.append(svg.text(left - 5, top + middle + 4, name, "label", "end", longest))
        if is_upright:
            parts.append(svg.text(left + middle, top - 5, name, "label", "middle"))
        else:
            parts.append(_turned(left + middle, top - 5, svg.text(0, 4, name, "label", "start", longest)))
    for i, row in enumerate(counts):
        for j, samples in enumerate(row):
            tip = f"{classes[i]} predicted as {classes[j]}: {samples}"
            parts.append(_matrix_cell((left + cell * j, top + cell * i, float(cell)), samples, sum(row), i == j, tip))
    frequent = [f"{classes[i]} predicted as {classes[j]}: {samples}" for samples, i, j in confusions(counts)[:10]]
    description = f"Most frequent confusions: {'; '.join(frequent)}"
    if not frequent:
        description = "No confusions"
    return svg.svg("confusion", size, "Confusion matrix of the result", description, parts)


def _turned(x: float, y: float, text: str) -> str:
    """Return a text that reads upwards."""
    return f'<g transform="translate({svg.n(x)} {svg.n(y)}) rotate(-90)">{text}</g>'


def _matrix_cell(square: tuple[float, float, float], count: int, total: int, is_right: bool, tip: str) -> str:
    x, y, size = square
    kind, exponent = _SHADES[is_right]
    text, style, opacity = "·", "empty", 0.0
    if count:
        opacity = PALEST + (DARKEST - PALEST) * (count / total) ** exponent
        text = str(count) if count < 10_000 else f"{count / 1000:.0f}k"
        style = "label"
    box = f'x="{svg.n(x + 0.5)}" y="{svg.n(y + 0.5)}" width="{svg.n(size - 1)}" height="{svg.n(size - 1)}"'
    return (
        f'<g>{svg.tip(tip)}<rect {box} class="{kind}" fill-opacity="{opacity:.2f}"/>'
        + svg.text(x + size / 2, y + size / 2 + 4, text, style, "middle")
        + "</g>"
    )


def latency_curves(curves: Sequence[LatencyCurve]) -> str:
    """Draw the cumulative distribution of the latency of each model; every curve has at least one value."""
    x = svg.Axis(0, max(map(_slowest, curves)) * 1.1 or 1, 44, 468)
    y = svg.Axis(0, 1, 250, 34)
    parts = [svg.text(10, 14, "Fraction of runs", "name")]
    parts += [svg.level(y.at(float(share or 1)), 44, RIGHT, share) for share in ("0", "0.5", "0.9", "0.99", "")]
    parts += [svg.tick(x.at(tick), 250, f"{tick:.3g}") for tick in x.ticks(6)]
    parts += [svg.line(44, 250, 468, 250, "axis"), svg.text(468, 286, "Latency of one inference, ms", "name", "end")]
    descriptions = []
    for curve in curves:
        parts += _latency_curve(curve, x, y)
        descriptions.append(f"{curve.name}: " + ", ".join(f"{name} {number(ms, 'ms')}" for name, _, ms in curve.marks))
    return svg.svg("latency", (WIDTH, 292), "Distribution of the latency", "; ".join(descriptions), parts)


def latency_notes(curves: Sequence[LatencyCurve]) -> list[str]:
    """Return sentences on the runs that `latency_curves` does not draw."""
    end = max(map(_slowest, curves)) * 1.1 or 1
    notes = []
    for curve in curves:
        slower = sum(value > end for value in curve.values)
        if slower:
            slowest = number(max(curve.values), "ms")
            notes.append(
                f"The axis ends at {number(end, 'ms')}: {count(slower, 'slower run')} of the {curve.name.lower()}, up "
                f"to {slowest}, {'is' if slower == 1 else 'are'} not drawn."
            )
    return notes


def _slowest(curve: LatencyCurve) -> float:
    """Return the 99th percentile, or a mark that is slower: single outliers are not drawn."""
    values = sorted(curve.values)
    return max([values[_rank(values, 0.99)], *(ms for _, _, ms in curve.marks)])


def _latency_curve(curve: LatencyCurve, x: svg.Axis, y: svg.Axis) -> list[str]:
    """Return the line of a model, its name next to it, and its percentiles."""
    share = _LABEL_AT[curve.kind]
    values = sorted(curve.values)
    near = min(x.at(values[_rank(values, share)]), x.end)
    if near + 8 + svg.wide(curve.name) < x.end:
        name = svg.text(near + 8, y.at(share), curve.name, "label", "start")
    else:
        name = svg.text(near - 8, y.at(share), curve.name, "label", "end")
    parts = [f'<path d="{_steps(values, x, y)}" class="curve {curve.kind}"/>', name]
    for percentile, fraction, ms in curve.marks:
        tip = svg.tip(f"{curve.name}, {percentile}: {number(ms, 'ms')}")
        across = min(x.at(ms), x.end)
        down = y.at(fraction)
        if curve.kind == "original":
            parts.append(svg.circle(across, down, 4.5, "original ring", tip))
        else:
            diamond = f"M{svg.n(across)} {svg.n(down - 5.5)}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"
            parts.append(f'<path d="{diamond}" class="result">{tip}</path>')
    return parts


def _rank(values: Sequence[float], share: float) -> int:
    return max(0, math.ceil(share * len(values)) - 1)


def _steps(values: Sequence[float], x: svg.Axis, y: svg.Axis) -> str:
    """Return an empirical distribution as a path."""
    drawn = values[:: max(1, len(values) // MAX_STEPS)]
    end = min(x.at(values[0]), x.end)
    path = [f"M{svg.n(end)} {svg.n(y.start)}"]
    for value in itertools.takewhile(lambda value: value <= x.high, drawn):
        end = x.at(value)
        path.append(f"H{svg.n(end)}V{svg.n(y.at(bisect.bisect_right(values, value) / len(values)))}")
    if end < x.end:
        path.append(f"H{svg.n(x.end)}")
    return " ".join(path)


def operator_strip(operators: Sequence[OperatorPlacement]) -> str:
    """Draw where operators run: a bar with all operators of equal width, and one by their MACs."""
    parts = [
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" class="cpu"/><rect width="2" height="6" class="stripe"/></pattern></defs>',
        f'<rect x="340" y="3" width="11" height="11" {_FILLS[True]}/>' + svg.text(356, 13, "Edge TPU", "tick"),
        f'<rect x="424" y="3" width="11" height="11" {_FILLS[False]}/>' + svg.text(440, 13, "CPU", "tick"),
    ]
    rows = [("Operators in order of execution", [1.0] * len(operators))]
    if any(op.macs for op in operators):
        rows.append(("Operators by MACs", [float(op.macs) for op in operators]))
    for index, (name, weights) in enumerate(rows):
        top = 20.0 + 64.0 * index
        parts.append(svg.text(0, top - 6, name, "tick"))
        parts += _segments(operators, weights, top)
    on_tpu = sum(op.on_tpu for op in operators)
    description = f"{on_tpu} operators on the Edge TPU, {len(operators) - on_tpu} on the CPU"
    return svg.svg("strip", (WIDTH, 64 * len(rows) - 4), "Where operators run", description, parts)


def _segments(operators: Sequence[OperatorPlacement], weights: Sequence[float], y: float) -> list[str]:
    """Return the rectangles of a bar; of very many operators, runs with the same placement are one."""
    indices = range(len(operators))
    groups = [[index] for index in indices]
    if len(operators) > MAX_SEGMENTS:
        groups = [list(group) for _, group in itertools.groupby(indices, key=lambda index: operators[index].on_tpu)]
    parts = []
    left = 0.0
    total = sum(weights)
    for group in groups:
        width = sum(weights[index] for index in group) / total * WIDTH
        if width > 0:
            parts.append(_segment(operators[group[0]], group, (left, y, width)))
        left += width
    return parts


def _segment(operator: OperatorPlacement, group: Sequence[int], bounds: tuple[float, float, float]) -> str:
    left, y, width = bounds
    name = operator.op
    if len(group) > 1:
        name = f"operators {group[0]} to {group[-1]}"
    tip = svg.tip(f"{group[0]}: {name}, {operator.processor}")
    gap = 0.5 if width > 2 else 0
    box = f'x="{left:.2f}" y="{svg.n(y)}" width="{max(width - gap, 0):.2f}" height="36"'
    return f"<rect {box} {_FILLS[operator.on_tpu]}>{tip}</rect>"
