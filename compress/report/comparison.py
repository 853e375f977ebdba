"""The sections on the run as a whole: budget, before and after, costs after each stage, stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compress.core.measurement import Measurement, Metric, origin, ratio
from compress.report import charts, training
from compress.report.blocks import (
    Block,
    Cell,
    Columns,
    Figure,
    Section,
    Style,
    Table,
    Text,
    joined,
    missing,
    or_missing,
    table,
)
from compress.report.verdict import limited
from compress.report.wording import MAX_PROSE, absence, count, metric, names, noun, number, seconds, shorten, show, span
from compress.results.run import RunRecord, StageRecord

OUTCOMES = {
    True: Cell("✓ within the limit", style="good"),
    False: Cell("✕ over the limit", style="bad"),
    None: Cell("? unknown", style="unsure"),
}
STATUSES: dict[str, tuple[str, Style, str]] = {
    "done": ("✓", "", "not measured"),
    "cached": ("✓", "", "not measured"),
    "skipped": ("»", "", "skipped"),
    "failed": ("✕", "bad", "the stage failed"),
    "not run": ("○", "", "did not run"),
}
"""Mark and style of each status of a stage, and the reason for a missing measurement."""


def budget(record: RunRecord) -> Section:
    """Return each limit with its measurement."""
    rows = []
    for row in record.budget:
        actual = show(row.measured, row.name, absence(record))
        outcome = OUTCOMES[row.holds]
        if row.is_uncertain:
            interval = span(row.measured.low, row.measured.high, row.unit)
            outcome = replace(outcome, small=f"the limit is within the interval {interval}: measure on the device")
        rows.append((limited(record, row.name), number(row.limit, row.unit), actual, outcome))
    return Section("Budget", or_missing(table(("Quantity", "Limit", "Actual", "Outcome"), rows), "no budget was set"))


def before_and_after(record: RunRecord) -> Section:
    """Return every measurement of both models with its change."""
    title = "Before and after"
    if record.models is None:
        return Section(title, [missing(absence(record))])
    original, result = (model.measurements for model in (record.models.original, record.models.result))
    metrics = [metric(record, name) for name in names(record, (original, result))]
    rows: list[tuple[str | Cell, ...]] = []
    if record.latency is not None and record.latency.measurement.how != "measured":
        rows.append((limited(record, "latency_ms"), "not predicted", show(record.latency.measurement), "not compared"))
    for known in metrics:
        before, after = (measurements.get(known.name) for measurements in (original, result))
        change = record.changes.get(known.change) or ratio(before, after)
        rows.append((_label(record, known), show(before), show(after), _change(change, known)))
    others = record.changes.keys() - {known.change for known in metrics}
    rows += [
        (metric(record, name).label, "compared", "compared", show(change, name))
        for name, change in record.changes.items()
        if name in others
    ]
    stages = [shorten(model.stage, 40) for model in (record.models.original, record.models.result)]
    caption = f"Original: stage “{stages[0]}”; result: stage “{stages[1]}”. "
    caption += f"{record.quality.label} is measured on the test split."
    return Section(title, [Table(("Quantity", "Original", "Result", "Change"), rows, caption)])


def _label(record: RunRecord, known: Metric) -> str:
    """Return the label of a metric; times on this CPU are the latency only for the target cpu."""
    is_time = known.name.startswith("latency") and record.latency is not None
    if is_time and record.latency is not None and record.latency.measurement.how != "measured":
        return known.label.replace("Latency", "Time on this machine's CPU")
    return known.label


def _change(change: Measurement, known: Metric) -> Cell:
    """Return the change as a cell, with the word "drop" or "increase" where it is not a ratio."""
    cell = show(change, known.change)
    word = known.change.rpartition("_")[2]
    if cell.style == "missing" or word == "ratio":
        return cell
    return replace(cell, text=f"{word} {cell.text}")


def outputs(record: RunRecord) -> list[Section]:
    """Return how close each output of the result is to the original's; nothing if models were not compared so."""
    compared = record.comparison.outputs if record.comparison else ()
    if not compared:
        return []
    rows = []
    for output in compared:
        same = "no decisions" if output.agreement is None else f"{output.agreement:.3f}"
        shape = " x ".join(map(str, output.shape)) or "one value"
        rows.append((shorten(output.name), shape, f"{output.sqnr_db:.1f} dB", f"{output.max_abs_error:.3g}", same))
        for scale in output.scales:
            label = f"values from {scale.low:.3g} to {scale.high:.3g}"
            constant = f"{len(scale.constant)} constant" if scale.constant else "none constant"
            width = count(len(scale.channels), "channel")
            rows.append((label, width, f"{scale.sqnr_db:.1f} dB", "as above", constant))
    header = ("Output", "Shape", "Signal to quantization noise", "Largest difference", "Equal decisions")
    caption = "The result compared with the original on the test split; measured."
    return [Section("Outputs compared", table(header, rows, caption))]


def costs(record: RunRecord) -> Section:
    """Return the plots of quality against size and MACs after each stage."""
    plots = [_plot(record, metric(record, name)) for name in ("size_bytes", "macs")]
    title = f"{record.quality.label} and cost after each stage"
    return Section(title, [Columns([[plot] for plot in plots])], key="quality-and-cost")


def _plot(record: RunRecord, cost: Metric) -> Block:
    """Return the plot of quality against a cost; a text if no stage has both."""
    points = []
    for stage in record.stages:
        x, y = stage.measurements.get(cost.name), stage.measurements.get(record.quality.name)
        if x is not None and y is not None and x.value is not None and y.value is not None:
            is_measured = origin(x, y) == "measured"
            points.append(charts.Point(shorten(stage.id, 40), x.value, y.value, y.low, y.high, is_measured))
    name = noun(cost.label)
    if not points:
        return missing(f"no plot against {name}: no stage has both values")
    caption = (
        "The top left is best. Bars: 95% interval. Filled: both values measured; hollow: at least one value predicted."
    )
    svg = charts.trade_off(points, quality=record.quality.label, cost=name, unit=cost.unit)
    title = f"{record.quality.label} on validation against {name}."
    return Figure(svg, title, " ".join([caption, *charts.trade_off_notes(points)]), data=_plotted(record, cost, points))


def _plotted(record: RunRecord, cost: Metric, points: Sequence[charts.Point]) -> Table:
    """Return the points of a plot as a table."""
    unit = record.quality.unit
    rows = []
    for point in points:
        quality = Cell(number(point.quality, unit), span(point.low, point.high, unit))
        rows.append((point.label, quality, Cell(number(point.cost, cost.unit), "" if point.measured else "predicted")))
    caption = "With 95% intervals."
    return Table(("Stage", f"{record.quality.label}, validation", cost.label), rows, caption)


def stages(record: RunRecord) -> Section:
    """Return what became of each stage, with the measurements of its model."""
    columns = names(record, [stage.measurements for stage in record.stages])
    rows = [_stage_row(index, stage, columns) for index, stage in enumerate(record.stages)]
    quality = {known.name for known in record.metrics}
    header = [metric(record, name).label + ", validation" * (name in quality) for name in columns]
    caption = f"Total time {seconds(record.seconds)}. Times are measured."
    blocks = table(("Stage", "Outcome", *header), rows, caption)
    blocks += [Text(f"{line} (measured).") for line in training.lines(record)]
    return Section("Stages", or_missing(blocks, absence(record)))


def _stage_row(index: int, stage: StageRecord, columns: list[str]) -> tuple[Cell, ...]:
    mark, style, absent = STATUSES[stage.status]
    head = Cell(f"{index} {shorten(stage.id)}", shorten(f"{stage.stage} · {stage.kind or 'no artifact'}"))
    remark = joined("; ", seconds(stage.seconds), shorten(stage.reason or "", MAX_PROSE))
    outcome = Cell(f"{mark} {stage.status}", remark, style)
    return (head, outcome, *(show(stage.measurements.get(name), name, absent) for name in columns))
